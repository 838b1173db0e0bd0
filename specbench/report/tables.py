"""The tables of the HTML report, made from the summary alone."""

from __future__ import annotations

import re
from dataclasses import dataclass

from specbench.report import words
from specbench.report.base import Row
from specbench.report.columns import COLUMNS, GROUPS, Column, chief, known
from specbench.report.engines import EngineTable
from specbench.report.words import Section

METHOD = ("method", "a way to generate; vanilla decodes one token a round")
PROMPTS = ("prompts", "questions that count")
PLACES = ("categories", "tasks", "overall")  # where `everything` may end; each leaves out those before it
TASK = ("task", "a kind of work; a category of it stands behind a slash")
ENGINE = {
    "engine": "what generated, and its version; specbench/native is specbench's own loop",
    "run": "the run's name",
    "load": "how many were decoded or in flight at once, or requests sent a second",
    "method": METHOD[1],
}


@dataclass(frozen=True)
class Table:
    """A table as the page shows it: headings (title, definition), then lines of (cell, number to sort by).

    The first `texts` columns are names. `groups` are (title, first column, last column), counted from 1;
    `folded` the numbers of the lines that are of a category and hidden at first.
    """

    caption: str
    heads: list[tuple[str, str]]
    lines: list[list[tuple[str, str]]]
    texts: int = 1
    groups: tuple[tuple[str, int, int], ...] = ()
    folded: frozenset[int] = frozenset()


def overall(section: Section) -> Table:
    """The overall rows in the columns that matter most."""
    rows = section.overall
    columns = chief(rows)
    lines = [
        [_text(row["method"]), (str(row["prompts"]), ""), *(_cell(column, row) for column in columns)]
        for row in rows
    ]
    return Table(
        f"Overall: {section.where}", [METHOD, PROMPTS, *((c.title, c.meaning) for c in columns)], lines
    )


def everything(section: Section, down_to: str = "categories") -> Table:
    """All columns, for sorting and filtering, of all rows or those down to one of PLACES."""
    rows = {(row["task"], row["category"], row["method"]): row for row in section.rows}
    methods = [row["method"] for row in section.overall]
    shown = [place for place in section.places if _place(place) in PLACES[PLACES.index(down_to) :]]
    places = [(words.OVERALL, None), *shown]
    ordered = [row for place in places for method in methods if (row := rows.get((*place, method)))]
    columns = known(COLUMNS, ordered)
    lines = [
        [
            _text(
                section.where if row["task"] == words.OVERALL else words.place(row["task"], row["category"])
            ),
            _text(row["method"]),
            (str(row["prompts"]), ""),
            *(_cell(column, row) for column in columns),
        ]
        for row in ordered
    ]
    first, groups = 4, []
    for group, title in GROUPS.items():
        count = sum(column.group == group for column in columns)
        if count:
            groups.append((title, first, first + count - 1))
        first += count
    folded = frozenset(number for number, row in enumerate(ordered) if row["category"] is not None)
    heads = [TASK, METHOD, PROMPTS, *((column.title, column.meaning) for column in columns)]
    return Table("Every number, by task and method", heads, lines, 2, tuple(groups), folded)


def left_out(section: Section, down_to: str) -> list[str]:
    """Which of PLACES the section has and `everything` leaves out."""
    has = {_place(place) for place in section.places}
    return [name for name in PLACES[: PLACES.index(down_to)] if name in has]


def _place(place: tuple[str, str | None]) -> str:
    return "tasks" if place[1] is None else "categories"


def matrix(section: Section) -> Table:
    """Speedups: a line a task, a column a method."""
    rows = {(row["task"], row["category"], row["method"]): row for row in section.parts}
    lines = [
        [
            _text(words.place(*place)),
            *(
                (words.speedup(row) if (row := rows.get((*place, m))) else words.NONE, "")
                for m in section.methods
            ),
        ]
        for place in section.places
    ]
    folded = frozenset(number for number, (_, category) in enumerate(section.places) if category is not None)
    heads = [TASK, *((method, f"speedup over vanilla, {section.how}") for method in section.methods)]
    return Table(f"Speedup by task, {section.how}", heads, lines, folded=folded)


def engines(table: EngineTable) -> Table:
    """Engines by methods."""
    heads = [*((head, ENGINE[head]) for head in table.heads), *((c.title, c.meaning) for c in table.columns)]
    lines = [
        [*map(_text, names), *(_cell(column, row) for column in table.columns)] for names, row in table.lines
    ]
    return Table(table.title, heads, lines, len(table.heads))


def _text(text: str) -> tuple[str, str]:
    return (text, "")


def _cell(column: Column, row: Row) -> tuple[str, str]:
    """The cell, and its number where the cell's own first number does not sort (it has a unit)."""
    text, value = column.cell(row), column.value(row)
    unit = re.search(r"\d [A-Za-z]", text)
    return text, f"{value:.5g}" if unit and isinstance(value, int | float) else ""
