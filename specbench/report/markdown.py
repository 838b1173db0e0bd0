"""The report for a README or a pull request: verdicts, tables, warnings, how to read, how to reproduce."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from specbench.report import break_even, engines, provenance, words
from specbench.report.base import Format, Row, Summary
from specbench.report.columns import COLUMNS, GROUPS, Column, chief, definitions, known
from specbench.report.plain import plain
from specbench.report.words import Section

INTERVAL = r"\[\d+\.\d\d, \d+\.\d\d\](?![(\[:])"  # is no link, and reads better unescaped
SPECIAL = re.compile(INTERVAL + r"|[\\`*_{}\[\]#|~$!]")
# What GitHub turns into links, and people into notified ones: addresses, @names, #numbers. It looks at the rendered
# text, so that no escape helps: a zero-width space goes to each of these places. `model@q4_1` is none of them.
LINKED = re.compile(
    r"(?<=www)(?=\.)"
    r"|(?<=\w:)(?=//)"
    r"|(?<![^\W_]@)(?<=@)(?=\w)"
    r"|(?<=@)(?=[\w\\-]+\.\w)"
    r"|(?<=#)(?=\d)",
    re.IGNORECASE,
)
APART = "&#8203;"

Place = tuple[str, str | None]  # a task, and a category of it


def escape(text: Any) -> str:
    """Text that stays text in Markdown: one line, no markup, no HTML, no cell of its own."""
    line = plain(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    line = SPECIAL.sub(lambda match: match[0] if len(match[0]) > 1 else "\\" + match[0], line)
    return LINKED.sub(APART, line)


def render(summary: Summary, runs: Sequence[Any] = ()) -> str:
    """The whole document."""
    names = ", ".join(escape(run["name"]) for run in summary["runs"])
    sections = list(words.sections(summary))
    parts = [
        f"# Speculative decoding: {names}",
        "\n".join(_verdicts(sections, len(summary["runs"]) > 1)) or "Nothing was measured.",
    ]
    if said := list(break_even.sentences(summary, escape)):
        parts += ["## Break-even", "\n".join(f"- {text}" for text in said)]
    for engine_table in engines.tables(summary):
        parts += _engines(engine_table)
    several = len(sections) > 1
    for section in sections:
        parts += _tables(section, several)
    parts += _warnings(summary)
    if sections:
        parts += ["## How to read the tables", "\n".join(_definitions(summary["rows"]))]
    for run in summary["runs"]:
        parts += _provenance(run)
    return "\n\n".join(parts) + "\n"


def _verdicts(sections: Sequence[Section], several: bool) -> Iterator[str]:
    for section in sections:
        run = f"{escape(section.run['name'])}: " if several else ""
        setting = ", ".join(section.setting)
        for row in section.overall:
            if row["method"] == words.BASELINE:
                continue
            verdict = words.verdict(row, section, escape)
            where = f" ({escape(setting)})" if setting else ""
            more = (words.extremes(row, section, escape), words.experts(row, section))
            yield " ".join([f"- {run}{verdict}{where}.", *(words.sentence(text) for text in more if text)])


def _engines(found: engines.EngineTable) -> Iterator[str]:
    yield f"## {escape(found.title)}"
    lines = ([*names, *(column.cell(row) for column in found.columns)] for names, row in found.lines)
    heads = [*found.heads, *(column.title for column in found.columns)]
    yield table(heads, lines, texts=len(found.heads))
    yield "\n".join(f"- {words.sentence(escape(note))}" for note in found.notes)


def _tables(section: Section, several: bool) -> Iterator[str]:
    name = f"{escape(section.run['name'])}: " if several else ""
    yield f"## {name}{escape(section.title)}"
    yield f"### Overall ({escape(section.where)})"
    yield _numbers(section.overall, chief(section.overall), places=False)
    yield from _by_place(section)
    positions = list(_positions(section.overall))
    if positions:
        deepest = max(len(cells) for cells in positions) - 1
        yield "### Acceptance by position (share of the rounds whose draft was that deep)"
        heads = ["method", *map(str, range(1, deepest + 1))]
        yield table(heads, [cells + [""] * (deepest + 1 - len(cells)) for cells in positions])
    yield from _more(section)


def _numbers(rows: Sequence[Row], columns: Iterable[Column], places: bool) -> str:
    """A line a row; columns in which nothing is known are left out."""
    shown = known(columns, rows)
    heads = [*(["task"] if places else []), "method", "prompts", *(column.title for column in shown)]
    lines = (
        [
            *([words.place(row["task"], row["category"])] if places else []),
            row["method"],
            str(row["prompts"]),
            *(column.cell(row) for column in shown),
        ]
        for row in rows
    )
    return table(heads, lines, texts=2 if places else 1)


def _by_place(section: Section) -> Iterator[str]:
    """The tasks; then their categories, which may be many, folded away where HTML is rendered."""
    tasks = [place for place in section.places if place[1] is None]
    categories = [place for place in section.places if place[1] is not None]
    if len(tasks) > 1:
        yield f"### Speedup by task ({section.how})"
        yield _speedups(section, tasks)
        yield from _folded("More numbers by task", [_numbers_at(section, tasks)])
    if categories:
        parts = [f"Speedup, {section.how}:", _speedups(section, categories), _numbers_at(section, categories)]
        yield from _folded("By category", parts)


def _speedups(section: Section, places: Sequence[Place]) -> str:
    """A line a place, a column a method."""
    rows = _by_method(section)
    lines = (
        [
            words.place(*place),
            *(words.speedup(row) if (row := rows.get((*place, m))) else words.NONE for m in section.methods),
        ]
        for place in places
    )
    return table(["task", *section.methods], lines)


def _numbers_at(section: Section, places: Sequence[Place]) -> str:
    rows, methods = _by_method(section), [row["method"] for row in section.overall]
    ordered = [row for place in places for m in methods if (row := rows.get((*place, m)))]
    return _numbers(ordered, chief(section.overall), places=True)


def _by_method(section: Section) -> dict[tuple[str, str | None, str], Row]:
    return {(row["task"], row["category"], row["method"]): row for row in section.parts}


def _more(section: Section) -> Iterator[str]:
    """What the first table has no room for, by what it is about."""
    tables = []
    shown = chief(section.overall)
    for group, title in GROUPS.items():
        columns = known([c for c in COLUMNS if c.group == group and c not in shown], section.overall)
        if columns:
            tables.append(f"**{title}**\n\n{_numbers(section.overall, columns, places=False)}")
    yield from _folded(f"More numbers overall ({escape(section.where)})", tables)


def _folded(title: str, parts: Sequence[str]) -> Iterator[str]:
    if parts:
        yield f"<details><summary>{title}</summary>"
        yield from parts
        yield "</details>"


def _positions(rows: Iterable[Row]) -> Iterator[list[str]]:
    for row in rows:
        if row["acceptance_by_position"]:
            yield [row["method"], *(words.percent(rate) for rate in row["acceptance_by_position"])]


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """A Markdown table; every cell is escaped here. The first `texts` columns are text, the rest numbers."""
    rules = [" :-- "] * texts + [" --: "] * (len(headings) - texts)
    lines = [_line(headings), "|" + "|".join(rules) + "|"]
    return "\n".join([*lines, *(_line(row) for row in rows)])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(escape, cells)) + " |"


def _warnings(summary: Summary) -> Iterator[str]:
    if summary["warnings"]:
        yield "## Warnings"
        yield "\n".join(_warning(warning, len(summary["runs"]) > 1) for warning in summary["warnings"])


def _warning(warning: dict[str, Any], several: bool) -> str:
    run = f" ({escape(warning['run'])})" if several else ""
    message, cure = escape(warning["message"]), escape(warning["cure"])
    return f"- **{escape(warning['code'])}**{run}: {message}. What to do: {cure}."


def _definitions(rows: Sequence[Row]) -> Iterator[str]:
    for title, _, meaning in definitions(known(COLUMNS, rows)):
        yield f"- **{escape(title)}**: {escape(meaning)}"
    yield f"- {words.NONE} means unknown or not applicable. Intervals are 95%."


def _provenance(run: dict[str, Any]) -> Iterator[str]:
    yield f"## Run {escape(run['name'])}"
    yield table(["what", "value"], provenance.facts(run), texts=2)
    if run.get("argv"):
        yield "\n".join(["To reproduce:", "", code(provenance.command_line(run["argv"]))])


def code(text: str) -> str:
    """A fenced block that its content cannot close."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


FORMAT = Format("md", "report.md", render)
