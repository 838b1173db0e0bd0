"""The tree of the most frequent continuations: REST's.

Source: He et al. 2023, "REST: Retrieval-Based Speculative Decoding" (arXiv 2311.08252); FasterDecoding/REST,
DraftRetriever/src/lib.rs. Every prefix of every continuation is counted, and the most frequent ones stay. Then, as
in the official code, those with the most distinct tokens go until the distinct tokens of all that stay come to no
more than the budget, which prunes long branches wherever there are several, far below the budget.

Unlike in the official code, ties have an order: of equally frequent prefixes the shorter one stays, then the smaller
by its ids; of equally varied ones the rarer goes first, then the longer. So a prefix never goes before what it is a
prefix of, and a tree never has more nodes than the budget (there it may, and the draft is given up).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specbench.decoding.trie import merged


@dataclass(frozen=True)
class _Prefix:
    tokens: list[int]
    count: int

    @property
    def distinct(self) -> int:
        return len(set(self.tokens))


def frequent_tree(continuations: np.ndarray, nodes: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of at most `nodes` nodes (see `Draft`).

    Args:
        continuations: int `[M, D]`, one a row, -1 from where it has ended; rows that begin alike stand together, the
            smaller ids first.
        nodes: the budget.
    """
    kept = _within_budget(_most_frequent(continuations, nodes), nodes)
    return merged(prefix.tokens for prefix in kept)


def _most_frequent(continuations: np.ndarray, most: int) -> list[_Prefix]:
    """The `most` prefixes that most rows begin with, most frequent first, of equals the shorter one."""
    rows, depths = continuations.shape
    begins = np.zeros(rows, dtype=bool)  # whether a row's prefix differs from the one of the row before
    begins[:1] = True
    starts, lengths, counts = [], [], []
    for depth in range(depths):
        token = continuations[:, depth]
        begins[1:] |= token[1:] != token[:-1]
        start = np.flatnonzero(begins)
        count = np.diff(start, append=rows)
        real = token[start] >= 0
        starts.append(start[real])
        counts.append(count[real])
        lengths.append(np.full(len(starts[-1]), depth + 1))
    start, count, length = map(np.concatenate, (starts, counts, lengths))
    if len(count) > most:
        least = np.partition(count, -most)[-most]
        above, equal = np.flatnonzero(count > least), np.flatnonzero(count == least)
        chosen = np.concatenate([above, equal[: most - len(above)]])
        start, count, length = start[chosen], count[chosen], length[chosen]
    order = np.argsort(-count, kind="stable")
    return [_Prefix(continuations[start[i], : length[i]].tolist(), int(count[i])) for i in order]


def _within_budget(prefixes: list[_Prefix], budget: int) -> list[_Prefix]:
    """`prefixes` without the most varied ones, the rarest and longest of them first, as the budget demands."""
    total = sum(prefix.distinct for prefix in prefixes)
    kept = dict(enumerate(prefixes))
    for place in sorted(kept, key=lambda place: (-prefixes[place].distinct, -place)):
        if total <= budget:
            break
        total -= kept.pop(place).distinct
    return list(kept.values())
