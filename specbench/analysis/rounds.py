"""What the rounds say: tokens per round, acceptance overall, by position, and as a histogram (design §2)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbench.analysis.frame import RoundColumns
from specbench.analysis.intervals import RATIO, UNKNOWN, Estimate, ratio_of_sums, sums_by

PERCENTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}


def acceptance(rounds: RoundColumns, cluster_of_row: NDArray[np.int64]) -> dict[str, Any]:
    """The acceptance fields of a summary row.

    Args:
        rounds: the rounds to count, every row of a batch with its own.
        cluster_of_row: for each trial, the question (or batch of questions) that the interval resamples.

    `tau` is emitted a round, bonus included; `alpha` accepted a round, bonus excluded; `acceptance_rate`
    accepted / drafted. Position i+1's rate is `acceptance_by_position[i]`: rounds that accepted at least i+1
    tokens over rounds whose draft was at least i+1 deep; `conditional_by_position[i]` counts only rounds that
    accepted at least i. `accepted_histogram[a]` is the number of rounds that accepted exactly a.
    """
    fields: dict[str, Any] = {
        "tau": dict(UNKNOWN),
        "tau_drafted": None,
        "alpha": None,
        "acceptance_rate": None,
        "acceptance_by_position": None,
        "conditional_by_position": None,
        "accepted_histogram": None,
    }
    if len(rounds.row) == 0:
        return fields
    emitted = np.stack([rounds.emitted, rounds.count], axis=1).astype(np.float64)
    fields["tau"] = _at_least_one(ratio_of_sums(sums_by(cluster_of_row[rounds.row], emitted), RATIO))
    if (rounds.accepted < 0).any():  # an engine that tells only tokens
        return fields
    fields["alpha"] = float(rounds.accepted.sum() / rounds.count.sum())
    if ((rounds.count == 1) | (rounds.accepted == 0)).all():
        fields["accepted_histogram"] = _histogram(rounds)
    if (rounds.with_draft >= 0).all() and rounds.with_draft.any():
        without = rounds.count - rounds.with_draft  # a round without a draft emits one token
        fields["tau_drafted"] = float((rounds.emitted - without).sum() / rounds.with_draft.sum())
    if (rounds.drafted >= 0).all() and rounds.drafted.any():
        fields["acceptance_rate"] = float(rounds.accepted.sum() / rounds.drafted.sum())
    if (rounds.depth >= 0).all():
        fields |= by_position(rounds.accepted, rounds.depth)
    return fields


def _at_least_one(tau: Estimate) -> Estimate:
    """Every round emits a token, so no population has a τ below 1: nothing is lost by ending the interval there."""
    low, point = tau["low"], tau["point"]
    return tau if low is None or point is None else tau | {"low": max(low, min(1.0, point))}


def _histogram(rounds: RoundColumns) -> list[int]:
    return np.bincount(rounds.accepted, weights=rounds.count).astype(int).tolist()


def by_position(accepted: NDArray[np.integer], depth: NDArray[np.integer]) -> dict[str, list[float | None]]:
    """Acceptance by position, unconditional and conditional; None where no round could be counted."""
    deepest = int(depth.max(initial=0))
    unconditional: list[float | None] = []
    conditional: list[float | None] = []
    for position in range(1, deepest + 1):
        reached = depth >= position
        hits = int(np.sum(reached & (accepted >= position)))
        candidates = int(np.sum(reached & (accepted >= position - 1)))
        unconditional.append(hits / int(reached.sum()))
        conditional.append(hits / candidates if candidates else None)
    return {"acceptance_by_position": unconditional, "conditional_by_position": conditional}


def gaps(rounds: RoundColumns) -> dict[str, float | None]:
    """{p50, p95, p99} of the seconds before each decoded token, as a streaming client sees them.

    A round's tokens arrive together: its first one waits for the whole round, the others not at all. So with
    two tokens a round the median gap is 0, and the tail is what tells how evenly text appears. Unknown is what an
    entry of several rounds hides, and of how many tokens an event was where that is not told.
    """
    timed = np.isfinite(rounds.round_s) & (rounds.emitted > 0) & (rounds.count == 1)
    return percentiles(rounds.round_s[timed], zeros=int((rounds.emitted[timed] - 1).sum()))


def durations(rounds: RoundColumns) -> dict[str, float | None]:
    """{p50, p95, p99} of the seconds of a round; unknown where an entry is the mean of several."""
    known = rounds.round_s if (rounds.count == 1).all() else np.zeros(0)
    return percentiles(known)


def mean(values: NDArray[np.float64]) -> float | None:
    """Of the known ones; None where there are none."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def percentiles(values: NDArray[np.float64], zeros: int = 0) -> dict[str, float | None]:
    """{p50, p95, p99} of the known `values` (not negative) and of as many `zeros` beside them."""
    known = np.sort(values[np.isfinite(values)])
    if len(known) + zeros == 0:
        return dict.fromkeys(PERCENTILES)
    places = np.array(list(PERCENTILES.values())) * (len(known) + zeros - 1)
    found = np.interp(places - zeros, np.arange(-1, len(known)), np.concatenate([[0.0], known]))
    return dict(zip(PERCENTILES, found.tolist(), strict=True))
