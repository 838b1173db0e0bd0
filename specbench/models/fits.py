"""Which target a draft was made for, by the numbers of both. No weights are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.errors import SpecbenchError
from specbench.models import registry
from specbench.models.checkpoint import FOR_TARGET
from specbench.models.detect import Recognised
from specbench.models.detect_settings import numbers
from specbench.models.fields import Fields

PADDING = 0.01  # vocabularies that differ by less are one vocabulary, padded (Qwen: 151936 and 152064)
OWN_TARGET = ("medusa-2", "mtp")  # the target is in the checkpoint itself
DRAFT_MODELS = ("pard", "causal-lm")  # these need the target's vocabulary and nothing else


@dataclass(frozen=True)
class Numbers:
    """What of a target's architecture a draft depends on."""

    hidden_size: int | None
    layers: int | None
    vocab_size: int | None


def config_of(ref: str) -> Mapping[str, Any]:
    """The config of a target: an alias, a Hub id or a folder.

    Raises:
        SpecbenchError: neither the registry nor this machine knows it.
    """
    path = Path(ref).expanduser()
    if path.is_dir():
        return _read(path)
    entry = registry.entry_for(ref)
    if entry is not None and entry.config is not None:
        return entry.config
    if entry is None and "/" not in ref:
        registry.find(ref)  # raises, and names the nearest
    from specbench.models.hub import cached

    snapshot = cached(entry.hub if entry is not None else ref)
    if snapshot is None:
        raise SpecbenchError(
            f"the architecture of {ref} is not known here",
            "name a folder, or an alias marked random in `specbench ls targets`",
        )
    return _read(snapshot.folder)


def numbers_of(ref: str) -> Numbers:
    """The numbers of a target. Raises SpecbenchError if they are not known (see `config_of`), or no numbers."""
    return _numbers(ref, config_of(ref))


def misfits(recognised: Recognised, target: Numbers) -> list[str]:
    """Why a draft does not fit a target; empty if it does. What is unknown of either is not held against it."""
    settings, found = recognised.settings, []
    if recognised.kind not in DRAFT_MODELS:
        found += _unequal("hidden size", settings.get("target_hidden_size"), target.hidden_size)
        found += _unequal("layers", settings.get("target_layers"), target.layers)
        found += _too_few_layers(settings, target.layers)
    draft, own = settings.get("vocab_size"), target.vocab_size
    if draft and own and not same_vocabulary(draft, own):
        found += _unequal("vocabulary", draft, own)
    return found


def same_vocabulary(draft: int, target: int) -> bool:
    """Whether these are sizes of one vocabulary, but for padding."""
    return abs(draft - target) <= PADDING * target


def check_vocabulary(ref: str, name: str, size: int, target: int) -> int:
    """`size`, the draft's idea (in `name`) of how many ids its target has: padding apart, this target's.

    Raises:
        SpecbenchError: it is another vocabulary.
    """
    if not same_vocabulary(size, target):
        raise SpecbenchError(
            f"{ref}: its target has {size} token ids ({name}), this target has {target}", FOR_TARGET
        )
    return size


def check_hidden_size(ref: str, name: str, size: int, target: int) -> None:
    """Refuse a draft that reads hidden states of another size."""
    if size != target:
        raise SpecbenchError(
            f"{ref}: it reads hidden states of size {size} ({name}), this target's have size {target}",
            FOR_TARGET,
        )


def fitting_targets(recognised: Recognised) -> list[str]:
    """Aliases of the registry whose numbers a draft fits."""
    if recognised.kind in OWN_TARGET:
        return []
    return [
        entry.alias
        for entry in registry.targets()
        if entry.config is not None and not misfits(recognised, _numbers(entry.alias, entry.config))
    ]


def named_target(config: Mapping[str, Any]) -> str | None:
    """The target that a draft's config names."""
    speculators = config.get("speculators_config")
    verifier = speculators.get("verifier") if isinstance(speculators, Mapping) else None
    if isinstance(verifier, Mapping):
        return verifier.get("name_or_path") or verifier.get("name")
    return config.get("base_model_name_or_path") or config.get("target_model_name_or_path")


def registered(ref: str) -> list[tuple[str, registry.Draft]]:
    """Where the registry has `ref` as a draft: target and entry."""
    return [
        (entry.alias, draft)
        for entry in registry.targets()
        for drafts in entry.drafts.values()
        for draft in drafts
        if draft.id.lower() == ref.lower()
    ]


def _unequal(what: str, draft: int | None, target: int | None) -> list[str]:
    if draft is None or target is None or draft == target:
        return []
    return [f"{what} {draft}, the target's is {target}"]


def _too_few_layers(settings: Mapping[str, Any], layers: int | None) -> list[str]:
    ids = settings.get("aux_layer_ids") or settings.get("target_layer_ids") or []
    if layers is None or not ids or max(ids) <= layers:
        return []
    return [f"it reads layer {max(ids)}, the target has {layers}"]


def _numbers(ref: str, config: Mapping[str, Any]) -> Numbers:
    return Numbers(**numbers(Fields(ref, config)))


def _read(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecbenchError(
            f"{folder} has no config.json that can be read", "name the target's folder, or an alias"
        ) from error
    return config if isinstance(config, dict) else {}
