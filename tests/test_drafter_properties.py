"""What every drafter without weights keeps to, whatever the text: limits, vocabulary, shape of trees, cold state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_datastore
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.decoding.draft import Draft, Drafter, Outcome
from specbench.decoding.sampling import Sampling
from specbench.decoding.tree import collate
from specbench.decoding.verify import verify
from specbench.spec import find_method

STORE = tiny_datastore.store([0, 1, 2, 0, 1, 3, 9, 0, 1, 2, 0, 1, 2, 4], [2, 2, 2, 2, 2, 1, 0], [5])

# A method and its options; an option that is a pair is a method, too.
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "prompt-lookup": ("prompt-lookup", {"k": 4, "partial": True}),
    "prompt-lookup, k=auto": ("prompt-lookup", {"k": "auto", "ngram": 2}),
    "lookahead": ("lookahead", {"level": 4, "window": 3, "guess": 2}),
    "lookahead of the prompt": ("lookahead", {"level": 3, "window": 1, "guess": 3, "pool_from_prompt": True}),
    "lookahead of bigrams": ("lookahead", {"level": 2, "window": 4, "guess": 1}),
    "token-recycling": ("token-recycling", {}),
    "token-recycling of few": ("token-recycling", {"k": 2}),
    "rest": ("rest", {"datastore": STORE, "shortest": 1, "nodes": 9}),
    "suffix": ("suffix", {"k": 5, "factor": 2.0, "offset": 1.0}),
    "suffix tree": ("suffix", {"k": 6, "tree": True, "depth": 5, "min_prob": 0.0, "factor": 3.0}),
    "sam": ("sam", {"k": 4, "threshold": 1, "corpus": STORE, "bias": 1, "fallback": ("token-recycling", {})}),
    "sam alone": ("sam", {"threshold": 2, "fallback": "none"}),
    "cascade": ("cascade", {"first": ("prompt-lookup", {"k": 3}), "then": ("token-recycling", {"k": 2})}),
    "cascade of probes": (
        "cascade",
        {"first": ("lookahead", {"level": 3}), "then": ("suffix", {"tree": True})},
    ),
    "cascade that ends in probes": (
        "cascade",
        {"first": ("prompt-lookup", {"k": 3}), "then": ("lookahead", {"level": 4, "window": 3, "guess": 2})},
    ),
    "sam with probes": ("sam", {"threshold": 2, "fallback": ("lookahead", {"level": 4, "window": 3})}),
}


@dataclass(frozen=True)
class Question:
    """A batch to generate: prompts, and for each round how deep each row may draft (0: it ends)."""

    prompts: list[list[int]]
    budgets: list[list[int]]
    seed: int


@dataclass
class Heard:
    """What a drafter proposed: a round, a row."""

    drafts: list[list[Draft]] = field(default_factory=list)

    def plain(self, row: int) -> list[Any]:
        """A row's drafts as numbers that can be compared."""
        return [_plain(drafts[row]) for drafts in self.drafts]


def _plain(draft: Draft) -> Any:
    tokens = [int(token) for token in draft.tokens]
    parents = list(range(-1, len(tokens) - 1)) if draft.parents is None else [int(p) for p in draft.parents]
    probes = draft.probes
    rides = (
        None
        if probes is None
        else ([int(t) for t in probes.tokens], [int(d) for d in probes.depth], probes.visible.tolist())
    )
    return tokens, parents, rides


@st.composite
def questions(draw: Callable[..., Any], vocab: int, rows: int) -> Question:
    token = st.integers(0, vocab - 1)
    prompts = draw(st.lists(st.lists(token, min_size=1, max_size=14), min_size=rows, max_size=rows))
    rounds = draw(st.integers(1, 9))
    budgets, left = [], [draw(st.integers(1, 30)) for _ in range(rows)]
    for _ in range(rounds):
        budgets.append(list(left))
        left = [max(budget - draw(st.integers(1, 8)), 0) for budget in left]
    return Question(prompts, budgets, draw(st.integers(0, 2**31)))


def ask(drafter: Drafter, vocab: int, question: Question) -> Heard:
    """The loop without a model: the target's logits are dice, each row's its own."""
    heard, rows = Heard(), len(question.prompts)
    dice = [torch.Generator().manual_seed(question.seed + row) for row in range(rows)]

    def logits(widths: list[int]) -> torch.Tensor:
        out = torch.zeros(rows, max(widths), vocab)
        for row, width in enumerate(widths):
            out[row, :width] = torch.randn(width, vocab, generator=dice[row])
        return out

    drafter.begin(question.prompts)
    first = logits([1] * rows)
    roots = first[:, 0].argmax(-1)
    drafter.observe(Outcome([[t] for t in roots.tolist()], [False] * rows, [0] * rows, first, {}))
    for budgets in question.budgets:
        drafts = drafter.propose(budgets, None)
        heard.drafts.append(drafts)
        active = [budget > 0 for budget in budgets]
        tree = collate(roots, drafts, active, vocab)
        scores = logits(tree.widths)
        verdict = verify(tree, scores, Sampling(), None)
        tokens = [
            [*tree.tokens[row, verdict.path[row, 1 : n + 1]].tolist(), int(verdict.bonus[row])] if on else []
            for row, (n, on) in enumerate(zip(verdict.accepted.tolist(), active, strict=True))
        ]
        finished = [not on for on in active]
        accepted = verdict.accepted.tolist()
        drafter.observe(Outcome(tokens, finished, accepted, scores, {}, tree, verdict.path))
        roots = verdict.bonus
    return heard


def make(name: str, vocab: int) -> Drafter:
    target = SimpleNamespace(vocab_size=vocab, device=torch.device("cpu"), tokenizer=None)

    def made(method: str, options: dict[str, Any]) -> Drafter:
        parts = {key: made(*value) if isinstance(value, tuple) else value for key, value in options.items()}
        return find_method(method)(target, **parts)

    return made(*DRAFTERS[name])


def check_draft(draft: Draft, budget: int, vocab: int, most: int) -> None:
    tokens, parents, rides = _plain(draft)
    assert len(tokens) + (len(rides[0]) if rides else 0) <= most, "more nodes than the target keeps room for"
    assert all(0 <= token < vocab for token in tokens), "outside the vocabulary"
    assert len(parents) == len(tokens)
    assert all(-1 <= parent < node for node, parent in enumerate(parents)), "parents come before children"
    depth: list[int] = []
    for parent in parents:
        depth.append(1 if parent < 0 else depth[parent] + 1)
    assert max(depth, default=0) <= budget, "deeper than allowed"
    assert len(set(zip(parents, tokens, strict=True))) == len(tokens), "siblings differ"
    if rides is not None:
        probes, depths, visible = rides
        assert all(0 <= token < vocab for token in probes)
        assert len(probes) == len(depths) == len(visible)
        assert all(len(row) == 1 + len(tokens) + len(probes) for row in visible)
        assert not any(any(row[1 : 1 + len(tokens)]) for row in visible), "no probe sees a candidate"
        assert all(row[1 + len(tokens) + place] for place, row in enumerate(visible)), "each sees itself"


names = pytest.mark.parametrize("name", DRAFTERS)
few = settings(max_examples=40, deadline=None, derandomize=True)


@names
@few
@given(st.data())
def test_drafts_are_well_formed(name: str, data: st.DataObject) -> None:
    vocab, rows = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3))
    question = data.draw(questions(vocab, rows))
    drafter = make(name, vocab)
    for budgets, drafts in zip(question.budgets, ask(drafter, vocab, question).drafts, strict=True):
        for budget, draft in zip(budgets, drafts, strict=True):
            check_draft(draft, budget, vocab, drafter.max_nodes)


@names
@few
@given(st.data())
def test_cold_drafts_do_not_depend_on_earlier_questions(name: str, data: st.DataObject) -> None:
    vocab = data.draw(st.integers(2, 6))
    earlier, question = data.draw(questions(vocab, 2)), data.draw(questions(vocab, 1))
    drafter, fresh = make(name, vocab), make(name, vocab)
    ask(drafter, vocab, earlier)
    assert not drafter.warm
    assert ask(drafter, vocab, question).plain(0) == ask(fresh, vocab, question).plain(0)


@names
@few
@given(st.data())
def test_rows_are_independent(name: str, data: st.DataObject) -> None:
    vocab = data.draw(st.integers(2, 6))
    question = data.draw(questions(vocab, 3))
    together = ask(make(name, vocab), vocab, question)
    for row, prompt in enumerate(question.prompts):
        budgets = [[budgets[row]] for budgets in question.budgets]
        alone = Question([prompt], budgets, question.seed + row)
        assert ask(make(name, vocab), vocab, alone).plain(0) == together.plain(row)


@names
def test_something_is_proposed(name: str) -> None:
    """The properties above would hold of a drafter that never proposes anything."""
    question = Question([[0, 1, 2, 0, 1, 2, 0, 1, 2]], [[40 - round_] for round_ in range(30)], 3)
    assert any(len(draft) for drafts in ask(make(name, 3), 3, question).drafts for draft in drafts)


@pytest.mark.parametrize(
    "draft",
    [
        Draft([1, 2, 3, 1, 2]),
        Draft([7]),
        Draft([1, 2], [1, -1]),
        Draft([1, 2], [-1]),
        Draft([1, 1], [-1, -1]),
        Draft([1, 2, 3]),
    ],
)
def test_the_check_sees_bad_drafts(draft: Draft) -> None:
    with pytest.raises(AssertionError):
        check_draft(draft, budget=2, vocab=5, most=4)
