"""Scaled dot-product attention that never copies keys and values for grouped-query heads.

transformers repeats K and V for every query head when a mask is given and more than one token is asked. A verify
pass is exactly that case. Here the query heads of a group become further queries of their one key head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "specbench_sdpa"
# Above this many queries the mask copied for each group costs more than K and V would.
_MOST_QUERIES = 128


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
    _, heads, length, _ = query.shape
    groups = heads // key.shape[1]
    plain = not any(kwargs.get(name) is not None for name in ("position_bias", "softcap", "s_aux"))
    if attention_mask is None or not plain or length * groups > _MOST_QUERIES or dropout:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    out = grouped(query, key, value, attention_mask, scaling)
    return out.transpose(1, 2).contiguous(), None


def grouped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None = None,
) -> torch.Tensor:
    """Output `[B, H, T, D]` under an additive mask `[B, 1, T, L]`: a group's heads are queries of one key head."""
    batch, heads, length, width = query.shape
    groups = heads // key.shape[1]
    if groups > 1:
        query = query.reshape(batch, key.shape[1], groups * length, width)
        if length > 1:
            mask = mask.repeat(1, 1, groups, 1)
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, length, -1)


def register() -> None:
    """Make `NAME` known to transformers, and leave cuDNN's attention out of what torch chooses from.

    torch prefers it on Hopper. It plans each new shape anew, for 20 to 40 ms of the host's time: for every new length
    of a prompt, and in transformers' own loop for every token, at the expense of whichever method comes first.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    AttentionInterface.register(NAME, grouped_sdpa)
    AttentionMaskInterface.register(NAME, sdpa_mask)
