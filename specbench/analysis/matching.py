"""Two runs in one table: which batches of theirs measured the same prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from specbench.analysis.frame import Frame, alone, build
from specbench.analysis.setting import AXES, Setting, measured_at
from specbench.analysis.summary import BASELINE

if TYPE_CHECKING:
    from specbench.store import Trial

SIDES = BASE, NEW = "base", "new"


class Place(NamedTuple):
    """A method at a setting."""

    method: str
    setting: Setting

    @property
    def order(self) -> tuple[Any, ...]:
        return self.method, self.setting.order


class Matching:
    """The trials of both runs, and their batches that count, numbered alike.

    Batches with equal `pair` measured the same prompts: task, questions, turn, repeat, setting and number
    of prompt tokens agree. `cluster` is what an interval resamples, the same number on both sides.
    """

    def __init__(self, base: Sequence[Trial], new: Sequence[Trial], other_prompts: Collection[str]) -> None:
        """`other_prompts` are the tasks whose prompts are known to differ between the runs."""
        frame = build([*_marked(BASE, base, new, other_prompts), *_marked(NEW, new, base, other_prompts)])
        self.rows = _with_sides(frame.rows)
        self.units = _units(frame)
        self.seen = {side: _places(self.rows, side) for side in SIDES}
        self.measured = {side: _places(self.units, side) for side in SIDES}

    @property
    def shared(self) -> list[Place]:
        """Of what both runs measured something; vanilla first."""
        both = self.measured[BASE] & self.measured[NEW]
        return sorted(both, key=lambda p: (p.setting.order, p.method != BASELINE, p.method))

    def batches(self, side: str, place: Place) -> pd.DataFrame:
        """One run's batches at a place, with vanilla's seconds and tokens of the same prompts beside (`_v`)."""
        vanilla = at(self.units, side, place._replace(method=BASELINE))
        timed = vanilla[["pair", "cost_s", "tokens"]]
        return at(self.units, side, place).merge(timed, on="pair", how="left", suffixes=("", "_v"))


def at(table: pd.DataFrame, side: str, place: Place) -> pd.DataFrame:
    """The lines of a run's method at a setting."""
    mine = (table["side"] == side) & (table["label"] == place.method)
    return table[mine & measured_at(table, place.setting)]


def _with_sides(table: pd.DataFrame) -> pd.DataFrame:
    parts = table["method"].astype(str).str.partition(" ")
    return table.assign(side=parts[0], label=parts[2])


def _places(table: pd.DataFrame, side: str) -> set[Place]:
    lines = table.loc[table["side"] == side, ["label", *AXES]].drop_duplicates()
    return {Place(label, Setting(*setting)) for label, *setting in lines.itertuples(index=False, name=None)}


def _units(frame: Frame) -> pd.DataFrame:
    """The batches that count, with the sums over their rows that `frame.batches` does not hold."""
    units = frame.batches.join(frame.rows.groupby("unit")[["emitted", "rounds"]].sum())
    return _with_sides(units[units["used"]])


def _marked(
    side: str, trials: Sequence[Trial], others: Sequence[Trial], other_prompts: Collection[str]
) -> Iterator[Trial]:
    """The trials with the side in front of the method, and numbered anew by repeat and prompt.

    `frame` pairs batches of one repeat. With the prompt's length, and the side where the prompts are known to
    differ, in the number of the repeat, it pairs those alone that had the same prompt.
    """
    kinds = sorted({(t.repeat, length) for run in (trials, others) for t, length in _with_lengths(run)})
    numbers = {kind: number for number, kind in enumerate(kinds)}
    for trial, length in _with_lengths(trials):
        number = 2 * numbers[trial.repeat, length] + (side == NEW and trial.task in other_prompts)
        yield replace(trial, method=f"{side} {trial.method}", repeat=number)


def _with_lengths(trials: Sequence[Trial]) -> Iterator[tuple[Trial, int]]:
    """Each trial with the prompt tokens of its whole batch: its rows must stay together.

    A failed request may not know its own, and a server's count is not ours: it has those of the same prompt's
    others.
    """
    answered = {_prompt(trial): trial.prompt_tokens for trial in trials if trial.error is None}
    lengths: Counter[tuple[Any, ...]] = Counter()
    for trial in trials:
        own = trial.prompt_tokens
        lengths[_batch(trial)] += own if trial.error is None else answered.get(_prompt(trial), own)
    return ((trial, lengths[_batch(trial)]) for trial in trials)


def _prompt(trial: Trial) -> tuple[Any, ...]:
    return trial.task, trial.question, trial.turn, trial.repeat


def _batch(trial: Trial) -> tuple[Any, ...]:
    """What was timed together, as in `frame`."""
    t = trial
    setting = (t.batch_size, t.concurrency, t.request_rate)
    where = (t.method, t.task, t.turn, *setting, t.repeat, t.attempt, t.block, t.batch)
    return (*where, t.question if alone(t) else None)
