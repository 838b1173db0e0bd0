"""What runs are called beside each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any


def run_names(runs: Sequence[Any]) -> list[str]:
    """A name for each run (a `RunData`) that none of the others has.

    It is the manifest's, else the folder's. Those that share one are called by their folders instead, as much of the
    end of the path as tells them apart: `a/night` and `b/night`. What nothing tells apart is numbered.
    """
    own = [_own_name(run, number) for number, run in enumerate(runs, start=1)]
    names = list(own)
    for shared, count in Counter(own).items():
        if count > 1:
            places = [place for place, name in enumerate(own) if name == shared]
            for place, name in zip(places, _ends([_folder(runs[p]) for p in places]), strict=True):
                names[place] = name or shared
    return _numbered(names)


def _own_name(run: Any, number: int) -> str:
    return str(run.manifest.get("name") or _folder(run).name or f"run-{number}")


def _folder(run: Any) -> PurePath:
    return PurePath(getattr(run, "path", None) or "")


def _ends(folders: Sequence[PurePath]) -> list[str]:
    """The shortest ends of the paths, equally long, that differ wherever the paths do."""
    ends = [""] * len(folders)
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        ends = [PurePath(*folder.parts[-depth:]).as_posix() for folder in folders]
        if len(set(ends)) == len(set(folders)):
            break
    return ends


def _numbered(names: Sequence[str]) -> list[str]:
    found: dict[str, None] = {}
    for name in names:
        unique, number = name, 1
        while unique in found:
            number += 1
            unique = f"{name} ({number})"
        found[unique] = None
    return list(found)
