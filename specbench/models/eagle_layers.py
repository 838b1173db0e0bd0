"""The decoder layers of EAGLE's networks: Llama's, but for what the first one reads."""

from __future__ import annotations

import torch
from torch import nn

from specbench.errors import SpecbenchError
from specbench.models.cache import SlotCache
from specbench.models.draft_net import Attention, LayerShape, Mlp, RMSNorm, Rope
from specbench.models.eagle_config import Config, Keys


class Layer(nn.Module):
    """A Llama layer, with or without the norm on its input."""

    def __init__(self, shape: LayerShape, index: int, normed: bool) -> None:
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


def shape_of(config: Config, keys: Keys, index: int = 0, reads: int = 1) -> LayerShape:
    """Sizes of layer `index`, whose attention reads `reads` times the hidden size.

    What exists (biases, query and key norms) is read off the keys.
    """
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise SpecbenchError(
            f"{config.ref}: config.json has {heads} attention heads, expected a multiple of its {kv_heads} "
            "key-value heads",
            "is config.json the one that belongs to these weights?",
        )
    return LayerShape(
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=config.integer("head_dim", hidden // heads),
        input_size=reads * hidden,
        eps=config.number("rms_norm_eps", 1e-6),
        qkv_bias=f"layers.{index}.self_attn.q_proj.bias" in keys,
        qk_norm=f"layers.{index}.self_attn.q_norm.weight" in keys,
    )
