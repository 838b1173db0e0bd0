"""One line a summary row, flat columns, for spreadsheets and notebooks."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

from specbench.report.base import Format, Row, Summary

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # what a spreadsheet would run


def render(summary: Summary, runs: Sequence[Any] = ()) -> str:
    """Columns are the row's fields; {low, point, high} become three columns, lists one cell joined by spaces.

    Unknown is an empty cell. A text that a spreadsheet would take for a formula gets a quote in front. Target
    and machine of the row's run follow at the end.
    """
    runs_by_name = {run["name"]: run for run in summary["runs"]}
    lines = [dict(_flat(row, runs_by_name.get(row["run"], {}))) for row in summary["rows"]]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    if lines:
        writer.writerow(lines[0])
        writer.writerows(line.values() for line in lines)
    return out.getvalue()


def _flat(row: Row, run: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in row.items():
        if isinstance(value, dict):
            for part, number in value.items():
                yield (name if part == "point" else f"{name}_{part}"), cell(number)
        else:
            yield name, cell(value)
    for name in ("target", "random_weights", "machine"):
        yield name, cell(run.get(name))


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
    quote = "'" if value.startswith(FORMULA) else ""
    return quote + value.replace("\r", " ").replace("\n", " ")


FORMAT = Format("csv", "report.csv", render)
