"""What a figure is, and what it is drawn from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from specbench.report.base import Row
from specbench.report.figures.style import Look, looks
from specbench.report.words import BASELINE, Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from specbench.store import Trial


@dataclass(frozen=True)
class Scene:
    """One section of the report, with its trials.

    Args:
        section: the summary's rows of one run at one setting.
        attempted: all trials of that setting, in the order of measuring.
        siblings: the overall rows of the run at all its settings.
    """

    section: Section
    attempted: Sequence[Trial]
    siblings: Sequence[Row]

    @cached_property
    def trials(self) -> list[Trial]:
        """Those that count."""
        return [trial for trial in self.attempted if counts(trial)]

    @cached_property
    def looks(self) -> dict[str, Look]:
        return looks([row["method"] for row in self.section.overall])

    @property
    def overall(self) -> list[Row]:
        """The overall rows of all methods but vanilla."""
        return [row for row in self.section.overall if row["method"] != BASELINE]

    def of_task(self, task: str) -> dict[str, Row]:
        """Method -> its row of a task (of the whole task, not of a category)."""
        rows = [row for row in self.section.rows if row["task"] == task and row["category"] is None]
        return {row["method"]: row for row in rows}

    def by_method(self) -> Iterator[tuple[str, list[Trial]]]:
        """(method, its trials), in the order of the tables."""
        for row in self.section.overall:
            yield row["method"], [trial for trial in self.trials if trial.method == row["method"]]


def counts(trial: Trial) -> bool:
    """Whether it is an answer that is not set aside."""
    return trial.excluded is None and trial.error is None


Drawn = tuple["Figure", str]


@dataclass(frozen=True)
class Drawing:
    """A figure of the report.

    Args:
        name: of its file.
        title: what it shows.
        caption: how to read it, in one sentence.
        draw: from a scene, or a table of engines, to a figure and its text alternative; None where that has nothing
            to show in it.
    """

    name: str
    title: str
    caption: str
    draw: Callable[[Any], Drawn | None]
