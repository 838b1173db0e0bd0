"""What a drafter chose its nodes by, overheard from its network: it tells a tie from a mistake.

Two tokens whose scores differ by less than float noise have no order of their own: which of them another machine
ranks first is chance. Only drafters whose ranks were not all screened for such ties in the golden folders are
listened to: Medusa (screened: the first four ranks) and Hydra (none).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

TIE = 2e-5  # below what screened ranks are apart, above what the same logits differ by between two programs

Rows = Callable[[Any, Sequence[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class Scores:
    """Where a method's scores come from.

    owner: attribute of the drafter whose `logits` are overheard.
    rows: of the drafted tree and what `logits` returned, the scores `[B, nodes, V]` each node was chosen among.
    follow: whether a node's scores depend on the drafted tokens above it.
    """

    owner: str
    rows: Rows
    follow: bool


def _by_head(tree: Any, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    (logits,) = outputs
    return logits[:, torch.tensor(tree.depths) - 1]


def _by_level(tree: Any, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    levels = tree.levels(outputs[0].device)
    return torch.cat([out[:, level.parent] for out, level in zip(outputs, levels, strict=True)], 1)


SCORES = {"medusa": Scores("heads", _by_head, False), "hydra": Scores("net", _by_level, True)}


@contextmanager
def overheard(owner: Any, function: str) -> Iterator[list[torch.Tensor]]:
    """A list that fills with what `owner.function` returns. Owners may be frozen dataclasses."""
    outputs: list[torch.Tensor] = []
    before, plain = vars(owner).get(function), getattr(owner, function)

    def spy(*args: Any, **kwargs: Any) -> Any:
        outputs.append(plain(*args, **kwargs))
        return outputs[-1]

    object.__setattr__(owner, function, spy)
    try:
        yield outputs
    finally:
        if before is None:
            object.__delattr__(owner, function)
        else:  # overheard by somebody else as well
            object.__setattr__(owner, function, before)


@dataclass(frozen=True)
class NodeScores:
    """The scores `[nodes, V]` of one row's draft (see `Scores.follow`)."""

    rows: torch.Tensor
    follow: bool

    def explain(self, ours: Sequence[int], golden: Sequence[int], parents: Sequence[int]) -> bool:
        """Whether ties are all that two drafts of one shape differ by.

        Below a node that differs, scores that follow the text say nothing of the golden draft's.
        """
        if len(ours) != len(golden):
            return False
        apart: list[bool] = []
        for node, (mine, theirs, parent) in enumerate(zip(ours, golden, parents, strict=True)):
            lost = self.follow and parent >= 0 and apart[parent]
            if not lost and mine != theirs and not self._tied(node, mine, theirs):
                return False
            apart.append(lost or mine != theirs)
        return any(apart)

    def _tied(self, node: int, one: int, other: int) -> bool:
        return bool((self.rows[node, one] - self.rows[node, other]).abs() < TIE)
