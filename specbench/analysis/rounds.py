"""What the rounds say: tokens per round, acceptance overall, by position, and as a histogram (design §2)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbench.analysis.frame import RoundColumns
from specbench.analysis.intervals import RATIO, UNKNOWN, ratio_of_sums, sums_by


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
    emitted = np.stack([rounds.emitted, np.ones_like(rounds.emitted)], axis=1)
    fields["tau"] = ratio_of_sums(sums_by(cluster_of_row[rounds.row], emitted), RATIO)
    if (rounds.drafted < 0).any() or (rounds.accepted < 0).any():  # an engine that tells only tokens
        return fields
    with_draft = rounds.drafted > 0
    fields["alpha"] = float(rounds.accepted.mean())
    fields["accepted_histogram"] = np.bincount(rounds.accepted).tolist()
    if with_draft.any():
        fields["tau_drafted"] = float(rounds.emitted[with_draft].mean())
        fields["acceptance_rate"] = float(rounds.accepted.sum() / rounds.drafted.sum())
    if (rounds.depth >= 0).all():
        fields |= by_position(rounds.accepted, rounds.depth)
    return fields


def by_position(accepted: NDArray[np.int64], depth: NDArray[np.int64]) -> dict[str, list[float | None]]:
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


def round_percentiles(seconds: NDArray[np.float64]) -> dict[str, float | None]:
    """{p50, p95, p99} of the rounds' seconds; each round of a batch once."""
    known = seconds[np.isfinite(seconds)]
    if len(known) == 0:
        return {"p50": None, "p95": None, "p99": None}
    p50, p95, p99 = np.percentile(known, [50, 95, 99])
    return {"p50": float(p50), "p95": float(p95), "p99": float(p99)}
