"""A leaderboard over several runs: methods by tasks, as Spec-Bench's, but with intervals.

Only what was measured on one target, with one engine, on one machine and with one setting stands in one table; a
target's precisions (dtype, `--quantize`) stand in one too, told apart by a column. A speedup is against the vanilla
of its own run, so that rows of several runs can stand together.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specbench.analysis.extract import OURS
from specbench.analysis.setting import in_words
from specbench.report import words
from specbench.report.base import Format, Row, Summary
from specbench.report.columns import BY_FIELD, Column, definitions, known
from specbench.report.markdown import escape
from specbench.report.words import BASELINE, OVERALL
from specbench.thresholds import RANKED_QUESTIONS, RANKED_WIDTH

SETTINGS = {
    "temperature": None,
    "top_p": 1,
    "top_k": 0,
    "max_new_tokens": None,
    "ignore_eos": False,
}  # and default
NO_RIVAL = ("oracle",)  # knows the answer: an upper bound, not a method
PRECISION, WEIGHTS = "precision", "target's weights"
LIMITS = tuple(
    BY_FIELD[field]
    for field in (
        "predicted_residual",
        "verify_inflation",
        "roofline_share",
        "experts",
        "other_share",
        "joules_per_token",
    )
)

NOTES = (
    "Speedup end to end over the vanilla of the same run, a ratio of sums, with a 95% interval over questions",
    "Vanilla stands once a precision, as the first run measured it",
    "τ counts tokens per round over all rounds, the target's own bonus token included",
    "Bold: the whole interval is above that of every other method in its precision, and above 1, rests on at least "
    f"{RANKED_QUESTIONS} questions and is no wider than ±{RANKED_WIDTH:.0%}; oracle, which knows the answer, does "
    "not compete",
)

Runs = dict[str, dict[str, Any]]  # by name


@dataclass(frozen=True)
class Line:
    """What a method measured in one precision: a line of a section's tables."""

    label: str
    precision: str
    weights: int | None  # bytes of the target's, as stored
    rows: dict[str, Row]  # by task

    @property
    def overall(self) -> Row | None:
        return self.rows.get(OVERALL)


def render(summary: Summary, runs: Sequence[Any] = ()) -> str:
    """One Markdown document; a section a target, engine, machine, load and setting."""
    by_name: Runs = {run["name"]: run for run in summary["runs"]}
    parts, told = ["# Leaderboard"], []
    for (target, setting), rows in _sections(summary, by_name).items():
        lines = sorted(_lines(rows, by_name), key=_rank)
        several = len({line.precision for line in lines}) > 1
        title = target if several else ", ".join(filter(None, (target, lines[0].precision)))
        parts += [f"## {escape(title)}", escape(setting), _table(lines, several)]
        columns = known(LIMITS, [line.overall for line in lines if line.overall is not None])
        if columns:
            parts += ["Overall, what limits it:", _limits(lines, several, columns)]
            told += columns
    if len(parts) == 1:
        parts.append("Nothing was measured.")
    meant = (f"{title}: {meaning.rstrip('.')}" for title, _, meaning in definitions(dict.fromkeys(told)))
    parts.append("\n".join(f"- {escape(note)}." for note in (*NOTES, *meant)))
    return "\n\n".join(parts) + "\n"


def _sections(summary: Summary, runs: Runs) -> dict[tuple[str, str], list[Row]]:
    """(target, the rest of what a table has in common) -> its rows, whole tasks and overall."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in summary["rows"]:
        if row["category"] is None:
            found.setdefault(_title(runs.get(row["run"], {}), row), []).append(row)
    return found


def _title(run: dict[str, Any], row: Row) -> tuple[str, str]:
    details, config = run.get("target_details") or {}, run.get("config") or {}
    target = [_given(run, run.get("target")) or "unknown target"]
    target += filter(None, (_given(run, details.get("quantization")), details.get("revision")))
    if run.get("random_weights"):
        target.append("RANDOM WEIGHTS, timing only")
    setting = [_engine(run), run.get("machine") or "unknown machine", *in_words(row)]
    chosen = ((name.replace("_", " "), config.get(name), default) for name, default in SETTINGS.items())
    setting += [
        f"{name} {value}" for name, value, default in chosen if value is not None and value != default
    ]
    return ", ".join(map(str, target)), ", ".join(map(str, setting))


def _scheme(run: dict[str, Any]) -> str:
    """What `--quantize` made of the weights; nothing where it was not asked for."""
    scheme = (run.get("config") or {}).get("quantize")
    return str(scheme) if scheme and scheme != "none" else ""


def _given(run: dict[str, Any], name: str | None) -> str:
    """A target's name, or quantisation, without what `--quantize` added: `t@int8` is t, `t@q4_1+int8` t@q4_1."""
    bare, scheme = name or "", _scheme(run)
    return re.sub(f"(^|[@+]){re.escape(scheme)}$", "", bare) if scheme else bare


def _precision(run: dict[str, Any]) -> str:
    """Of the target in memory: `float32`, `bfloat16, int8`; nothing where the run does not say."""
    dtype = (run.get("target_details") or {}).get("dtype")
    return ", ".join(filter(None, (str(dtype) if dtype else "", _scheme(run))))


def _engine(run: dict[str, Any]) -> str:
    """Its name, and the version of one that is not ours: our own runs stand together from version to version."""
    engine = run.get("engine") or {}
    name, version = engine.get("name") or "unknown engine", engine.get("version")
    return name if name == OURS or not version else f"{name} {version}"


def _table(lines: Sequence[Line], several: bool) -> str:
    """Speedups by task, then what else ranks a method overall."""
    tasks = [*dict.fromkeys(task for line in lines for task in line.rows if task != OVERALL), OVERALL]
    weighed = any(line.weights is not None for line in lines)
    heads = [*_names(several), *tasks, "τ", *([WEIGHTS] if weighed else []), "output = vanilla's", "prompts"]
    cells = []
    for line in lines:
        tau = output = prompts = words.NONE
        if line.overall is not None:
            tau, output, prompts = (
                words.tau(line.overall), words.output(line.overall), str(line.overall["prompts"]),
            )  # fmt: skip
        stored = [words.size(line.weights)] if weighed else []
        facts = map(escape, (tau, *stored, output, prompts))
        cells.append([*_named(line, several), *(_cell(lines, line, task) for task in tasks), *facts])
    return _markdown(heads, cells, len(_names(several)))


def _limits(lines: Sequence[Line], several: bool, columns: Sequence[Column]) -> str:
    """What a reader asks of a speedup: how near it is to the device's own limit, and what stands between."""
    heads = [*_names(several), *(column.title for column in columns)]
    cells = (
        [*_named(line, several), *(escape(column.cell(line.overall)) for column in columns)]
        for line in lines
        if line.overall is not None
    )
    return _markdown(heads, cells, len(_names(several)))


def _names(several: bool) -> list[str]:
    return ["method", *([PRECISION] if several else [])]


def _named(line: Line, several: bool) -> list[str]:
    return [escape(line.label), *([escape(line.precision or words.NONE)] if several else [])]


def _markdown(heads: Sequence[str], lines: Iterable[Sequence[str]], texts: int) -> str:
    """A table of cells that are escaped already: bold ones hold markup. The first `texts` columns are text."""
    rules = ["|", *[" :-- |"] * texts, *[" --: |"] * (len(heads) - texts)]
    return "\n".join([_joined(map(escape, heads)), "".join(rules), *map(_joined, lines)])


def _joined(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _lines(rows: Sequence[Row], runs: Runs) -> Iterator[Line]:
    """A line a run's method; the run is named where another has the same in one precision. Vanilla, 1 by definition,
    once a precision.
    """
    found: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        precision = _precision(runs.get(row["run"], {}))
        run = "" if row["method"] == BASELINE else row["run"]
        found.setdefault((row["method"], precision, run), {}).setdefault(row["task"], row)
    methods = Counter((method, precision) for method, precision, _ in found)
    for (method, precision, run), by_task in found.items():
        first = next(iter(by_task.values()))
        weights = (runs.get(first["run"], {}).get("target_details") or {}).get("bytes")
        label = f"{method} ({run})" if methods[method, precision] > 1 else method
        yield Line(label, precision, weights, by_task)


def _rank(line: Line) -> tuple[float, str, str]:
    """The fastest overall first; unknown last."""
    point = line.overall["speedup"]["point"] if line.overall else None
    return (-point if point is not None else float("inf"), line.label, line.precision)


def _cell(lines: Sequence[Line], line: Line, task: str) -> str:
    row = line.rows.get(task)
    if row is None:
        return words.NONE
    text = escape(words.speedup(row))
    # Another precision's vanilla takes other seconds: its speedups do not compete.
    rivals = [other.rows[task] for other in lines if task in other.rows and other.precision == line.precision]
    return f"**{text}**" if _best(row, rivals) else text


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
