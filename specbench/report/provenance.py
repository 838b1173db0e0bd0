"""Where a run's numbers come from, and how to get them again: the facts and the command, for every format."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from specbench.report.plain import visible

PLACE = {
    "--name": 1,
    "--output": 1,
    "--reports": 1,
    "--fresh": 0,
}  # option -> its values; not what is measured


def facts(run: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(what, value) of a `runs[]` entry: target, drafters, machine, versions, config; unknown ones left out."""
    found = {"target": run.get("target"), **(run.get("target_details") or {})}
    found |= {f"engine {key}": value for key, value in _flat(run.get("engine"))}
    found |= {f"drafter of {method}": name for method, name in (run.get("drafters") or {}).items()}
    found |= {key: run.get(key) for key in ("machine", "start", "end", "seed")}
    found |= {f"git {key}": value for key, value in _flat(run.get("git"))}
    found |= dict(_flat(run.get("versions")))
    found |= {f"config {key}": value for key, value in _flat(run.get("config"))}
    for key, value in found.items():
        if text := _text(value):
            yield str(key), text


def _flat(value: Any) -> Iterable[tuple[str, Any]]:
    return value.items() if isinstance(value, dict) else [("", value)] if value else []


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "" if value is None or value == {} else str(value)


def command_line(argv: Sequence[str] | str) -> str:
    """The command that measures the same again, ready for a shell.

    What says where the run was kept is left out: under its old name the command would resume the old run.
    """
    if isinstance(argv, str):
        return visible(argv)
    typed = list(_without_place([str(word) for word in argv]))
    if typed and typed[0].endswith(("/specbench", "__main__.py")):
        typed[0] = "specbench"
    return visible(shlex.join(typed))


def _without_place(words: Sequence[str]) -> Iterator[str]:
    skip = 0
    for word in words:
        option, equals, _ = word.partition("=")
        if skip:
            skip -= 1
        elif option in PLACE:
            skip = 0 if equals else PLACE[option]
        else:
            yield word
