"""Suffix decoding: its counts, the drafts they make, what it keeps between prompts, and parity with golden files."""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import parity
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parity_made import OFFICIAL

from specbench.decoding.suffix_tree import Rule, SuffixTree, Text

Suffix = importlib.import_module("specbench.methods.suffix").Suffix
GOLDEN = OFFICIAL / "suffix-decoding"

tokens = st.lists(st.integers(0, 3), max_size=12)
# What happens to a tree: (text, tokens) are appended to a text; (text, None) removes it.
histories = st.lists(st.tuples(st.integers(0, 2), tokens | st.none()), min_size=1, max_size=12)


def grown(history: list[tuple[int, list[int] | None]], depth: int) -> tuple[SuffixTree, list[list[int]]]:
    """A tree with a history, and the texts that are left in it."""
    tree, texts = SuffixTree(depth), {}
    for number, new in history:
        text = texts.setdefault(number, Text())
        if new is None:
            tree.remove(texts.pop(number))
        else:
            tree.append(text, new)
    return tree, [text.tokens for text in texts.values()]


def occurrences(texts: list[list[int]], depth: int) -> Counter[tuple[int, ...]]:
    return Counter(
        tuple(text[start : start + length])
        for text in texts
        for start in range(len(text))
        for length in range(1, min(depth, len(text) - start) + 1)
    )


@settings(max_examples=200, deadline=None, derandomize=True)
@given(histories, st.integers(2, 6))
def test_counts_are_those_of_a_plain_scan(history: list[tuple[int, list[int] | None]], depth: int) -> None:
    tree, texts = grown(history, depth)
    counted = occurrences(texts, depth)
    for string, count in counted.items():
        state, length = tree.match(list(string))
        assert (length, tree.count[state]) == (len(string), count)
        if len(string) < depth:
            after = {token: counted[*string, token] for token in range(4) if counted[*string, token]}
            order = list(tree._followers(state))
            assert sorted(order) == sorted(after)
            assert [after[token] for token in order] == sorted(after.values(), reverse=True)
    assert len(tree.next) <= 2 * sum(len(new or []) for _, new in history) + 1, (
        "states are linear in the texts"
    )


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    histories,
    tokens,
    st.integers(2, 7),
    st.builds(Rule, st.integers(1, 8), st.sampled_from([0.5, 1, 3]), st.sampled_from([0, 1]),
              st.sampled_from([0.0, 0.1, 0.4]), st.booleans()),
    st.integers(0, 6),
)  # fmt: skip
def test_a_draft_is_the_best_of_all_matches(
    history: list[tuple[int, list[int] | None]], context: list[int], depth: int, rule: Rule, budget: int
) -> None:
    tree, texts = grown(history, depth)
    counted = occurrences(texts, depth)
    draft = tree.speculate(context, rule, budget)
    if draft.tokens:
        check_draft(draft, context, counted, rule, min(depth - draft.match, budget))
    worst, best = (
        max(
            (path_score(m, context, counted, rule, depth, budget, pick) for m in range(1, len(context))),
            default=0,
        )
        for pick in (min, max)
    )
    assert draft.score > worst - 1e-5
    assert rule.tree or draft.score < best + 1e-5
    assert not rule.tree or draft.score > best - 1e-5, "a tree never scores less than the best path"


def check_draft(draft, context: list[int], counted: Counter, rule: Rule, room: int) -> None:
    """Its nodes are likely enough, each as likely as the counts say, and no more or deeper than allowed."""
    match = tuple(context[-draft.match :])
    assert draft.match < len(context)
    assert len(draft.tokens) <= rule.most(draft.match)
    paths: list[tuple[int, ...]] = []
    for token, parent, prob in zip(draft.tokens, draft.parents, draft.probs, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
        assert prob == pytest.approx(counted[match + paths[-1]] / counted[match], abs=1e-6)
        assert prob >= rule.min_prob - 1e-6
        assert len(paths[-1]) <= room
    assert draft.score == pytest.approx(sum(draft.probs), abs=1e-5)


def path_score(
    match: int,
    context: list[int],
    counted: Counter,
    rule: Rule,
    depth: int,
    budget: int,
    pick: Callable[..., float],
) -> float:
    """The sum of probabilities along the most frequent tokens; of equals the one to `pick`: they may part later."""
    string = tuple(context[-match:])
    if match >= depth or not counted[string]:
        return 0
    room = min(depth - match, budget, rule.most(match))

    def along(path: tuple[int, ...], left: int) -> float:
        after = {token: counted[(*string, *path, token)] for token in range(4)}
        count = max(after.values())
        prob = count / counted[string]
        if left < 1 or not count or prob < rule.min_prob - 1e-9:
            return 0
        return pick(prob + along((*path, token), left - 1) for token, n in after.items() if n == count)

    return along((), room)


def proposal(drafter, budget: int = 100) -> list[int]:
    return list(drafter.propose([budget], None)[0].tokens)


def say(drafter, *rows: list[int]) -> None:
    drafter.observe(SimpleNamespace(tokens=list(rows)))


def test_the_longer_the_match_the_longer_the_draft() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    for match, options, length in ((1, {}, 1), (3, {}, 3), (3, {"factor": 0.5}, 1), (3, {"offset": 2.0}, 5),
                                   (1, {"offset": -1.0}, 0), (3, {"k": 2}, 2), (3, {"depth": 5}, 2)):  # fmt: skip
        drafter = Suffix(None, min_prob=0.0, **options)
        drafter.begin([[*text, *text[:match]]])
        assert proposal(drafter) == text[match : match + length], (match, options)


def test_it_stops_where_it_is_not_sure_enough() -> None:
    prompt = [1, 2, 3, 1, 2, 4, 1, 2, 3, 9, 1, 2]  # 1 2 came four times, twice with 3 after it, once 3 1
    for least, length in ((0.6, 0), (0.4, 1), (0.2, 2)):
        drafter = Suffix(None, min_prob=least)
        drafter.begin([prompt])
        assert len(proposal(drafter)) == length
        assert proposal(drafter)[:1] == [3][:length]


def test_a_tree_branches_where_the_text_did() -> None:
    drafter = Suffix(None, tree=True, factor=3, min_prob=0.0)
    drafter.begin([[1, 2, 3, 4, 1, 2, 5, 6, 1, 2]])
    (draft,) = drafter.propose([1], None)
    assert sorted(draft.tokens) == [3, 5]
    assert draft.parents == [-1, -1]


def test_answers_count_for_themselves() -> None:
    """What the prompt said often does not dilute what the answer says."""
    prompt, answer = [1, 9, 1, 8, 1, 7, 1, 6], [1, 2, 1]
    for answers, tokens in ((0, [9]), (1, [2])):
        drafter = Suffix(None, answers=answers, k=1)
        drafter.begin([prompt])
        say(drafter, answer)
        assert proposal(drafter) == tokens


def test_warm_answers_serve_later_prompts_and_other_rows() -> None:
    first, second = [7, 7], [5, 6]
    for warm, tokens in ((False, []), (True, [3, 4])):
        drafter = Suffix(None, warm=warm)
        drafter.begin([first])
        say(drafter, [1, 2, 3, 4])
        drafter.begin([second, second])
        say(drafter, [1, 2], [8, 9])
        assert [list(draft.tokens) for draft in drafter.propose([9, 9], None)] == [tokens, []]
        say(drafter, [], [1, 2])
        assert list(drafter.propose([0, 9], None)[1].tokens)[:1] == tokens[:1], (
            "cold rows do not see each other"
        )
        drafter.forget()
        drafter.begin([second])
        say(drafter, [1, 2])
        assert proposal(drafter) == []


def test_the_oldest_answer_leaves() -> None:
    drafter = Suffix(None, warm=True, answers=2)
    for answer in ([1, 2, 3], [4, 5, 6]):
        drafter.begin([[0]])
        say(drafter, answer)
    drafter.begin([[0]])
    say(drafter, [4, 5])
    assert proposal(drafter)[:1] == [6]
    drafter.begin([[0]])
    say(drafter, [1, 2])
    assert proposal(drafter) == []


def test_what_left_takes_no_room() -> None:
    """However many answers come and go, and those that are left are drafted from as ever."""
    drafter = Suffix(None, warm=True, answers=2)
    for number in range(40):
        drafter.begin([[0]])
        say(drafter, [number * 10 + digit for digit in range(9)])
        assert len(drafter._kept.tree.next) <= 6 * 9 + 1, (
            "those kept, as much again that left, and the newest"
        )
    drafter._kept.most = 9  # so that asking moves nothing out
    for place, token in ((380, [382]), (390, [392]), (370, [])):
        drafter.begin([[0]])
        say(drafter, [place, place + 1])
        assert proposal(drafter)[:1] == token


def test_an_answer_goes_on_after_the_tree_was_made_anew() -> None:
    drafter = Suffix(None, warm=True, answers=2)
    for answer in ([1] * 30, [2] * 30):
        drafter.begin([[0]])
        say(drafter, answer)
    drafter.begin([[0], [0]])  # both leave
    say(drafter, [3, 4, 5, 3, 4], [6])
    drafter.begin([[0]])
    say(drafter, [8])
    assert len(drafter._kept.tree.next) < 20
    drafter.begin([[7]])
    say(drafter, [8])
    assert proposal(drafter) == []


def test_an_answer_that_left_while_it_was_written_is_no_longer_kept() -> None:
    drafter = Suffix(None, warm=True, answers=1)
    drafter.begin([[0], [0]])
    say(drafter, [1, 2, 3], [4, 5])
    drafter.begin([[9]])
    say(drafter, [1, 2])
    assert proposal(drafter) == []


@pytest.mark.parametrize(
    "options",
    [
        {"k": 0},
        {"depth": 1},
        {"answers": -1},
        {"factor": -1.0},
        {"factor": math.inf},
        {"factor": math.nan},
        {"offset": math.nan},
        {"offset": -math.inf},
        {"min_prob": 1.5},
        {"warm": True, "answers": 0},
    ],
)
def test_nonsense_is_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=r"must be|must lie|keeps"):
        Suffix(None, **options)


def test_no_finite_factor_is_too_large() -> None:
    drafter = Suffix(None, factor=1e308, offset=1e308, k=4)
    drafter.begin([[1, 2, 3, 4, 5, 6, 7, 1, 2, 3]])
    assert proposal(drafter) == [4, 5, 6, 7]


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="the golden files are not on this machine")
def test_golden_folder() -> None:
    assert parity.check(GOLDEN) == "ok: 315 rounds of 8 prompts, 129 logged drafts"
