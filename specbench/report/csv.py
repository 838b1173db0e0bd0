"""One line a summary row, flat columns, for spreadsheets and notebooks."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from specbench.report.base import Format, Row, Summary
from specbench.report.plain import plain

# What a spreadsheet would run (OWASP, "CSV injection"), the full-width spellings that some accept with it.
FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠", "\t", "\r", "\n")


def render(summary: Summary, runs: Sequence[Any] = ()) -> str:
    """Columns are the row's fields; {low, point, high} become three columns, lists one cell joined by spaces.

    Unknown is an empty cell. A text that a spreadsheet would take for a formula gets a quote in front. Target
    and machine of the row's run follow at the end.
    """
    runs_by_name = {run["name"]: run for run in summary["runs"]}
    return lines(dict(_flat(row, runs_by_name.get(row["run"], {}))) for row in summary["rows"])


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
    quote = "'" if value.lstrip(" ").startswith(FORMULA) else ""
    return quote + plain(value)


FORMAT = Format("csv", "report.csv", render)
