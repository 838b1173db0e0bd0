"""Trials as columns: one row a trial, one row a batch, one entry a round.

A batch is what was timed once; its seconds and spans repeat on each of its rows and are counted once here. A
batch with a failed or excluded row is not used. `pair` numbers what a batch measured (task, questions, turn,
repeat, batch size, concurrency), so that two methods' batches with one number are the two halves of a
comparison; `cluster` numbers what the bootstrap draws (the question, or the questions that shared batches).
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

if TYPE_CHECKING:
    from specbench.store import Trial

SPANS = ("draft", "verify", "accept", "other")
MEMORY = ("weights_bytes", "kv_bytes", "peak_bytes")
NEAR_TIE = 1e-3  # a top-2 logit gap up to this is a tie that rounding decides


@dataclass(frozen=True)
class RoundColumns:
    """All rounds of all trials. `row` is the trial's position in Frame.rows; -1 and NaN mean unknown."""

    row: NDArray[np.int64]
    drafted: NDArray[np.int64]
    depth: NDArray[np.int64]
    accepted: NDArray[np.int64]
    emitted: NDArray[np.int64]
    round_s: NDArray[np.float64]

    def of(self, rows: NDArray[np.bool_]) -> RoundColumns:
        """The rounds of the trials marked in `rows`."""
        keep = rows[self.row]
        return RoundColumns(**{name: column[keep] for name, column in vars(self).items()})


@dataclass(frozen=True)
class Frame:
    rows: pd.DataFrame
    batches: pd.DataFrame
    rounds: RoundColumns


def build(trials: Sequence[Trial]) -> Frame:
    """Columns of the trials, in an order that does not depend on theirs."""
    ordered = sorted(trials, key=_position)
    rounds, counts = _round_columns(ordered)
    rows = _rows(ordered, counts)
    for name in ("drafted", "accepted", "emitted"):
        rows[name] = np.bincount(rounds.row, weights=getattr(rounds, name), minlength=len(rows))
    rows["decode_tokens"] = np.where(counts > 0, rows["emitted"], np.maximum(rows["output_tokens"] - 1, 0))
    rows["asked"] = rows.groupby(["task", "question"], sort=False, observed=True).ngroup()
    rows["unit"] = rows.groupby(_UNIT, sort=False, observed=True).ngroup()
    batches = _batches(rows)
    rows["used"] = batches["used"].to_numpy()[rows["unit"].to_numpy()]
    longest = rows.groupby("unit")["rounds"].idxmax().to_numpy(dtype=np.int64)
    rows["leader"] = np.isin(np.arange(len(rows)), longest)
    return Frame(rows, batches, rounds)


_UNIT = ["method", "task", "turn", "batch_size", "concurrency", "repeat", "attempt", "block", "batch", "own"]
_FIRST = ["method", "task", "turn", "batch_size", "concurrency", "repeat", "attempt", "block"]
_ONCE = ["batch_s", "decode_s", *SPANS, "joules"]


def _position(trial: Trial) -> tuple[Any, ...]:
    t = trial
    where = (t.task, t.question, t.turn, t.repeat, t.method, t.batch_size, t.concurrency or 0)
    return (*where, t.block, t.batch, t.attempt, t.order)


def _rows(trials: Sequence[Trial], counts: NDArray[np.int64]) -> pd.DataFrame:
    same = [(t.agreement or {}).get("same") for t in trials]
    columns: dict[str, Any] = {
        name: [getattr(t, name) for t in trials]
        for name in (
            "task",
            "question",
            "category",
            "turn",
            "method",
            "batch_size",
            "repeat",
            "block",
            "batch",
        )
    }
    columns |= {
        "own": [t.question if t.batch_size * (t.concurrency or 1) == 1 else "" for t in trials],
        "concurrency": [t.concurrency or 0 for t in trials],  # 0: not asked for
        "attempt": [t.attempt for t in trials],
        "order": [t.order for t in trials],
        "state": [t.state for t in trials],
        "output_tokens": [t.output_tokens for t in trials],
        "rounds": counts,
        "batch_s": _floats(t.batch_s if t.batch_s is not None else _alone(t) for t in trials),
        "prefill_s": _floats(t.prefill_s for t in trials),
        "decode_s": _floats(t.decode_s for t in trials),
        "joules": _floats((t.nvml or {}).get("joules") for t in trials),
        "lossless": [t.lossless for t in trials],
        "failed": [t.error is not None for t in trials],
        "contended": [bool(t.contended) for t in trials],
        "excluded": [t.excluded for t in trials],
        "same": _floats(None if s is None else bool(s) for s in same),
        "first_difference": _floats((t.agreement or {}).get("first_difference") for t in trials),
        "logit_gap": _floats((t.agreement or {}).get("logit_gap") for t in trials),
    }
    columns |= {name: _floats(_span(t, name) for t in trials) for name in SPANS}
    columns |= {name: _floats((t.memory or {}).get(name) for t in trials) for name in MEMORY}
    frame = pd.DataFrame(columns)
    for name in (
        "task",
        "category",
        "method",
        "state",
        "excluded",
    ):  # compared often: as numbers, not as text
        frame[name] = pd.Categorical(frame[name], categories=sorted(set(frame[name].dropna())))
    return frame.astype(dict.fromkeys(("question", "batch", "own", "lossless"), object))


def _alone(trial: Trial) -> float | None:
    """Seconds of a request that was its own batch, where only its own were recorded."""
    return trial.total_s if trial.batch_size * (trial.concurrency or 1) == 1 else None


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
    array = np.array([math.nan if value is None else value for value in values], dtype=np.float64)
    array[~np.isfinite(array)] = math.nan
    return array


def _round_columns(trials: Sequence[Trial]) -> tuple[RoundColumns, NDArray[np.int64]]:
    counts = np.array([len(t.rounds.emitted) for t in trials], dtype=np.int64)

    def flat(name: str, dtype: Any, missing: float) -> NDArray[Any]:
        columns = (getattr(t.rounds, name) for t in trials)
        filled = (
            column if column is not None and len(column) == count else [missing] * int(count)
            for column, count in zip(columns, counts, strict=True)
        )
        return np.fromiter(chain.from_iterable(filled), dtype, count=int(counts.sum()))

    whole = {name: flat(name, np.int64, -1) for name in ("drafted", "depth", "accepted", "emitted")}
    row = np.repeat(np.arange(len(trials)), counts)
    return RoundColumns(row=row, **whole, round_s=flat("round_s", np.float64, math.nan)), counts


def _batches(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a timed batch, numbered as in rows.unit."""
    grouped = rows.groupby("unit", sort=True)
    batches = grouped[_FIRST].first()
    batches[_ONCE] = grouped[_ONCE].max()  # repeated on the batch's rows; decode lasts as its longest row's
    batches["passes"] = grouped["rounds"].max()
    batches[["tokens", "decode_tokens"]] = grouped[["output_tokens", "decode_tokens"]].sum()
    batches["category"] = _shared(rows)
    bad = rows["failed"] | rows["excluded"].notna()
    batches["good"] = ~bad.groupby(rows["unit"]).any()
    batches["lost"] = rows["excluded"].notna().groupby(rows["unit"]).any()
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
        *(batches[name] for name in ("task", "turn", "batch_size", "concurrency", "repeat")),
        map(tuple, members),
        strict=True,
    )
    numbers: dict[tuple[Any, ...], int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def _clusters(rows: pd.DataFrame, batches: pd.DataFrame) -> NDArray[np.int64]:
    """Connected components of questions and their batches: at batch size 1, the question itself."""
    question = rows.groupby(["asked", "batch_size", "concurrency"], sort=False).ngroup().to_numpy()
    questions = int(question.max()) + 1 if len(question) else 0
    pair = batches["pair"].to_numpy()
    nodes = questions + (int(pair.max()) + 1 if len(pair) else 0)
    edges = (np.ones(len(rows)), (question, questions + pair[rows["unit"].to_numpy()]))
    _, labels = connected_components(coo_matrix(edges, shape=(nodes, nodes)), directed=False)
    return labels[questions + pair].astype(np.int64)
