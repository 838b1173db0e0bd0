"""The aliases of registry.toml: targets, their architectures and their drafters. Imports nothing heavy."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from specbench.errors import SpecbenchError

RANDOM_PREFIX = "random:"
EAGLES_NEWEST_FIRST = ("eagle3", "eagle2", "eagle1")


@dataclass(frozen=True)
class Draft:
    """One drafter of a target.

    Args:
        method: the method it serves (`eagle3`, `medusa`, …).
        id: Hub id or alias.
        source: where the id was read.
        verified: somebody has loaded it with this target.
        expected_tau: published tokens a round (τ, bonus included), under the conditions of `tau_source`.
        note: what to know before using it.
        not_run: why no method here runs it; None: one does.
    """

    method: str
    id: str
    source: str
    verified: bool = False
    expected_tau: float | None = None
    tau_source: str | None = None
    note: str | None = None
    not_run: str | None = None


@dataclass(frozen=True)
class EmbeddedGguf:
    """A GGUF file inside a wheel on PyPI: where the embedded default comes from without a Hub."""

    package: str
    version: str
    member: str
    sha256: str
    quantization: str


@dataclass(frozen=True)
class Entry:
    """One target of the registry.

    Args:
        parameters: published number of parameters.
        dtype: the checkpoint's own.
        stored: its `quantization_config`, where the Hub's weights are quantised; those of `random:` are not.
        template: a line about its chat template.
        chat_template: Jinja, for repositories that hold none.
        config: every number of the architecture, for `random:`; None = not recorded.
        drafts: by method, the preferred one first; those that no method runs are among them.
    """

    alias: str
    hub: str
    parameters: int
    dtype: str
    template: str
    gated: bool = False
    verified: bool = False
    note: str | None = None
    stored: Mapping[str, Any] | None = None
    chat_template: str | None = None
    config: Mapping[str, Any] | None = None
    drafts: Mapping[str, tuple[Draft, ...]] = field(default_factory=dict)
    gguf: EmbeddedGguf | None = None

    def usable(self, method: str) -> tuple[Draft, ...]:
        """The drafters a method runs, the preferred one first."""
        return tuple(draft for draft in self.drafts.get(method, ()) if draft.not_run is None)

    @property
    def gguf_name(self) -> str | None:
        """Name of the embedded variant (`smollm2-135m@q4_1`), which is also a ref."""
        return f"{self.alias}@{self.gguf.quantization}" if self.gguf else None


@cache
def _entries() -> dict[str, Entry]:
    tables = tomllib.loads(Path(__file__).with_name("registry.toml").read_text(encoding="utf-8"))
    templates: dict[str, str] = tables.pop("templates", {})
    return {alias: _entry(alias, table, templates) for alias, table in tables.items()}


def _entry(alias: str, table: dict[str, Any], templates: dict[str, str]) -> Entry:
    drafts = {
        method: tuple(Draft(method=method, **draft) for draft in drafts)
        for method, drafts in table.pop("drafts", {}).items()
    }
    gguf = table.pop("gguf", None)
    own = table.pop("chat_template", None)
    return Entry(
        alias=alias,
        parameters=int(table.pop("parameters")),
        chat_template=templates[own] if own else None,
        drafts=drafts,
        gguf=EmbeddedGguf(**gguf) if gguf else None,
        **table,
    )


def targets() -> list[Entry]:
    """Every target, in the order of the file."""
    return list(_entries().values())


def get(alias: str) -> Entry | None:
    """The entry of an alias, or None."""
    return _entries().get(alias)


def find(alias: str, role: str = "target") -> Entry:
    """The entry of an alias. Raises SpecbenchError with the nearest aliases if there is none.

    `role`: what the model is wanted for, in the error's words.
    """
    entry = get(alias)
    if entry is None:
        near = difflib.get_close_matches(alias.lower(), _entries(), n=3, cutoff=0.5)
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        raise SpecbenchError(
            f"unknown {role} {alias!r}",
            f"{meant}see `specbench ls targets`; a Hub id is owner/name, a folder ./name, a file name.gguf",
        )
    return entry


def entry_for(ref: str) -> Entry | None:
    """The entry that any spelling of a target belongs to: alias, `alias@q4_1`, `random:alias` or Hub id."""
    name = ref.removeprefix(RANDOM_PREFIX)
    for entry in targets():
        if name in (entry.alias, entry.gguf_name) or name.lower() == entry.hub.lower():
            return entry
    return None


def default_draft(ref: str, known: Sequence[Draft]) -> str | None:
    """The id of the drafter a method takes unasked: the first that is known for the target.

    None: none is known, or it is inside the target's own checkpoint (MTP, Medusa-2), where the method finds it.
    """
    entry = entry_for(ref)
    own = None if entry is None else entry.hub
    return next((draft.id for draft in known[:1] if draft.id != own), None)


def drafts_for(ref: str, method: str) -> tuple[Draft, ...]:
    """Drafters of a target that a method runs, preferred first; empty if none is known.

    `eagle` means the newest EAGLE known for the target; the `method` of what is returned says which.
    """
    entry = entry_for(ref)
    if entry is None:
        return ()
    names = EAGLES_NEWEST_FIRST if method == "eagle" else (method,)
    return next((found for name in names if (found := entry.usable(name))), ())
