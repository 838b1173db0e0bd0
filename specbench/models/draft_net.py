"""The parts that drafters' own networks are made of: a Llama-like layer over a slot cache, and a few norms.

A drafter's network keeps its keys and values as the target does (`SlotCache`), and `decoding.context.Context`
lays out its passes, so that ragged rows, trees drafted level by level and rewinding need no code of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from transformers.activations import ACT2FN

from specbench.models.attention import grouped
from specbench.models.buckets import round_up
from specbench.models.cache import SlotCache
from specbench.models.fields import Fields
from specbench.models.rope import Frequencies, Rope, rope_at, rotate


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one layer. `input_size` is what the attention projections read (EAGLE-3: twice the hidden size)."""

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    input_size: int
    eps: float = 1e-6
    qkv_bias: bool = False
    qk_norm: bool = False
    activation: str = "silu"


def read_shape(
    fields: Fields,
    *,
    reads: int = 1,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    intermediate_size: int | None = None,
) -> LayerShape:
    """The sizes that a config names.

    Args:
        reads: how many hidden states side by side the attention projections read.
        intermediate_size: if the config is not to be asked for it.

    Raises:
        SpecbenchError: a field that is missing or no such number, or an activation nobody knows.
    """
    heads, kv_heads, head_dim = fields.heads()
    hidden = fields.integer("hidden_size")
    return LayerShape(
        hidden_size=hidden,
        intermediate_size=intermediate_size or fields.integer("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        input_size=reads * hidden,
        eps=fields.number("rms_norm_eps", default=1e-6),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        activation=fields.activation(),
    )


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, in one kernel (which computes in float32)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions. Keys and values go to layer `index` of the owner's cache."""

    def __init__(self, shape: LayerShape, index: int) -> None:
        super().__init__()
        self.shape, self.index = shape, index
        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.input_size, width, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(shape.input_size, kv_width, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(shape.input_size, kv_width, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)
        if shape.qk_norm:
            self.q_norm = RMSNorm(shape.head_dim, shape.eps)
            self.k_norm = RMSNorm(shape.head_dim, shape.eps)

    def queries(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Rotated queries `[B, H, T, D]` of `x` `[B, T, input_size]`."""
        q = self.q_proj(x).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
        return rotate(self.q_norm(q) if self.shape.qk_norm else q, rope)

    def keys_values(self, x: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys, and values, `[B, H_kv, T, D]` each."""
        k = self.k_proj(x).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
        return rotate(self.k_norm(k) if self.shape.qk_norm else k, rope), v

    def remember(self, x: torch.Tensor, rope: Rope, cache: SlotCache) -> None:
        """Store the keys and values of `x` `[B, T, input_size]` where `cache` was told to."""
        cache.update(*self.keys_values(x, rope), self.index)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Output `[B, T, hidden_size]` of queries over keys and values.

        Args:
            mask: additive `[B, 1, T, L]`; None is causal, for a first pass that attends to itself alone.
        """
        if mask is None:
            shared = q.shape[1] != k.shape[1]
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
        else:
            out = grouped(q, k, v, mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def forward(
        self, x: torch.Tensor, rope: Rope, mask: torch.Tensor | None, cache: SlotCache
    ) -> torch.Tensor:
        """Store this pass's keys and values where `cache` was told to, and attend to what it may read."""
        k, v = cache.update(*self.keys_values(x, rope), self.index)
        return self.attend(self.queries(x, rope), k, v, mask)


class Mlp(nn.Module):
    """The gated feed-forward part of a Llama layer."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)
        self.activation = ACT2FN[shape.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A Llama layer, with or without the norm on its input."""

    def __init__(self, shape: LayerShape, index: int, normed: bool = True) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.eps) if normed else None
        self.self_attn = Attention(shape, index)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.eps)
        self.mlp = Mlp(shape)

    def forward(
        self, x: torch.Tensor, rope: Rope, mask: torch.Tensor | None, cache: SlotCache
    ) -> torch.Tensor:
        """Output `[B, T, h]` for `x` `[B, T, h]`."""
        return self.rest(x if self.input_layernorm is None else self.input_layernorm(x), x, rope, mask, cache)

    def rest(
        self, x: torch.Tensor, residual: torch.Tensor, rope: Rope, mask: torch.Tensor | None, cache: SlotCache
    ) -> torch.Tensor:
        """What follows the input norm: attention reads `x` `[B, T, input_size]`, and is added to `residual`."""
        x = residual + self.self_attn(x, rope, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class DraftNet(nn.Module):
    """A drafter's network: what `Context` needs of a model, and a cache of `layers` layers."""

    kinds: tuple[str, ...] = ("full_attention",)
    window: int | None = None

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.cache = SlotCache(layers)
        self._frequencies: Frequencies

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def set_rope(self, frequencies: Frequencies) -> None:
        """Take the frequencies of this network's rotary positions (once its weights are where they stay)."""
        self._frequencies = frequencies[0].to(self.device), frequencies[1]

    def rope_at(self, positions: torch.Tensor) -> Rope:
        """Cosines and sines of positions int64 `[B, T]`."""
        return rope_at(self._frequencies, positions, self.dtype)

    def reserve(self, rows: int, tokens: int) -> None:
        """Room for `rows` sequences of up to `tokens` tokens, drafts included (and the scratch slot)."""
        self.cache.reserve(rows, round_up(tokens + 1))
