"""REST: searches and trees against plain counting, and where it is not as the official code."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_datastore
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.decoding.draft import Draft
from specbench.decoding.frequent_tree import frequent_tree
from specbench.errors import SpecbenchError
from specbench.models.datastore import Datastore

Rest = importlib.import_module("specbench.methods.rest").Rest
VOCAB, END = 4, 65535

texts = st.lists(st.lists(st.integers(0, 1), max_size=12), min_size=1, max_size=3)


def plain_search(
    texts: list[list[int]], end: list[int], longest: int, shortest: int, depth: int
) -> list[Any]:
    """What follows the longest end that occurs, by looking at every place."""
    for length in range(min(longest, len(end)), shortest - 1, -1):
        found = [
            text[place + length : place + length + depth]
            for text in texts
            for place in range(len(text) - length)
            if text[place : place + length] == end[len(end) - length :]
        ]
        if found:
            return sorted(found)
    return []


def real(rows: np.ndarray) -> list[list[int]]:
    """Rows without their padding, those with nothing left out."""
    return [kept for row in rows.tolist() if (kept := [token for token in row if token >= 0])]


def shards_of(texts: list[list[int]]) -> Datastore:
    return Datastore(Path("x"), tuple(tiny_datastore.shard(text) for text in texts if text))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(texts, st.lists(st.integers(0, 1), min_size=1, max_size=8), st.integers(1, 5), st.booleans())
def test_search_equals_looking_at_every_place(
    texts: list[list[int]], end: list[int], depth: int, apart: bool
) -> None:
    store = shards_of(texts) if apart else tiny_datastore.store(*texts)
    options = {"longest": 5, "shortest": 2, "depth": depth}
    found = store.search(end, matches=10_000, vocab=VOCAB, **options)
    wanted = plain_search(texts, end, **options)
    assert sorted(real(found)) == wanted
    if wanted:
        assert set(paths(*frequent_tree(found, 12))) == plain_tree(wanted, 12)


@pytest.mark.parametrize("kind", [np.uint16, np.uint32])
def test_ids_beyond_16_bits_and_beyond_the_vocabulary(kind: type) -> None:
    big = 60_000 if kind is np.uint16 else 150_000
    store = tiny_datastore.store([big, 1, 2, big - 1, 5], kind=kind)

    def search(end: list[int], vocab: int) -> list[list[int]]:
        return real(store.search(end, longest=4, shortest=1, matches=9, depth=4, vocab=vocab))

    assert search([7, big, 1], big + 1) == [[2, big - 1, 5]]
    assert search([1], big - 1) == [[2]], "a continuation ends before an id the target has not"
    assert search([2], big - 1) == []


def test_only_so_many_matches_of_a_shard() -> None:
    store = shards_of([[1, 3, 1, 2, 1, 0], [1, 0, 1, 3]])
    found = store.search([1], longest=1, shortest=1, matches=2, depth=1, vocab=VOCAB)
    assert real(found) == [[0], [0], [2], [3]], "the first by their ids, of each"


def plain_tree(rows: list[list[int]], budget: int) -> set[tuple[int, ...]]:
    """The rule in words, with ties as `frequent_tree` breaks them; nodes as paths."""
    counts = Counter(tuple(row[:end]) for row in rows for end in range(1, len(row) + 1))
    kept = sorted(counts, key=lambda prefix: (-counts[prefix], len(prefix), prefix))[:budget]
    varied = sorted(kept, key=lambda prefix: (len(set(prefix)), kept.index(prefix)))
    while sum(len(set(prefix)) for prefix in varied) > budget:
        varied.pop()
    return {prefix[:end] for prefix in varied for end in range(1, len(prefix) + 1)}


def paths(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    out: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        out.append((*(out[parent] if parent >= 0 else ()), token))
    return out


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=12), st.integers(1, 30)
)
def test_trees_equal_plain_counting(rows: list[list[int]], budget: int) -> None:
    rows = sorted(rows)
    padded = np.array([row + [-1] * (5 - len(row)) for row in rows])
    tree = paths(*frequent_tree(padded, budget))
    assert len(set(tree)) == len(tree) <= budget, (
        "the official code may find its tree too large, and gives up"
    )
    assert set(tree) == plain_tree(rows, budget)


def rest(store: Datastore, **options: Any) -> Any:
    return Rest(SimpleNamespace(vocab_size=VOCAB, tokenizer=None), datastore=store, **options)


def drafted(drafter: Any, text: list[int], budget: int = 20) -> Draft:
    drafter.begin([text])
    return drafter.propose([budget], None)[0]


def test_nothing_found_is_nothing_proposed() -> None:
    """The official code proposes token 100."""
    assert len(drafted(rest(tiny_datastore.store([0, 1, 2])), [3, 3, 3])) == 0


def test_a_match_with_nothing_after_it_gives_way_to_a_shorter_one() -> None:
    """The official code crashes here."""
    draft = drafted(rest(tiny_datastore.store([2, 1, 3], [0, 1, 2], [1, 2, 0])), [0, 1, 2])
    assert (draft.tokens, draft.parents) == ([0], [-1])


def test_documents_are_kept_apart() -> None:
    """The official datastore has nothing between them."""
    store = tiny_datastore.store([0, 1], [2, 3])
    assert len(drafted(rest(store), [0, 1])) == 0
    assert END in store.shards[0].tokens


def test_a_budget_cuts_the_depth_and_text_grows() -> None:
    drafter = rest(tiny_datastore.store([0, 1, 2, 3, 0, 2, 1]), longest=3)
    assert drafted(drafter, [3, 3, 0, 1], budget=2).tokens == [2, 3]
    drafter.observe(SimpleNamespace(tokens=[[2, 3, 0]]))
    assert drafter._ends == [[2, 3, 0]]
    assert drafter.propose([9], None)[0].tokens == [2, 1]
    assert len(drafter.propose([0], None)[0]) == 0


@pytest.mark.parametrize(
    "options", [{"longest": 1, "shortest": 2}, {"shortest": 0}, {"matches": 0}, {"depth": 0}, {"nodes": 0}]
)
def test_nonsense_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="longest must be at least shortest"):
        rest(tiny_datastore.store([1]), **options)


def test_a_datastore_is_needed() -> None:
    with pytest.raises(SpecbenchError, match="rest needs a datastore"):
        Rest(SimpleNamespace(vocab_size=VOCAB, device=torch.device("cpu")))
