"""The parts that drafters' own networks are made of: a Llama-like layer over a slot cache, and a few norms.

A drafter's network keeps its keys and values as the target does (`SlotCache`), and `decoding.context.Context`
lays out its passes, so that ragged rows, trees drafted level by level and rewinding need no code of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from specbench.models.attention import grouped
from specbench.models.cache import SlotCache
from specbench.models.target import round_up


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
    rope_theta: float = 10000.0


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class DraftNet(nn.Module):
    """A drafter's network: what `Context` needs of a model, and a cache of `layers` layers."""

    kinds: tuple[str, ...] = ("full_attention",)
    window: int | None = None

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.cache = SlotCache(layers)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def reserve(self, rows: int, tokens: int) -> None:
        """Room for `rows` sequences of up to `tokens` tokens, drafts included (and the scratch slot)."""
        self.cache.reserve(rows, round_up(tokens + 1))


Rope = tuple[torch.Tensor, torch.Tensor]


def rope_at(positions: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rope:
    """Cosines and sines `[B, 1, T, D]` of rotary positions int64 `[B, T]` (unscaled, halves rotated)."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    return rope_by(1.0 / theta**exponents, positions, dtype)


def rope_by(
    frequencies: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype, scale: float = 1.0
) -> Rope:
    """The same for given frequencies float32 `[D / 2]`, both times `scale` (1 but for YaRN)."""
    angles = positions[..., None].float() * frequencies
    angles = torch.cat([angles, angles], -1)[:, None]
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """`x` `[B, H, T, D]` rotated by its positions."""
    cos, sin = rope
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
