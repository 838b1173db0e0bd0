"""`--until 3%`: whether the speedup of every method is known well enough, from the rows as they come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specbench.build import VANILLA
from specbench.errors import SpecbenchError
from specbench.store import Trial

MIN_QUESTIONS = 20  # an interval of fewer is no ground to stop on: it may be narrow by chance
CHECK_SHARE = 0.05  # more questions than at the last look before looking again, as a share


@dataclass(frozen=True)
class _Measured:
    """As much of a run as `summarise` needs."""

    trials: list[Trial]
    manifest: dict[str, Any] = field(default_factory=dict)


class Precision:
    """Half widths of the overall speedups (end to end, 95%), as shares of their points.

    Args:
        width: what each is to be brought to, 0.03 for ±3%.
        methods: labels; vanilla is what the others are compared with.
        done: rows measured by an earlier start.
    """

    def __init__(self, width: float, methods: Iterable[str], done: Sequence[Trial] = ()) -> None:
        self.width = width
        self._methods = [method for method in methods if method != VANILLA]
        self._rows: dict[int, list[Trial]] = {}
        self._next_look: dict[int, int] = {}
        self._widths: dict[int, dict[str, float | None]] = {}
        for row in done:
            self._rows.setdefault(row.batch_size, []).append(row)
        for batch_size in self._rows:
            self._look(batch_size)

    def add(self, batch_size: int, rows: Sequence[Trial]) -> None:
        """Take in a finished block, and look again if enough has come since the last look."""
        known = self._rows.setdefault(batch_size, [])
        known += rows
        if self._questions(batch_size) >= self._next_look.get(batch_size, MIN_QUESTIONS):
            self._look(batch_size)

    def reached(self, batch_size: int) -> bool:
        """Whether every method's interval is narrow enough at this batch size."""
        widths = self._widths.get(batch_size, {})
        return bool(widths) and all(w is not None and w <= self.width for w in widths.values())

    def describe(self) -> str:
        """`±2.1% (prompt-lookup)`: the widest interval, or which method has none yet."""
        found = [pair for batch_size in self._rows for pair in self._measure(batch_size).items()]
        unknown = [method for method, width in found if width is None]
        if unknown or not found:
            return f"no interval yet for {', '.join(dict.fromkeys(unknown)) or 'any method'}"
        method, width = max(found, key=lambda pair: pair[1] or 0.0)
        count = min(map(self._questions, self._rows))
        few = f"; {count} questions are too few to stop on" if count < MIN_QUESTIONS else ""
        return f"widest ±{width:.1%} ({method}){few}"

    def _questions(self, batch_size: int) -> int:
        """Questions, or batches of them, that an interval would rest on."""
        return len({(row.task, row.batch) for row in self._rows[batch_size]})

    def _look(self, batch_size: int) -> None:
        count = self._questions(batch_size)
        self._next_look[batch_size] = max(MIN_QUESTIONS, int(count * (1 + CHECK_SHARE)) + 1)
        if count >= MIN_QUESTIONS:
            self._widths[batch_size] = self._measure(batch_size)

    def _measure(self, batch_size: int) -> dict[str, float | None]:
        """The half widths as of now, of the methods that run at this batch size; None: no interval."""
        from specbench.analysis.intervals import half_width
        from specbench.analysis.summary import OVERALL, summarise

        rows = summarise([_Measured(self._rows[batch_size])])["rows"]
        found = {row["method"]: half_width(row["speedup"]) for row in rows if row["task"] == OVERALL}
        return {method: found[method] for method in self._methods if method in found}


def parse_width(text: str) -> float:
    """`3%` or `0.03` as 0.03.

    Raises:
        SpecbenchError: not a width between 0 and 100%.
    """
    try:
        width = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        width = 0.0
    if not 0 < width < 1:
        raise SpecbenchError(f"--until {text} is not a precision", "write e.g. 3% for an interval of ±3%")
    return width
