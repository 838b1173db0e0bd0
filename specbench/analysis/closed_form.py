"""The closed form of speculative decoding with chains (Leviathan, Kalman and Matias 2023, theorem 3.8).

With a the chance that a drafted token is accepted, k the tokens drafted a round and c the cost of drafting one
as a share of the target's pass: speedup = (1 - a^(k+1)) / ((1 - a)(c·k + 1)). It takes all drafts to be k deep,
acceptance to be independent, drafting to cost c a token, and verifying to cost one pass however long the draft.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.optimize import brentq

from specbench.analysis.frame import RoundColumns

LONGEST = 16  # drafts looked at for the best length


def closed_form(rounds: RoundColumns, alpha: float | None, overhead: float | None) -> dict[str, Any]:
    """`closed_form_speedup` at the usual depth of the drafts, and `best_k`, the depth it calls best.

    Args:
        rounds: of the trials that count.
        alpha: mean accepted a round; a is chosen so that drafts of the usual depth accept that many.
        overhead: draft seconds a round over vanilla's seconds a round.

    Unknown for trees, for methods that draft nothing, and where depth or costs are unknown.
    """
    fields: dict[str, Any] = {"closed_form_speedup": None, "best_k": None}
    if alpha is None or overhead is None or not _chains(rounds):
        return fields
    depth = usual_depth(rounds)
    cost = overhead / float(rounds.depth.mean())
    chance = chance_of(alpha, depth)
    lengths = np.arange(1, LONGEST + 1)
    best = lengths[np.argmax([speedup(chance, int(k), cost) for k in lengths])]
    return {"closed_form_speedup": speedup(chance, depth, cost), "best_k": int(best)}


def speedup(chance: float, depth: int, cost: float) -> float:
    """The closed form."""
    return expected_tokens(chance, depth) / (cost * depth + 1)


def expected_tokens(chance: float, depth: int) -> float:
    """(1 - a^(k+1)) / (1 - a), as the sum it is of: exact at a = 1 too."""
    return float(np.sum(chance ** np.arange(depth + 1)))


def chance_of(alpha: float, depth: int) -> float:
    """The chance a of one token at which drafts of `depth` tokens accept `alpha` of them on average."""
    accepted = min(max(alpha, 0.0), float(depth))
    return float(brentq(lambda chance: expected_tokens(chance, depth) - 1 - accepted, 0, 1))


def usual_depth(rounds: RoundColumns) -> int:
    """The commonest depth of the rounds that had a draft."""
    return int(np.argmax(np.bincount(rounds.depth[rounds.depth > 0])))


def _chains(rounds: RoundColumns) -> bool:
    """Whether there were drafts, and each was as deep as it had tokens."""
    depth = rounds.depth
    return bool(np.any(depth > 0) and np.all(depth >= 0) and np.array_equal(depth, rounds.drafted))
