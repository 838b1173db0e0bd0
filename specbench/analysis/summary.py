"""`summarise`: the one summary object of runs (design §7), from which every table and report is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pandas as pd

from specbench.analysis import caution, engines, estimates, run_caution
from specbench.analysis.break_even import break_even
from specbench.analysis.closed_form import closed_form
from specbench.analysis.definitions import DEFINITIONS
from specbench.analysis.extract import run_extract
from specbench.analysis.floors import with_floors
from specbench.analysis.frame import Frame, RoundColumns, build
from specbench.analysis.open_loop import queue_growth
from specbench.analysis.rounds import acceptance, durations, gaps, mean
from specbench.analysis.run_names import run_names
from specbench.analysis.setting import AXES, Setting, measured_at

if TYPE_CHECKING:
    from specbench.store import Trial

SCHEMA = 1
FIELDS = tuple(DEFINITIONS)
BASELINE, AGAIN = "vanilla", "vanilla-again"
OVERALL = "overall"


class RunData(Protocol):
    """What is summarised. `specbench.store.Run` is one; its `warnings`, where it has any, are passed on."""

    @property
    def manifest(self) -> dict[str, Any]: ...

    @property
    def trials(self) -> Sequence[Trial]: ...


# Pandas keeps text in pyarrow where that is installed, which takes no lone surrogate; here nothing depends on it.
@pd.option_context("mode.string_storage", "python")
def summarise(runs: Sequence[RunData]) -> dict[str, Any]:
    """The summary object: `schema`, `runs`, `warnings`, `rows`, `break_even` and `engines`, of plain JSON values.

    Unknown is None. What the fields of a row mean is in `definitions`. Times are seconds, memory bytes, shares
    and rates fractions of 1. Intervals are 95%. The same trials give the same summary whatever their order.
    """
    summary: dict[str, Any] = {"schema": SCHEMA, "runs": [], "warnings": [], "rows": []}
    names = run_names(runs)
    manifests = {name: run.manifest for name, run in zip(names, runs, strict=True)}
    tables, apart = engines.tables(manifests)
    summary["warnings"] += [*run_caution.between_runs(manifests), *apart]
    for name, run in zip(names, runs, strict=True):
        summary["runs"].append(run_extract(run.manifest, name))
        if run.trials:
            rows, warnings = _summarise_run(run, name)
            summary["rows"] += rows
            summary["warnings"] += warnings
    summary["break_even"] = list(break_even(summary["rows"], OVERALL, (BASELINE, AGAIN)))
    summary["engines"] = tables
    return summary


@dataclass(frozen=True)
class _Group:
    """One method at one setting: its trials, batches, pairs with vanilla, and rounds."""

    method: str
    setting: Setting
    rows: pd.DataFrame
    units: pd.DataFrame  # batches that count
    pairs: pd.DataFrame
    rounds: RoundColumns  # of rows that count
    waits: RoundColumns  # of rows that count
    cluster_of_row: np.ndarray
    fixed: dict[str, Any]  # fields that are the method's, not the task's: memory


def _summarise_run(run: RunData, name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    frame = with_floors(build(run.trials), run.manifest)
    told = getattr(run, "warnings", ())
    warnings = run_caution.run_warnings(run.manifest, name, _answered(frame), told, BASELINE)
    rows: list[dict[str, Any]] = []
    tasks = _in_order(frame.rows, "task")
    for group in _groups(frame):
        overall = _row(group, name, OVERALL, None)
        parts = [row for task in tasks for row in _task_rows(group, name, task)]
        rows += [*parts, overall]
        beside = caution.Overall(
            overall,
            [part for part in parts if part["category"] is None],
            estimates.clusters_needed(group.pairs, caution.WANTED),
            int(group.units["requests"].max()) if len(group.units) else 0,
            int(group.pairs["tokens_v"].sum()),
            int(group.pairs["tokens"].sum()),
        )
        warnings += caution.method_warnings(beside, run.manifest)
    return rows, warnings + caution.few_prompts(rows, name)


def _groups(frame: Frame) -> Iterator[_Group]:
    rows, batches = frame.rows, frame.batches
    cluster_of_row = batches["cluster"].to_numpy()[rows["unit"].to_numpy()]
    settings = {Setting(*values) for values in zip(*(rows[axis].tolist() for axis in AXES), strict=True)}
    methods = sorted(_in_order(rows, "method", "order"), key=lambda method: method != BASELINE)
    for setting in sorted(settings, key=lambda one: one.order):
        at_setting = measured_at(rows, setting)
        used = batches[batches["used"] & measured_at(batches, setting)]
        baseline = rows[at_setting & (rows["method"] == BASELINE)]
        for method in methods:
            mine = at_setting & (rows["method"] == method)
            if not mine.any():
                continue
            units = used[used["method"] == method]
            counted = (mine & rows["used"]).to_numpy(dtype=bool)
            rounds = frame.rounds.of(counted)
            yield _Group(
                method,
                setting,
                rows[mine],
                units,
                estimates.join(units, used[used["method"] == BASELINE], rows[mine], baseline),
                rounds,
                rounds if frame.waits is frame.rounds else frame.waits.of(counted),
                cluster_of_row,
                estimates.memory(rows[mine], baseline),
            )


def _task_rows(group: _Group, run: str, task: str) -> Iterator[dict[str, Any]]:
    """The task's row, then one a category where it has several; nothing where the method has no trials."""
    rows = group.rows[group.rows["task"] == task]
    if rows.empty:
        return
    yield _row(group, run, task, None)
    categories = sorted(set(rows["category"].dropna()))
    if len(categories) > 1:
        yield from (_row(group, run, task, category) for category in categories)


def _row(group: _Group, run: str, task: str, category: str | None) -> dict[str, Any]:
    rows, units, pairs = (_select(t, task, category) for t in (group.rows, group.units, group.pairs))
    rounds = _rounds_of(group.rounds, rows)
    used = rows[rows["used"]]
    fields = acceptance(rounds, group.cluster_of_row)
    fields |= estimates.counts(rows) | estimates.speed(pairs) | estimates.cost(used, units)
    overhead = estimates.draft_overhead(pairs)
    # Requests at an engine have their own rounds and seconds: there, too, it is τ.
    gain = fields["tau"]["point"] if group.setting.batch_size == 1 else estimates.pass_gain(pairs)
    fields |= {"pass_gain": gain, "clusters": estimates.clusters(pairs)}
    fields |= estimates.physics(pairs, gain, fields["decode_speedup"], overhead)
    fields |= estimates.roofline(pairs, gain)
    fields |= closed_form(rounds, overhead)
    fields |= estimates.agreement(used) | estimates.told(used) | group.fixed
    once = np.isin(rounds.row, used.index[used["leader"]].to_numpy())
    waits = gaps(rounds if group.waits is group.rounds else _rounds_of(group.waits, rows))
    leading = rounds.of_entries(once)
    fields |= {"round_s": durations(leading), "itl_s": waits, "experts": mean(leading.experts)}
    fields["queue_growth"] = queue_growth(used) if group.setting.request_rate else None
    head = {
        "run": run,
        "method": group.method,
        "task": task,
        "category": category,
        **group.setting.fields(),
    }
    return {name: (head | fields)[name] for name in FIELDS}


def _select(table: pd.DataFrame, task: str, category: str | None) -> pd.DataFrame:
    if task == OVERALL:
        return table
    mask = table["task"] == task
    return table[mask] if category is None else table[mask & (table["category"] == category)]


def _rounds_of(rounds: RoundColumns, rows: pd.DataFrame) -> RoundColumns:
    if len(rounds.row) == 0:
        return rounds
    marks = np.zeros(int(rounds.row.max()) + 1, dtype=bool)
    index = rows.index.to_numpy()
    marks[index[index < len(marks)]] = True
    return rounds.of(marks)


def _answered(frame: Frame) -> pd.DataFrame:
    """The rows, each marked whether its batch, or another attempt at it, counts."""
    batches = frame.batches
    used = batches.loc[batches["used"], ["method", "pair"]].drop_duplicates()
    known = set(zip(used["method"], used["pair"], strict=True))
    answered = np.array(
        [key in known for key in zip(batches["method"], batches["pair"], strict=True)], dtype=bool
    )
    return frame.rows.assign(answered=answered[frame.rows["unit"].to_numpy()])


def _in_order(rows: pd.DataFrame, column: str, tie: str = "block") -> list[str]:
    """The column's values in the order in which the run first met them: by block, then `tie`, then name."""
    first = rows[[column, "block", tie]] if tie != "block" else rows[[column, "block"]]
    ordered = first.sort_values(list(dict.fromkeys(["block", tie, column])), kind="stable")
    return list(dict.fromkeys(ordered[column]))
