"""The target: a transformers causal language model behind a slot cache, with taps.

Everything that decodes (vanilla, the verify pass, a draft model's steps) goes through `Target.prefill` and
`Target.forward`, so that all of them cost the same.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specbench.errors import SpecbenchError, first_line
from specbench.measure.memory import module_bytes
from specbench.models import attention
from specbench.models.acceleration import (
    OFF,
    compiled,
    experts_implementation,
    group_experts,
    spread,
    uncapturable,
)
from specbench.models.buckets import buckets, round_up
from specbench.models.cache import SlotCache
from specbench.models.device import send
from specbench.models.fixed_pass import SLOTS, Tensors
from specbench.models.fused import fuse
from specbench.models.joined import Switch
from specbench.models.kernels import Choices, pack
from specbench.models.long_rope import LongRope
from specbench.models.passes import Passes
from specbench.models.routers import PREFIX, number_of_experts
from specbench.models.skipped_layers import going_around
from specbench.models.taps import Taps

LOGITS = "logits"
GROWTH = 512  # slots that a cache grows by where passes are kept: growing makes all of them worthless
ATTENTION_KINDS = ("full_attention", "sliding_attention")

_log = logging.getLogger("specbench")


@dataclass(frozen=True)
class Pass:
    """One forward: logits `[B, T, V]`, and the hidden states asked for, `[B, T, H]` each."""

    logits: torch.Tensor
    taps: dict[str, torch.Tensor]


class Target:
    """A decoder-only model made ready for draft-verify decoding. Also what a draft model is wrapped in.

    Args:
        model: a transformers causal language model, in eval mode.
        tokenizer: its tokenizer, or None (prompts are ids).
        identity: who the model is (`specbench.models.load.Identity`), or None.
        stop: ids that end a generation.

    Raises:
        SpecbenchError: for an architecture whose layers cannot be verified from a slot cache.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        identity: Any = None,
        stop: frozenset[int] = frozenset(),
    ) -> None:
        self.model, self.tokenizer, self.identity, self.stop = model, tokenizer, identity, stop
        self.config = model.config.get_text_config(decoder=True)
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.dtype: torch.dtype = model.get_input_embeddings().weight.dtype
        self.vocab_size = _logits_width(model, self.config)
        self.context: int = getattr(self.config, "max_position_embeddings", None) or 2**31
        self.kinds = _layer_kinds(self.config, type(model).__name__)
        self.window: int | None = getattr(self.config, "sliding_window", None)
        self.cache = SlotCache(self.config.num_hidden_layers, alike=not spread(model))
        self._cache_argument = _cache_argument(model)
        self._taps = Taps(model)
        self.experts = number_of_experts(self.config)[0] if self._taps.routers else 0
        self._switch, self.kernel_choices = Switch(), Choices()
        self.fused: dict[str, int] = {}
        self._skipped: tuple[int, ...] = ()
        self._long_rope = LongRope(model)
        self._compiled: Any = None  # the model
        self.graphs, self.compiled = "off", False
        self.passes = Passes(self.name, off=OFF)
        # A model may be wrapped twice, as target and as its own draft: each wrapper has its own cache.
        ours = self.config._attn_implementation
        self._stock_attention = "sdpa" if ours == attention.NAME else ours
        if self._stock_attention == "sdpa":
            attention.register()
            self._set_attention(attention.NAME)

    @property
    def embeddings(self) -> torch.nn.Module:
        """Input embeddings: ids to `[…, H]`."""
        return self.model.get_input_embeddings()

    @property
    def lm_head(self) -> torch.nn.Module:
        """Hidden states `[…, H]` (after the final norm) to logits `[…, V]`."""
        return self.model.get_output_embeddings()

    @property
    def name(self) -> str:
        return type(self.model).__name__ if self.identity is None else self.identity.name

    @property
    def kernels(self) -> dict[str, Any]:
        """What computes: must not change within a run."""
        chosen = {"attention": self.config._attn_implementation, "linear": self.kernel_choices}
        if self.fused:
            chosen["fused"] = self.fused
        if self.device.type == "cuda":
            chosen["graphs"] = self._uncapturable() or "captured"
            chosen["cudnn_attention"] = torch.backends.cuda.cudnn_sdp_enabled()
            chosen["experts"] = experts_implementation(self.model) if self.experts else None
        if self.compiled:
            chosen["compile"] = "torch.compile"
        return chosen

    @property
    def router_taps(self) -> tuple[str, ...]:
        """The taps of a mixture's routers, one a MoE layer; none of a dense model."""
        return tuple(f"{PREFIX}{place}" for place in range(len(self._taps.routers)))

    def weights_bytes(self) -> int:
        """Bytes of parameters and buffers, as stored."""
        return module_bytes(self.model)

    def fuse(self) -> Target:
        """Take fewer kernels for the same arithmetic (`models.fused`); before `pack`."""
        if not spread(self.model):
            self.fused = fuse(self.model, self._switch)
        return self

    def pack(self, folder: Path, notify: Callable[[str], None] = lambda line: None) -> Target:
        """On a CPU, take the fastest matrix kernels (`models.kernels`); choices are kept in `folder`."""
        self.kernel_choices = pack(self.model, folder, self._switch, notify)
        return self

    def accelerate(self, graphs: str = "auto", compile: bool = False) -> Target:
        """Run decoding passes as CUDA graphs (`auto`: wherever that can be; `off`), or compiled, or both."""
        self.graphs, self.compiled = graphs, compile
        if self.device.type == "cuda" and self.experts:
            group_experts(self.model)
        reason = self._uncapturable()
        self.passes = Passes(self.name, off=reason)
        if reason is not None and graphs != "off" and self.device.type == "cuda":
            _log.warning("the %s runs without CUDA graphs: %s", self.name, reason)
        self._compiled = compiled(self.model) if compile else None
        return self

    def reserve(self, rows: int, tokens: int, spare: int = 0) -> None:
        """Room for `rows` sequences of up to `tokens` tokens, and `spare` more for drafts (and the scratch slot)."""
        slots = round_up(tokens + spare + 1)
        if self.passes.off is None:
            slots = -(-slots // GROWTH) * GROWTH
        self.cache.reserve(rows, slots)
        self._long_rope.choose(tokens)

    def ahead(self, rows: int, shortest: int, longest: int) -> None:
        """Untimed: make the passes that have come up so far for all contexts of `shortest` to `longest` tokens."""
        if self.passes.off is not None or not self.cache.ready:
            return
        lengths = buckets(shortest, longest, self.cache.slots)
        self.passes.ahead(rows, self.cache.version, lengths, self._as)

    def release(self) -> None:
        """Give back the cache and the passes that write to it; the weights stay."""
        self.cache.release()
        self.passes.clear()

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> Pass:
        """Process prompts into slots 1..len of their rows. Logits `[B, 1, V]` at each row's last token.

        Ragged rows are padded on the right: under a causal mask no real token sees the padding, and what it leaves
        in the cache lies beyond the row's length, where every later mask hides it until it is overwritten.
        """
        longest = max(map(len, prompts))
        tokens = send([list(p) + [p[-1]] * (longest - len(p)) for p in prompts], self.device)
        positions = torch.arange(longest, device=self.device)[None].expand(len(prompts), -1)
        self.cache.start_prefill()
        ends = sorted({len(p) - 1 for p in prompts})
        keep = send(ends, self.device)
        out = self._call(tokens, positions, None, logits_to_keep=keep)
        if len(ends) > 1:
            last = send([ends.index(len(p) - 1) for p in prompts], self.device)
            out = out.gather(1, last[:, None, None].expand(-1, 1, out.shape[-1]))
        return Pass(out, self._taps.take())

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        masks: dict[str, torch.Tensor],
    ) -> Pass:
        """A pass over tokens, positions and slots, int64 `[B, T]` each.

        Args:
            masks: additive float `[B, 1, T, L]` by layer type (`self.kinds`), L the slots attention reads.
        """
        inputs = {"tokens": tokens, "positions": positions, SLOTS: slots, **masks}
        length = masks[self.kinds[0]].shape[-1]
        if self.passes.off is None and self.cache.ready:
            variant = self._taps.names, self._skipped
            out = self.passes.run(variant, self.cache.version, self._compute, inputs, length)
        else:
            out = self._compute(inputs, length)
        logits = out.pop(LOGITS)
        return Pass(
            logits, {name: t.flatten(0, 1) if name.startswith(PREFIX) else t for name, t in out.items()}
        )

    def _compute(self, inputs: Tensors, length: int) -> Tensors:
        """Logits and taps, `[B, T, …]` each, of a pass."""
        tokens, slots = inputs["tokens"], inputs[SLOTS]
        masks = {kind: inputs[kind] for kind in self.kinds}
        self.cache.start(slots, length)
        mask = masks if len(self.kinds) > 1 else masks[self.kinds[0]]
        logits = self._call(tokens, inputs["positions"], mask, fused=True)
        taps = self._taps.take()
        return {
            LOGITS: logits,
            **{
                name: t.unflatten(0, slots.shape) if name.startswith(PREFIX) else t
                for name, t in taps.items()
            },
        }

    @contextlib.contextmanager
    def tapping(self, names: Sequence[str]) -> Iterator[None]:
        """While open, every pass returns the hidden states `names`: "embed", "layer:i", "final"; and of `router_taps`
        the experts `[B·T, k]` that each token was sent to.

        Raises:
            SpecbenchError: for a name this model has no module for.
        """
        with self._taps.open(names):
            yield

    @contextlib.contextmanager
    def skipping(self, layers: Collection[int]) -> Iterator[None]:
        """While open, passes go around the decoder layers `layers` (counted from 0) and leave their cache alone.

        Raises:
            SpecbenchError: for a model whose decoder has no list of layers, or not these.
        """
        before, self._skipped = self._skipped, tuple(sorted(layers))
        try:
            with going_around(self.model, layers):
                yield
        finally:
            self._skipped = before

    @contextlib.contextmanager
    def _as(self, variant: tuple[tuple[str, ...], tuple[int, ...]]) -> Iterator[None]:
        """While open, passes are of this variant: taps, and layers skipped."""
        taps, skipped = variant
        with self.tapping(taps), self.skipping(skipped) if skipped else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def stock_attention(self) -> Iterator[None]:
        """While open, the model computes as transformers would have it (for the references through `generate`)."""
        ours = self.config._attn_implementation
        self._set_attention(self._stock_attention)
        try:
            with self._switch.off(), self._long_rope.stock():
                yield
        finally:
            self._set_attention(ours)

    def _set_attention(self, name: str) -> None:
        # The private field and not `set_attn_implementation`: it is read at every forward, and switching must be
        # cheap and must not touch a vision or audio tower.
        self.config._attn_implementation = name

    def _call(
        self, tokens: torch.Tensor, positions: torch.Tensor, mask: Any, fused: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        kwargs |= {"input_ids": tokens, "position_ids": positions, "attention_mask": mask}
        kwargs |= {self._cache_argument: self.cache, "use_cache": True}
        if fused and self._compiled is not None:
            try:
                return self._compiled(**kwargs).logits.to(self.device)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - compilers fail in many ways; the model itself still runs
                self._compiled = None
                _log.warning("the %s runs without torch.compile: %s", self.name, first_line(error))
        return self.model(**kwargs).logits.to(self.device)

    def _uncapturable(self) -> str | None:
        """Why no pass can be a CUDA graph, as far as it is known before one is tried."""
        return OFF if self.graphs == "off" else uncapturable(self.model, self.device, self.experts)


def _logits_width(model: Any, config: Any) -> int:
    head = model.get_output_embeddings()
    return head.weight.shape[0] if head is not None and hasattr(head, "weight") else config.vocab_size


def _cache_argument(model: Any) -> str:
    """`cache` from transformers 5.24 on, `past_key_values` before."""
    forward = inspect.signature(inspect.unwrap(type(model).forward))
    return "cache" if "cache" in forward.parameters else "past_key_values"


def _layer_kinds(config: Any, name: str) -> tuple[str, ...]:
    types = getattr(config, "layer_types", None)
    if not types:
        types = ["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"]
    kinds = tuple(dict.fromkeys(types))
    strange = [kind for kind in kinds if kind not in ATTENTION_KINDS]
    if strange:
        raise SpecbenchError(
            f"{name} has layers of type {', '.join(strange)}, whose state a rejected draft cannot be taken out of",
            "use a target whose layers are all full or sliding attention",
        )
    return kinds
