"""DFlash: a network that guesses a whole block of tokens in one pass from the target's hidden states.

A few Qwen3 layers over a block [last token, MASK, MASK…] whose positions see each other. Keys and values of every
layer also come from the context: the hidden states of some target layers, through `fc` and `hidden_norm`, for each
token the target has verified. Those are kept in the slot cache; a block's own are written behind them and forgotten.

Sources: z-lab/dflash, dflash/model.py (arXiv 2602.06036). For checkpoints of DeepSpec, whose blocks are shifted by
one (the root's place guesses the first token) and may have a Markov head: deepseek-ai/DeepSpec, modeling/dspark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import embedding, linear

from specbench.models.checkpoint import Checkpoint
from specbench.models.dflash_settings import DFlashSettings, read_settings
from specbench.models.draft_net import DraftNet, Layer, RMSNorm
from specbench.models.dspark import MarkovHead
from specbench.models.fields import Fields
from specbench.models.fill import LAYER_FIELDS, fill, fit_rows, own_weight
from specbench.models.rope import read_frequencies, target_base
from specbench.models.target import Target

if TYPE_CHECKING:
    from specbench.decoding.context import Context

# Copies of the target's (DeepSpec keeps them frozen); and a head that only shortens drafts, by default not at all.
SHARED = ("embed_tokens.weight", "lm_head.weight")
MARKOV = {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}  # a row an id
UNUSED = ("confidence_head.proj.weight", "confidence_head.proj.bias")


def open_dflash(checkpoint: Checkpoint, target: Target) -> DFlashNet:
    """The network of a DFlash or DSpark checkpoint, ready to draft for `target`.

    Raises:
        SpecbenchError: another kind of drafter, a variant that is not built, a draft for another target, or weights
            that are missing, misshapen or too many.
    """
    settings = read_settings(checkpoint, target)
    checkpoint = fit_rows(checkpoint, MARKOV, target.vocab_size)
    fields = Fields(checkpoint.ref, checkpoint.config)
    frequencies = read_frequencies(fields, settings.layer.head_dim, base=target_base(target))
    with torch.device("meta"):
        net = DFlashNet(settings, target)
    fill(
        net, checkpoint, device=target.device, dtype=target.dtype, ignored=(*SHARED, *UNUSED),
        said_by={**LAYER_FIELDS, "fc.": "target_layer_ids", "markov_w": "markov_rank"},
    )  # fmt: skip
    net.embed_weight = own_weight(checkpoint, SHARED[0], target.embeddings)
    net.head_weight = own_weight(checkpoint, SHARED[1], target.lm_head)
    net.set_rope(frequencies)
    return net


class DFlashNet(DraftNet):
    """The layers of a DFlash draft. Embeddings and head are the target's, unless the checkpoint has others."""

    def __init__(self, settings: DFlashSettings, target: Target) -> None:
        super().__init__(settings.layers)
        self.settings = settings
        self.kinds = tuple(dict.fromkeys(settings.layer_types))
        self.window = settings.window
        shape = settings.layer
        width = shape.hidden_size
        self.fc = nn.Linear(len(settings.layer_ids) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, shape.eps)
        self.layers: Any = nn.ModuleList(Layer(shape, index) for index in range(settings.layers))
        self.norm = RMSNorm(width, shape.eps)
        if settings.markov is not None:
            self.markov_head = MarkovHead(settings.markov, target.vocab_size, settings.markov_rank, width)
        self.embed_weight: nn.Parameter | None = None
        self.head_weight: nn.Parameter | None = None
        self._shared: tuple[Any, Any] = target.embeddings, target.lm_head

    def remember(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Keep the hidden states of verified tokens: keys and values of every layer.

        Args:
            features: the taps side by side, `[B, T, taps * H]`, right-padded.
            positions, slots: int64 `[B, T]`, as `Context.occupy` gives them.
        """
        states = self.hidden_norm(self.fc(features.to(self.dtype)))
        rope = self.rope_at(positions)
        self.cache.start(slots, 0)
        for layer in self.layers:
            layer.self_attn.remember(states, rope, self.cache)

    def block(self, roots: torch.Tensor, context: Context, start: torch.Tensor, read: int) -> torch.Tensor:
        """One pass over a block a row: hidden states `[B, drafts, H]` of the drafted places.

        Args:
            roots: int64 `[B]`, the last token of each row, which stands behind its context.
            start, read: of `context`, see `Context.layout`.
        """
        rows, width = len(roots), self.settings.block
        tokens = roots.new_full((rows, width), self.settings.mask_token)
        tokens[:, 0] = roots
        depth = torch.arange(width, device=roots.device).expand(rows, -1)
        live = torch.ones(rows, width, dtype=torch.bool, device=roots.device)
        masks = {}
        for kind in self.kinds:
            every = None if kind in self.settings.causal else live[:, None, :].expand(-1, width, -1)
            at = context.layout(depth, live, every, 0, start, read)
            masks[kind] = at.masks[kind]
        rope = self.rope_at(at.positions)
        self.cache.start(at.slots, at.masks[self.kinds[0]].shape[-1])
        x = self.embed(tokens)
        for layer, kind in zip(self.layers, self.settings.layer_types, strict=True):
            x = layer(x, rope, masks[kind], self.cache)
        return self.norm(x[:, width - self.settings.drafts :])

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Raw embeddings of ids: not scaled or normalised as some targets do for themselves."""
        weight: torch.Tensor = self._shared[0].weight if self.embed_weight is None else self.embed_weight
        return embedding(tokens, weight).to(self.dtype) * self.settings.embedding_scale

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[…, V]` on this network's device of hidden states `[…, H]`."""
        head = self._shared[1]
        if self.head_weight is None:
            out = head(hidden.to(head.weight.device)).to(self.device)
        else:
            out = linear(hidden, self.head_weight)
        out = out * self.settings.output_multiplier
        cap = self.settings.softcap
        return out if cap is None else torch.tanh(out / cap) * cap
