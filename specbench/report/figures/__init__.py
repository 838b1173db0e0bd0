"""The figures of a report, each left out where a run has nothing to show in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specbench.analysis.setting import Setting
from specbench.report import words
from specbench.report.base import Summary
from specbench.report.engines import EngineTable
from specbench.report.figures import engines, latency, load, rounds, speed, style
from specbench.report.figures.base import Drawing, Scene

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWINGS = (
    Drawing(
        "speedup",
        "Speedup by task",
        "Right of the dashed line the method is faster than vanilla; an interval that crosses it says "
        "nothing either way, and a hollow marker has too few questions for one.",
        speed.by_task,
    ),
    Drawing(
        "tokens-per-round",
        "Tokens a round",
        "The bar is τ over all prompts and the dots are the tasks; vanilla emits one token a round, at the "
        "dashed line.",
        rounds.tokens,
    ),
    Drawing(
        "acceptance",
        "Acceptance by position",
        "How often a drafted token is accepted, by how far into the draft it stands; a flat right-hand curve "
        "means longer drafts would still pay.",
        rounds.acceptance,
    ),
    Drawing(
        "time-in-a-round",
        "Where a round's time goes",
        "The mean round of each method; what is not verify is overhead that a faster drafter or harness could "
        "save.",
        rounds.time,
    ),
    Drawing(
        "k-sweep",
        "Draft length",
        "Measured decode speedup at each draft length, and Leviathan's closed form for the same acceptance "
        "and cost; far below it the harness, not the drafter, is the limit.",
        rounds.k_sweep,
    ),
    Drawing(
        "load",
        "Speedup against load",
        "Where a line falls below the dashed one, speculation no longer pays at that load; the shade is the 95% "
        "interval, and where its edges cross the dashed line that of the break-even. Hollow: too few questions.",
        load.speedup,
    ),
    Drawing(
        "throughput",
        "Throughput against load",
        "What the whole server or loop puts out; a line that no longer rises has found what it can do. Where "
        "requests come at a rate, all that keep up put out the same.",
        load.throughput,
    ),
    Drawing(
        "latency-load",
        "Latency against load",
        "How long a request takes from its sending to its last token; a line that turns upwards is a queue.",
        load.latency,
    ),
    Drawing(
        "memory",
        "Memory against speedup",
        "Up is faster, left is smaller: what each method costs in peak memory for the speed it gives.",
        speed.memory,
    ),
    Drawing(
        "run-order",
        "Speedup in the order of measuring",
        "Ups and downs are the questions' own; a slope or a step that all methods share means that the machine "
        "changed during the run.",
        speed.order,
    ),
    Drawing(
        "inter-token",
        "Time between tokens",
        "The share of tokens that came at most so long after the one before; a curve starts at the share that "
        "came together with it, and a long right tail is stutter.",
        latency.between_tokens,
    ),
)


@dataclass(frozen=True)
class Drawn:
    """A figure that has been drawn: of which drawing, in which section, and what it says in words."""

    drawing: Drawing
    figure: Figure
    said: str


def scenes(summary: Summary, runs: Sequence[Any]) -> Iterator[Scene]:
    """A scene a section of the report, in the same order."""
    by_name = {extract["name"]: run for extract, run in zip(summary["runs"], runs, strict=True)}
    for section in words.sections(summary):
        name = section.run["name"]
        trials = [
            trial
            for trial in getattr(by_name.get(name), "trials", ())
            if Setting(trial.batch_size, trial.concurrency or 0, trial.request_rate or 0.0) == section.load
        ]
        trials.sort(key=lambda trial: (trial.block, trial.attempt, trial.order, trial.key))
        overall = [row for row in summary["rows"] if row["run"] == name and row["task"] == words.OVERALL]
        yield Scene(section, trials, overall)


def draw(scene: Scene) -> Iterator[Drawn]:
    """The scene's figures. Only inside `style.styled()`."""
    yield from _drawn(DRAWINGS, scene)


def draw_engines(table: EngineTable) -> Iterator[Drawn]:
    """The figures of a table of engines. Only inside `style.styled()`."""
    yield from _drawn(engines.DRAWINGS, table)


def _drawn(drawings: Sequence[Drawing], of: Scene | EngineTable) -> Iterator[Drawn]:
    for drawing in drawings:
        if (drawn := drawing.draw(of)) is not None:
            yield Drawn(drawing, *drawn)


__all__ = ["DRAWINGS", "Drawn", "Scene", "draw", "draw_engines", "scenes", "style"]
