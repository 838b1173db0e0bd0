"""`compare`: what changed between two runs, each row with an interval and a verdict (design §6).

The change of a metric is new / base. Where both runs measured the same prompt (task, question, turn, repeat,
batch and number of prompt tokens) it comes from those prompts alone, paired: all columns of a question are
resampled together, a speedup's ratio being a ratio of eight sums. Elsewhere the two runs are independent
samples, and the interval of their ratio comes from each one's own by the method of variance estimates recovery
(MOVER; Donner and Zou, "Closed-form confidence intervals for functions of the normal mean and standard
deviation", Statistical Methods in Medical Research 21, 2012), on the logarithm.

Intervals are over questions. What changes between two starts of a machine or an engine is not in them: the
margin of a verdict must allow for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from specbench.analysis import comparable, compare_notes
from specbench.analysis.caution import warning
from specbench.analysis.extract import run_extract
from specbench.analysis.intervals import (
    MIN_CLUSTERS,
    RATIO,
    SPEEDUP,
    UNKNOWN,
    Estimate,
    ratio_of_sums,
    sums_by,
)
from specbench.analysis.matching import BASE, NEW, SIDES, Matching, Place, at
from specbench.analysis.run_names import run_names
from specbench.analysis.setting import in_words
from specbench.analysis.summary import BASELINE, OVERALL

if TYPE_CHECKING:
    from specbench.analysis.summary import RunData

SCHEMA = 1
AGAIN = "vanilla-again"  # a check of the machine, not a method
REGRESSED, AMBIGUOUS, NO_CHANGE, IMPROVED = "regressed", "ambiguous", "no change", "improved"
VERDICTS = (REGRESSED, AMBIGUOUS, NO_CHANGE, IMPROVED)
MOVED = 0.05  # of vanilla's own speed, from here on worth saying


@dataclass(frozen=True)
class Metric:
    """What can be compared.

    Args:
        columns: of a batch, whose sums it is made of; `_v` behind are vanilla's of the same prompts.
        signs: of the columns, as in `intervals.ratio_of_sums`.
        limit: the smallest new / base that is no regression, on one machine.
        elsewhere: the same on another machine; None: absolute, not compared there.
        smaller: smaller is better, and the limit is an upper one.
        of_vanilla: whether vanilla's own row says anything.
    """

    name: str
    unit: str
    columns: tuple[str, ...]
    signs: tuple[float, ...]
    limit: float
    elsewhere: float | None
    smaller: bool = False
    of_vanilla: bool = False


METRICS = {
    metric.name: metric
    for metric in (
        Metric("speedup", "x", ("cost_s_v", "tokens_v", "cost_s", "tokens"), SPEEDUP, 0.95, 0.80),
        Metric("tau", "tokens/round", ("emitted", "rounds"), RATIO, 0.98, 0.98),
        Metric("tokens_per_s", "tokens/s", ("tokens", "batch_s"), RATIO, 0.90, None, of_vanilla=True),
        Metric("memory", "bytes", (), (), 1.05, None, smaller=True, of_vanilla=True),
    )
}
DEFAULT = ("speedup", "tau")


def limit_of(metric: Metric, same_machine: bool) -> float:
    """The metric's own limit of new / base."""
    return metric.limit if same_machine or metric.elsewhere is None else metric.elsewhere


def verdict(change: Estimate, limit: float, smaller: bool = False) -> str:
    """What the interval of new / base says against `limit`.

    With F = `limit` (1/F for a metric whose `smaller` values are better, which is turned round first):
    regressed, the whole interval is below F; improved, it is above 1/F; no change, it lies within [F, 1/F];
    ambiguous, it reaches over an edge, so that more questions are needed, or there is no interval.
    """
    low, high = change["low"], change["high"]
    if low is None or high is None:
        return AMBIGUOUS
    if smaller:
        low, high, limit = 1 / high, 1 / low, 1 / limit
    if high < limit:
        return REGRESSED
    if low > 1 / limit:
        return IMPROVED
    return NO_CHANGE if low >= limit and high <= 1 / limit else AMBIGUOUS


def compare(
    base: RunData,
    new: RunData,
    metrics: Sequence[str] = DEFAULT,
    limits: Mapping[str, float] | None = None,
    strict: bool = False,
) -> dict[str, Any]:
    """The comparison object: plain JSON values, unknown is None.

    `rows[]` has one entry a (metric, method, setting, task) and task `overall`: {metric, unit, method,
    batch_size, concurrency, request_rate, task, base {low, point, high}, new {…}, change {…} (new / base), limit,
    smaller_is_better, paired, questions {base, new}, unmatched {base, new}, verdict, reason}; paired rows hold
    the matching prompts alone, and `overall` the tasks that both runs have. `missing[]` are the methods (at a
    setting) that cannot be compared, with the reason; `changes[]` what else differs between the
    runs; `warnings[]` as in a summary.

    Args:
        limits: by metric, the smallest new / base that is no regression (for memory the largest).
        strict: a method that NEW did not try is a regression, as one is whose every trial fails there.

    Raises:
        SpecbenchError: the runs may not be compared (`comparable.check`).
    """
    wanted = [METRICS[name] for name in dict.fromkeys(metrics)]
    comparable.check(base.manifest, new.manifest, [m.name for m in wanted if m.elsewhere is None])
    same = comparable.same_machine(base.manifest, new.manifest)
    known = {m.name: (limits or {}).get(m.name) or limit_of(m, same) for m in wanted}
    others = comparable.other_prompts(base.manifest, new.manifest)
    table = Matching(base.trials, new.trials, others)
    name_of_base, name = run_names([base, new])
    rows = [row for m in wanted for row in _rows(table, m, known[m.name])]
    lost = dict.fromkeys(compare_notes.lost(table), "every trial failed in NEW")
    if strict:
        untried = (place for place in compare_notes.untried(table) if place.method != AGAIN)
        lost |= dict.fromkeys(untried, compare_notes.UNTRIED)
    rows += [_lost_row(place, m, known[m.name], reason) for place, reason in lost.items() for m in wanted]
    sides = {BASE: _side(base, name_of_base), NEW: _side(new, name)}
    return {
        "schema": SCHEMA,
        **sides,
        "same_machine": same,
        "limits": known,
        "rows": rows,
        "missing": compare_notes.missing(
            table, lost, {side: extract["engine"]["name"] for side, extract in sides.items()}
        ),
        "changes": comparable.changes(base.manifest, new.manifest),
        "warnings": [
            *comparable.cautions(base.manifest, new.manifest, name),
            *(_moved(table, name) if same else ()),
            *compare_notes.outputs(table, name),
            *compare_notes.failures(table, name),
        ],
    }


def _rows(table: Matching, metric: Metric, limit: float) -> Iterator[dict[str, Any]]:
    for place in table.shared:
        if place.method in (BASELINE, AGAIN) and not (metric.of_vanilla and place.method == BASELINE):
            continue
        if not metric.columns:
            yield from _memory_row(table, metric, place, limit)
            continue
        base, new = (_known(table.batches(side, place), metric) for side in SIDES)
        tasks = [task for task in dict.fromkeys(base["task"]) if task in set(new["task"])]
        for task in [*tasks, OVERALL]:
            chosen = tasks if task == OVERALL else [task]
            values = _values(metric, *(side[side["task"].isin(chosen)] for side in (base, new)))
            if values is not None:
                yield _row(metric, place, str(task), limit, values)


def _known(batches: pd.DataFrame, metric: Metric) -> pd.DataFrame:
    return batches[np.isfinite(batches[list(metric.columns)].to_numpy(dtype=np.float64)).all(axis=1)]


@dataclass(frozen=True)
class _Values:
    base: Estimate
    new: Estimate
    change: Estimate
    paired: bool | None = None  # None: no prompts are in it
    questions: tuple[int, int] = (0, 0)
    unmatched: tuple[int, int] = (0, 0)


def _values(metric: Metric, base: pd.DataFrame, new: pd.DataFrame) -> _Values | None:
    """Paired over the prompts that match, if they are enough for an interval, or the runs have no more."""
    matched = base.merge(new, on="pair", suffixes=("", "_n"))
    count = matched["cluster"].nunique()
    totals = base["cluster"].nunique(), new["cluster"].nunique()
    columns = list(metric.columns)
    paired = count >= MIN_CLUSTERS or (count > 0 and min(totals) < MIN_CLUSTERS)
    if paired:
        renamed = [f"{column}_n" for column in columns]
        sums = sums_by(matched["cluster"].to_numpy(), matched[columns + renamed].to_numpy(dtype=np.float64))
        first, second = sums[:, : len(columns)], sums[:, len(columns) :]
        change = ratio_of_sums(sums, tuple(-sign for sign in metric.signs) + metric.signs)
        questions, unmatched = (count, count), (totals[0] - count, totals[1] - count)
    else:
        first, second = (
            sums_by(side["cluster"].to_numpy(), side[columns].to_numpy(dtype=np.float64))
            for side in (base, new)
        )
        questions, unmatched = totals, (0, 0)
    before, after = ratio_of_sums(first, metric.signs), ratio_of_sums(second, metric.signs)
    if before["point"] is None or after["point"] is None:
        return None
    if not paired:
        change = independent(before, after)
    return _Values(before, after, change, paired, questions, unmatched)


def independent(base: Estimate, new: Estimate) -> Estimate:
    """{low, point, high} of new / base for two independent samples, by MOVER on the logarithm."""
    points = base["point"], new["point"]
    if points[0] is None or points[1] is None:
        return dict(UNKNOWN)
    point = points[1] / points[0]
    edges = [estimate[edge] for estimate in (base, new) for edge in ("low", "high")]
    if any(edge is None or edge <= 0 for edge in edges):
        return {"low": None, "point": point, "high": None}
    b_low, b_high, n_low, n_high = (math.log(edge) for edge in edges if edge is not None)
    b, n = math.log(points[0]), math.log(points[1])
    low = n - b - math.hypot(n - n_low, b_high - b)
    high = n - b + math.hypot(n_high - n, b - b_low)
    return {"low": math.exp(low), "point": point, "high": math.exp(high)}


def _row(metric: Metric, place: Place, task: str, limit: float, values: _Values) -> dict[str, Any]:
    found = verdict(values.change, limit, metric.smaller)
    return _head(metric, place, task, limit) | {
        "base": values.base,
        "new": values.new,
        "change": values.change,
        "paired": values.paired,
        "questions": dict(zip(SIDES, values.questions, strict=True)),
        "unmatched": dict(zip(SIDES, values.unmatched, strict=True)),
        "verdict": found,
        "reason": _reason(found, values.change, limit),
    }


def _head(metric: Metric, place: Place, task: str, limit: float) -> dict[str, Any]:
    return {
        "metric": metric.name,
        "unit": metric.unit,
        "method": place.method,
        **place.setting.fields(),
        "task": task,
        "limit": limit,
        "smaller_is_better": metric.smaller,
    }


def _reason(found: str, change: Estimate, limit: float) -> str | None:
    """Why a verdict is ambiguous."""
    if found != AMBIGUOUS:
        return None
    if change["low"] is None:
        return "too few questions for an interval"
    if change["low"] >= limit:
        return "no regression; whether it is a gain is not clear"
    return f"whether it is below {limit:g} is not clear: measure more questions"


def _memory_row(table: Matching, metric: Metric, place: Place, limit: float) -> Iterator[dict[str, Any]]:
    """Peak bytes: read once a method, so one number without an interval, taken as exact."""
    base, new = (float(at(table.rows, side, place)["peak_bytes"].max()) for side in SIDES)
    if base > 0 and new > 0:
        yield _row(metric, place, OVERALL, limit, _Values(_exact(base), _exact(new), _exact(new / base)))


def _exact(value: float) -> Estimate:
    return {"low": value, "point": value, "high": value}


def _lost_row(place: Place, metric: Metric, limit: float, reason: str) -> dict[str, Any]:
    """A method that BASE measured and NEW could not, or did not: a regression of every metric."""
    row = _row(metric, place, OVERALL, limit, _Values(dict(UNKNOWN), dict(UNKNOWN), dict(UNKNOWN)))
    return row | {"verdict": REGRESSED, "reason": reason}


def _moved(table: Matching, name: str) -> Iterator[dict[str, Any]]:
    """Vanilla's own speed, on one machine: a speedup falls when vanilla gets faster, too."""
    metric = METRICS["tokens_per_s"]
    for place in table.shared:
        if place.method != BASELINE:
            continue
        values = _values(metric, *(_known(table.batches(side, place), metric) for side in SIDES))
        low, point, high = (values.change[k] if values else None for k in ("low", "point", "high"))
        if low is None or high is None or point is None or abs(point - 1) < MOVED or low <= 1 <= high:
            continue
        load = ", ".join(in_words(place.setting.fields()))
        message = f"vanilla itself runs at {point:.2f}x [{low:.2f}, {high:.2f}] of its speed in BASE"
        cure = "every speedup moves the other way by as much: see --metric tokens_per_s"
        yield warning("vanilla-moved", f"{load}: {message}" if load else message, cure, name)


def _side(run: RunData, name: str) -> dict[str, Any]:
    path = getattr(run, "path", None)
    return run_extract(run.manifest, name) | {"path": None if path is None else str(path)}
