"""Under which load something was measured: the axes of a sweep, and how they are said."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pandas as pd


class Setting(NamedTuple):
    """One point of a sweep. 0: not asked for."""

    batch_size: int
    concurrency: int = 0
    request_rate: float = 0.0  # requests sent a second, whatever is in flight

    @property
    def at_once(self) -> int:
        """Requests decoded together; of an open loop it is not known."""
        return self.batch_size * (self.concurrency or 1)

    @property
    def order(self) -> tuple[float, ...]:
        """To sort by: open loops after closed ones, each from the smallest load on."""
        return (self.request_rate, *self)

    def fields(self) -> dict[str, Any]:
        """As a summary row has them: None where not asked for."""
        return {
            "batch_size": self.batch_size,
            "concurrency": self.concurrency or None,
            "request_rate": self.request_rate or None,
        }


AXES = Setting._fields


def measured_at(table: pd.DataFrame, setting: Setting) -> pd.Series[bool]:
    """Marks the lines of a table (with a column an axis, 0 where not asked for) that were measured there."""
    marks = (table[axis] == value for axis, value in zip(AXES, setting, strict=True))
    return reduce(operator.and_, marks)


def setting_of(row: Mapping[str, Any]) -> Setting:
    """Of a summary row, or of whatever else has its fields."""
    return Setting(row["batch_size"] or 1, row["concurrency"] or 0, row["request_rate"] or 0.0)


def part_filled(part: int, batches: int, size: int, first_turn: bool) -> tuple[str, str]:
    """Message and cure where `part` of the batches of a size held fewer prompts than that.

    Args:
        first_turn: whether some of them are of the first turn: questions ran out, not conversations.
    """
    message = f"{part} of the {batches} batches of size {size} held fewer prompts"
    if first_turn:
        return message, f"--limit a multiple of {size}, of tasks with as many questions, for full batches"
    return message, "conversations end at different turns: tasks with as many turns in each, for full batches"


def in_words(row: Mapping[str, Any]) -> list[str]:
    """`batch size 4`, `concurrency 8`, `2.5 requests/s`; nothing of one request at a time."""
    setting, found = setting_of(row), []
    if setting.batch_size > 1:
        found.append(f"batch size {setting.batch_size}")
    if setting.concurrency > 1:
        found.append(f"concurrency {setting.concurrency}")
    if setting.request_rate:
        found.append(f"{setting.request_rate:g} requests/s")
    return found
