"""One line a summary row, flat columns, for spreadsheets and notebooks."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from specbench.report.base import Format, Row, Summary
from specbench.report.plain import plain

# What a spreadsheet would run (OWASP, "CSV injection"), the full-width spellings that some accept with it.
FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")
BREAKS = frozenset("\t\r\n")  # in front, they are as bad
# What is not seen before it, and may be dropped: blanks, and Unicode's Default_Ignorable_Code_Point.
UNSEEN = re.compile(
    r"[\s\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    r"\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U000e0000-\U000e0fff]*"
)


def render(summary: Summary, runs: Sequence[Any] = ()) -> str:
    """Columns are the row's fields; {low, point, high} become three columns, lists one cell joined by spaces.

    Unknown is an empty cell. A text that a spreadsheet would take for a formula gets a quote in front. Target,
    machine and engine of the row's run follow at the end, with the number of the table of engines in which it
    stands (`engine_table`).
    """
    runs_by_name = {run["name"]: run for run in summary["runs"]}
    engine_table = {
        run: number for number, group in enumerate(summary.get("engines", ()), 1) for run in group["runs"]
    }
    return lines(
        dict(_flat(row, runs_by_name.get(row["run"], {}))) | {"engine_table": engine_table.get(row["run"])}
        for row in summary["rows"]
    )


def lines(records: Iterable[Mapping[str, Any]]) -> str:
    """CSV of records that all have the same fields, which are the heading; nothing for no records."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for number, record in enumerate(records):
        if number == 0:
            writer.writerow(record)
        writer.writerow(map(cell, record.values()))
    return out.getvalue()


def _flat(row: Row, run: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, dict):
            for part, number in value.items():
                yield (name if part == "point" else f"{name}_{part}"), number
        else:
            yield name, value
    for name in ("target", "random_weights", "machine"):
        yield name, run.get(name)
    for name in ("name", "version"):
        yield f"engine_{name}".removesuffix("_name"), (run.get("engine") or {}).get(name)


def cell(value: Any) -> str:
    """One value as a cell."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list):
        return " ".join(cell(item) or "nan" for item in value)
    if not isinstance(value, str):
        return str(value)
    return ("'" if _is_formula(value) else "") + plain(value)


def _is_formula(text: str) -> bool:
    """Whether a spreadsheet might run it."""
    unseen = UNSEEN.match(text)
    start = unseen.end() if unseen else 0
    return text.startswith(FORMULA, start) or not BREAKS.isdisjoint(text[:start])


FORMAT = Format("csv", "report.csv", render)
