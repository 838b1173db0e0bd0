"""Scaled dot-product attention that never copies keys and values for grouped-query heads.

transformers repeats K and V for every query head when a mask is given and more than one token is asked. A verify
pass is exactly that case. Here the query heads of a group become further queries of their one key head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from specbench.models.attention_choice import choices

NAME = "specbench_sdpa"


def grouped_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of query `[B, H, T, D]` over key and value `[B, H_kv, L, D]`: output `[B, T, H, D]`.

    Without a mask, and for whatever this does not know, transformers' own sdpa does the work.
    """
    plain = not any(kwargs.get(name) is not None for name in ("position_bias", "softcap", "s_aux"))
    if attention_mask is None or not plain or dropout or not _worth_grouping(query.shape[2], key):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    out = grouped(query, key, value, attention_mask, scaling)
    return out.transpose(1, 2).contiguous(), None


def _worth_grouping(length: int, key: torch.Tensor) -> bool:
    """Whether a mask for each of g heads (g·T·L numbers) is less to copy than K and V for all (2·g·H_kv·L·D)."""
    return length <= 2 * key.shape[1] * key.shape[3]


def grouped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None = None,
) -> torch.Tensor:
    """Output `[B, H, T, D]` under an additive mask `[B, 1, T, L]`: a group's heads are queries of one key head.

    In passes that are captured, by whichever of `IMPLEMENTATIONS` was measured to be fastest (`attention_choice`).
    """
    batch, heads, length, width = query.shape
    key_heads = key.shape[1]
    query = query.reshape(batch, key_heads, heads // key_heads * length, width)
    name = choices.pick(IMPLEMENTATIONS, query, key, value, mask, scaling)
    return IMPLEMENTATIONS[name](query, key, value, mask, scaling).reshape(batch, heads, length, -1)


# The implementations: queries and output `[B, H_kv, g·T, D]`, keys and values `[B, H_kv, L, D]`, mask `[B, 1, T, L]`.


def fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None = None,
) -> torch.Tensor:
    """torch's own single kernel."""
    length = mask.shape[2]
    if 1 < length < query.shape[2]:
        mask = mask.repeat(1, 1, query.shape[2] // length, 1)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)


def cudnn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None = None,
) -> torch.Tensor:
    """cuDNN's kernel, whose planning a captured graph does not repeat."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return fused(query, key, value, mask, scaling)


def two_products(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None = None,
) -> torch.Tensor:
    """Matrix products with a softmax between them: five kernels, each spread over the keys as well as the heads.

    Scores are float32, and the mask is not repeated for each group.

    Raises:
        RuntimeError: key or value is no slice of a slot cache (only a copy would do), or the device has no product
            of halves that comes out in float32 (CUDA has, from torch 2.8 on).
    """
    batch, heads, queries, width = query.shape
    keys, values = (each.view(batch * heads, *each.shape[2:]) for each in (key, value))
    scores = _scores(query.reshape(batch * heads, queries, width), keys.transpose(1, 2))
    scores = scores.view(batch, heads, -1, *mask.shape[2:])
    scores = torch.add(mask[:, :, None], scores, alpha=width**-0.5 if scaling is None else scaling)
    weights = scores.softmax(-1).to(value.dtype)
    return torch.bmm(weights.view(batch * heads, queries, -1), values).view(batch, heads, queries, -1)


def _scores(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Their products in float32: `[N, Q, D]` by `[N, D, L]`."""
    if queries.dtype == torch.float32:
        return torch.bmm(queries, keys)
    return torch.bmm(queries, keys, out_dtype=torch.float32)


# The first, unless another is faster.
IMPLEMENTATIONS = {"fused": fused, "two products": two_products, "cudnn": cudnn}


def register() -> None:
    """Make `NAME` known to transformers, and leave cuDNN's attention out of what torch chooses from.

    torch prefers it on Hopper. It plans each new shape anew, for 20 to 40 ms of the host's time: for every new length
    of a prompt, and in transformers' own loop for every token, at the expense of whichever method comes first.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    AttentionInterface.register(NAME, grouped_sdpa)
    AttentionMaskInterface.register(NAME, sdpa_mask)
