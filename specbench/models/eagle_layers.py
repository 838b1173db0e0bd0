"""The first decoder layer of EAGLE-3's networks, which reads more than Llama's, and the sizes of the others."""

from __future__ import annotations

import torch

from specbench.models.cache import SlotCache
from specbench.models.draft_net import Layer, LayerShape, RMSNorm, read_shape
from specbench.models.eagle_config import Keys
from specbench.models.fields import Fields
from specbench.models.rope import Rope


class SideBySide(Layer):
    """EAGLE-3's first layer: attention reads the embedding and the hidden state, each normed, side by side."""

    def __init__(self, shape: LayerShape, norms: tuple[bool, bool], norm_before_residual: bool) -> None:
        super().__init__(shape, 0, norms[0])
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.eps) if norms[1] else None
        self.norm_before_residual = norm_before_residual

    def forward(  # type: ignore[override]
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        rope: Rope,
        mask: torch.Tensor | None,
        cache: SlotCache,
    ) -> torch.Tensor:
        """Output `[B, T, h]` for an embedding and a hidden state of `[B, T, h]` each."""
        embedded = embedded if self.input_layernorm is None else self.input_layernorm(embedded)
        normed = hidden if self.hidden_norm is None else self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        return self.rest(torch.cat([embedded, normed], -1), residual, rope, mask, cache)


def shape_of(fields: Fields, keys: Keys, index: int = 0, reads: int = 1) -> LayerShape:
    """Sizes of layer `index`, whose attention reads `reads` times the hidden size.

    What exists (biases, query and key norms) is read off the keys.
    """
    at = f"layers.{index}.self_attn"
    return read_shape(
        fields, reads=reads, qkv_bias=f"{at}.q_proj.bias" in keys, qk_norm=f"{at}.q_norm.weight" in keys
    )
