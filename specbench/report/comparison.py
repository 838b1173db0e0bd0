"""A comparison of two runs (`analysis.compare`) as words, terminal tables and Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from specbench.analysis.compare import AMBIGUOUS, IMPROVED, NO_CHANGE, REGRESSED, VERDICTS
from specbench.analysis.setting import in_words
from specbench.analysis.summary import OVERALL
from specbench.report import words
from specbench.report.base import Row
from specbench.report.markdown import escape, table
from specbench.report.plain import plain

Comparison = dict[str, Any]

COLOURS = {REGRESSED: "red", AMBIGUOUS: "yellow", IMPROVED: "green", NO_CHANGE: ""}
HEADINGS = ("method", "metric", "task", "BASE", "NEW", "change", "limit", "questions", "verdict")
TEXTS = 3  # columns of text, before the numbers
COMMIT = 12  # hex digits shown

HOW_TO_READ = (
    "The change is NEW / BASE with a 95% interval over questions: paired over the prompts that both runs "
    "measured, where there are enough; else marked unpaired, each run a sample of its own",
    "With F the limit of a row: regressed, the whole interval is below F; improved, above 1/F; no change, "
    "within F and 1/F; ambiguous, across one of them, so more questions are needed. Memory's limit is the upper "
    "one, and its reading is one number",
    "Differences between two starts of a machine are not in the intervals: the limits allow for them",
)


def headline(comparison: Comparison) -> str:
    """`1 regressed, 5 no change; by task: 2 ambiguous, 6 no change; 1 method not compared`.

    The overall rows, then the others, then what has no row.
    """
    overall = [row["verdict"] for row in comparison["rows"] if row["task"] == OVERALL]
    parts = [row["verdict"] for row in comparison["rows"] if row["task"] != OVERALL]
    counted = "; by task: ".join(_counts(verdicts) for verdicts in (overall, parts) if verdicts)
    lost = len({method(place) for place in comparison["missing"]})
    return counted + (f"; {lost} method{'s' * (lost > 1)} not compared" if lost else "")


def _counts(verdicts: Sequence[str]) -> str:
    counts = Counter(verdicts)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])


def sentence(row: Row) -> str:
    """`eagle speedup on chat regressed: 2.90x -> 2.41x, -16.9% [-19.0%, -14.6%]`, as plain text."""
    parts = [f"{label(row)} {row['verdict']}: {value(row, 'base')} -> {value(row, 'new')}, {change(row)}"]
    return "; ".join([*parts, *([row["reason"]] if row["reason"] else [])])


def label(row: Row) -> str:
    """What the row is of, in words."""
    where = "overall" if row["task"] == OVERALL else f"on {row['task']}"
    return f"{method(row)} {row['metric']} {where}"


def method(row: Row) -> str:
    """The method, with its setting where that is not one request at a time."""
    return ", ".join([row["method"], *in_words(row)])


def value(row: Row, side: str) -> str:
    """The metric's value of one side, with its own interval."""
    estimate = row[side]
    if row["metric"] == "memory":
        return words.size(estimate["point"])
    if row["metric"] == "tokens_per_s":
        return words.number(estimate["point"], 1)
    return words.interval(estimate, "x" if row["metric"] == "speedup" else "")


def change(row: Row) -> str:
    """`-3.1% [-7.0%, +1.0%]`, or the point alone."""
    low, point, high = (row["change"][edge] for edge in ("low", "point", "high"))
    if point is None:
        return words.NONE
    if low is None or high is None or low == high:
        return _percent(point)
    return f"{_percent(point)} [{_percent(low)}, {_percent(high)}]"


def _percent(ratio: float) -> str:
    text = f"{ratio - 1:+.1%}"
    return "0.0%" if text in ("+0.0%", "-0.0%") else text


def limit(row: Row) -> str:
    return f"{'<=' if row['smaller_is_better'] else '>='} {row['limit']:g}"


def questions(row: Row) -> str:
    """How many questions the change rests on: `40`, `40 of 40/80` matched, `40 and 80, unpaired`."""
    base, new = row["questions"]["base"], row["questions"]["new"]
    if row["paired"] is None:
        return words.NONE
    if not row["paired"]:
        return f"{base} and {new}, unpaired"
    lost = row["unmatched"]
    return str(base) if not any(lost.values()) else f"{base} of {base + lost['base']}/{new + lost['new']}"


def cells(row: Row) -> list[str]:
    """The row's cells under HEADINGS, as plain text."""
    sides = (value(row, "base"), value(row, "new"))
    return [
        method(row),
        row["metric"],
        row["task"],
        *sides,
        change(row),
        limit(row),
        questions(row),
        row["verdict"],
    ]


def terminal(comparison: Comparison, every: bool = False) -> RenderableType:
    """What to print: the overall rows, and of the tasks those that changed; with `every` all."""
    return Group(*_terminal(comparison, every))


def _terminal(comparison: Comparison, every: bool) -> Iterator[RenderableType]:
    for side in ("base", "new"):
        yield Text(plain(f"{side.upper():4}  {_side(comparison[side])}"))
    yield Text("")
    rows = _ordered(comparison["rows"])
    shown = [row for row in rows if every or row["task"] == OVERALL or _tells(row)]
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="")
    for number, heading in enumerate(HEADINGS):
        justify = "left" if number < TEXTS or number == len(HEADINGS) - 1 else "right"
        grid.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in shown:
        *others, verdict = cells(row)
        grid.add_row(*(Text(plain(cell)) for cell in others), Text(verdict, style=COLOURS[verdict]))
    yield grid
    yield Text("")
    if len(shown) < len(rows):
        hidden = len(rows) - len(shown)
        what = (
            "1 row of tasks shows no change or rests"
            if hidden == 1
            else f"{hidden} rows of tasks show no change or rest"
        )
        yield Text(f"{what} on too few questions (--all)", style="dim")
    reasons: dict[str, list[str]] = {}
    for row in shown:
        if row["reason"]:
            reasons.setdefault(row["reason"], []).append(label(row))
    for reason, labels in reasons.items():
        yield Text(f"{reason}: {plain(listed(labels))}", style="dim")
    for place in comparison["missing"]:
        yield Text(plain(f"not compared: {method(place)}, {place['reason']}"))
    for warning in comparison["warnings"]:
        yield (
            Text("warning: ", style="yellow")
            .append(plain(warning["message"]), style="default")
            .append(f"\n  {plain(warning['cure'])}", style="dim")
        )
    if comparison["changes"]:
        changed = (
            f"{c['what']} {c['base'] or words.NONE} -> {c['new'] or words.NONE}"
            for c in comparison["changes"]
        )
        yield Text(plain("also changed: " + "; ".join(changed)), style="dim")
    yield Text(headline(comparison), style="bold")


def _tells(row: Row) -> bool:
    """Whether a task's row says something that its method's overall row does not."""
    return row["verdict"] != NO_CHANGE and (row["verdict"] != AMBIGUOUS or row["change"]["low"] is not None)


def listed(names: Sequence[str], most: int = 5) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def markdown(comparison: Comparison) -> str:
    """The document for a CI step summary or a pull request."""
    base, new = (escape(comparison[side]["name"]) for side in ("base", "new"))
    rows = _ordered(comparison["rows"])
    overall = [row for row in rows if row["task"] == OVERALL]
    parts = [f"## {new} against {base}: {headline(comparison)}"]
    found = [row for row in rows if row["verdict"] in (REGRESSED, IMPROVED)]
    if found:
        parts.append("\n".join(f"- {escape(sentence(row))}" for row in found))
    parts += ["\n".join(f"- {side.upper()}: {escape(_side(comparison[side]))}" for side in ("base", "new"))]
    parts.append(_table(overall))
    if len(rows) > len(overall):
        inner = _table([row for row in rows if row["task"] != OVERALL])
        parts.append(f"<details><summary>By task</summary>\n\n{inner}\n\n</details>")
    notes = [f"- not compared: {escape(method(p))}, {escape(p['reason'])}" for p in comparison["missing"]]
    notes += [
        f"- **{escape(w['code'])}**: {escape(w['message'])}. What to do: {escape(w['cure'])}."
        for w in comparison["warnings"]
    ]
    if notes:
        parts.append("\n".join(notes))
    if comparison["changes"]:
        lines = [[c["what"], c["base"] or words.NONE, c["new"] or words.NONE] for c in comparison["changes"]]
        inner = table(["what else changed", "BASE", "NEW"], lines, texts=TEXTS)
        parts.append(f"<details><summary>What else changed</summary>\n\n{inner}\n\n</details>")
    parts.append("\n".join(f"- {escape(line)}." for line in HOW_TO_READ))
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[Row]) -> str:
    return table(list(HEADINGS), [cells(row) for row in rows], texts=TEXTS)


def _ordered(rows: Sequence[Row]) -> list[Row]:
    """Overall rows first, regressions before the rest; otherwise as they come."""
    return sorted(rows, key=lambda row: (row["task"] != OVERALL, VERDICTS.index(row["verdict"])))


def _side(run: dict[str, Any]) -> str:
    """A run in one line: name, target, machine, commit, date, folder."""
    commit = ((run.get("git") or {}).get("commit") or "")[:COMMIT]
    facts = [run["name"], run.get("target"), run.get("machine"), commit, run.get("start"), run.get("path")]
    return "; ".join(str(fact) for fact in facts if fact)
