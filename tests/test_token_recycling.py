"""Token recycling: what its table holds, cold and warm, and where it is not as the official code."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.decoding.draft import Draft, Outcome, Probes
from specbench.decoding.largest import BLOCK, largest
from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Request
from specbench.decoding.tree import collate
from specbench.measure.clock import NullClock
from specbench.models.target import Target

TokenRecycling = importlib.import_module("specbench.methods.token_recycling").TokenRecycling
VOCAB = 64


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.llama(VOCAB)


def generate(target: Target, drafter: object, prompts: list[list[int]], new: int = 30) -> list[list[int]]:
    rounds = list(DraftVerify(target, drafter).generate(Request(prompts, new), NullClock()))
    return [[t for one in rounds for t in one.tokens[row]] for row in range(len(prompts))]


def test_after_a_prompt_the_table_knows_its_last_token(target: Target) -> None:
    drafter, prompt = TokenRecycling(target), tiny.prompts(1, VOCAB)[0]
    generate(target, drafter, [prompt], new=1)
    with target.stock_attention():
        wanted = target.model(torch.tensor([prompt])).logits[0, -1].topk(8).indices
    assert drafter._table[0, prompt[-1]].tolist() == wanted.tolist()
    others = [token for token in range(VOCAB) if token != prompt[-1]]
    assert (drafter._table[0, others] == torch.arange(8)).all()


def test_of_a_token_on_several_nodes_the_last_live_one_counts() -> None:
    """The official code leaves the choice to the device."""
    drafter = TokenRecycling(SimpleNamespace(vocab_size=6, device=torch.device("cpu")), k=2)
    drafter.begin([[0]])
    tokens, live = torch.tensor([[3, 1, 3, 3]]), torch.tensor([[True, True, True, False]])
    logits = torch.zeros(1, 4, 6)
    for column, (best, second) in enumerate([(1, 2), (3, 4), (5, 0), (4, 4)]):
        logits[0, column, best], logits[0, column, second] = 2, 1
    drafter.learn(tokens, live, logits)
    table = drafter._table[0, :6].tolist()
    assert table == [[0, 1], [3, 4], [0, 1], [5, 0], [0, 1], [0, 1]]


def test_a_draft_follows_the_table_along_the_tree() -> None:
    drafter = TokenRecycling(SimpleNamespace(vocab_size=40, device=torch.device("cpu")), k=8)
    drafter.begin([[7]])
    drafter._table[0, :40] = torch.randint(0, 40, (40, 8), generator=torch.Generator().manual_seed(0)).int()
    (draft,) = drafter.propose([50], None)
    assert len(draft) == 80
    for node, path in enumerate(drafter.tree.choices):
        token = 7
        for rank in path:
            token = int(drafter._table[0, token, rank])
        assert int(draft.tokens[node]) == token


def test_cold_forgets_and_warm_does_not(target: Target) -> None:
    prompts = tiny.prompts(2, VOCAB, seed=5)
    cold, warm = TokenRecycling(target), TokenRecycling(target, warm=True)
    assert (cold.warm, warm.warm) == (False, True)
    for drafter in (cold, warm):
        for prompt in prompts:
            generate(target, drafter, [prompt])
            drafter.release()
            drafter.begin([prompt])
    untaught = torch.arange(8)
    assert (cold._table == untaught).all()
    assert not (warm._table == untaught).all()
    warm.forget()
    warm.begin([prompts[0]])
    assert (warm._table == untaught).all()


def test_a_warm_table_outlives_a_smaller_batch(target: Target) -> None:
    prompts = tiny.prompts(3, VOCAB, seed=6)
    drafter = TokenRecycling(target, warm=True)
    generate(target, drafter, prompts[:2])
    second = drafter._table[1].clone()
    assert generate(target, drafter, prompts[:1]) == generate(target, TokenRecycling(target), prompts[:1])
    assert torch.equal(drafter._table[1], second), "the row that had no prompt learns nothing"
    generate(target, drafter, prompts)
    assert len(drafter._table) == 3


def test_it_learns_to_be_right(target: Target) -> None:
    prompts = tiny.prompts(4, VOCAB, seed=7)

    def rounds(drafter: object) -> int:
        method = DraftVerify(target, drafter)
        return sum(len(list(method.generate(Request([prompt], 40), NullClock()))) for prompt in prompts)

    vanilla = rounds(TokenRecycling.__mro__[1](target))
    assert rounds(TokenRecycling(target, warm=True)) < rounds(TokenRecycling(target)) < vanilla


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_vocabulary_smaller_than_k(size: int) -> None:
    drafter = TokenRecycling(SimpleNamespace(vocab_size=size, device=torch.device("cpu")))
    drafter.begin([[0]])
    (draft,) = drafter.propose([6], None)
    assert sorted(set(draft.tokens.tolist())) == list(range(size))
    assert len(draft) == drafter.max_nodes


def test_nothing_is_learned_from_another_drafters_probes() -> None:
    """What the target makes of a probe it makes of a guessed context."""
    drafter = TokenRecycling(SimpleNamespace(vocab_size=6, device=torch.device("cpu")), k=1)
    drafter.begin([[0]])
    probes = Probes([5], [1], torch.tensor([[True, False, True]]))
    tree = collate(torch.tensor([3]), [Draft([4], probes=probes)], [True], 6)
    logits = torch.eye(6)[[1, 2, 3]][None]
    drafter.observe(Outcome([[4, 2]], [False], [1], logits, {}, tree))
    assert drafter._table[0, :6, 0].tolist() == [0, 0, 0, 1, 2, 0]


def test_nonsense_is_refused(target: Target) -> None:
    with pytest.raises(ValueError, match="k must be at least 1"):
        TokenRecycling(target, k=0)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 12), st.integers(1, 12 * BLOCK), st.integers(0, 1000))
def test_largest_is_topk(k: int, width: int, seed: int) -> None:
    width = max(width, k)
    scores = torch.rand(2, 3, width, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(largest(scores, k), scores.topk(k).indices)
