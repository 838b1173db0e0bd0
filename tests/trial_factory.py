"""Synthetic trials and runs with numbers that can be worked out on paper."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbench.analysis.summary import summarise
from specbench.store import Rounds, Trial


@dataclass
class FakeRun:
    """Looks like `specbench.store.Run`."""

    trials: list[Trial]
    manifest: dict[str, Any] = field(default_factory=lambda: {"name": "run", "target": {"name": "tiny"}})
    warnings: list[str] = field(default_factory=list)
    path: Path = Path("results/run")


def trial(question: str = "q1", method: str = "vanilla", **fields: Any) -> Trial:
    """One request at batch size 1: 0.5 s of prefill, 11 tokens; the other fields as given.

    `seconds` is the decode time; `accepted` the accepted tokens of each round, each drafted `drafted` deep.
    """
    seconds = fields.pop("seconds", 10.0)
    accepted: list[int] = fields.pop("accepted", [0] * 10)
    drafted = fields.pop("drafted", 0 if method.startswith("vanilla") else 4)
    known = {
        "task": "chat",
        "category": None,
        "turn": 0,
        "batch_size": 1,
        "repeat": 0,
        "order": 0 if method == "vanilla" else 1,
        "output_tokens": 1 + sum(accepted) + len(accepted),
        "finish": "length",
        "prefill_s": 0.5,
        "decode_s": seconds,
        "batch_s": seconds + 0.5,
        "total_s": seconds + 0.5,
        "rounds": chain(accepted, drafted, seconds),
    }
    return Trial(question=question, method=method, **(known | fields))


def chain(accepted: list[int], drafted: int, seconds: float) -> Rounds:
    """Rounds of equal time that drafted `drafted` tokens in a row; a tenth drafting, the rest verifying."""
    count = len(accepted)
    each = seconds / count if count else 0.0
    share = 0.1 if drafted else 0.0
    return Rounds(
        drafted=[drafted] * count,
        depth=[drafted] * count,
        accepted=accepted,
        emitted=[a + 1 for a in accepted],
        draft_s=[each * share] * count,
        verify_s=[each * (1 - share)] * count,
        round_s=[each] * count,
    )


def block(question: str, number: int, methods: dict[str, dict[str, Any]], **fields: Any) -> list[Trial]:
    """The trials of several methods on one question, in the order given."""
    return [
        trial(question, method, block=number, order=order, **(fields | own))
        for order, (method, own) in enumerate(methods.items())
    ]


def blocks(count: int, methods: dict[str, dict[str, Any]], **fields: Any) -> list[Trial]:
    """The same block for `count` questions."""
    return [t for i in range(count) for t in block(f"q{i}", i, methods, **fields)]


def spread(counts: Iterable[int], method: str = "fast") -> list[Trial]:
    """A block a question; the method needs half of vanilla's rounds and, by question, other seconds."""
    found = []
    for number, tokens in enumerate(counts):
        methods = {
            "vanilla": {"seconds": float(2 * tokens), "accepted": [0] * (2 * tokens)},
            method: {"seconds": tokens * (1.0 + 0.1 * (number % 3)), "accepted": [1] * tokens},
        }
        found += block(f"q{number}", number, methods)
    return found


def rows_of(trials: list[Trial], **manifest: object) -> list[dict[str, Any]]:
    """The summary's rows of one run."""
    run = FakeRun(trials, {"name": "run", "target": {"name": "tiny"}} | manifest)
    return summarise([run])["rows"]


def row_of(trials: list[Trial], method: str, task: str = "overall", **where: object) -> dict[str, Any]:
    """The one row of a method on a task."""
    wanted = {"method": method, "task": task, "category": None} | where
    found = [row for row in rows_of(trials) if all(row[key] == value for key, value in wanted.items())]
    assert len(found) == 1, wanted
    return found[0]
