"""EAGLE's draft networks: one decoder layer that continues the target's hidden states, token by token.

EAGLE-1 and EAGLE-2 share theirs (Li et al. 2024, arXiv 2401.15077 and 2406.16858; HASS, arXiv 2408.15766, trains it
better). EAGLE-3 (Li et al. 2025, arXiv 2503.01840) reads several layers of the target and has a head of its own;
its variants add norms. At position t both take the target's hidden state of token t and the embedding of token t+1,
and say what token t+2 is. The official code is SafeAILab/EAGLE; `models.eagle_config` reads the other spellings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from specbench.errors import SpecbenchError
from specbench.models.checkpoint import FOR_TARGET, Checkpoint
from specbench.models.detect import expect
from specbench.models.draft_net import DraftNet, Layer, LayerShape, RMSNorm
from specbench.models.eagle_config import AUX_IDS, Keys, aux_taps, window_of
from specbench.models.eagle_layers import SideBySide, shape_of
from specbench.models.fields import Fields
from specbench.models.fill import LAYER_FIELDS, fill
from specbench.models.fits import check_hidden_size, check_vocabulary
from specbench.models.rope import Rope, read_frequencies
from specbench.models.target import Target

if TYPE_CHECKING:
    from specbench.decoding.context import Layout


def open_eagle(checkpoint: Checkpoint, target: Target) -> Eagle:
    """The EAGLE network in `checkpoint`, checked against `target` and moved to its device and dtype.

    Raises:
        SpecbenchError: a field or weight is missing, misshapen or unknown, or the draft is for another target.
    """
    found = expect(checkpoint, ("eagle3", "eagle"), "eagle")
    fields, keys = Fields(checkpoint.ref, checkpoint.config), Keys(checkpoint)
    frequencies = read_frequencies(fields, fields.heads()[2])
    with torch.device("meta"):
        net = (Eagle3 if found.kind == "eagle3" else Eagle1)(fields, keys, target)
    fill(
        net, checkpoint, device=target.device, dtype=target.dtype, key_of=keys.spelled,
        ignored=keys.not_loaded(), said_by={**LAYER_FIELDS, "fc.": AUX_IDS[0]},
    )  # fmt: skip
    net.set_rope(frequencies)
    return net


class Eagle(DraftNet):
    """What both networks have in common, and all a drafter knows of them.

    Attributes:
        kind: "EAGLE-1/2" or "EAGLE-3".
        taps: the target's hidden states it reads.
        width: h, the size of its own hidden states.
        vocab: tokens it can draft, D.
        positions: how many it was made for (a huge number if its config does not say).
    """

    kind: str
    taps: tuple[str, ...]

    def __init__(self, fields: Fields, shape: LayerShape, layers: int, target: Target) -> None:
        super().__init__(layers)
        self.width = fields.integer("hidden_size")
        self.positions = fields.integer("max_position_embeddings", default=2**31)
        self.target_vocab = target.vocab_size
        self.vocab = target.vocab_size
        self.ids: torch.Tensor | None = None  # target id of each draft id, where they differ
        # In tuples: modules of the target are not this network's own, neither to be moved nor to be counted.
        self._embed, self._head = (target.embeddings,), (target.lm_head,)
        self.shape = shape
        self.window = window_of(fields)
        if self.window is not None:
            self.kinds = ("sliding_attention",)

    def features(self, taps: dict[str, torch.Tensor]) -> torch.Tensor:
        """What the network continues, `[B, T, h]`, from the target's hidden states `[B, T, H]` each."""
        raise NotImplementedError

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor, at: Layout | None) -> torch.Tensor:
        """Outputs `[B, T, h]`.

        Args:
            tokens: int64 `[B, T]`, the target's ids, each one further than its hidden state.
            hidden: `[B, T, h]`, features of the target or, further out, `feedback` of this network's outputs.
            at: where the pass writes and looks; None for a first pass, which attends to itself alone.
        """
        if at is None:
            self.cache.start_prefill()
            places = torch.arange(tokens.shape[1], device=tokens.device)[None]
            mask = None
        else:
            mask = at.masks[self.kinds[0]]
            self.cache.start(at.slots, mask.shape[-1])
            places = at.positions
        return self.run(self.embed(tokens), hidden, self.rope_at(places), mask)

    def run(
        self, embedded: torch.Tensor, hidden: torch.Tensor, rope: Rope, mask: torch.Tensor | None
    ) -> torch.Tensor:
        raise NotImplementedError

    def feedback(self, out: torch.Tensor) -> torch.Tensor:
        """Of outputs `[B, T, h]`, the hidden states that go in with the tokens drafted from them."""
        return out

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """Float32 logits `[B, T, D]` of outputs `[B, T, h]`."""
        return self._head[0](out).to(self.device).float()[..., : self.target_vocab]

    def to_target(self, ids: torch.Tensor) -> torch.Tensor:
        """Target ids of draft ids."""
        return ids if self.ids is None else self.ids[ids]

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._embed[0](tokens).to(self.device, self.dtype)


class Eagle1(Eagle):
    """EAGLE-1 and EAGLE-2: `fc` over embedding and hidden state, a layer without input norm, the target's head."""

    kind = "EAGLE-1/2"
    taps = ("final",)

    def __init__(self, fields: Fields, keys: Keys, target: Target) -> None:
        super().__init__(fields, shape_of(fields, keys), keys.layers(), target)
        check_hidden_size(fields.ref, "hidden_size", self.width, target.config.hidden_size)
        vocab = check_vocabulary(fields.ref, "vocab_size", fields.integer("vocab_size"), target.vocab_size)
        if "embed_tokens.weight" in keys:  # the target's are used: this one only has to fit
            keys.take("embed_tokens.weight", vocab, self.width)
        converted = fields.config.get("model_type") == "eagle"
        bias = fields.flag("eagle_fc_bias") if converted else fields.flag("bias", default=True)
        self.fc = nn.Linear(2 * self.width, self.width, bias=bias)
        if (
            "lm_head.weight" in keys
        ):  # converted: a copy of the target's, which may be cut to its first tokens
            drafts = keys.take("lm_head.weight", None, self.width).shape[0]
            self.vocab = min(drafts, target.vocab_size)
            self.lm_head = nn.Linear(self.width, drafts, bias=False)
            self._head = (self.lm_head,)
        self.layers = nn.ModuleList(
            Layer(self.shape, index, normed=index > 0) for index in range(len(self.cache))
        )

    def features(self, taps: dict[str, torch.Tensor]) -> torch.Tensor:
        return taps["final"].to(self.device, self.dtype)

    def run(
        self, embedded: torch.Tensor, hidden: torch.Tensor, rope: Rope, mask: torch.Tensor | None
    ) -> torch.Tensor:
        x = self.fc(torch.cat([embedded, hidden], -1))
        for layer in self.layers:
            x = layer(x, rope, mask, self.cache)
        return x


class Eagle3(Eagle):
    """EAGLE-3: `fc` over several layers of the target, a first layer that reads embedding and hidden state side by
    side, its own norm and head over a vocabulary of D tokens.

    Variants, by flag or key: `norm_before_residual`; `norm_before_fc` (one norm over all layers' hidden states);
    `fc_norm` (one a layer) and `norm_output` (the normed output is fed back), both of EAGLE-3.1; without `fc`
    (`use_aux_hidden_state: false`) the target's last hidden state alone is read; an own hidden size.
    """

    kind = "EAGLE-3"

    def __init__(self, fields: Fields, keys: Keys, target: Target) -> None:
        super().__init__(fields, shape_of(fields, keys, reads=2), keys.layers(), target)
        size, eps = target.config.hidden_size, self.shape.eps
        vocab = check_vocabulary(fields.ref, "vocab_size", fields.integer("vocab_size"), target.vocab_size)
        stated = fields.optional("target_hidden_size")
        if stated is not None:
            check_hidden_size(fields.ref, "target_hidden_size", stated, size)
        self.norm_output = fields.flag("norm_output")
        if fields.flag("use_aux_hidden_state", default=True):
            self.taps = aux_taps(fields, target.config.num_hidden_layers)
            read = len(self.taps) * size
            self.fc = nn.Linear(read, self.width, bias="fc.bias" in keys)
            if fields.flag("norm_before_fc", default="input_norm.weight" in keys):
                self.input_norm = RMSNorm(read, eps)
            if fields.flag("fc_norm", default="fc_norm.0.weight" in keys):
                self.fc_norm = nn.ModuleList(RMSNorm(size, eps) for _ in self.taps)
        else:
            self.taps = ("final",)
            check_hidden_size(fields.ref, "hidden_size", self.width, size)
        self.layers = nn.ModuleList([self._first_layer(fields, keys)])
        for i in range(1, len(self.cache)):
            self.layers.append(Layer(shape_of(fields, keys, i), i, normed=True))
        self.norm = RMSNorm(self.width, eps)
        hint = f"check draft_vocab_size in its config.json; {FOR_TARGET}"
        stated = fields.optional("draft_vocab_size")
        drafts = len(keys.take("lm_head.weight", stated, self.width, hint=hint))
        self.lm_head = nn.Linear(self.width, drafts, bias=False)
        self._head = (self.lm_head,)
        self._open_embeddings(keys, target, vocab)
        self._open_vocabulary(fields, keys, target, vocab, drafts)

    def features(self, taps: dict[str, torch.Tensor]) -> torch.Tensor:
        parts = [taps[name].to(self.device, self.dtype) for name in self.taps]
        if not hasattr(self, "fc"):
            return parts[0]
        if hasattr(self, "fc_norm"):
            parts = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
        x = torch.cat(parts, -1)
        return self.fc(self.input_norm(x) if hasattr(self, "input_norm") else x)

    def run(
        self, embedded: torch.Tensor, hidden: torch.Tensor, rope: Rope, mask: torch.Tensor | None
    ) -> torch.Tensor:
        first, *others = self.layers
        x = first(embedded, hidden, rope, mask, self.cache)
        for layer in others:
            x = layer(x, rope, mask, self.cache)
        return x

    def feedback(self, out: torch.Tensor) -> torch.Tensor:
        return self.norm(out) if self.norm_output else out

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        return super().logits(self.norm(out))[..., : self.vocab]

    def _first_layer(self, fields: Fields, keys: Keys) -> SideBySide:
        """Both its norms are there, but where the hidden state comes as it is (no `fc`): then the keys say."""
        of_embedding, of_hidden = (
            hasattr(self, "fc") or f"layers.0.{name}.weight" in keys
            for name in ("input_layernorm", "hidden_norm")
        )
        return SideBySide(self.shape, (of_embedding, of_hidden), fields.flag("norm_before_residual"))

    def _open_embeddings(self, keys: Keys, target: Target, vocab: int) -> None:
        """The target's, whatever the file says (some hold random ones), unless the sizes differ."""
        if self.width != target.config.hidden_size:
            self.embed_tokens = nn.Embedding(vocab, self.width)
        elif "embed_tokens.weight" in keys:
            keys.take("embed_tokens.weight", vocab, self.width)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "embed_tokens"):
            return super().embed(tokens)
        return self.embed_tokens(tokens.clamp(max=self.embed_tokens.num_embeddings - 1))

    def _open_vocabulary(self, fields: Fields, keys: Keys, target: Target, vocab: int, drafts: int) -> None:
        """Which target id each draft id is: id + d2t[id]; the same where there is no map."""
        self.vocab = min(drafts, target.vocab_size)
        if "t2d" in keys:
            keys.take("t2d", vocab)
        if drafts == vocab and "d2t" not in keys:
            return
        with torch.device("cpu"):
            ids = keys.take("d2t", drafts).long() + torch.arange(drafts)
            if ids.min() < 0 or ids.max() >= target.vocab_size or ids.unique().numel() != drafts:
                raise SpecbenchError(
                    f"{fields.ref}: {keys.spelled('d2t')} does not map its {drafts} tokens to different ids below "
                    f"{target.vocab_size}",
                    FOR_TARGET,
                )
        self.vocab, self.ids = drafts, ids.to(target.device)
