"""The loop is lossless: greedy float32 output of every drafter equals transformers' own greedy `generate`."""

from __future__ import annotations

import importlib
import random
from collections.abc import Sequence

import pytest
import tiny
import tiny_datastore
import torch
from transformers import (
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

from specbench.decoding.draft import Draft, Drafter, Probes
from specbench.decoding.draft_length import DraftLength
from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Method, Request, Round
from specbench.decoding.sampling import Sampling
from specbench.measure.clock import Clock, NullClock
from specbench.models.target import Target

VOCAB, NEW = 64, 40


def method_class(name: str) -> type:
    module = importlib.import_module(f"specbench.methods.{name}")
    return next(
        v
        for v in vars(module).values()
        if isinstance(v, type) and v.__module__ == module.__name__ and issubclass(v, Drafter | Method)
    )


DraftModel, PromptLookup, Oracle = map(method_class, ("draft_model", "prompt_lookup", "oracle"))
SelfSpeculation = method_class("self_speculation")
Lookahead, TokenRecycling, Rest = map(method_class, ("lookahead", "token_recycling", "rest"))
Suffix, Sam, Cascade = map(method_class, ("suffix", "sam", "cascade"))

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2}
ARCHITECTURES = {
    "llama": (LlamaConfig(**SMALL), "sdpa"),
    "llama-eager": (LlamaConfig(**SMALL), "eager"),
    "mistral-sliding": (MistralConfig(**SMALL, sliding_window=9), "sdpa"),
    "gemma3": (Gemma3TextConfig(**{**SMALL, "num_hidden_layers": 6}, sliding_window=9), "sdpa"),
    "mixtral": (MixtralConfig(**SMALL, **EXPERTS, num_local_experts=4), "sdpa"),
    "qwen3-moe": (Qwen3MoeConfig(**SMALL, **EXPERTS, num_experts=4, moe_intermediate_size=32), "sdpa"),
    "gpt-oss": (GptOssConfig(**SMALL, **EXPERTS, num_local_experts=4, sliding_window=9), "eager"),
}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def target(request: pytest.FixtureRequest) -> Target:
    config, attention = ARCHITECTURES[request.param]
    return tiny.build(config, seed=1, attn=attention).fuse()


@pytest.fixture(scope="module")
def llama() -> Target:
    return tiny.llama(VOCAB)


def hf_greedy(target: Target, prompt: list[int], new: int = NEW, stop: Sequence[int] = ()) -> list[int]:
    """transformers' own answer, with its own attention and cache."""
    ids = torch.tensor([prompt])
    with target.stock_attention():
        out = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=list(stop) or None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def generate(method: Method, request: Request) -> tuple[list[list[int]], list[Round]]:
    rounds = list(method.generate(request, NullClock()))
    return [[t for r in rounds for t in r.tokens[row]] for row in range(len(request.prompts))], rounds


class RandomTrees(Drafter):
    """Random trees whose nodes are right about half the time: every shape of acceptance and compaction."""

    max_nodes = 12

    def __init__(self, target: Target, answers: dict[tuple[int, ...], list[int]]) -> None:
        super().__init__(target)
        self.answers, self.dice = answers, random.Random(0)

    def begin(self, prompts: list[list[int]]) -> None:
        self.truths = [self.answers[tuple(prompt)] for prompt in prompts]
        self.done = [0] * len(prompts)

    def observe(self, outcome) -> None:
        self.done = [done + len(new) for done, new in zip(self.done, outcome.tokens, strict=True)]

    def propose(self, budgets: list[int], generators: object) -> list[Draft]:
        return [
            self.tree(truth[done:], b) for truth, done, b in zip(self.truths, self.done, budgets, strict=True)
        ]

    def tree(self, truth: list[int], budget: int) -> Draft:
        nodes: list[tuple[int, int, int]] = []  # parent, token, depth
        for _ in range(self.max_nodes if budget else 0):
            parent = self.dice.randrange(-1, len(nodes))
            depth = 1 if parent < 0 else nodes[parent][2] + 1
            token = (
                truth[depth - 1]
                if depth <= len(truth) and self.dice.random() < 0.6
                else self.dice.randrange(VOCAB)
            )
            if depth <= budget and all((p, t) != (parent, token) for p, t, _ in nodes):
                nodes.append((parent, token, depth))
        return Draft([t for _, t, _ in nodes], [p for p, _, _ in nodes])


@pytest.mark.parametrize("rows", [1, 4])
def test_greedy_equals_transformers(target: Target, rows: int) -> None:
    prompts = tiny.prompts(rows, VOCAB, seed=2)
    answers = {tuple(prompt): hf_greedy(target, prompt) for prompt in prompts}
    draft = Target(target.model)
    drafters = {
        "vanilla": Drafter(target),
        "prompt-lookup": PromptLookup(target, k=4, ngram=2, partial=True),
        "self-draft": DraftModel(target, draft=draft, k=3),
        "self-draft, k=auto": DraftModel(target, draft=draft, k="auto"),
        "self-speculation": SelfSpeculation(target),
        "early exit, k=auto": SelfSpeculation(target, exit=1, k="auto", threshold=0.3),
        "layer search": SelfSpeculation(target, search=True, k=2),
        "random trees": RandomTrees(target, answers),
        "lookahead": Lookahead(target, level=4, window=4, guess=3, pool_from_prompt=True),
        "token recycling": TokenRecycling(target),
        "rest": Rest(target, datastore=tiny_datastore.store(*answers.values()), shortest=1),
        "suffix": Suffix(target),
        "suffix tree": Suffix(target, tree=True, factor=2, offset=1, warm=True),
        "sam": Sam(target, threshold=2, fallback=TokenRecycling(target, tree="sam")),
        "sam of a corpus": Sam(
            target, corpus=tiny_datastore.store(*answers.values()), bias=0, fallback="none"
        ),
        "cascade": Cascade(
            target, first=PromptLookup(target, k=4, ngram=2), then=DraftModel(target, draft=draft, k=3)
        ),
        "cascade of probes": Cascade(
            target, first=Lookahead(target, level=4, window=4), then=TokenRecycling(target)
        ),
        "cascade that ends in probes": Cascade(
            target,
            first=PromptLookup(target, k=4, ngram=2, partial=True),
            then=Lookahead(target, level=5, window=4),
        ),
        "sam with probes": Sam(target, threshold=2, fallback=Lookahead(target, level=5, window=4)),
    }
    for name, drafter in drafters.items():
        outputs, _ = generate(DraftVerify(target, drafter), Request(prompts, NEW))
        assert outputs == list(answers.values()), name


@pytest.mark.parametrize(
    "options", [{}, {"schedule": "heuristic"}, {"schedule": "confidence", "threshold": 0.2}]
)
@pytest.mark.parametrize("rows", [1, 4])
def test_a_poor_draft_changes_nothing(llama: Target, options: dict, rows: int) -> None:
    prompts = tiny.prompts(rows, VOCAB, seed=3)
    drafter = DraftModel(llama, draft=noisy_copy(llama, 0.02), k=4, **options)
    outputs, rounds = generate(DraftVerify(llama, drafter), Request(prompts, NEW))
    assert outputs == [hf_greedy(llama, prompt) for prompt in prompts]
    accepted = sum(n for r in rounds for n in r.accepted)
    drafted = sum(n or 0 for r in rounds for n in r.drafted)
    assert 0 < accepted < drafted, "the draft should be right sometimes and wrong sometimes"


def noisy_copy(target: Target, noise: float) -> Target:
    copy = tiny.llama(VOCAB)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight, own in zip(copy.model.parameters(), target.model.parameters(), strict=True):
            weight.copy_(own + noise * torch.randn(own.shape, generator=generator))
    return copy


@pytest.mark.parametrize("name", ["hf_generate", "hf_prompt_lookup", "hf_assisted"])
def test_references_agree_with_vanilla(llama: Target, name: str) -> None:
    (prompt,) = tiny.prompts(1, VOCAB, seed=4)
    options = {"draft": noisy_copy(llama, 0.02), "k": 4} if name == "hf_assisted" else {}
    method = method_class(name)(llama, **options)
    clock = Clock()
    clock.start()
    rounds = list(method.generate(Request([prompt], NEW), clock))
    timings = clock.stop()
    assert [t for r in rounds for t in r.tokens[0]] == hf_greedy(llama, prompt)
    assert len(timings.round_s) == len(rounds) - 1, "each round after the prefill has its time"
    for one in rounds[1:-1]:
        assert len(one.tokens[0]) == one.accepted[0] + 1
        assert one.accepted[0] <= one.drafted[0]


@pytest.mark.parametrize("k", [1, 3, 6])
def test_the_target_as_its_own_draft_is_always_right(llama: Target, k: int) -> None:
    prompts = tiny.prompts(4, VOCAB, seed=6)
    method = DraftVerify(llama, DraftModel(llama, draft=Target(llama.model), k=k))
    _, rounds = generate(method, Request(prompts, NEW))
    for one in rounds[1:-1]:
        assert one.accepted == [k] * 4
        assert [len(tokens) for tokens in one.tokens] == [k + 1] * 4


def test_a_round_costs_the_draft_k_passes(llama: Target) -> None:
    draft = noisy_copy(llama, 0.02)
    passes = []
    draft.model.register_forward_pre_hook(lambda *_: passes.append(1))
    _, rounds = generate(
        DraftVerify(llama, DraftModel(llama, draft=draft, k=4)), Request(tiny.prompts(1, VOCAB), NEW)
    )
    assert len(passes) == sum(r.drafted[0] for r in rounds[1:])


@pytest.mark.parametrize("rows", [1, 3])
def test_stop_token_and_limit_are_exact(llama: Target, rows: int) -> None:
    prompts = tiny.prompts(rows, VOCAB, seed=7)
    free = [hf_greedy(llama, prompt, 24) for prompt in prompts]
    stop = frozenset({free[0][10], free[-1][5]})
    answers = {tuple(p): a for p, a in zip(prompts, free, strict=True)}
    for drafter in (
        Drafter(llama),
        RandomTrees(llama, answers),
        DraftModel(llama, draft=Target(llama.model), k=5),
    ):
        outputs, rounds = generate(DraftVerify(llama, drafter), Request(prompts, 24, stop))
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output == hf_greedy(llama, prompt, 24, sorted(stop))
            assert not stop & set(output[:-1]), "nothing follows a stop token"
        assert all(sum(map(len, r.tokens)) for r in rounds), "no round without a token"
        for limit in (1, 2, 7):
            outputs, _ = generate(DraftVerify(llama, drafter), Request(prompts, limit))
            assert [len(output) for output in outputs] == [limit] * rows


def test_accepted_counts_stop_at_the_stop_token(llama: Target) -> None:
    (prompt,) = tiny.prompts(1, VOCAB, seed=8)
    free = hf_greedy(llama, prompt, 20)
    method = DraftVerify(llama, DraftModel(llama, draft=Target(llama.model), k=19))
    _, rounds = generate(method, Request([prompt], 20, frozenset({free[4]})))
    first = free.index(free[4])
    assert rounds[1].accepted == [first]
    assert rounds[1].tokens == [free[1 : first + 1]]


class Listener(Drafter):
    """Takes down what it is told."""

    taps = ("embed", "layer:0", "final")
    max_nodes = 8

    def begin(self, prompts: list[list[int]]) -> None:
        self.heard = []

    def observe(self, outcome) -> None:
        self.heard.append(outcome)


def test_taps_and_logits_are_those_of_a_plain_forward(llama: Target) -> None:
    prompts = tiny.prompts(2, VOCAB, seed=9)
    drafter = Listener(llama)
    outputs, _ = generate(DraftVerify(llama, drafter), Request(prompts, 4))
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        with llama.stock_attention():
            plain = llama.model(torch.tensor([prompt + output]), output_hidden_states=True)
        embed, layer0, final = plain.hidden_states
        prefill, *rounds = drafter.heard
        for name, expected in (("embed", embed), ("layer:0", layer0), ("final", final)):
            torch.testing.assert_close(
                prefill.taps[name][row, : len(prompt)], expected[0, : len(prompt)], atol=1e-5, rtol=1e-4
            )
            for step, heard in enumerate(rounds):
                torch.testing.assert_close(
                    heard.taps[name][row, 0], expected[0, len(prompt) + step], atol=1e-5, rtol=1e-4
                )
        for step, heard in enumerate(rounds):
            torch.testing.assert_close(
                heard.logits[row, 0], plain.logits[0, len(prompt) + step], atol=1e-5, rtol=1e-4
            )


class Window(Drafter):
    """A candidate chain of two and three probes: a chain of their own that starts after the root."""

    max_nodes = 5

    def observe(self, outcome) -> None:
        if outcome.tree is not None and outcome.logits.shape[1] == 6:
            self.probe_logits = outcome.logits[:, 3:]

    def propose(self, budgets: list[int], generators: object) -> list[Draft]:
        visible = torch.zeros(3, 6, dtype=torch.bool)
        visible[:, 0] = True
        visible[:, 3:] = torch.ones(3, 3).tril().bool()
        probes = Probes([7, 8, 9], [1, 2, 3], visible)
        return [Draft([1, 2], probes=probes) if budget >= 3 else Draft() for budget in budgets]


@pytest.mark.parametrize("rows", [1, 2])
def test_probes_see_their_own_mask_and_change_nothing(llama: Target, rows: int) -> None:
    prompts = tiny.prompts(rows, VOCAB, seed=10)
    drafter = Window(llama)
    outputs, rounds = generate(DraftVerify(llama, drafter), Request(prompts, 5))
    assert outputs == [hf_greedy(llama, prompt, 5) for prompt in prompts]
    assert rounds[1].drafted == [2] * rows, "probes are not counted as drafted"
    for row, prompt in enumerate(prompts):
        with llama.stock_attention():
            plain = llama.model(torch.tensor([[*prompt, outputs[row][0], 7, 8, 9]])).logits[0, -3:]
        torch.testing.assert_close(drafter.probe_logits[row], plain, atol=1e-5, rtol=1e-4)


def test_a_row_does_not_depend_on_its_neighbours(llama: Target) -> None:
    prompts = tiny.prompts(3, VOCAB, seed=11)
    draft = noisy_copy(llama, 0.02)
    sampling = Sampling(0.9)

    def run(rows: list[int]) -> list[list[int]]:
        generators = [torch.Generator().manual_seed(100 + row) for row in rows]
        method = DraftVerify(llama, DraftModel(llama, draft=draft, k=3))
        return generate(
            method, Request([prompts[row] for row in rows], 20, frozenset(), sampling, generators)
        )[0]

    together = run([0, 1, 2])
    assert run([0, 1, 2]) == together, "same seeds, same tokens"
    assert [run([row])[0] for row in range(3)] == together


def test_a_draft_with_a_padded_vocabulary(llama: Target) -> None:
    """q over fewer or more ids than the target has: extended by zeros, or cut, and still exact greedily."""
    (prompt,) = tiny.prompts(1, VOCAB, seed=12)
    for size in (VOCAB - 8, VOCAB + 8):
        drafter = DraftModel.__new__(DraftModel)
        Drafter.__init__(drafter, llama)
        drafter.draft, drafter.length, drafter.threshold = tiny.llama(size, seed=3), DraftLength(3), 0.0
        drafter.max_nodes = 3
        method = DraftVerify(llama, drafter)
        outputs, _ = generate(method, Request([prompt], NEW))
        assert outputs == [hf_greedy(llama, prompt)]
        request = Request(
            [prompt], NEW, sampling=Sampling(1.0), generators=[torch.Generator().manual_seed(0)]
        )
        assert len(generate(method, request)[0][0]) == NEW
