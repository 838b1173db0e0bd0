"""Static trees: node order, clipping, level-by-level gathering, and the named shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specbench.decoding.draft import Draft
from specbench.decoding.static_tree import StaticTree, named
from specbench.errors import SpecbenchError

PARITY = Path(__file__).resolve().parents[2] / "shared" / "parity"
SMALL = [(1, 0), (0,), (1,), (0, 2), (0, 0), (0, 2, 1)]
CPU = torch.device("cpu")


def test_nodes_are_sorted_by_depth_then_path() -> None:
    tree = StaticTree(SMALL)
    assert tree.choices == [(0,), (1,), (0, 0), (0, 2), (1, 0), (0, 2, 1)]
    assert tree.parents == [-1, -1, 0, 0, 1, 3]
    assert tree.depths == [1, 1, 2, 2, 2, 3]
    assert (tree.width, tree.depth, tree.ranks) == (6, 3, 3)


def test_clipping_cuts_a_prefix_and_is_kept() -> None:
    tree = StaticTree(SMALL)
    assert tree.clip(2).choices == tree.choices[:5]
    assert tree.clip(2) is tree.clip(2)
    assert tree.clip(3) is tree is tree.clip(9)
    assert tree.clip(0).width == tree.clip(0).depth == 0


def test_a_small_vocabulary_has_fewer_ranks() -> None:
    tree = StaticTree(SMALL)
    assert tree.narrow(2).choices == [(0,), (1,), (0, 0), (1, 0)]
    assert tree.narrow(3) is tree


def test_levels_gather_what_the_paths_say() -> None:
    """Tokens are named by their path, so that a wrong parent or rank shows."""
    tree = StaticTree(SMALL)

    def name(path: tuple[int, ...]) -> int:
        return int("1" + "".join(map(str, path)))

    tokens, inner = [], [()]
    for level in tree.levels(CPU):
        ranked = torch.tensor([[[name((*path, r)) for r in range(level.ranks)] for path in inner]])
        picked = level.pick(ranked)[0].tolist()
        assert level.first == len(tokens)
        tokens += picked
        assert level.stop == len(tokens)
        inner = [tree.choices[level.first + i] for i in level.inner.tolist()]
    assert tokens == [name(path) for path in tree.choices]


def test_levels_see_their_ancestors_among_inner_nodes() -> None:
    first, second, third = StaticTree(SMALL).levels(CPU)
    assert first.visible.tolist() == [[True, False], [False, True]]
    assert second.visible.tolist() == [[True, False, True]]  # (0,), (1,), (0, 2)
    assert third.visible.shape == (0, 3)


def test_guesses_by_depth() -> None:
    ranked = torch.tensor([[[10, 11, 12], [20, 21, 22], [30, 31, 32]]])
    assert StaticTree(SMALL).pick(ranked).tolist() == [[10, 11, 20, 22, 20, 31]]


def test_drafts_keep_to_their_budgets() -> None:
    tree = StaticTree(SMALL)
    tokens = torch.arange(12).view(2, 6).repeat(2, 1)
    full, shallow, none, chain = tree.drafts(tokens, [7, 2, 0, 1])
    assert torch.as_tensor(full.tokens).tolist() == list(range(6))
    assert torch.as_tensor(full.parents).tolist() == tree.parents
    assert torch.as_tensor(shallow.tokens).tolist() == [6, 7, 8, 9, 10]
    assert none == Draft()
    assert torch.as_tensor(chain.parents).tolist() == [-1, -1]


def test_a_node_needs_its_parent() -> None:
    with pytest.raises(ValueError, match=r"\(1, 0\) has no parent"):
        StaticTree([(0,), (1, 0)])


def test_an_unknown_name() -> None:
    with pytest.raises(SpecbenchError, match="no tree is called 'oak'"):
        named("oak")


@pytest.mark.parametrize(
    ("name", "fixture"),
    [
        ("mc_sim_7b_63", "medusa1-mcsim63"),
        ("mc_sim_7b_63", "hydra-prefixmlp-mcsim63"),
        ("eagle1", "eagle1-static25"),
    ],
)
def test_named_trees_are_the_official_ones(name: str, fixture: str) -> None:
    file = PARITY / fixture / "golden.json"
    if not file.is_file():
        pytest.skip(f"{file} is not here")
    golden = json.loads(file.read_text())
    assert [list(path) for path in named(name).choices] == golden["tree_choices"]
    assert named(name).parents == golden["parents"]
    assert named(name).depths == golden["depths"]
