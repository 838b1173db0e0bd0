"""Figures of speedups: by task, against memory, in the order of measuring."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specbench.analysis.sizes import UNITS
from specbench.report import words
from specbench.report.base import Row
from specbench.report.figures.base import Drawn, Scene, counts
from specbench.report.figures.style import DASHED, GRID, INK, LINE, legend, new_figure, shortened

if TYPE_CHECKING:
    from specbench.store import Trial

BINS = 24  # points a method in the order of measuring


def by_task(scene: Scene) -> Drawn | None:
    """A dot and its interval for each method on each task, the tasks from top to bottom, overall last."""
    places = [
        task for task in [*scene.section.tasks, words.OVERALL] if _measured(scene.of_task(task).values())
    ]
    methods = [row["method"] for row in scene.overall if row["speedup"]["point"] is not None]
    if len(scene.section.tasks) == 1:
        places = places[-1:]
    if not methods or not places:
        return None
    step = 1 / (len(methods) + 1)
    figure, axes = new_figure(0.75 + len(places) * max(0.34, 0.05 + 0.115 * len(methods)))
    said = []
    for index, method in enumerate(methods):
        look = scene.looks[method]
        rows = {place: row for place in places if (row := scene.of_task(place).get(method))}
        heights = [places.index(place) + (index + 1) * step - 0.5 for place in rows]
        _points(
            axes, [(row["speedup"], y) for row, y in zip(rows.values(), heights, strict=True)], look, True
        )
        said.append(f"{look.label}: " + ", ".join(f"{p} {words.speedup(row)}" for p, row in rows.items()))
    for edge in range(1, len(places)):
        axes.axhline(edge - 0.5, color=GRID, linewidth=0.8)
    _one(axes.axvline)
    names = [scene.section.where if place == words.OVERALL else place for place in places]
    axes.set_yticks(range(len(places)), shortened(names))
    axes.set_ylim(len(places) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"speedup over vanilla, {scene.section.how} (95% interval)")
    legend(figure, axes)
    return figure, "; ".join(said)


def memory(scene: Scene) -> Drawn | None:
    """Speedup against the memory above vanilla."""
    rows = [r for r in scene.overall if r["memory_overhead_bytes"] is not None and _measured([r])]
    if not rows:
        return None
    unit, name = _unit(max(abs(row["memory_overhead_bytes"]) for row in rows))
    figure, axes = new_figure(2.9)
    for row in rows:
        _points(
            axes, [(row["speedup"], row["memory_overhead_bytes"] / unit)], scene.looks[row["method"]], False
        )
    _one(axes.axhline)
    axes.axvline(0, color=LINE, linewidth=0.8)
    axes.margins(x=0.08)
    axes.set_xlabel(f"peak memory above vanilla ({name})")
    axes.set_ylabel(f"speedup, {scene.section.how}")
    legend(figure, axes)
    said = (
        f"{scene.looks[row['method']].label}: {words.size(row['memory_overhead_bytes'], signed=True)}, "
        f"{words.speedup(row)}"
        for row in rows
    )
    return figure, "; ".join(said)


def _unit(largest: float) -> tuple[int, str]:
    power = max((i for i in range(len(UNITS)) if largest >= 1024**i), default=0)
    return 1024**power, UNITS[power]


def order(scene: Scene) -> Drawn | None:
    """The speedup of each stretch of the run: a ratio of sums over neighbouring batches of the method."""
    sums = _seconds_and_tokens(scene)
    figure, axes = new_figure(2.9)
    said = []
    for row in scene.overall:
        look = scene.looks[row["method"]]
        line = _stretches(sums.get(words.BASELINE, {}), sums.get(row["method"], {}))
        if len(line) < 2:
            continue
        x, y = zip(*line, strict=True)
        axes.plot(x, y, color=look.colour, marker=look.marker, label=look.label, linewidth=1, markersize=4)
        said.append(
            f"{look.label}: first {y[0]:.2f}x, last {y[-1]:.2f}x, from {min(y):.2f}x to {max(y):.2f}x"
        )
    if not said:
        return None
    _one(axes.axhline)
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("block, in the order of measuring")
    axes.set_ylabel(f"speedup, {scene.section.how}")
    legend(figure, axes)
    return figure, "; ".join(said)


@dataclass
class _Batch:
    """When a batch was measured, its seconds once, the tokens of all its rows."""

    block: int
    seconds: float
    tokens: int


def _seconds_and_tokens(scene: Scene) -> dict[str, dict[tuple[Any, ...], _Batch]]:
    """Method -> what was asked -> the batch that answered it, at the last attempt.

    A batch of which a trial does not count is left out, as in the tables: its seconds are that trial's too.
    """
    batches: dict[tuple[str, tuple[Any, ...], int], list[Trial]] = defaultdict(list)
    for trial in scene.attempted:
        asked = (trial.task, trial.batch or trial.question, trial.turn, trial.repeat)
        batches[trial.method, asked, trial.attempt].append(trial)
    sums: dict[str, dict[tuple[Any, ...], _Batch]] = defaultdict(dict)
    for (method, asked, _), trials in batches.items():
        seconds = _seconds(trials) if all(map(counts, trials)) else None
        if seconds:
            sums[method][asked] = _Batch(trials[0].block, seconds, sum(t.output_tokens for t in trials))
    return sums


def _seconds(trials: Sequence[Trial]) -> float | None:
    """Of a whole batch; of requests that came at a rate, and of one alone, their own. None: not all are known."""
    first = trials[0]
    if first.request_rate is None and (first.batch_s is not None or len(trials) > 1):
        return first.batch_s
    own = [trial.total_s for trial in trials if trial.total_s is not None]
    return sum(own) if len(own) == len(trials) else None


def _stretches(base: dict[Any, _Batch], own: dict[Any, _Batch]) -> list[tuple[int, float]]:
    """(first block, speedup) of up to BINS stretches of the batches both measured, two or more in each."""
    pairs = [(batch, base[asked]) for asked, batch in own.items() if asked in base]
    pairs.sort(key=lambda pair: pair[0].block)
    bins = min(BINS, len(pairs) // 2)
    found = []
    for number in range(bins):
        stretch = pairs[len(pairs) * number // bins : len(pairs) * (number + 1) // bins]
        ours, vanillas = zip(*stretch, strict=True)
        if (cost := _per_token(ours)) and (base_cost := _per_token(vanillas)):
            found.append((ours[0].block, base_cost / cost))
    return found


def _per_token(batches: Sequence[_Batch]) -> float | None:
    tokens = sum(batch.tokens for batch in batches)
    return sum(batch.seconds for batch in batches) / tokens if tokens else None


def _measured(rows: Iterable[Row]) -> bool:
    return any(row["speedup"]["point"] is not None for row in rows if row["method"] != words.BASELINE)


def _points(axes: Any, points: list[tuple[dict[str, Any], float]], look: Any, lying: bool) -> None:
    """Estimates with their intervals, at a place on the other axis. A hollow marker has no interval."""
    found = [(e, place) for e, place in points if e["point"] is not None]
    for known in (True, False):
        some = [(e, place) for e, place in found if (e["low"] is not None) == known]
        if not some:
            continue
        values = [e["point"] for e, _ in some]
        reach = (
            [[e["point"] - e["low"] for e, _ in some], [e["high"] - e["point"] for e, _ in some]]
            if known
            else None
        )
        places = [place for _, place in some]
        x, y = (values, places) if lying else (places, values)
        axes.errorbar(
            x,
            y,
            **{"xerr" if lying else "yerr": reach},
            fmt=look.marker,
            color=look.colour,
            markerfacecolor=look.colour if known else "none",
            label=look.label if known or len(some) == len(found) else None,
            elinewidth=1.6,
            markersize=5,
        )


def _one(line: Any) -> None:
    """The line of no difference."""
    line(1, color=INK, linewidth=1, linestyle=DASHED)
