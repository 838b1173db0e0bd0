"""What an importer is, and what all of them share: reading files, and the manifest of what they found."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbench.errors import SpecbenchError
from specbench.models.identity import sha256

BASELINE = "vanilla"
Row = dict[str, Any]  # a trial as JSON: fields that it does not name are unknown


@dataclass(frozen=True)
class Source:
    """A file of results, and the method it is of; None: the file's own name for it."""

    path: Path
    label: str | None = None


@dataclass
class Imported:
    """What an importer found.

    Args:
        rows: trials as JSON, of all files.
        target: what the files say of it: name, dtype; empty where they do not.
        config: likewise of the settings (`temperature`).
        notes: what a reader of the numbers must know.
        results: label -> the totals of each file, kept in the manifest as they are.
    """

    rows: list[Row]
    target: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    results: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    start: str | None = None
    end: str | None = None


@dataclass(frozen=True)
class Importer:
    """A format of results.

    Args:
        name: as spelled in `specbench import NAME`.
        title: whose files they are.
        unknown: what its files cannot give.
        read: (sources, temperature) to what they hold; the temperature is None where the user gave none.
    """

    name: str
    title: str
    unknown: tuple[str, ...]
    read: Callable[[Sequence[Source], float | None], Imported]


def refuse_again(source: Source, label: str, known: Iterable[str]) -> None:
    """Files become repeats of one method only where the user named them alike."""
    if source.label is None and label in known:
        raise SpecbenchError(
            f"{source.path} names {label} again", "write METHOD=FILE for each; one METHOD twice makes repeats"
        )


def objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of a JSON or JSON-lines file.

    Raises:
        SpecbenchError: unreadable, or not JSON objects.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise SpecbenchError(f"cannot read {path}: {why}", "give the benchmark's own result file") from error
    found = list(_parsed(path, text))
    if not found:
        raise SpecbenchError(f"{path} is empty", "give the benchmark's own result file")
    for number, value in found:
        if not isinstance(value, dict):
            raise SpecbenchError(
                f"{path} line {number} is not a JSON object", "give the benchmark's own result file"
            )
        yield number, value


def _parsed(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    try:
        yield 1, json.loads(text)  # one object over several lines
        return
    except ValueError:
        pass
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise SpecbenchError(
                    f"{path} line {number} is not JSON: {error}", "give the benchmark's own result file"
                ) from error


def manifest(
    importer: Importer,
    sources: Sequence[Source],
    found: Imported,
    name: str,
    target: str | None,
    argv: list[str],
) -> dict[str, Any]:
    """The manifest of an imported run: what the files say, and what they do not as None."""
    tasks: dict[str, set[str]] = {}
    for row in found.rows:
        tasks.setdefault(row["task"], set()).add(row["question"])
    labels = dict.fromkeys(row["method"] for row in found.rows)
    unknown = f"imported from {importer.title}; not known: {', '.join(importer.unknown)}"
    identity = {"source": "imported", "notes": [unknown, *found.notes], **found.target}
    return {
        "name": name,
        "argv": ["specbench", *argv],
        "config": found.config,
        "seed": None,
        "target": identity | ({"name": target} if target else {}),
        "drafters": {},
        "methods": [{"label": label, "lossless": None, "state": None} for label in labels],
        "tasks": [{"name": task, "source": importer.name, "questions": len(q)} for task, q in tasks.items()],
        "machine": None,
        "machine_fingerprint": None,
        "versions": {},
        "git": {"commit": None, "dirty": None},
        "imported": {
            "format": importer.name,
            "files": {str(source.path): sha256(source.path) for source in sources},
            "unknown": list(importer.unknown),
            "results": found.results,
        },
        "start": found.start,
        "end": found.end,
        "status": "complete",
    }
