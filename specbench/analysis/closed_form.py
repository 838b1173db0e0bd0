"""The closed form of speculative decoding with chains (Leviathan, Kalman and Matias 2023, theorem 3.8).

With a the chance that a drafted token is accepted, k the tokens drafted a round, c the cost of drafting one as a
share of the target's pass, and p the share of the rounds that have a draft (prompt-lookup often finds none):
speedup = (1 + p·Σᵢ₌₁ᵏ aⁱ) / (1 + p·c·k). At p = 1 that is Leviathan's (1 - a^(k+1)) / ((1 - a)(c·k + 1)). It takes
all drafts to be k deep, acceptance to be independent, drafting to cost c a token, and verifying to cost one pass
however long the draft.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from specbench.analysis.frame import RoundColumns

LONGEST = 16  # drafts looked at for the best length


def closed_form(rounds: RoundColumns, overhead: float | None) -> dict[str, Any]:
    """`closed_form_speedup` at the usual depth of the drafts, and `best_k`, the depth it calls best.

    Args:
        rounds: of the trials that count; a is chosen so that drafts as deep as theirs accept as many tokens.
        overhead: draft seconds a round, of all rounds, over vanilla's seconds a round.

    Unknown for trees, for methods that draft nothing, and where depth, acceptance or costs are unknown.
    """
    fields: dict[str, Any] = {"closed_form_speedup": None, "best_k": None}
    if overhead is None or not _chains(rounds):
        return fields
    with_draft = rounds.depth > 0
    share = float(with_draft.mean())
    cost = overhead / float(rounds.depth.mean())  # both over all rounds: of one drafted position
    chance = chance_of(float(rounds.accepted[with_draft].mean()), rounds.depth[with_draft])
    lengths = np.arange(1, LONGEST + 1)
    best = lengths[np.argmax([speedup(chance, int(k), cost, share) for k in lengths])]
    return {
        "closed_form_speedup": speedup(chance, usual_depth(rounds), cost, share),
        "best_k": int(best),
    }


def speedup(chance: float, depth: int, cost: float, share: float = 1.0) -> float:
    """The closed form; `share` of the rounds have a draft."""
    return (1 + share * (expected_tokens(chance, depth) - 1)) / (1 + share * cost * depth)


def expected_tokens(chance: float, depth: int) -> float:
    """Tokens of a round with a draft: (1 - a^(k+1)) / (1 - a), as the sum it is of: exact at a = 1 too."""
    return float(np.sum(chance ** np.arange(depth + 1)))


def chance_of(accepted: float, depths: NDArray[np.integer]) -> float:
    """The chance a of one token at which drafts of these `depths` accept `accepted` tokens on average."""
    positions = np.arange(1, int(depths.max()) + 1)
    reached = np.cumsum(np.bincount(depths)[:0:-1])[::-1] / len(depths)  # share of the drafts that deep
    wanted = min(max(accepted, 0.0), float(reached.sum()))
    return float(brentq(lambda chance: np.sum(reached * chance**positions) - wanted, 0, 1))


def usual_depth(rounds: RoundColumns) -> int:
    """The commonest depth of the rounds that had a draft."""
    return int(np.argmax(np.bincount(rounds.depth[rounds.depth > 0])))


def _chains(rounds: RoundColumns) -> bool:
    """Whether there were drafts, each as deep as it had tokens, and what was accepted of them is known."""
    depth = rounds.depth
    known = np.any(depth > 0) and np.all(depth >= 0) and np.all(rounds.accepted >= 0)
    return bool(known and np.array_equal(depth, rounds.drafted))
