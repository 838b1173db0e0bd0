"""A leaderboard over several runs: methods by tasks, as Spec-Bench's, but with intervals.

Only what was measured on one target, with one engine, on one machine and with one setting stands in one table. A
speedup is against the vanilla of its own run, so that rows of several runs can stand together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from specbench.analysis.extract import OURS
from specbench.analysis.setting import in_words
from specbench.report import words
from specbench.report.base import Format, Row, Summary
from specbench.report.markdown import escape
from specbench.report.words import BASELINE, OVERALL
from specbench.thresholds import RANKED_QUESTIONS, RANKED_WIDTH

IDENTITY = ("dtype", "quantization", "revision")
SETTINGS = {
    "temperature": None,
    "top_p": 1,
    "top_k": 0,
    "max_new_tokens": None,
    "ignore_eos": False,
}  # and default
NO_RIVAL = ("oracle",)  # knows the answer: an upper bound, not a method

NOTES = (
    "Speedup end to end over the vanilla of the same run, a ratio of sums, with a 95% interval over questions",
    "τ counts tokens per round over all rounds, the target's own bonus token included",
    "Bold: the whole interval is above every other method's, and above 1, rests on at least "
    f"{RANKED_QUESTIONS} questions and is no wider than ±{RANKED_WIDTH:.0%}; oracle, which knows the answer, does "
    "not compete",
)

Line = tuple[str, dict[str, Row]]  # a method's label, and its rows by task


def render(summary: Summary, runs: Sequence[Any] = ()) -> str:
    """One Markdown document; a section a target, engine, machine, load and setting."""
    parts = ["# Leaderboard"]
    for title, rows in _sections(summary).items():
        parts += [f"## {escape(title[0])}", escape(title[1]), _table(rows)]
    if len(parts) == 1:
        parts.append("Nothing was measured.")
    parts.append("\n".join(f"- {escape(note)}." for note in NOTES))
    return "\n\n".join(parts) + "\n"


def _sections(summary: Summary) -> dict[tuple[str, str], list[Row]]:
    """(target, the rest of what a table has in common) -> its rows, whole tasks and overall."""
    runs = {run["name"]: run for run in summary["runs"]}
    found: dict[tuple[str, str], list[Row]] = {}
    for row in summary["rows"]:
        if row["category"] is None:
            found.setdefault(_title(runs.get(row["run"], {}), row), []).append(row)
    return found


def _title(run: dict[str, Any], row: Row) -> tuple[str, str]:
    details, config = run.get("target_details") or {}, run.get("config") or {}
    target = [run.get("target") or "unknown target", *(details[k] for k in IDENTITY if details.get(k))]
    if run.get("random_weights"):
        target.append("RANDOM WEIGHTS, timing only")
    setting = [_engine(run), run.get("machine") or "unknown machine", *in_words(row)]
    known = ((name.replace("_", " "), config.get(name), default) for name, default in SETTINGS.items())
    setting += [f"{name} {value}" for name, value, default in known if value is not None and value != default]
    return ", ".join(map(str, target)), ", ".join(map(str, setting))


def _engine(run: dict[str, Any]) -> str:
    """Its name, and the version of one that is not ours: our own runs stand together from version to version."""
    engine = run.get("engine") or {}
    name, version = engine.get("name") or "unknown engine", engine.get("version")
    return name if name == OURS or not version else f"{name} {version}"


def _table(rows: Sequence[Row]) -> str:
    tasks = [*dict.fromkeys(row["task"] for row in rows if row["task"] != OVERALL), OVERALL]
    lines = sorted(_lines(rows), key=_rank)
    heads = ["method", *tasks, "τ", "output = vanilla's", "prompts"]
    rules = ["|", " :-- |", *[" --: |"] * (len(heads) - 1)]
    found = [_joined(map(escape, heads)), "".join(rules)]
    for label, by_task in lines:
        cells = [_cell(lines, by_task.get(task), task) for task in tasks]
        overall = by_task.get(OVERALL)
        facts = [words.NONE] * 3
        if overall is not None:
            facts = [words.tau(overall), words.output(overall), str(overall["prompts"])]
        found.append(_joined([escape(label), *cells, *map(escape, facts)]))
    return "\n".join(found)


def _joined(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"


def _lines(rows: Sequence[Row]) -> Iterator[Line]:
    """A line a run's method; the run is named where another has the same method. Vanilla, 1 by definition, once."""
    by_method: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        run = "" if row["method"] == BASELINE else row["run"]
        by_method.setdefault((row["method"], run), {}).setdefault(row["task"], row)
    methods = [method for method, _ in by_method]
    for (method, run), by_task in by_method.items():
        yield f"{method} ({run})" if methods.count(method) > 1 else method, by_task


def _rank(line: Line) -> tuple[float, str]:
    """The fastest overall first; unknown last."""
    overall = line[1].get(OVERALL)
    point = overall["speedup"]["point"] if overall else None
    return (-point if point is not None else float("inf"), line[0])


def _cell(lines: Sequence[Line], row: Row | None, task: str) -> str:
    if row is None:
        return words.NONE
    text = escape(words.speedup(row))
    return f"**{text}**" if _best(row, [other[task] for _, other in lines if task in other]) else text


def _best(row: Row, rows: Sequence[Row]) -> bool:
    """Whether the row's interval ranks, and is clear of every other method's, vanilla's 1 included."""
    low = row["speedup"]["low"]
    if low is None or low <= 1 or not words.ranks(row) or not _competes(row):
        return False
    rivals = [other for other in rows if other["method"] != row["method"] and _competes(other)]
    return all(_reach(other) < low for other in rivals)


def _competes(row: Row) -> bool:
    return row["method"].partition(":")[0] not in (BASELINE, *NO_RIVAL)


def _reach(row: Row) -> float:
    """The most that the row's speedup may be; without an interval anything."""
    if row["speedup"]["point"] is None:
        return 0.0
    high = row["speedup"]["high"]
    return float("inf") if high is None else float(high)


FORMAT = Format("leaderboard", "leaderboard.md", render)
