"""Draft models: opening one for a target, and whether the two speak the same ids."""

from __future__ import annotations

from specbench.errors import SpecbenchError
from specbench.models.target import Target


def open_draft_model(draft: str | Target | None, target: Target, method: str, share: bool = True) -> Target:
    """The draft model for `target`: any REF a target may be, or one that is open already.

    With `share`, a REF that names the target itself shares its weights (each wrapper has its own cache).

    Raises:
        SpecbenchError: no draft given, one that does not load, or one with another vocabulary.
    """
    if draft is None:
        raise SpecbenchError(
            f"{method} needs a draft model, and none is known for this target",
            f"give one with --draft REF or {method}:draft=REF",
        )
    opened = draft if isinstance(draft, Target) else _load(draft, target, share)
    check_same_vocabulary(target, opened)
    return opened


def _load(ref: str, target: Target, share: bool) -> Target:
    from specbench.models.gguf import cache_folder
    from specbench.models.load import load

    if share and target.identity is not None and ref in (target.identity.ref, target.identity.name):
        return Target(target.model, target.tokenizer, target.identity)
    loaded = load(ref, dtype=str(target.dtype).removeprefix("torch."), device=str(target.device))
    return Target(loaded.model, loaded.tokenizer, loaded.identity).pack(cache_folder())


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
