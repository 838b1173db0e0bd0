"""Figures of a sweep: speedup, throughput and latency against batch size, concurrency or request rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import Any

from specbench.analysis.setting import AXES, setting_of
from specbench.report import words
from specbench.report.base import Row
from specbench.report.figures.base import Drawn, Scene
from specbench.report.figures.style import DASHED, INK, Look, legend, new_figure

BETWEEN = 16  # pieces of a straight line, which is a curve on a logarithmic axis
LABELS = {
    "request_rate": "requests sent a second",
    "batch_size": "batch size",
    "concurrency": "requests in flight",
}


@dataclass(frozen=True)
class Measure:
    """What a chart shows of a row: its value as an estimate, and in words."""

    label: str
    of: Callable[[Row], dict[str, float | None]]
    show: Callable[[Row], str]
    is_ratio: bool = False  # to vanilla, with an interval: 1 is the line of no difference


@dataclass(frozen=True)
class Line:
    """One line of a chart: a method's rows, each with its load."""

    look: Look
    rows: Sequence[tuple[float, Row]]


def _number(field: str, row: Row) -> dict[str, float | None]:
    return {"low": None, "point": row[field], "high": None}


SPEEDUP = Measure("speedup (95% interval)", lambda row: dict(row["speedup"]), words.speedup, is_ratio=True)
THROUGHPUT = Measure(
    "tokens/s in all",
    partial(_number, "tokens_per_s"),
    lambda row: f"{words.number(row['tokens_per_s'], 1)} tok/s",
)
LATENCY = Measure(
    "seconds of a request", partial(_number, "latency_s"), lambda row: words.seconds(row["latency_s"])
)


def speedup(scene: Scene) -> Drawn | None:
    """The speedup by load, its interval as a band."""
    sweep = _sweep(scene)
    return None if sweep is None else chart(sweep.lines(scene.section.methods), LABELS[sweep.axis], SPEEDUP)


def throughput(scene: Scene) -> Drawn | None:
    """Tokens/s of the whole server or loop by load; at request rates beside what was offered."""
    sweep = _sweep(scene)
    if sweep is None:
        return None
    return chart(sweep.lines(), LABELS[sweep.axis], THROUGHPUT, list(sweep.offered()))


def latency(scene: Scene) -> Drawn | None:
    """Seconds of a request by load, at serving engines."""
    sweep = _sweep(scene)
    if sweep is None or sweep.axis == "batch_size":
        return None
    return chart(sweep.lines(), LABELS[sweep.axis], LATENCY)


@dataclass(frozen=True)
class _Sweep:
    """The overall rows along an axis, and how their methods look."""

    axis: str
    rows: Sequence[Row]
    looks: dict[str, Look]

    def at(self, row: Row) -> float:
        return float(getattr(setting_of(row), self.axis) or 1)

    def lines(self, methods: Sequence[str] | None = None) -> list[Line]:
        chosen = [
            (look, method) for method, look in self.looks.items() if methods is None or method in methods
        ]
        return [Line(look, [(self.at(row), row) for row in self._of(method)]) for look, method in chosen]

    def offered(self) -> Iterator[tuple[float, float]]:
        """(rate, tokens/s that it asks for), by the tokens that vanilla's answers have."""
        for row in self._of(words.BASELINE) if self.axis == "request_rate" else ():
            answered = row["trials"] - row["failed"] - row["excluded"]
            if answered and row["tokens"]:
                yield self.at(row), self.at(row) * row["tokens"] / answered

    def _of(self, method: str) -> list[Row]:
        return [row for row in self.rows if row["method"] == method]


def _sweep(scene: Scene) -> _Sweep | None:
    """The sweep that begins at the scene's section: along one axis, the others as they are there."""
    here = scene.section.load
    for axis in AXES:
        rest = here._replace(**{axis: 0})
        along = [row for row in scene.siblings if setting_of(row)._replace(**{axis: 0}) == rest]
        loads = {getattr(setting_of(row), axis) for row in along}
        if len(loads) > 1 and getattr(here, axis) == min(loads):
            return _Sweep(axis, along, scene.looks)
    return None


def chart(
    lines: Sequence[Line], axis: str, measure: Measure, offered: Sequence[tuple[float, float]] = ()
) -> Drawn | None:
    """A line each, over the loads at which they were measured; None where none has two points."""
    figure, axes = new_figure(2.9)
    loads: set[float] = set()
    said = []
    for line in lines:
        known = sorted((p for p in line.rows if measure.of(p[1])["point"] is not None), key=lambda p: p[0])
        if len(known) > 1:
            _draw(axes, [(load, measure.of(row)) for load, row in known], line.look, measure.is_ratio)
            loads.update(load for load, _ in known)
            told = ", ".join(f"{load:g} {measure.show(row)}" for load, row in known)
            said.append(f"{line.look.label}: {told}")
    if not said:
        return None
    if measure.is_ratio:
        axes.axhline(1, color=INK, linewidth=1, linestyle=DASHED)
    if offered:
        straight = map(_straight, zip(*offered, strict=True))
        axes.plot(*straight, color=INK, linewidth=1, linestyle=DASHED, label="offered")
    axes.set_xscale("log")
    axes.set_xticks(sorted(loads), [f"{load:g}" for load in sorted(loads)])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(axis)
    axes.set_ylabel(measure.label)
    legend(figure, axes)
    return figure, "; ".join(said)


def _draw(
    axes: Any, points: Sequence[tuple[float, dict[str, float | None]]], look: Look, intervals: bool
) -> None:
    """The points, straight lines between them, and a band between the ends of their `intervals`; the marker of a
    point without one is hollow, and the band stops there."""
    loads, values = [load for load, _ in points], [e["point"] for _, e in points]
    axes.plot(_straight(loads), _straight(values), color=look.colour, linewidth=1)
    for known, stretch in groupby(points, lambda point: point[1]["low"] is not None):
        inside = [*stretch]
        at = [load for load, _ in inside]
        if known and len(inside) > 1:
            low, high = (_straight([e[end] for _, e in inside]) for end in ("low", "high"))
            axes.fill_between(_straight(at), low, high, color=look.colour, alpha=0.15, linewidth=0)
        elif known:  # no neighbour to share a band with
            axes.vlines(at, inside[0][1]["low"], inside[0][1]["high"], color=look.colour, linewidth=1.6)
    style = {"color": look.colour, "linestyle": "none", "marker": look.marker, "markersize": 5}
    hollow = [intervals and e["low"] is None for _, e in points]
    for is_hollow in sorted(set(hollow)):
        some = [(load, value) for load, value, h in zip(loads, values, hollow, strict=True) if h == is_hollow]
        label = look.label if is_hollow == min(hollow) else None  # once in the legend
        axes.plot(
            *zip(*some, strict=True), label=label, markerfacecolor="none" if is_hollow else None, **style
        )


def _straight(values: Sequence[Any]) -> list[float]:
    """The values with others between them, evenly apart."""
    return [a + (b - a) * step / BETWEEN for a, b in pairwise(values) for step in range(BETWEEN + 1)]
