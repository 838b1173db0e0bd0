"""Where along a sweep a method stops paying: its speedup by load, and the load at which that is 1."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from specbench.analysis.intervals import Estimate
from specbench.analysis.setting import AXES, Setting, setting_of

Sweep = dict[float, Estimate]  # an axis' value -> the overall speedup there


def break_even(
    rows: Sequence[Mapping[str, Any]], overall: str, baselines: Collection[str]
) -> Iterator[dict[str, Any]]:
    """`{run, method, axis, low, value, high, of}` for each method of each run that has several values of an axis.

    `of` maps the axis' values (as text, being JSON) to the overall speedup there. `value` is where the straight
    lines between those first cross 1. Where those between the ends of their 95% intervals do are its own `low` and
    `high`: between them the speedup is not told from 1. None where there is no such place among what was measured.
    The other axis of a closed loop is held at its smallest.
    """
    overalls = [row for row in rows if row["task"] == overall and row["method"] not in baselines]
    for run, method in dict.fromkeys((row["run"], row["method"]) for row in overalls):
        mine = {
            setting_of(row): row["speedup"]
            for row in overalls
            if (row["run"], row["method"]) == (run, method)
        }
        for axis in AXES:
            sweep = _sweep(mine, axis)
            if len(sweep) > 1:
                of = {f"{value:g}": dict(speedup) for value, speedup in sweep.items()}
                yield {"run": run, "method": method, "axis": axis, **_crossings(sweep), "of": of}


def _sweep(speedups: Mapping[Setting, Estimate], axis: str) -> Sweep:
    """The known speedups by the axis' value, in its order."""
    paced = {s: e for s, e in speedups.items() if bool(s.request_rate) == (axis == "request_rate")}
    others = {s: s._replace(**{axis: 0}) for s in paced}
    smallest = min(others.values(), default=None)
    known = {
        float(getattr(s, axis) or 1): e
        for s, e in paced.items()
        if others[s] == smallest and e["point"] is not None
    }
    return dict(sorted(known.items()))


def _crossings(sweep: Sweep) -> Estimate:
    """Where the lines through the points and through the ends of the intervals first cross 1."""
    points, *ends = (_line(sweep, edge) for edge in ("point", "low", "high"))
    pays = next(iter(points.values())) > 1
    found = crossing(points)
    # An end that begins on the other side of 1 says that this may already be so at the smallest load.
    low, high = (crossing(end) if end and (next(iter(end.values())) > 1) == pays else None for end in ends)
    if found is None:
        low = high = None
    return {"low": low if pays else high, "value": found, "high": high if pays else low}


def _line(sweep: Sweep, edge: str) -> dict[float, float]:
    """One end of the estimates by load; nothing where it is unknown somewhere."""
    line = {value: bound for value, estimate in sweep.items() if (bound := estimate[edge]) is not None}
    return line if len(line) == len(sweep) else {}


def crossing(sweep: Mapping[float, float]) -> float | None:
    """Where the straight lines between the points first cross 1; a point on it does not pay."""
    for (left, before), (right, after) in pairwise(sweep.items()):
        if (before > 1) != (after > 1):
            return left + (right - left) * (1 - before) / (after - before)
    return None
