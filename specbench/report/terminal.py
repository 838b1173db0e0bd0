"""The table at the end of `run`: each method overall, then the speedups by task, then what to be wary of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from specbench.report import break_even, engines, words
from specbench.report.base import Row, Summary
from specbench.report.columns import COLUMNS, Column, differs
from specbench.report.plain import plain
from specbench.report.words import Section

GAP = 2  # blanks between columns; one of them is the box's own divider
NAME_WIDTH = 24  # of a name before it is folded; a quarter of a wide terminal
FEW = "few-prompts"


def render(summary: Summary, width: int = 100) -> RenderableType:
    """What to print on a terminal of `width` columns; narrow ones lose the least important columns."""
    return Group(*_parts(summary, width))


def _parts(summary: Summary, width: int) -> Iterator[RenderableType]:
    several = len(summary["runs"]) > 1
    for section in words.sections(summary):
        name = f"{section.run['name']}: " if several else ""
        yield Text(plain(f"{name}{section.title}"), style="bold")
        yield Text("")
        yield _overall(section, width)
        yield Text("")
        if len(section.places) > 1:
            yield from _by_task(section, width)
    yield from side_by_side(summary, width)
    for said in break_even.sentences(summary):
        yield Text(plain(said))
        yield Text("")
    if not summary["rows"]:
        yield Text("nothing was measured")
    yield from _notes(summary)


def side_by_side(summary: Summary, width: int) -> Iterator[RenderableType]:
    """The tables of engines alone, each with its notes; nothing where no runs stand in one."""
    for found in engines.tables(summary):
        yield Text(plain(found.title), style="bold")
        yield Text("")
        yield _numbers(found.heads, found.lines, found.columns, width)
        yield Text("")
        yield from (Text(plain(words.sentence(note)), style="dim") for note in found.notes)
        yield Text("")


def _overall(section: Section, width: int) -> Table:
    lines = [([row["method"]], row) for row in section.overall]
    return _numbers([section.where], lines, COLUMNS, width)


def _numbers(
    heads: Sequence[str], lines: Sequence[tuple[list[str], Row]], columns: Sequence[Column], width: int
) -> Table:
    """A line a row: its names, then as many of the columns as fit."""
    most = max(NAME_WIDTH, width // 4) if len(heads) == 1 else NAME_WIDTH
    names = [[plain(name) for name in line] for line, _ in lines]
    widths = [
        min(most, max(map(cell_len, [plain(head), *column])))
        for head, *column in zip(heads, *names, strict=True)
    ]
    rows = [row for _, row in lines]
    shown = _fitting(rows, columns, width - sum(widths) - GAP * (len(widths) - 1))
    table = _table()
    for head, name_width in zip(heads, widths, strict=True):
        table.add_column(Text(plain(head)), max_width=name_width, overflow="fold")
    for column in shown:
        table.add_column(Text(column.heading, justify="right"), justify="right", no_wrap=True)
    for line, row in zip(names, rows, strict=True):
        cells = (Text(column.terse(row), style=_colour(row) if column.keep == 9 else "") for column in shown)
        table.add_row(*map(Text, line), *cells)
    return table


def _fitting(rows: Sequence[Row], columns: Sequence[Column], width: int) -> list[Column]:
    """The columns that fit, the least important dropped first; columns with nothing known are not shown."""
    widths = {}
    for column in columns:
        cells = [column.terse(row) for row in rows]
        if column.beside and not differs(column, rows):
            continue
        if column.keep and (column.keep >= 6 or any(cell != words.NONE for cell in cells)):
            widths[column] = GAP + max(cell_len(line) for line in [*column.heading.split("\n"), *cells])
    while sum(widths.values()) > width and len(widths) > 1:
        del widths[min(widths, key=lambda column: column.keep)]
    return [column for column in columns if column in widths]


def _by_task(section: Section, width: int) -> Iterator[RenderableType]:
    """Speedups, a line a task (its categories indented below), a column a method; as many tables as fit."""
    methods = section.methods
    cells = {(row["task"], row["category"], row["method"]): row for row in section.parts}
    # A category of too few questions for an interval says nothing a reader could use: it is in the report.
    known = {(task, category) for (task, category, _), row in cells.items() if _has_interval(row)}
    places = [place for place in section.places if place[1] is None or place in known]
    labels = [plain(task) if category is None else f"  {plain(category)}" for task, category in places]
    label_width = min(NAME_WIDTH, max([len("speedup by task"), *map(cell_len, labels)]))
    cell_width = max([18, *(len(words.speedup(row)) for row in section.parts)])
    per_table = max(1, (width - label_width) // (GAP + cell_width))
    for start in range(0, len(methods), per_table):
        table = _table()
        table.add_column("speedup by task", max_width=label_width, overflow="fold")
        for method in methods[start : start + per_table]:
            table.add_column(Text(plain(method), justify="right"), justify="right", overflow="fold")
        for (task, category), label in zip(places, labels, strict=True):
            rows = [cells.get((task, category, method)) for method in methods[start : start + per_table]]
            table.add_row(Text(label), *(_speedup(row) for row in rows))
        yield table
        yield Text("")


def _has_interval(row: Row) -> bool:
    return row["speedup"]["low"] is not None


def _speedup(row: Row | None) -> Text:
    return Text(words.NONE) if row is None else Text(words.speedup(row), style=_colour(row))


def _colour(row: Row) -> str:
    """Green where the interval is above 1, red where it is below."""
    low, high = row["speedup"]["low"], row["speedup"]["high"]
    if row["method"] in (words.BASELINE, words.AGAIN) or low is None or high is None:
        return ""
    return "green" if low > 1 else "red" if high < 1 else ""


def _table() -> Table:
    return Table(
        box=box.SIMPLE_HEAD, show_edge=False, padding=(0, GAP - 1, 0, 0), pad_edge=False, header_style=""
    )


def _notes(summary: Summary) -> Iterator[Text]:
    several = len(summary["runs"]) > 1
    for warning in summary["warnings"]:
        few = warning["code"] == FEW
        where = f"{warning['run']}: " if several else ""
        text = Text("note: " if few else "warning: ", style="dim" if few else "yellow")
        text.append(plain(f"{where}{warning['message']}"), style="dim" if few else "default")
        text.append(f"\n  {plain(warning['cure'])}", style="dim")
        yield text
