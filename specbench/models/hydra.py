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
from torch.nn.functional import embedding

from specbench.decoding.context import Layout
from specbench.errors import SpecbenchError
from specbench.models.cache import SlotCache
from specbench.models.checkpoint import Checkpoint
from specbench.models.draft_net import DraftNet, Layer, LayerShape, RMSNorm, read_shape
from specbench.models.fields import Fields
from specbench.models.fill import fill, own_weight
from specbench.models.fits import check_vocabulary
from specbench.models.medusa import Head
from specbench.models.rope import plain_frequencies, target_base
from specbench.models.target import Target

PREFIX = "prefix_embeding_layer."  # the official spelling
EMBEDDINGS = "input_embed_fn.weight"  # the target's, as the heads knew them
UNUSED = (f"{PREFIX}embed_tokens.weight", f"{PREFIX}layers.0.self_attn.rotary_emb.inv_freq")


class Prefix(DraftNet):
    """The prefix layer; hidden states `[B, T, H]` in, `[B, T, H]` out."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(layers=1)
        self.layers = nn.ModuleList([Layer(shape, 0)])
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
        return self.norm(self.layers[0](x, self.rope_at(positions), mask, self.cache))


class HydraNet(nn.Module):
    """The prefix layer, the heads in order, and the embeddings the heads read.

    Args:
        heads: how many heads, of `blocks` blocks each.
        rows: the vocabulary the heads were made for.
        vocab: the target's, V; the two may differ by padding, and ids beyond the smaller one are not drafted.
    """

    def __init__(self, shape: LayerShape, heads: int, blocks: int, rows: int, vocab: int) -> None:
        super().__init__()
        self.prefix = Prefix(shape)
        self.heads = nn.ModuleList(
            Head((i + 2) * shape.hidden_size, shape.hidden_size, blocks, rows, bias=True)
            for i in range(heads)
        )
        self.vocab = min(rows, vocab)
        self.embeddings: nn.Parameter | None = None

    @property
    def lm_heads(self) -> list[nn.Module]:
        """The layers that make logits, one a head."""
        return [head.out for head in self.heads]  # type: ignore[misc]

    @property
    def cache(self) -> SlotCache:
        """The prefix layer's keys and values."""
        return self.prefix.cache

    def logits(self, head: int, path: torch.Tensor) -> torch.Tensor:
        """Logits `[…, V]` of one head after paths `[…, (head + 2) · H]`."""
        chosen: Any = self.heads[head]
        return chosen.logits(path)[..., : self.vocab]

    def embed(self, tokens: torch.Tensor, target: Target) -> torch.Tensor:
        """Embeddings `[…, H]`: the target's, unless the checkpoint has others."""
        if self.embeddings is None:
            return target.embeddings(tokens)
        return embedding(tokens, self.embeddings)


def open_hydra(checkpoint: Checkpoint, target: Target) -> HydraNet:
    """The drafter in a checkpoint of official layout, in the target's dtype. Its parts are counted from the keys.

    Raises:
        SpecbenchError: another kind of Hydra heads, or another vocabulary; a missing, unknown or misshapen weight.
    """
    _check_kind(checkpoint)
    heads = _highest(checkpoint.state, r"hydra_(?:mlp|lm_head)\.(\d+)\.") + 1
    last = _highest(checkpoint.state, r"hydra_mlp\.\d+\.(\d+)\.")
    shape, vocab = _shape(checkpoint, target), target.vocab_size
    head = _official("heads.0.out.weight")
    rows = len(checkpoint.take(head, None, shape.hidden_size)) if head in checkpoint.state else vocab
    check_vocabulary(checkpoint.ref, head, rows, vocab)
    with torch.device("meta"):
        net = HydraNet(shape, max(heads, 1), max(last + 1, 2) // 2, rows, vocab)
    ignored = [EMBEDDINGS, *UNUSED]
    fill(net, checkpoint, device=target.device, dtype=target.dtype, key_of=_official, ignored=ignored)
    net.embeddings = own_weight(checkpoint, EMBEDDINGS, target.embeddings)
    net.prefix.set_rope(plain_frequencies(target_base(target), shape.head_dim))
    return net


def _official(name: str) -> str:
    """The official name of a weight. Blocks there have odd numbers: a dropout stands before each."""
    if name.startswith("prefix."):
        return PREFIX + name.removeprefix("prefix.")
    name = re.sub(r"heads\.(\d+)\.blocks\.(\d+)", lambda m: f"hydra_mlp.{m[1]}.{2 * int(m[2]) + 1}", name)
    return re.sub(r"heads\.(\d+)\.out", r"hydra_lm_head.\1.1", name)


def _check_kind(checkpoint: Checkpoint) -> None:
    fields = Fields(checkpoint.ref, checkpoint.config)
    kind, grounded = (
        fields.get("hydra_head_arch") or "prefix-mlp",
        fields.flag("grounded_heads", default=True),
    )
    offset = fields.integer("hidden_state_offset", default=0, least=0)
    if kind != "prefix-mlp" or not grounded or offset:
        raise SpecbenchError(
            f"{checkpoint.ref}: Hydra heads of another kind (hydra_head_arch {kind}, grounded_heads {grounded}, "
            f"hidden_state_offset {offset})",
            "Hydra++ checkpoints are supported: prefix-mlp, grounded, offset 0",
        )


def _shape(checkpoint: Checkpoint, target: Target) -> LayerShape:
    """A layer like the target's, but for the width of its feed-forward part."""
    layer = f"{PREFIX}layers.0."
    gate = checkpoint.take(f"{layer}mlp.gate_proj.weight", None, target.config.hidden_size)
    return read_shape(
        Fields("the target", target.config.to_dict()),
        intermediate_size=len(gate),
        qkv_bias=f"{layer}self_attn.q_proj.bias" in checkpoint.state,
    )


def _highest(keys: Iterable[str], pattern: str) -> int:
    return max((int(match[1]) for key in keys if (match := re.match(pattern, key))), default=-1)
