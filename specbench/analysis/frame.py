"""Trials as columns: one row a trial, one row a batch, one entry a round.

A batch is what was timed once; its seconds and spans repeat on each of its rows and are counted once here. A
batch with a failed or excluded row is not used. Of requests that were served beside each other, each at its own time,
a failed one leaves the others' times what they are: they are used, but the batch's own seconds, and with them its
throughput, are unknown. `pair` numbers what a batch measured (task, questions, turn,
repeat, setting), so that two methods' batches with one number are the two halves of a comparison; `cluster`
numbers what the bootstrap draws (the question, or the questions that shared batches).

`cost_s` is what a speedup counts of a batch: its seconds, once. In an open loop (a request rate) these are set by
the moments of sending, whatever the server does; there it is the sum of the requests' own, sent to answered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from specbench.analysis import steadiness
from specbench.analysis.setting import AXES
from specbench.thresholds import THROTTLED

if TYPE_CHECKING:
    from specbench.store import Trial

SPANS = ("draft", "verify", "accept", "other")
MEMORY = ("weights_bytes", "draft_weights_bytes", "kv_bytes", "graph_bytes", "peak_bytes")
AGREEMENT = ("same", "first_difference", "logit_gap", "same_text")
COUNTS = ("source", "scope")  # of an engine's own account


@dataclass(frozen=True)
class RoundColumns:
    """All rounds of all trials. `row` is the trial's position in Frame.rows; -1 and NaN mean unknown.

    An entry stands for `count` rounds, `with_draft` of which had a draft: engines need not tell rounds apart.
    """

    row: NDArray[np.int32]
    drafted: NDArray[np.int32]
    depth: NDArray[np.int32]
    accepted: NDArray[np.int32]
    emitted: NDArray[np.int32]
    count: NDArray[np.int32]
    with_draft: NDArray[np.int32]
    round_s: NDArray[np.float64]
    experts: NDArray[np.float64]
    probes: NDArray[np.int32]  # 0 where none are told of

    def of(self, rows: NDArray[np.bool_]) -> RoundColumns:
        """The rounds of the trials marked in `rows`."""
        return self.of_entries(rows[self.row])

    def of_entries(self, marks: NDArray[np.bool_]) -> RoundColumns:
        """The entries marked."""
        keep = np.flatnonzero(marks)
        return RoundColumns(**{name: column.take(keep) for name, column in vars(self).items()})


@dataclass(frozen=True)
class Frame:
    rows: pd.DataFrame
    batches: pd.DataFrame
    rounds: RoundColumns
    waits: RoundColumns  # `emitted` tokens came together after `round_s`: the rounds, or what a client saw


def build(trials: Sequence[Trial]) -> Frame:
    """Columns of the trials, in an order that does not depend on theirs."""
    ordered = sorted(trials, key=_position)
    rounds = _round_columns(ordered)
    rows = _rows(
        ordered, np.bincount(rounds.row, weights=rounds.count, minlength=len(ordered)).astype(np.int64)
    )
    for name in ("drafted", "accepted", "emitted"):
        rows[name] = np.bincount(rounds.row, weights=getattr(rounds, name), minlength=len(rows))
    decoded = np.where(rows["rounds"] > 0, rows["emitted"], np.maximum(rows["output_tokens"] - 1, 0))
    opening = _floats(_opening(trial) for trial in ordered)
    after = np.maximum(rows["output_tokens"] - opening, 0)  # what `decode_s` is the time of
    rows["decode_tokens"] = np.where(np.isnan(opening), decoded, after).astype(np.int64)
    rows["asked"] = rows.groupby(["task", "question"], sort=False, observed=True).ngroup()
    rows["unit"] = rows.groupby(_UNIT, sort=False, observed=True).ngroup()
    batches = _batches(rows)
    unit = rows["unit"].to_numpy()
    rows["pair"] = batches["pair"].to_numpy()[unit]
    rows["used"] = batches["used"].to_numpy()[unit] & ~rows["failed"].to_numpy()
    longest = rows.groupby("unit")["rounds"].idxmax().to_numpy(dtype=np.int64)
    rows["leader"] = np.isin(np.arange(len(rows)), longest) | rows["served"]
    rows["pace"] = steadiness.pace(rows)
    rows["outlier"] = steadiness.outliers(rows)
    # A table that grew by columns keeps each apart; a copy lays those of a type together, to be picked at once.
    rows, batches = rows.drop(columns=["batch", "own"]).copy(), batches.copy()
    return Frame(rows, batches, rounds, _waits(ordered, rounds))


_FIRST = ["method", "task", "turn", *AXES, "repeat", "attempt", "block"]
_UNIT = [*_FIRST, "batch", "own"]
_NAMES = ("task", "category", "method", "state", "excluded")
_TEXTS = (*_NAMES, "question", "batch")
_NUMBERS = ("turn", "batch_size", "repeat", "block", "attempt", "order", "prompt_tokens", "output_tokens")
_ONCE = ["batch_s", "decode_s", *SPANS, "joules"]


def _position(trial: Trial) -> tuple[Any, ...]:
    t = trial
    where = (
        t.task,
        t.question,
        t.turn,
        t.repeat,
        t.method,
        t.batch_size,
        t.concurrency or 0,
        t.request_rate or 0.0,
    )
    return (*where, t.block, t.batch, t.attempt, t.order)


def _opening(trial: Trial) -> int | None:
    """Tokens of a stream's first event; None where there is none or it does not tell."""
    return trial.arrivals["tokens"][0] if trial.arrivals and trial.arrivals["tokens"] else None


def _rows(trials: Sequence[Trial], rounds: NDArray[np.int64]) -> pd.DataFrame:
    agreements = [t.agreement or {} for t in trials]
    memories = [t.memory or {} for t in trials]
    columns: dict[str, Any] = {name: [getattr(t, name) for t in trials] for name in (*_TEXTS, *_NUMBERS)}
    columns |= {
        "own": [t.question if alone(t) else "" for t in trials],
        "served": [
            not alone(t) and t.batch_size == 1 for t in trials
        ],  # each at its own time, others beside it
        "concurrency": [t.concurrency or 0 for t in trials],  # 0: not asked for
        "request_rate": [t.request_rate or 0.0 for t in trials],
        "rounds": rounds,
        "batch_s": _floats(t.batch_s if t.batch_s is not None or not alone(t) else t.total_s for t in trials),
        "prefill_s": _floats(t.prefill_s for t in trials),
        "decode_s": _floats(t.decode_s for t in trials),
        "total_s": _floats(t.total_s for t in trials),
        "sent_s": _floats(t.sent_s for t in trials),
        "joules": _floats((t.nvml or {}).get("joules") for t in trials),
        "lossless": _floats(t.lossless for t in trials),
        "by_ids": [bool(t.output_ids) for t in trials],
        "failed": [t.error is not None for t in trials],
        "contended": [bool(t.contended) for t in trials],
        "throttled": [bool(THROTTLED.intersection(_reasons(t))) for t in trials],
    }
    columns |= {name: _floats(found.get(name) for found in agreements) for name in AGREEMENT}
    columns |= {name: _floats(found.get(name) for found in memories) for name in MEMORY}
    columns |= {name: [(t.acceptance or {}).get(name) for t in trials] for name in COUNTS}
    columns |= {name: _floats(_span(t, name) for t in trials) for name in SPANS}
    frame = pd.DataFrame(columns)
    for name in (*_NAMES, *COUNTS):  # compared often: as numbers, not as text
        frame[name] = pd.Categorical(frame[name], categories=sorted(set(frame[name].dropna())))
    return frame.astype(dict.fromkeys(("question", "batch", "own"), object))


def _reasons(trial: Trial) -> Sequence[str]:
    return (trial.nvml or {}).get("throttle_reasons") or ()


def alone(trial: Trial) -> bool:
    """Whether a request was its own batch."""
    return trial.batch_size * (trial.concurrency or 1) == 1 and trial.request_rate is None


def _span(trial: Trial, name: str) -> float | None:
    """Seconds of a span; draft and verify also from the rounds, other also as what the rest leave."""
    spans = trial.spans or {}
    if spans.get(name) is not None:
        return spans[name]
    known = [spans[other] for other in SPANS[:3] if spans.get(other) is not None]
    if name == "other" and len(known) == 3 and trial.decode_s is not None:
        return trial.decode_s - math.fsum(known)
    column = {"draft": trial.rounds.draft_s, "verify": trial.rounds.verify_s}.get(name)
    return math.fsum(column) if column else None


def _floats(values: Iterable[float | bool | None]) -> NDArray[np.float64]:
    array = np.array(list(values), dtype=np.float64)  # None becomes NaN
    array[~np.isfinite(array)] = math.nan
    return array


def _round_columns(trials: Sequence[Trial]) -> RoundColumns:
    counts = np.array([len(t.rounds.emitted) for t in trials], dtype=np.int64)

    total = int(counts.sum())

    def column(name: str, missing: float, dtype: type[np.generic]) -> NDArray[Any]:
        given = [getattr(t.rounds, name) for t in trials]
        if all(values is None for values in given):
            return np.full(total, missing, dtype)
        filled = (
            values if values is not None and len(values) == count else [missing] * count
            for values, count in zip(given, counts.tolist(), strict=True)
        )
        return np.fromiter(chain.from_iterable(filled), dtype, count=total)

    def whole(name: str) -> NDArray[np.int32]:
        return column(name, -1, np.int32)

    drafted, count, with_draft = whole("drafted"), whole("count"), whole("with_draft")
    told_apart = count < 0
    return RoundColumns(
        row=np.repeat(np.arange(len(trials), dtype=np.int32), counts),
        drafted=drafted,
        depth=whole("depth"),
        accepted=whole("accepted"),
        emitted=whole("emitted"),
        count=np.where(told_apart, 1, count).astype(np.int32),
        with_draft=np.where(told_apart & (drafted >= 0), drafted > 0, with_draft).astype(np.int32),
        round_s=column("round_s", math.nan, np.float64),
        experts=column("experts", math.nan, np.float64),
        probes=column("probes", 0, np.int32),
    )


def _waits(trials: Sequence[Trial], rounds: RoundColumns) -> RoundColumns:
    """What a streaming client waits for: the events of engines, elsewhere the rounds.

    Where the tokens of one of a request's events are not told, those of all are -1: the rest would tell of too few.
    """
    seen = [bool(t.arrivals and len(t.arrivals["at_s"]) > 1) for t in trials]
    if not any(seen):
        return rounds
    parts = [rounds.of(~np.array(seen))]
    for row, trial in enumerate(trials):
        if seen[row]:
            assert trial.arrivals is not None
            seconds = np.diff(np.asarray(trial.arrivals["at_s"], dtype=np.float64))
            told = trial.arrivals["tokens"][1:]
            tokens = np.array([-1] * len(told) if None in told else told, np.int32)
            unknown, one = np.full(len(tokens), -1, np.int32), np.ones(len(tokens), np.int32)
            where, waited = np.full(len(tokens), row, np.int32), np.maximum(seconds, 0)
            nowhere = np.full(len(tokens), np.nan)
            parts.append(
                RoundColumns(
                    where,
                    unknown,
                    unknown,
                    unknown,
                    tokens,
                    one,
                    unknown,
                    waited,
                    nowhere,
                    np.zeros_like(where),
                )
            )
    return RoundColumns(*map(np.concatenate, zip(*(vars(part).values() for part in parts), strict=True)))


def _batches(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a timed batch, numbered as in rows.unit."""
    grouped = rows.groupby("unit", sort=True)
    batches = grouped[_FIRST].first()
    batches[_ONCE] = grouped[_ONCE].max()  # repeated on the batch's rows; decode lasts as its longest row's
    served = grouped["served"].all()  # their requests wait at the same time, not one for all
    batches["decode_s"] = batches["decode_s"].where(~served, grouped["decode_s"].sum(min_count=1))
    batches["whole"] = ~grouped["failed"].any()
    batches.loc[~batches["whole"], ["batch_s", "joules"]] = math.nan  # they are of the failed request too
    waited = grouped["total_s"].sum().where(grouped["total_s"].count() == grouped.size())
    batches["cost_s"] = batches["batch_s"].where(batches["request_rate"] == 0, waited)
    batches["requests"] = grouped.size()
    batches["passes"] = grouped["rounds"].max()
    batches[["tokens", "decode_tokens"]] = grouped[["output_tokens", "decode_tokens"]].sum()
    batches["category"] = _shared(rows)
    batches["lost"] = rows["excluded"].notna().groupby(rows["unit"]).any()
    answered = batches["whole"] | (served & ~grouped["failed"].all())
    batches["good"] = answered & ~batches["lost"]
    batches["pair"] = _pairs(rows, batches)
    batches["cluster"] = _clusters(rows, batches)
    last = batches[batches["good"]].sort_values(["attempt", "block"], kind="stable")
    kept = last.drop_duplicates(["method", "pair"], keep="last").index
    batches["used"] = batches.index.isin(kept)
    return batches


def _shared(rows: pd.DataFrame) -> pd.Categorical:
    """The category of each batch, None where its questions differ in it."""
    codes = rows["category"].cat.codes.groupby(rows["unit"])
    low, high = codes.min().to_numpy(), codes.max().to_numpy()
    names = rows["category"].cat.categories
    return pd.Categorical.from_codes(np.where(low == high, low, -1).astype(np.int64), categories=names)


def _pairs(rows: pd.DataFrame, batches: pd.DataFrame) -> NDArray[np.int64]:
    members: list[list[str]] = [[] for _ in range(len(batches))]
    for unit, question in zip(rows["unit"], rows["question"], strict=True):  # rows are sorted by question
        members[unit].append(question)
    keys = zip(
        *(batches[name] for name in ("task", "turn", *AXES, "repeat")),
        map(tuple, members),
        strict=True,
    )
    numbers: dict[tuple[Any, ...], int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def _clusters(rows: pd.DataFrame, batches: pd.DataFrame) -> NDArray[np.int64]:
    """Connected components of questions and their batches: at batch size 1, the question itself."""
    question = rows.groupby(["asked", *AXES], sort=False).ngroup().to_numpy()
    questions = int(question.max()) + 1 if len(question) else 0
    pair = batches["pair"].to_numpy()
    nodes = questions + (int(pair.max()) + 1 if len(pair) else 0)
    edges = (np.ones(len(rows)), (question, questions + pair[rows["unit"].to_numpy()]))
    _, labels = connected_components(coo_matrix(edges, shape=(nodes, nodes)), directed=False)
    return labels[questions + pair].astype(np.int64)
