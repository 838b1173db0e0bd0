"""SAM decoding: what is copied from text and corpus, when another drafter is asked, how official code differs."""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace
from typing import Any

import parity
import pytest
import tiny
import tiny_datastore
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity_made import OFFICIAL
from tiny_folder import Workplace, specbench

from specbench.build import make
from specbench.config import RunConfig
from specbench.decoding.draft import Draft, Drafter
from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Request
from specbench.decoding.suffix_automaton import SuffixAutomaton
from specbench.errors import SpecbenchError
from specbench.measure.clock import NullClock
from specbench.spec import parse_spec

Sam = importlib.import_module("specbench.methods.sam").Sam
TokenRecycling = importlib.import_module("specbench.methods.token_recycling").TokenRecycling
FOLDERS = sorted(OFFICIAL.glob("sam-decoding-*"))
TARGET = SimpleNamespace(vocab_size=60, device=torch.device("cpu"), tokenizer=None)


def alone(**options: Any) -> Any:
    return Sam(TARGET, fallback="none", **options)


def proposal(drafter: Any, text: list[int], budget: int = 100) -> list[int]:
    drafter.begin([text])
    return list(drafter.propose([budget], None)[0].tokens)


def scanned(text: list[int], k: int, threshold: int) -> list[int]:
    """The rule said once more, by scanning: the last token is what the copy follows, and is not copied itself."""
    known, firsts = text[:-1], {}
    for length in range(1, len(text)):
        ends = [end for end in range(length, len(known) + 1) if text[end - length : end] == text[-length:]]
        if ends:
            firsts[length] = ends[0]
    if max(firsts, default=0) < threshold:
        return []
    enough = [length for length, end in firsts.items() if len(known) - end > k]
    end = firsts[max(enough, default=1)]
    return known[end : end + k]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 8), st.integers(1, 4))
def test_copies_are_those_of_a_plain_scan(text: list[int], k: int, threshold: int) -> None:
    assert proposal(alone(k=k, threshold=threshold), text) == scanned(text, k, threshold)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 2), max_size=8), min_size=1, max_size=4), st.randoms())
def test_the_automaton_knows_every_substring_of_texts_that_grow_by_turns(
    texts: list[list[int]], dice: Any
) -> None:
    automaton, ends = SuffixAutomaton(), [0] * len(texts)
    turns = [number for number, text in enumerate(texts) for _ in text]
    dice.shuffle(turns)
    done = [0] * len(texts)
    for number in turns:
        ends[number] = automaton.extend(ends[number], texts[number][done[number]])
        done[number] += 1
    strings = {tuple(t[a:b]) for t in texts for a in range(len(t)) for b in range(a + 1, len(t) + 1)}
    for string in strings:
        assert automaton.match(list(string))[1] == len(string)
        absent = [token for token in range(3) if (*string, token) not in strings]
        assert all(automaton.match([*string, token])[1] <= len(string) for token in absent)
    assert sum(
        automaton.length[s] - automaton.length[automaton.link[s]] for s in range(1, len(automaton.next))
    ) == len(strings), "each string is in one state"


def test_a_short_match_is_not_used() -> None:
    text = [1, 2, 3, 4, 9, 1, 2]
    assert proposal(alone(threshold=2, k=3), text) == [3, 4, 9]
    assert proposal(alone(threshold=3, k=3), text) == []
    assert proposal(alone(threshold=2, k=3), text, budget=1) == [3]


def test_a_longer_match_in_the_corpus_wins_by_more_than_the_bias() -> None:
    corpus = tiny_datastore.store([8, 1, 2, 3, 50, 51], [7, 1, 2, 3, 40, 41, 42])
    text = [2, 3, 30, 31, 7, 1, 2, 3]  # 2 3 in the text, 7 1 2 3 in the corpus
    for bias, copied in ((0, [40, 41, 42]), (1, [40, 41, 42]), (2, [30, 31, 7])):
        assert proposal(alone(threshold=1, k=3, bias=bias, corpus=corpus), text) == copied
    assert proposal(alone(threshold=3, k=3, bias=1, corpus=corpus), text) == [40, 41, 42], "none in the text"
    assert proposal(alone(threshold=4, k=3, bias=1, corpus=corpus), text) == []


def test_a_match_in_the_corpus_grows_with_the_text() -> None:
    corpus = tiny_datastore.store([5, 1, 2, 3, 4, 6, 7, 8])
    drafter = alone(threshold=3, bias=0, k=2, corpus=corpus)
    assert proposal(drafter, [9, 1, 2]) == []
    for tokens, copied in (([3], [4, 6]), ([4, 6], [7, 8]), ([9], []), ([5, 1], []), ([2], [3, 4])):
        drafter.observe(SimpleNamespace(tokens=[tokens]))
        assert list(drafter.propose([9], None)[0].tokens) == copied


def test_otherwise_than_in_the_official_code_a_document_ends_a_draft() -> None:
    corpus = tiny_datastore.store([1, 2, 3], [4, 5, 6, 1, 2, 7])
    assert proposal(alone(threshold=2, bias=0, k=5, corpus=corpus), [1, 2]) == [3]
    assert proposal(alone(threshold=1, bias=0, k=5, corpus=corpus), [3]) == [], (
        "and nothing follows it is no match"
    )


def test_otherwise_than_in_the_official_code_drafts_are_not_filled_up_with_token_0() -> None:
    assert proposal(alone(threshold=2, k=30), [1, 2, 3, 1, 2]) == [3, 1]


def test_otherwise_than_in_the_official_code_the_fallback_forgets_between_prompts() -> None:
    target = tiny.llama(64)
    prompts = tiny.prompts(2, 64, seed=5)

    def drafts(warm: bool, asked: list[list[int]]) -> list[Any]:
        fallback = TokenRecycling(target, tree="sam", warm=warm)
        drafter, heard = Sam(target, fallback=fallback), []
        assert drafter.warm == warm
        propose = drafter.propose
        drafter.propose = lambda *args: heard.append(propose(*args)) or heard[-1]
        for prompt in asked:
            heard.clear()
            list(DraftVerify(target, drafter).generate(Request([prompt], 12), NullClock()))
        return [[int(token) for token in draft.tokens] for (draft,) in heard]

    assert drafts(False, prompts) == drafts(False, prompts[1:]) == drafts(True, prompts[1:])
    assert drafts(True, prompts) != drafts(True, prompts[1:])


class Noted(Drafter):
    """Proposes 7 and notes what it is asked."""

    max_nodes = 90

    def propose(self, budgets: list[int], generators: object) -> list[Draft]:
        self.budgets = list(budgets)
        return [Draft([7]) if budget else Draft() for budget in budgets]


def test_the_fallback_is_asked_for_rows_without_a_copy() -> None:
    noted = Noted(TARGET)
    drafter = Sam(TARGET, threshold=2, k=2, fallback=noted)
    drafter.begin([[1, 2, 3, 1, 2], [1, 2, 3], [1, 2]])
    assert [list(draft.tokens) for draft in drafter.propose([5, 4, 0], None)] == [[3, 1], [7], []]
    assert noted.budgets == [0, 4, 0]
    assert drafter.max_nodes == 90
    assert Sam(TARGET, k=20, fallback="none").max_nodes == 20


def test_its_identity_is_that_of_corpus_and_fallback() -> None:
    corpus, noted = tiny_datastore.store([1, 2]), Noted(TARGET)
    assert alone().draft_identity() is None
    assert alone(corpus=corpus).draft_identity() == corpus.identity()
    noted.draft_identity = lambda: {"name": "heads"}
    both = Sam(TARGET, corpus=corpus, fallback=noted).draft_identity()
    assert both == {"name": "in-memory + heads", "parts": [corpus.identity(), {"name": "heads"}]}


def test_its_fallback_is_listed_as_it_is_written() -> None:
    listed = specbench("ls", "methods", "--json").out
    assert "fallback=(token-recycling:tree=sam)" in listed


def test_as_a_spec() -> None:
    target, config = tiny.llama(64), RunConfig("t", (), ("x",))
    drafter = make(parse_spec("sam"), target, config)
    assert isinstance(drafter.parts[0], TokenRecycling)
    assert drafter.parts[0].tree.width == 60
    assert make(parse_spec("sam:fallback=none,k=3"), target, config).parts == ()
    nested = make(parse_spec("sam:fallback=(prompt-lookup:k=3)"), target, config)
    assert (nested.parts[0].max_nodes, nested.max_nodes) == (3, 39)
    with pytest.raises(SpecbenchError, match=r"fallback=suffix of sam is not a SPEC in parentheses or none$"):
        make(parse_spec("sam:fallback=suffix"), target, config)
    with pytest.raises(SpecbenchError, match="there is no datastore nowhere"):
        make(parse_spec("sam:corpus=nowhere"), target, config)


@pytest.mark.parametrize("options", [{"k": 0}, {"threshold": 0}, {"bias": -1}])
def test_nonsense_is_refused(options: dict) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        alone(**options)


def test_in_a_run(fresh: Workplace) -> None:
    result = fresh.run("--method", "sam:threshold=2", "--method", "suffix:tree=true,factor=2", "--json")
    assert result.code == 0, result.err
    rows = [row for row in json.loads(result.out)["rows"] if row["task"] == "overall"]
    assert all(
        row["identical"] == row["compared"] and row["lossless"] for row in rows if row["method"] != "vanilla"
    )
    assert {row["state"] for row in rows} == {"cold"}


@pytest.mark.skipif(not FOLDERS, reason="the golden files are not on this machine")
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_golden_folder(folder: Any) -> None:
    rounds = sum(map(len, json.loads((folder / "golden.json").read_text())["rounds"]))
    assert parity.check(folder) == f"ok: {rounds} rounds of 8 prompts"


@pytest.mark.skipif(not FOLDERS, reason="the golden files are not on this machine")
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_single_look_ups_are_the_official_ones(folder: Any) -> None:
    for case in json.loads((folder / "golden.json").read_text())["sam_cases"]:
        drafter, text = alone(k=case["n_predicts"] - 1, threshold=1), []
        for step in case["steps"]:
            text = text + step["added"]
            for token, length, official in step["lookups"]:
                copied = proposal(drafter, [*text, token])
                assert bool(copied) <= (length > 0)
                assert (
                    not length or [token, *copied] + [0] * (case["n_predicts"] - 1 - len(copied)) == official
                )
