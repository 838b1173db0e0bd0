"""The report for a README or a pull request: verdicts, tables, warnings, how to read, how to reproduce."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from specbench.report import words
from specbench.report.base import Format, Row, Summary
from specbench.report.columns import COLUMNS
from specbench.report.words import Section

INTERVAL = r"\[\d+\.\d\d, \d+\.\d\d\](?![(\[:])"  # is no link, and reads better unescaped
SPECIAL = re.compile(INTERVAL + r"|[\\`*_{}\[\]#|~$!]")
CONTROL = re.compile(r"[\x00-\x1f\x7f\u2028\u2029]+")


def escape(text: Any) -> str:
    """Text that stays text in Markdown: one line, no markup, no HTML, no cell of its own."""
    line = CONTROL.sub(" ", str(text))
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return SPECIAL.sub(lambda match: match[0] if len(match[0]) > 1 else "\\" + match[0], line)


def render(summary: Summary, runs: Sequence[Any] = ()) -> str:
    """The whole document."""
    names = ", ".join(escape(run["name"]) for run in summary["runs"])
    sections = list(words.sections(summary))
    parts = [f"# Speculative decoding: {names}", "\n".join(_verdicts(sections)) or "Nothing was measured."]
    several = len(sections) > 1
    for section in sections:
        parts += _tables(section, several)
    parts += _warnings(summary)
    if sections:
        parts += ["## How to read the tables", "\n".join(_definitions())]
    for run in summary["runs"]:
        parts += _provenance(run)
    return "\n\n".join(parts) + "\n"


def _verdicts(sections: Sequence[Section]) -> Iterator[str]:
    for section in sections:
        suffix = section.title.partition(", ")[2]
        for row in section.overall:
            if row["method"] != words.BASELINE:
                sentence = words.verdict(row, section, escape)
                yield f"- {sentence}{f' ({escape(suffix)})' if suffix else ''}."


def _tables(section: Section, several: bool) -> Iterator[str]:
    name = f"{escape(section.run['name'])}: " if several else ""
    yield f"## {name}{escape(section.title)}"
    tasks = section.tasks
    where = escape(tasks[0]) if len(tasks) == 1 else f"all {len(tasks)} tasks"
    yield f"### Overall ({where})"
    headings = ["method", "prompts", *(column.title for column in COLUMNS)]
    yield table(headings, [[row["method"], str(row["prompts"]), *_cells(row)] for row in section.overall])
    if len(section.places) > 1:
        yield from _by_task(section, headings)
    positions = list(_positions(section.overall))
    if positions:
        deepest = max(len(cells) for cells in positions) - 1
        yield "### Acceptance by position (share of the rounds whose draft was that deep)"
        heads = ["method", *map(str, range(1, deepest + 1))]
        yield table(heads, [cells + [""] * (deepest + 1 - len(cells)) for cells in positions])


def _by_task(section: Section, headings: list[str]) -> Iterator[str]:
    """The speedups as a matrix, then everything, folded away where HTML is rendered."""
    methods = [row["method"] for row in section.overall if row["method"] != words.BASELINE]
    rows = {(row["task"], row["category"], row["method"]): row for row in section.parts}
    yield "### Speedup by task (end to end)"
    yield table(
        ["task", *methods],
        [
            [
                _label(*place),
                *(words.speedup(row) if (row := rows.get((*place, m))) else words.NONE for m in methods),
            ]
            for place in section.places
        ],
    )
    found = [
        row for place in section.places for row in section.parts if (row["task"], row["category"]) == place
    ]
    yield "<details><summary>All numbers by task</summary>"
    yield table(
        ["task", *headings],
        [
            [_label(row["task"], row["category"]), row["method"], str(row["prompts"]), *_cells(row)]
            for row in found
        ],
        texts=2,
    )
    yield "</details>"


def _cells(row: Row) -> list[str]:
    return [column.cell(row) for column in COLUMNS]


def _label(task: str, category: str | None) -> str:
    return task if category is None else f"{task} / {category}"


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


def _definitions() -> Iterator[str]:
    for column in COLUMNS:
        yield f"- **{escape(column.title)}**: {escape(column.meaning)}."
    yield f"- {words.NONE} means unknown or not applicable. Intervals are 95%."


def _provenance(run: dict[str, Any]) -> Iterator[str]:
    yield f"## Run {escape(run['name'])}"
    facts = {"target": run.get("target"), **(run.get("target_details") or {})}
    facts |= {f"drafter of {method}": name for method, name in (run.get("drafters") or {}).items()}
    facts |= {key: run.get(key) for key in ("machine", "start", "end", "seed")}
    facts |= {f"git {key}": value for key, value in _flat(run.get("git"))}
    facts |= dict(_flat(run.get("versions")))
    facts |= {f"config {key}": value for key, value in _flat(run.get("config"))}
    yield table(
        ["what", "value"], [[key, _value(value)] for key, value in facts.items() if _value(value)], texts=2
    )
    if run.get("argv"):
        command = "\n".join(["To reproduce:", "", code(command_line(run["argv"]))])
        yield command


def _flat(value: Any) -> Iterable[tuple[str, Any]]:
    return value.items() if isinstance(value, dict) else [("", value)] if value else []


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "" if value is None or value == {} else str(value)


def command_line(argv: Sequence[str] | str) -> str:
    """The command as typed, ready for a shell."""
    if isinstance(argv, str):
        return argv
    typed = [str(word) for word in argv]
    if typed and typed[0].endswith(("/specbench", "__main__.py")):
        typed[0] = "specbench"
    return shlex.join(typed)


def code(text: str) -> str:
    """A fenced block that its content cannot close."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


FORMAT = Format("md", "report.md", render)
