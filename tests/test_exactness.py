"""Sampling is exact: the joint distribution of three tokens equals the target's, computed by enumeration."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import tiny
import tiny_datastore
import torch

from specbench.decoding.draft import Draft, Drafter
from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Request
from specbench.decoding.sampling import Sampling, draw, drawn, exponentials, probabilities
from specbench.measure.clock import NullClock
from specbench.models.target import Target

VOCAB, SAMPLES, ROWS = 6, 50_000, 2500
PROMPT = [1, 4, 2, 5, 1, 4]
SAMPLINGS = [
    Sampling(1.0),
    Sampling(0.7, top_p=0.9),
    *(
        pytest.param(sampling, marks=pytest.mark.slow)
        for sampling in [
            Sampling(0.7),
            Sampling(1.0, top_p=0.9),
            Sampling(1.0, top_k=4),
            Sampling(0.7, top_k=10),
        ]
    ),
]

DraftModel = importlib.import_module("specbench.methods.draft_model").DraftModel
SelfSpeculation = importlib.import_module("specbench.methods.self_speculation").SelfSpeculation
PromptLookup = importlib.import_module("specbench.methods.prompt_lookup").PromptLookup
Oracle = importlib.import_module("specbench.methods.oracle").Oracle
Lookahead = importlib.import_module("specbench.methods.lookahead").Lookahead
TokenRecycling = importlib.import_module("specbench.methods.token_recycling").TokenRecycling
Rest = importlib.import_module("specbench.methods.rest").Rest
Suffix = importlib.import_module("specbench.methods.suffix").Suffix
Sam = importlib.import_module("specbench.methods.sam").Sam
Cascade = importlib.import_module("specbench.methods.cascade").Cascade


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.llama(VOCAB, seed=3, layers=1, hidden=16, std=0.6)


@pytest.fixture(scope="module")
def draft() -> Target:
    return tiny.llama(VOCAB, seed=4, layers=1, hidden=16, std=0.6)


def exact(target: Target, sampling: Sampling) -> np.ndarray:
    """The target's joint distribution of the next three tokens, by a plain forward over every prefix."""
    texts = torch.tensor([[*PROMPT, a, b] for a, b in product(range(VOCAB), repeat=2)])
    with torch.no_grad(), target.stock_attention():
        p = probabilities(target.model(texts).logits[:, len(PROMPT) - 1 :], sampling).numpy()
    joint = np.empty((VOCAB,) * 3)
    for row, (a, b) in enumerate(product(range(VOCAB), repeat=2)):
        joint[a, b] = p[row, 0, a] * p[row, 1, b] * p[row, 2]
    return joint / joint.sum()  # float32: it need not be 1 exactly


def sampled(
    target: Target, drafter: Drafter, sampling: Sampling, answer: list[int] | None = None
) -> np.ndarray:
    """The same distribution from `SAMPLES` generations of four tokens (so that drafts are up to three deep)."""
    method, counts = DraftVerify(target, drafter), np.zeros((VOCAB,) * 3)
    generators = [torch.Generator().manual_seed(row) for row in range(ROWS)]
    request = Request([PROMPT] * ROWS, 4, sampling=sampling, generators=generators)
    if answer is not None:
        method.set_answer([answer] * ROWS)
    for _ in range(SAMPLES // ROWS):
        rounds = list(method.generate(request, NullClock()))
        tokens = np.array([[t for r in rounds for t in r.tokens[row]][:3] for row in range(ROWS)])
        np.add.at(counts, tuple(tokens.T), 1)
    return counts / SAMPLES


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).sum() / 2)


def noise(joint: np.ndarray) -> tuple[float, float]:
    """Mean and deviation of the total variation of an honest sample of the same size."""
    draws = (
        np.random.default_rng(0).multinomial(SAMPLES, joint.ravel(), 200).reshape(-1, *joint.shape) / SAMPLES
    )
    distances = [distance(one, joint) for one in draws]
    return float(np.mean(distances)), float(np.std(distances))


class SampledTree(Drafter):
    """Two siblings a node, drawn without replacement from q: a stochastic tree of depth two."""

    max_nodes = 6

    def __init__(self, target: Target, seed: int = 0, argmax_with_softmax_q: bool = False) -> None:
        super().__init__(target)
        table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))
        self.table = table  # q depends on the last token alone
        self.biased = argmax_with_softmax_q

    def begin(self, prompts: list[list[int]]) -> None:
        self.last = [prompt[-1] for prompt in prompts]

    def observe(self, outcome) -> None:
        self.last = [new[-1] if new else old for new, old in zip(outcome.tokens, self.last, strict=True)]

    def propose(self, budgets: list[int], generators: Sequence[torch.Generator] | None) -> list[Draft]:
        assert generators is not None
        return [
            self._row(last, min(b, 2), g) for last, b, g in zip(self.last, budgets, generators, strict=True)
        ]

    def _row(self, last: int, depth: int, generator: torch.Generator) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        probs: list[torch.Tensor] = []
        frontier = [(-1, last)]
        for _ in range(depth):
            level = []
            for parent, token in frontier:
                q = self.table[token].softmax(-1)
                for _ in range(1 if self.biased else 2):
                    child = (
                        int(q.argmax()) if self.biased else int(torch.multinomial(q, 1, generator=generator))
                    )
                    tokens.append(child)
                    parents.append(parent)
                    probs.append(q)
                    level.append((len(tokens) - 1, child))
                    q = q.clone()
                    q[child] = 0
                    q = q / q.sum()
            frontier = level
        return Draft(tokens, parents, torch.stack(probs)) if tokens else Draft()


def check(target: Target, drafter: Drafter, sampling: Sampling, answer: list[int] | None = None) -> None:
    joint = exact(target, sampling)
    mean, deviation = noise(joint)
    assert mean + 5 * deviation < 0.03, "the sample is too small to see a bias of 0.03"
    assert distance(sampled(target, drafter, sampling, answer), joint) < mean + 5 * deviation


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("schedule", ["constant", pytest.param("confidence", marks=pytest.mark.slow)])
def test_draft_model_chain(target: Target, draft: Target, sampling: Sampling, schedule: str) -> None:
    check(target, DraftModel(target, draft=draft, k=3, schedule=schedule), sampling)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_sampled_tree(target: Target, sampling: Sampling) -> None:
    check(target, SampledTree(target), sampling)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_prompt_lookup(target: Target, sampling: Sampling) -> None:
    check(target, PromptLookup(target, k=3, ngram=2, partial=True), sampling)


@pytest.mark.parametrize(
    "options",
    [
        {"skip": [1], "k": "auto"},
        pytest.param({"skip": [1, 2]}, marks=pytest.mark.slow),
        pytest.param({"exit": 1, "threshold": 0.4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_self_speculation(options: dict) -> None:
    deep = tiny.llama(VOCAB, seed=3, layers=3, hidden=16, std=0.6)
    check(deep, SelfSpeculation(deep, **options), Sampling(1.0))


@pytest.mark.slow
def test_draft_model_of_adaptive_length(target: Target, draft: Target) -> None:
    check(target, DraftModel(target, draft=draft, k="auto"), Sampling(1.0))


def test_deterministic_tree(target: Target) -> None:
    check(target, Oracle(target, rate=0.6, k=3, tree=7), Sampling(1.0), answer=[4, 2, 5, 1])


def test_lookahead(target: Target) -> None:
    check(target, Lookahead(target, level=3, window=1, guess=3, pool_from_prompt=True), Sampling(1.0))


def test_token_recycling(target: Target) -> None:
    check(target, TokenRecycling(target, k=2), Sampling(1.0))


@pytest.mark.slow
def test_rest(target: Target) -> None:
    store = tiny_datastore.store([1, 4, 2, 5, 1, 4, 0, 3, 1, 4, 2], [4, 0, 1, 1, 4, 3, 3], [4, 0, 3])
    check(target, Rest(target, datastore=store, shortest=1), Sampling(1.0))


def test_suffix(target: Target) -> None:
    check(target, Suffix(target, tree=True, factor=3, min_prob=0.0), Sampling(1.0))


def test_sam(target: Target) -> None:
    check(target, Sam(target, threshold=1, fallback=TokenRecycling(target, k=2)), Sampling(1.0))


def test_cascade_of_what_is_looked_up_and_what_is_sampled(target: Target, draft: Target) -> None:
    """One row's draft is deterministic while another's was drawn from q."""
    first, then = PromptLookup(target, k=3, ngram=2, partial=True), DraftModel(target, draft=draft, k=3)
    check(target, Cascade(target, first=first, then=then), Sampling(1.0))


def test_vanilla(target: Target) -> None:
    check(target, Drafter(target), Sampling(1.0))


def test_the_check_sees_a_biased_rule(target: Target) -> None:
    """Argmax drafts judged with a softmax q: the mistake this test exists to catch."""
    with pytest.raises(AssertionError):
        check(target, SampledTree(target, argmax_with_softmax_q=True), Sampling(1.0))


def test_probabilities_are_those_of_transformers() -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(0)) * 3
    logits[::2] = logits[::2].round()  # ties, as half precision has many
    for sampling in [Sampling(0.7), Sampling(1.3, top_k=5), Sampling(1.0, top_p=0.9), Sampling(0.6, 8, 0.8)]:
        theirs = TemperatureLogitsWarper(sampling.temperature)(None, logits.clone())
        if sampling.top_k:
            theirs = TopKLogitsWarper(sampling.top_k)(None, theirs)
        if sampling.top_p < 1:
            theirs = TopPLogitsWarper(sampling.top_p)(None, theirs)
        torch.testing.assert_close(probabilities(logits, sampling), theirs.softmax(-1))


def test_a_row_draws_by_its_own_generator() -> None:
    p = torch.full((2, 3, 8), 1 / 8)
    both = draw(p, [torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)], [3, 2])
    alone = draw(p[1:, :2], [torch.Generator().manual_seed(2)], [2])
    assert both[1].tolist() == [*alone[0].tolist(), 0]


def test_draws_by_exponential_variates_are_the_same_draws() -> None:
    p, counts = torch.randn(2, 5, 300).softmax(-1), [5, 2]
    generators = [[torch.Generator().manual_seed(seed) for seed in (1, 2)] for _ in range(2)]
    noise = exponentials(5, 300, generators[0], counts)
    assert torch.equal(drawn(p, noise), draw(p, generators[1], counts))
    assert [g.get_state().tolist() for g in generators[0]] == [g.get_state().tolist() for g in generators[1]]
