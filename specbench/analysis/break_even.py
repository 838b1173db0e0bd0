"""Where along a sweep a method stops paying: its speedup by batch size or concurrency, and where that is 1."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

AXES = ("batch_size", "concurrency")


def break_even(
    rows: Sequence[Mapping[str, Any]], overall: str, baselines: Collection[str]
) -> Iterator[dict[str, Any]]:
    """`{run, method, axis, value, of}` for each method of each run that has several values of an axis.

    `of` maps the axis' values (as text, being JSON) to the overall speedup there; `value` is where the straight
    line between two of them first crosses 1, None if it never does. The other axis is held at its smallest.
    """
    overalls = [row for row in rows if row["task"] == overall and row["method"] not in baselines]
    for run, method in dict.fromkeys((row["run"], row["method"]) for row in overalls):
        mine = [row for row in overalls if (row["run"], row["method"]) == (run, method)]
        for axis, other in (AXES, AXES[::-1]):
            sweep = _sweep(mine, axis, other)
            if len(sweep) > 1:
                of = {str(value): speedup for value, speedup in sweep.items()}
                yield {"run": run, "method": method, "axis": axis, "value": crossing(sweep), "of": of}


def _sweep(rows: Sequence[Mapping[str, Any]], axis: str, other: str) -> dict[int, float]:
    """Speedup by the axis' value, in its order."""
    smallest = min(row[other] or 1 for row in rows)
    known = {
        row[axis] or 1: row["speedup"]["point"]
        for row in rows
        if (row[other] or 1) == smallest and row["speedup"]["point"] is not None
    }
    return dict(sorted(known.items()))


def crossing(sweep: Mapping[int, float]) -> float | None:
    """Where the straight lines between the points first cross 1."""
    for (left, before), (right, after) in pairwise(sweep.items()):
        if (before - 1) * (after - 1) <= 0 and before != after:
            return left + (right - left) * (1 - before) / (after - before)
    return None
