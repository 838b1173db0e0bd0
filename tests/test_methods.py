"""What single methods promise: prompt lookup's proposals, the oracle's rate, which drafts are refused."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Request
from specbench.errors import SpecbenchError
from specbench.measure.clock import NullClock
from specbench.models.drafts import check_same_vocabulary, open_draft_model

PARITY = Path(__file__).parents[2] / "shared" / "parity" / "prompt-lookup" / "golden.json"
PromptLookup = importlib.import_module("specbench.methods.prompt_lookup").PromptLookup
Oracle = importlib.import_module("specbench.methods.oracle").Oracle
DraftModel = importlib.import_module("specbench.methods.draft_model").DraftModel


def proposal(ids: list[int], k: int, ngram: int, **options: bool) -> list[int]:
    drafter = PromptLookup(None, k=k, ngram=ngram, **options)
    drafter.begin([ids])
    return list(drafter.propose([1000], None)[0].tokens)


def original(ids: list[int], k: int, ngram: int) -> list[int]:
    """The README's function, said once more from its description: a slow scan for the leftmost match."""
    for n in range(min(ngram, len(ids)), 0, -1):
        for start in range(len(ids) - n + 1):
            end = start + n
            if ids[start:end] == ids[len(ids) - n :] and end + k <= len(ids) and end < len(ids) - n:
                return ids[end : end + k]
    return []


@pytest.mark.skipif(not PARITY.is_file(), reason="the golden files are not on this machine")
def test_prompt_lookup_proposes_what_the_original_function_does() -> None:
    cases = json.loads(PARITY.read_text())["cases"]
    compared = 0
    for case in cases:
        for ngram, k, expected in case["original"]:
            assert proposal(case["input_ids"], k, ngram) == expected
            compared += bool(expected)
    assert compared > 100, "the cases should mostly have proposals"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 6), st.integers(1, 4))
def test_prompt_lookup_equals_a_plain_scan(ids: list[int], k: int, ngram: int) -> None:
    assert proposal(ids, k, ngram) == original(ids, k, ngram)
    partial = proposal(ids, k, ngram, partial=True)
    assert len(partial) <= k
    if original(ids, k, ngram):
        assert partial, "partial matches are taken besides, not instead"


def test_prompt_lookup_takes_short_continuations_only_if_asked() -> None:
    assert proposal([1, 2, 3, 1, 2], k=4, ngram=2) == []
    assert proposal([1, 2, 3, 1, 2], k=4, ngram=2, partial=True) == [3, 1, 2]


def test_prompt_lookup_learns_from_what_is_emitted() -> None:
    grown = PromptLookup(None, k=3, ngram=2)
    grown.begin([[5, 6]])
    for tokens in ([7, 8, 9], [1], [5, 6]):
        grown.observe(SimpleNamespace(tokens=[tokens]))
    assert list(grown.propose([9], None)[0].tokens) == proposal([5, 6, 7, 8, 9, 1, 5, 6], 3, 2) == [7, 8, 9]
    assert list(grown.propose([2], None)[0].tokens) == [7, 8]
    assert list(grown.propose([0], None)[0].tokens) == []


@pytest.mark.parametrize(("rate", "tree"), [(0.0, 0), (0.5, 0), (1.0, 0), (0.5, 30), (1.0, 30)])
def test_oracle_is_right_as_often_as_told(rate: float, tree: int) -> None:
    target = tiny.llama()
    prompts = tiny.prompts(4, 64, seed=1)
    new, k = 120, 4
    vanilla = list(
        DraftVerify(target, Oracle.__mro__[1](target)).generate(Request(prompts, new), NullClock())
    )
    answer = [[t for r in vanilla for t in r.tokens[row]] for row in range(4)]
    method = DraftVerify(target, Oracle(target, rate=rate, k=k, tree=tree))
    method.set_answer(answer)
    rounds = list(method.generate(Request(prompts, new), NullClock()))
    assert [[t for r in rounds for t in r.tokens[row]] for row in range(4)] == answer
    full = [
        (r.drafted[row], r.accepted[row])
        for r in rounds[1:]
        for row in range(4)
        if r.depth[row] == k and r.tokens[row]
    ]
    assert {drafted for drafted, _ in full} == {tree or k}
    first_right = sum(accepted >= 1 for _, accepted in full) / len(full)
    assert abs(first_right - rate) < 0.12
    if rate == 1:
        assert {accepted for _, accepted in full} == {k}


@pytest.mark.parametrize("options", [{"rate": 1.5}, {"k": 0}, {"tree": -1}])
def test_oracle_refuses_nonsense(options: dict) -> None:
    with pytest.raises(ValueError, match="rate must lie"):
        Oracle(None, **options)


class Words:
    """A tokenizer reduced to its vocabulary."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)}


def speaker(words: list[str], width: int = 64):
    return SimpleNamespace(tokenizer=Words(words), vocab_size=width)


def test_a_draft_must_speak_the_same_ids() -> None:
    words = [f"w{i}" for i in range(50)]
    check_same_vocabulary(speaker(words), speaker(words, width=96))
    check_same_vocabulary(speaker(words), speaker([*words, "<extra>"]))
    with pytest.raises(SpecbenchError, match="id 7 is 'other' there and 'w7' in the target"):
        check_same_vocabulary(speaker(words), speaker([*words[:7], "other", *words[8:]]))
    with pytest.raises(SpecbenchError, match="knows 20 of the target's 50"):
        check_same_vocabulary(speaker(words), speaker(words[:20]))


def test_without_tokenizers_sizes_decide() -> None:
    check_same_vocabulary(tiny.llama(64), tiny.llama(64))
    with pytest.raises(SpecbenchError, match="48 token ids and the target 64"):
        open_draft_model(tiny.llama(48), tiny.llama(64), "draft-model")


def test_a_draft_model_is_needed() -> None:
    with pytest.raises(SpecbenchError, match="needs a draft model"):
        DraftModel(tiny.llama())


def test_heuristic_schedule_grows_and_shrinks() -> None:
    target = tiny.llama()
    method = DraftVerify(
        target, DraftModel(target, draft=tiny.build(target.config, 0), k=2, schedule="heuristic")
    )
    rounds = list(method.generate(Request(tiny.prompts(1, 64), 60), NullClock()))
    lengths = [r.drafted[0] for r in rounds[1:-1]]
    assert lengths == [min(2 + 2 * i, 32) for i in range(len(lengths))], "always right: two more each round"
    wrong = DraftVerify(target, DraftModel(target, draft=tiny.llama(seed=9), k=3, schedule="heuristic"))
    rounds = list(wrong.generate(Request(tiny.prompts(1, 64), 20), NullClock()))
    assert [r.drafted[0] for r in rounds[1:6]] == [3, 2, 1, 1, 1]
