"""What is measured once on a machine and kept on disk: same choices, same tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from specbench.measure.cpu import CpuProbe

Facts = TypeVar("Facts")

DISTURBED = (
    "note: the machine was busy with other things meanwhile: what was measured serves this run only, "
    "and the next one measures again"
)


def kept(file: Path) -> Any:
    """What was kept in `file`; None if nothing was, or nothing that can be read."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def measured(file: Path, measure: Callable[[], Facts], threads: int) -> tuple[Facts, bool]:
    """What `measure` returns, kept in `file` unless other processes disturbed it; and whether they left it alone.

    Args:
        measure: returns what JSON can hold.
        threads: threads it computes with (torch's on a CPU, 1 on a GPU).
    """
    probe = CpuProbe(threads)
    probe.start()
    facts = measure()
    quiet = not probe.stop().contended
    if quiet:
        keep(file, facts)
    return facts, quiet


def keep(file: Path, facts: Any) -> None:
    """Best effort: without a writable cache it is measured again next time."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(".new")
        draft.write_text(json.dumps(facts, indent=1), encoding="utf-8")
        draft.replace(file)
    except OSError:
        return
