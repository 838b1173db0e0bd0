"""Hydra++: heads that know the tokens before theirs, on a layer of their own over the target's hidden states.

A `prefix` layer (a decoder layer like the target's, and a final norm) reads the target's last hidden states, after
the final norm, of verified tokens only, and keeps their keys and values. Head i is a small network over the prefix
layer's output at the last verified token, the embedding of the root, and the embeddings of i tokens drafted after
it; it guesses the next one. Sources: Ankner et al., "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding"
(2024); zankner/Hydra, hydra/model/hydra_heads/prefix_mlp_head.py.

Unlike the official code, this honours the target's rope_theta and its grouped-query attention.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import embedding, silu

from specbench.decoding.context import Layout
from specbench.errors import SpecbenchError
from specbench.models.checkpoint import Checkpoint
from specbench.models.draft_net import Attention, DraftNet, LayerShape, Mlp, RMSNorm, rope_at
from specbench.models.fill import fill, own_weight
from specbench.models.target import Target

PREFIX = "prefix_embeding_layer."  # the official spelling
EMBEDDINGS = "input_embed_fn.weight"  # the target's, as the heads knew them
UNUSED = (f"{PREFIX}embed_tokens.weight", f"{PREFIX}layers.0.self_attn.rotary_emb.inv_freq")


class _Layer(nn.Module):
    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape, 0)
        self.mlp = Mlp(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.eps)


class Prefix(DraftNet):
    """The prefix layer; hidden states `[B, T, H]` in, `[B, T, H]` out."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(layers=1)
        self.shape = shape
        self.layers = nn.ModuleList([_Layer(shape)])
        self.norm = RMSNorm(shape.hidden_size, shape.eps)

    def prefill(self, hidden: torch.Tensor) -> torch.Tensor:
        """Fresh rows: hidden states of their prompts, padded on the right."""
        self.cache.start_prefill()
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        return self._run(hidden, positions, None)

    def forward(self, hidden: torch.Tensor, at: Layout) -> torch.Tensor:
        """Further verified tokens, where `at` says."""
        (mask,) = at.masks.values()
        self.cache.start(at.slots, mask.shape[-1])
        return self._run(hidden, at.positions, mask)

    def _run(self, x: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        layer: Any = self.layers[0]
        rope = rope_at(positions, self.shape.head_dim, self.shape.rope_theta, x.dtype)
        x = x + layer.self_attn(layer.input_layernorm(x), rope, mask, self.cache)
        return self.norm(x + layer.mlp(layer.post_attention_layernorm(x)))


class Block(nn.Module):
    """A residual block, x + silu(W x + b); the first narrows its input, and its x goes through a layer of its own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.res_connection = nn.Linear(inputs, outputs) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.res_connection(x) + silu(self.linear(x))


class HydraHead(nn.Module):
    """The head that follows a path of `length` vectors: the prefix layer's output, the root's embedding, …"""

    def __init__(self, length: int, blocks: int, hidden: int, vocab: int) -> None:
        super().__init__()
        inputs = [length * hidden] + [hidden] * (blocks - 1)
        self.blocks = nn.Sequential(*(Block(size, hidden) for size in inputs))
        self.out = nn.Linear(hidden, vocab)

    def logits(self, path: torch.Tensor) -> torch.Tensor:
        """Logits `[…, V]` after paths `[…, length · H]`."""
        return self.out(self.blocks(path))


class HydraNet(nn.Module):
    """The prefix layer, the heads in order, and the embeddings the heads read."""

    def __init__(self, shape: LayerShape, heads: int, blocks: int, vocab: int) -> None:
        super().__init__()
        self.prefix = Prefix(shape)
        self.heads = nn.ModuleList(HydraHead(i + 2, blocks, shape.hidden_size, vocab) for i in range(heads))
        self.embeddings: nn.Parameter | None = None

    def logits(self, head: int, path: torch.Tensor) -> torch.Tensor:
        """Logits `[…, V]` of one head after paths `[…, (head + 2) · H]`."""
        chosen: Any = self.heads[head]
        return chosen.logits(path)

    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(p.nbytes for p in self.parameters())

    def embed(self, tokens: torch.Tensor, target: Target) -> torch.Tensor:
        """Embeddings `[…, H]`: the target's, unless the checkpoint has others."""
        if self.embeddings is None:
            return target.embeddings(tokens)
        return embedding(tokens, self.embeddings)


def open_hydra(checkpoint: Checkpoint, target: Target) -> HydraNet:
    """The drafter in a checkpoint of official layout, in the target's dtype. Its parts are counted from the keys.

    Raises:
        SpecbenchError: another kind of Hydra heads; a missing, unknown or misshapen weight.
    """
    _check_kind(checkpoint)
    heads = _highest(checkpoint.state, r"hydra_(?:mlp|lm_head)\.(\d+)\.") + 1
    last = _highest(checkpoint.state, r"hydra_mlp\.\d+\.(\d+)\.")
    with torch.device("meta"):
        net = HydraNet(_shape(checkpoint, target), max(heads, 1), max(last + 1, 2) // 2, target.vocab_size)
    ignored = [EMBEDDINGS, *UNUSED]
    fill(net, checkpoint, device=target.device, dtype=target.dtype, key_of=_official, ignored=ignored)
    net.embeddings = own_weight(checkpoint, EMBEDDINGS, target.embeddings)
    return net


def _official(name: str) -> str:
    """The official name of a weight. Blocks there have odd numbers: a dropout stands before each."""
    if name.startswith("prefix."):
        return PREFIX + name.removeprefix("prefix.")
    name = re.sub(r"heads\.(\d+)\.blocks\.(\d+)", lambda m: f"hydra_mlp.{m[1]}.{2 * int(m[2]) + 1}", name)
    return re.sub(r"heads\.(\d+)\.out", r"hydra_lm_head.\1.1", name)


def _check_kind(checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    kind, grounded = config.get("hydra_head_arch", "prefix-mlp"), config.get("grounded_heads", True)
    offset = config.get("hidden_state_offset", 0)
    if kind != "prefix-mlp" or not grounded or offset:
        raise SpecbenchError(
            f"{checkpoint.ref}: Hydra heads of another kind (hydra_head_arch {kind}, grounded_heads {grounded}, "
            f"hidden_state_offset {offset})",
            "Hydra++ checkpoints are supported: prefix-mlp, grounded, offset 0",
        )


def _shape(checkpoint: Checkpoint, target: Target) -> LayerShape:
    config, layer = target.config, f"{PREFIX}layers.0."
    hidden, heads = config.hidden_size, config.num_attention_heads
    return LayerShape(
        hidden_size=hidden,
        intermediate_size=checkpoint.take(f"{layer}mlp.gate_proj.weight", None, hidden).shape[0],
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        input_size=hidden,
        eps=getattr(config, "rms_norm_eps", 1e-6),
        qkv_bias=f"{layer}self_attn.q_proj.bias" in checkpoint.state,
        rope_theta=_rope_theta(config),
    )


def _highest(keys: Iterable[str], pattern: str) -> int:
    return max((int(match[1]) for key in keys if (match := re.match(pattern, key))), default=-1)


def _rope_theta(config: Any) -> float:
    """The base of the target's rotary positions; transformers 5 keeps it in `rope_parameters`."""
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    return float(parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)
