"""Drafts as a method is given them: heads in a checkpoint, or whole models that speak the target's ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from specbench.errors import SpecbenchError
from specbench.measure.memory import module_bytes
from specbench.models.checkpoint import Checkpoint, list_checkpoint, open_checkpoint
from specbench.models.detect import KINDS, expect
from specbench.models.identity import ModelIdentity
from specbench.models.medusa import INSIDE
from specbench.models.quantize import NONE, draft_dtype, quantise_network, scheme_of
from specbench.models.target import Target

MODELS = ("causal-lm", "mtp", "pard", "medusa-2")  # kinds of checkpoint that run as a model on their own


def open_heads(draft: str | Checkpoint | None, method: str, kinds: Sequence[str]) -> Checkpoint:
    """The checkpoint of a learned drafter, which may be open already, if it is one of the `kinds` `method` runs.

    Raises:
        SpecbenchError: no draft given, one that cannot be read, or something else (see `detect.expect`).
    """
    if draft is None:
        raise SpecbenchError(
            f"{method} needs {KINDS[kinds[0]].words}, and none is known for this target",
            f"give one with --draft REF or {method}:draft=REF",
        )
    if isinstance(draft, Checkpoint):
        expect(draft, kinds, method)
        return draft
    listing = list_checkpoint(draft)
    found = expect(listing, kinds, method)
    # Of a whole model only its heads are wanted.
    return open_checkpoint(draft, listing.revision, (INSIDE,) if found.kind == "medusa-2" else None)


def quantised(network: nn.Module, who: ModelIdentity, quantize: str, target: Target) -> ModelIdentity:
    """Quantise a drafter's network in place, where that is asked for; who it is then.

    Raises:
        SpecbenchError: it cannot be, here or in the target's dtype.
    """
    if quantize == NONE:
        return who
    note = quantise_network(network, quantize, target.dtype, target.device)
    return who.quantised(quantize, module_bytes(network), note)


def open_draft_model(
    draft: str | Target | None,
    target: Target,
    method: str,
    *,
    kinds: Sequence[str] = MODELS,
    share: bool = True,
    quantize: str = NONE,
) -> Target:
    """The draft model for `target`: any REF a target may be, or one that is open already.

    With `share`, a REF that names the target itself, quantised as it is, shares its weights (each wrapper has its own
    cache). `quantize` is the draft model's own: see `models.quantize`.

    Raises:
        SpecbenchError: no draft given, one that is none of `kinds` (see `detect.expect`) or does not load, or one
            with another vocabulary.
    """
    if draft is None:
        raise SpecbenchError(
            f"{method} needs a draft model, and none is known for this target",
            f"give one with --draft REF or {method}:draft=REF",
        )
    opened = draft if isinstance(draft, Target) else _load(draft, target, method, kinds, share, quantize)
    check_same_vocabulary(target, opened)
    return opened


def _load(ref: str, target: Target, method: str, kinds: Sequence[str], share: bool, quantize: str) -> Target:
    from specbench.models.gguf import cache_folder
    from specbench.models.load import load

    share = share and quantize == scheme_of(target.model)
    if share and target.identity is not None and ref in (target.identity.ref, target.identity.name):
        shared = Target(target.model, target.tokenizer, target.identity)
        return shared.accelerate(target.graphs, target.compiled)
    _expect_model(ref, method, kinds)
    dtype = draft_dtype(quantize, target.dtype)
    loaded = load(ref, dtype=dtype, device=str(target.device), quantize=quantize, role="draft")
    own = Target(loaded.model, loaded.tokenizer, loaded.identity).fuse().pack(cache_folder())
    return own.accelerate(target.graphs, target.compiled)


def _expect_model(ref: str, method: str, kinds: Sequence[str]) -> None:
    """Check what a folder or Hub id holds; aliases, GGUF files and random weights are whole models."""
    from specbench.models.source import resolve

    if Path(ref).is_dir() or ("/" in ref and not ref.endswith(".gguf")):
        expect(replace(list_checkpoint(str(resolve(ref).folder)), ref=ref), kinds, method)


def known_ids(tokens: list[int], draft: Target, target: Target) -> list[int]:
    """Ids beyond the draft's embeddings (a target with a larger vocabulary) become its id 0."""
    size = draft.vocab_size
    return tokens if size >= target.vocab_size else [token if token < size else 0 for token in tokens]


def check_same_vocabulary(target: Target, draft: Target) -> None:
    """Every id that both tokenizers define must mean the same token; sizes may differ by padding.

    Models without tokenizers (random weights) are compared by the width of their logits.

    Raises:
        SpecbenchError: naming the first id that differs.
    """
    hint = "use a draft model of the target's own family, with the same tokenizer"
    if target.tokenizer is None or draft.tokenizer is None:
        if target.vocab_size != draft.vocab_size:
            raise SpecbenchError(
                f"the draft model has {draft.vocab_size} token ids and the target {target.vocab_size}", hint
            )
        return
    ours, theirs = _by_id(target), _by_id(draft)
    shared = ours.keys() & theirs.keys()
    differing = sorted(i for i in shared if ours[i] != theirs[i])
    if differing:
        first = differing[0]
        raise SpecbenchError(
            f"the draft model has another vocabulary: {len(differing)} of {len(shared)} ids differ, "
            f"id {first} is {theirs[first]!r} there and {ours[first]!r} in the target",
            hint,
        )
    if len(shared) < 0.9 * len(ours):
        raise SpecbenchError(
            f"the draft model knows {len(shared)} of the target's {len(ours)} token ids", hint
        )


def _by_id(model: Target) -> dict[int, str]:
    return {i: token for token, i in model.tokenizer.get_vocab().items()}
