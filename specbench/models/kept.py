"""What is measured once on a machine and kept on disk: same choices, same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def kept(file: Path) -> Any:
    """What was kept in `file`; None if nothing was, or nothing that can be read."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def keep(file: Path, facts: Any) -> None:
    """Best effort: without a writable cache it is measured again next time."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(".new")
        draft.write_text(json.dumps(facts, indent=1), encoding="utf-8")
        draft.replace(file)
    except OSError:
        return
