"""Figures of engines side by side: their sweeps of load over one axis, batch sizes of our own loop among them."""

from __future__ import annotations

from specbench.analysis.setting import setting_of
from specbench.report import words
from specbench.report.base import Row
from specbench.report.engines import EngineTable
from specbench.report.figures.base import Drawing, Drawn
from specbench.report.figures.load import SPEEDUP, THROUGHPUT, Line, Measure, chart
from specbench.report.figures.style import looks

AT_ONCE = "requests at once (in flight, or in a batch)"


def speedup(table: EngineTable) -> Drawn | None:
    """The speedup of each engine's methods over its own vanilla."""
    return _chart(table, SPEEDUP, baselines=False)


def throughput(table: EngineTable) -> Drawn | None:
    """Tokens/s of each engine's methods and of its vanilla; only on one machine."""
    return _chart(table, THROUGHPUT, baselines=True) if table.one_machine else None


def _chart(table: EngineTable, measure: Measure, baselines: bool) -> Drawn | None:
    found: dict[str, list[tuple[float, Row]]] = {}
    for names, row in table.lines:
        setting = setting_of(row)
        if setting.request_rate or (row["method"] == words.BASELINE and not baselines):
            continue
        label = " ".join(name for head, name in zip(table.heads, names, strict=True) if head != "load")
        found.setdefault(label, []).append((setting.at_once, row))
    seen = looks(list(found))
    return chart([Line(seen[label], rows) for label, rows in found.items()], AT_ONCE, measure)


DRAWINGS = (
    Drawing(
        "engines-speedup",
        "Speedup of each engine against load",
        "Each over its own vanilla: where a line falls below the dashed one, speculation no longer pays there. "
        "Hollow: too few questions for an interval.",
        speedup,
    ),
    Drawing(
        "engines-throughput",
        "Throughput of each engine against load",
        "All on one kind of machine: what each puts out in all, with speculation and without.",
        throughput,
    ),
)
