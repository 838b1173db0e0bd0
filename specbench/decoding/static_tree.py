"""Token trees of a fixed shape: which ranks of a drafter's guesses are proposed, whatever the tokens turn out to be.

A node is named by its path of ranks: (0, 2) is the third guess after the first guess. Sources of the named shapes:
Medusa (Cai et al. 2024; FasterDecoding/Medusa, medusa/model/medusa_choices.py) and EAGLE-1 (Li et al. 2024;
SafeAILab/EAGLE, branch v1, model/choices.py), which both call theirs `mc_sim_7b_63`; token recycling (Luo et al.
2024; Luowaterbi/TokenRecycling, model/recycling/tree_template_.py, version 2.2.2); SAM decoding's tree for it (Hu et
al. 2024; hyx1999/SAM-Decoding, samd/config/token_recycle.json).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from specbench.decoding.draft import Draft
from specbench.errors import SpecbenchError
from specbench.models.device import send

Path = tuple[int, ...]


@dataclass(frozen=True)
class Level:
    """The n nodes of one depth, and how they hang on the nodes of the depth above that have children at all.

    Such nodes are called inner: a drafter that works level by level runs only those through its network. The root
    is the one inner node above the first level.

        first: where the level starts in the tree's node order.
        parent: int64 `[n]`, each node's parent, counted among the inner nodes of the level above.
        rank: int64 `[n]`, which of its parent's guesses each node is.
        ranks: guesses needed from each parent (the highest rank, plus one).
        inner: int64 `[m]`, this level's inner nodes, counted from `first`.
        visible: bool `[m, M]`, what each of them attends to among the M inner nodes of this level and those above
            (the root, which is committed, is not among them): its ancestors and itself.
    """

    first: int
    parent: torch.Tensor
    rank: torch.Tensor
    ranks: int
    inner: torch.Tensor
    visible: torch.Tensor

    @property
    def stop(self) -> int:
        return self.first + len(self.rank)

    def pick(self, ranked: torch.Tensor) -> torch.Tensor:
        """Of each parent's guesses `[B, parents, >= ranks, …]`, best first, this level's nodes `[B, n, …]`."""
        return ranked[:, self.parent, self.rank]


class StaticTree:
    """A tree shape; nodes are ordered by depth, then by path, so that a shallower tree is a prefix of it.

    Args:
        choices: the path of every node. Every prefix of a path must be there too.

    Attributes:
        choices: the paths, in node order.
        parents: each node's parent, -1 = the root.
        depths: each node's depth, 1 for children of the root.
        width: the number of nodes, without the root.
        depth: the depth of the deepest node.
    """

    def __init__(self, choices: Sequence[Path]) -> None:
        self.choices: list[Path] = sorted(
            {tuple(path) for path in choices}, key=lambda path: (len(path), path)
        )
        index: dict[Path, int] = {(): -1} | {path: node for node, path in enumerate(self.choices)}
        for path in self.choices:
            if not path or path[:-1] not in index:
                raise ValueError(f"tree node {path} has no parent in the tree")
        self.parents = [index[path[:-1]] for path in self.choices]
        self.depths = [len(path) for path in self.choices]
        self.width, self.depth = len(self.choices), max(self.depths, default=0)
        self._clipped: dict[int, StaticTree] = {}
        self._levels: dict[torch.device, list[Level]] = {}
        self._tensors: dict[torch.device, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    @classmethod
    def growing(cls, children: Mapping[Path, int]) -> StaticTree:
        """The tree in which the node at each path has so many children (the root's path is ())."""
        return cls([(*path, rank) for path, count in children.items() for rank in range(count)])

    def clip(self, depth: int) -> StaticTree:
        """The tree without what is deeper than `depth`: near the end a full tree would overshoot."""
        if depth >= self.depth:
            return self
        if depth not in self._clipped:
            self._clipped[depth] = StaticTree([path for path in self.choices if len(path) <= depth])
        return self._clipped[depth]

    def narrow(self, ranks: int) -> StaticTree:
        """The tree without guesses of rank `ranks` and beyond: a small vocabulary has no more."""
        return self if ranks >= self.ranks else StaticTree([p for p in self.choices if max(p) < ranks])

    def levels(self, device: torch.device) -> list[Level]:
        """The levels from the root down, their tensors on `device`."""
        if device not in self._levels:
            self._levels[device] = self._cut(device)
        return self._levels[device]

    def pick(self, ranked: torch.Tensor) -> torch.Tensor:
        """The tree's tokens `[B, width]` where guesses depend on the depth alone: `[B, >= depth, >= ranks]`."""
        _, depth, rank = self._on(ranked.device)
        return ranked[:, depth, rank]

    @cached_property
    def ranks(self) -> int:
        """Guesses needed at most from one place (the highest rank, plus one)."""
        return max((path[-1] + 1 for path in self.choices), default=0)

    def drafts(self, tokens: torch.Tensor, budgets: Sequence[int]) -> list[Draft]:
        """Tokens `[B, >= width]` of this tree as one draft a row, each cut to its row's budget."""
        out = []
        for row, budget in enumerate(budgets):
            tree = self.clip(max(budget, 0))
            parents, _, _ = tree._on(tokens.device)
            out.append(
                Draft(tokens[row, : tree.width], parents, deepest=tree.depth, siblings=tree.ranks)
                if tree.width
                else Draft()
            )
        return out

    def _on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Parents, depths counted from 0, and ranks of all nodes, int64 `[width]` on `device`."""
        if device not in self._tensors:
            rows = (self.parents, [depth - 1 for depth in self.depths], [path[-1] for path in self.choices])
            parents, depths, ranks = (send(row, device, torch.long) for row in rows)
            self._tensors[device] = parents, depths, ranks
        return self._tensors[device]

    def _cut(self, device: torch.device) -> list[Level]:
        levels: list[Level] = []
        above: dict[Path, int] = {(): 0}
        seen: list[Path] = []
        parents_of_some = {path[:-1] for path in self.choices}
        for depth in range(1, self.depth + 1):
            paths = [path for path in self.choices if len(path) == depth]
            inner = [path for path in paths if path in parents_of_some]
            seen += inner
            visible = [[path[: len(other)] == other for other in seen] for path in inner]
            levels.append(
                Level(
                    first=self.depths.index(depth),
                    parent=send([above[path[:-1]] for path in paths], device),
                    rank=send([path[-1] for path in paths], device),
                    ranks=max(path[-1] for path in paths) + 1,
                    inner=send([paths.index(path) for path in inner], device, torch.long),
                    visible=send(visible, device, torch.bool).view(len(inner), len(seen)),
                )
            )
            above = {path: place for place, path in enumerate(inner)}
        return levels


# How many children the node at each path has.
_TREES: dict[str, dict[Path, int]] = {
    "mc_sim_7b_63": {
        (): 10,
        (0,): 10, (1,): 7, (2,): 3, (3,): 2, (4,): 1, (5,): 1, (6,): 1, (7,): 1, (8,): 1, (9,): 1,
        (0, 0): 10, (0, 1): 3, (0, 2): 2, (0, 3): 1, (0, 4): 1, (0, 5): 1, (0, 6): 1, (0, 7): 1, (1, 0): 2, (2, 0): 1,
        (0, 0, 0): 2,
    },
    "eagle1": {
        (): 4,
        (0,): 3, (1,): 2, (2,): 2, (3,): 1,
        (0, 0): 3, (0, 1): 2, (0, 2): 2, (1, 0): 1,
        (0, 0, 0): 3,
        (0, 0, 0, 0): 2,
    },
    "recycling": {
        (): 8,
        (0,): 8, (1,): 4, (2,): 3, (3,): 2, (4,): 1, (5,): 1, (6,): 1, (7,): 1,
        (0, 0): 8, (0, 1): 3, (0, 2): 2, (0, 3): 1, (0, 4): 1, (0, 5): 1, (0, 6): 1, (0, 7): 1, (1, 0): 2, (1, 1): 1,
        (2, 0): 1, (3, 0): 1, (4, 0): 1, (5, 0): 1,
        (0, 0, 0): 5, (0, 0, 1): 2, (0, 0, 2): 1, (0, 0, 3): 1, (0, 0, 4): 1, (0, 1, 0): 1, (0, 2, 0): 1,
        (1, 0, 0): 1, (2, 0, 0): 1, (3, 0, 0): 1,
        (0, 0, 0, 0): 3, (0, 0, 0, 1): 1, (0, 0, 0, 2): 1, (0, 0, 1, 0): 1, (0, 1, 0, 0): 1, (1, 0, 0, 0): 1,
        (0, 0, 0, 0, 0): 2, (0, 0, 0, 1, 0): 1,
    },
    "sam": {
        (): 7,
        (0,): 6, (1,): 5, (2,): 3, (3,): 2, (4,): 2, (5,): 1, (6,): 1,
        (0, 0): 3, (0, 1): 2, (0, 2): 2, (0, 3): 1, (0, 4): 1, (1, 0): 3, (1, 1): 2, (1, 2): 1, (1, 3): 1,
        (2, 0): 1, (2, 1): 1, (3, 0): 1, (4, 0): 1, (5, 0): 1,
        (0, 0, 0): 2, (0, 0, 1): 1, (0, 1, 0): 1, (1, 0, 0): 2, (1, 1, 0): 1, (2, 0, 0): 1,
        (0, 0, 0, 0): 2, (0, 0, 1, 0): 1, (1, 0, 0, 0): 1,
    },
}  # fmt: skip


@lru_cache(maxsize=32)
def named(name: str) -> StaticTree:
    """The tree called `name`.

    Raises:
        SpecbenchError: no tree is called so.
    """
    if name not in _TREES:
        raise SpecbenchError(f"no tree is called {name!r}", f"known trees: {', '.join(sorted(_TREES))}")
    return StaticTree.growing(_TREES[name])
