"""The figure of the time between tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specbench.report import words
from specbench.report.figures.base import Drawn, Scene
from specbench.report.figures.style import legend, new_figure

if TYPE_CHECKING:
    from specbench.store import Trial

POINTS = 60  # of a curve


def between_tokens(scene: Scene) -> Drawn | None:
    """For each method the share of tokens that came at most so long after the one before (`itl_s`)."""
    from matplotlib.ticker import LogLocator

    figure, axes = new_figure(2.9)
    said = []
    rows = {row["method"]: row for row in scene.section.overall}
    for method, trials in scene.by_method():
        waits, together = _waits(trials)
        if len(waits) < 2:
            continue
        look = scene.looks[method]
        shares = np.linspace(0.005, 0.995, POINTS)
        curve = np.quantile(waits, shares) * 1e3
        shares = together + (1 - together) * shares
        axes.plot(curve, shares, color=look.colour, label=look.label, marker=look.marker, markevery=(7, 15))
        known = rows[method].get("itl_s") or {}
        said.append(
            f"{look.label}: " + ", ".join(f"{p} {words.seconds(value)}" for p, value in known.items())
        )
    if not said:
        return None
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("milliseconds after the token before")
    axes.set_ylabel("share of tokens")
    legend(figure, axes)
    return figure, "; ".join(said)


def _timed(trial: Trial) -> Iterator[tuple[float, int]]:
    """Seconds and tokens of each round, or of each event that an engine sent."""
    if trial.arrivals:
        at, tokens = trial.arrivals["at_s"], trial.arrivals["tokens"]
        pairs = zip((after - before for before, after in pairwise(at)), tokens[1:], strict=True)
        yield from ((seconds, 1 if count is None else count) for seconds, count in pairs if count != 0)
    else:
        pairs = zip(trial.rounds.round_s or (), trial.rounds.emitted, strict=False)
        yield from ((seconds, emitted) for seconds, emitted in pairs if seconds and emitted)


def _waits(trials: Sequence[Trial]) -> tuple[NDArray[np.float64], float]:
    """Seconds of the rounds, which the first token of each waits for, and the share of tokens that come with it.

    So do those of an event that came in one piece with the one before.
    """
    timed = [pair for trial in trials for pair in _timed(trial)]
    tokens = sum(emitted for _, emitted in timed)
    waits = [seconds for seconds, _ in timed if seconds > 0]
    return np.array(waits), 1 - len(waits) / tokens if tokens else 0.0
