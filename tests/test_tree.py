"""Drafts as tensors: who descends from whom."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from specbench.decoding.draft import Draft, Ids
from specbench.decoding.tree import collate


def ancestors(parents: list[int]) -> list[set[int]]:
    """Of each column (the root is 0), itself and what is above it, one step at a time."""
    found = [{0}]
    for node, parent in enumerate(parents):
        found.append(found[parent + 1] | {node + 1})
    return found


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 7, 8, 9, 16, 17, 33])
@pytest.mark.parametrize("reach", [1, 3, 100])
@pytest.mark.parametrize("kind", [list, torch.tensor], ids=["on the host", "on the device"])
def test_every_node_sees_its_ancestors_and_itself(kind: Callable[..., Ids], nodes: int, reach: int) -> None:
    """Trees of every depth, from a chain (`reach` 1: each node's parent is the one before it) to bushes; and ragged:
    the last row has a node less, and padding sees the root and itself."""
    dice = torch.Generator().manual_seed(nodes)
    rows = [
        [node - 1 - int(torch.randint(min(reach, node + 1), (1,), generator=dice)) for node in range(nodes)]
        for _ in range(3)
    ]
    rows[2].pop()
    drafts = [Draft(list(range(len(parents))), kind(parents)) for parents in rows]
    tree = collate(torch.tensor([1, 2, 3]), drafts, [True] * 3, 50)
    for row, parents in enumerate(rows):
        expected = ancestors(parents) + [{0, nodes}] * (nodes - len(parents))
        seen = [set(line.nonzero()[:, 0].tolist()) for line in tree.visible[row]]
        assert seen == expected
        assert tree.depth[row].tolist() == [len(path) - 1 for path in expected]
        assert tree.parents[row].tolist() == [0, *(parent + 1 for parent in parents), 0][: nodes + 1]
