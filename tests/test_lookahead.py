"""Lookahead: what its window and pool hold, and where it is not as the official code."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch

from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Request
from specbench.measure.clock import NullClock

Lookahead = importlib.import_module("specbench.methods.lookahead").Lookahead
VOCAB = 64


class Watched(Lookahead):
    """Takes down, for each pass: the text before it, the window in it, and the guesses the window brought."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[tuple[list[int], list[list[int]], list[int]]] = []

    def begin(self, prompts: list[list[int]]) -> None:
        super().begin(prompts)
        self.texts = [list(prompt) for prompt in prompts]
        for number, row in enumerate(self._rows):
            row.advance = self._noting(number, row, row.advance)

    def _noting(self, number: int, row: Any, advance: Any) -> Any:
        def noting(guesses: list[int]) -> None:
            self.seen.append((list(self.texts[number]), [list(line) for line in row.window], guesses))
            advance(guesses)

        return noting

    def observe(self, outcome: Any) -> None:
        super().observe(outcome)
        self.texts = [text + new for text, new in zip(self.texts, outcome.tokens, strict=True)]


@pytest.mark.parametrize("shape", [(5, 4), (3, 1), (2, 3)])
def test_each_guess_is_the_targets_own_after_what_its_column_holds(shape: tuple[int, int]) -> None:
    """Window and mask, against plain forwards over the tokens a column sees, in a row without gaps."""
    target, (level, window) = tiny.llama(VOCAB), shape
    drafter = Watched(target, level=level, window=window, guess=3)
    prompts = tiny.prompts(2, VOCAB, seed=1)
    for _ in DraftVerify(target, drafter).generate(Request(prompts, 20), NullClock()):
        pass
    widths = set()
    for text, lines, guesses in drafter.seen:
        widths.add((len(lines), len(guesses)))
        first, *others = lines
        for column, guess in enumerate(guesses):
            seen = [*text, *first[:column], *(line[column] for line in others)]
            with torch.no_grad(), target.stock_attention():
                logits = target.model(torch.tensor([seen])).logits[0, -1]
            assert int(logits.argmax()) == guess
    assert widths == {(rows, window + level - 1 - rows) for rows in range(1, level)}


def after(drafter: Any, *passes: tuple[list[int], list[int]]) -> Any:
    """The first row's state after passes that emitted tokens and brought guesses."""
    (row,) = drafter._rows
    for tokens, guesses in passes:
        row.advance(guesses)
        row.extend(tokens)
    return row


def begun(prompt: list[int], first_row: list[int], **options: Any) -> Any:
    drafter = Lookahead(None, **options)
    drafter.first_row = lambda _: first_row
    drafter.begin([prompt])
    return drafter


def test_the_pool_keeps_columns_by_the_token_before_them() -> None:
    drafter = begun([9], [11, 12, 13], level=3, window=3, guess=2)
    row = after(drafter, ([20], [30, 31, 32, 33]))
    assert row.window == [[12, 13], [31, 32, 33]], "filled: each row begins one token later"
    assert row.pool == {}
    row = after(drafter, ([21], [40, 41, 42]))
    assert row.pool == {20: {(31, 40): None}, 12: {(32, 41): None}, 13: {(33, 42): None}}
    assert row.window == [[32, 33], [40, 41, 42]], "full: the oldest row goes"


def test_the_least_recently_found_ngram_goes_first() -> None:
    row = begun([1], [1], level=3, window=1, guess=2)._rows[0]
    for rest in ((1, 1), (2, 2), (1, 1), (3, 3)):
        row.keep(7, rest)
    assert list(row.pool[7]) == [(1, 1), (3, 3)]


def test_the_pool_of_a_prompt_holds_the_text() -> None:
    """The official pool learns the last token of a round repeated; ours the tokens."""
    drafter = begun([1, 2, 3], [0, 0, 0], level=3, window=3, guess=4, pool_from_prompt=True)
    drafter.observe(SimpleNamespace(tree=None, tokens=[[4]]))
    drafter._rows[0].extend([5, 6])
    assert drafter._rows[0].pool == {
        1: {(2, 3): None}, 2: {(3, 4): None}, 3: {(4, 5): None}, 4: {(5, 6): None},
    }  # fmt: skip


def test_ngrams_that_begin_alike_share_nodes() -> None:
    """The official code verifies each as a chain of its own."""
    drafter = begun([1, 5], [0, 0], level=3, window=2, guess=3)
    row = after(drafter, ([5], [0, 0, 0]))
    for rest in ((6, 7), (6, 8), (9, 9)):
        row.keep(5, rest)
    (draft,) = drafter.propose([10], None)
    assert (draft.tokens, draft.parents) == ([6, 7, 8, 9, 9], [-1, 0, 0, -1, 3])
    (draft,) = drafter.propose([1], None)
    assert (draft.tokens, draft.parents) == ([6, 9], [-1, -1]), "no deeper than allowed"


@pytest.mark.parametrize("level", [2, 3, 5])
def test_an_ngram_that_matches_whole_is_accepted_whole(level: int) -> None:
    """The official code accepts one token less."""
    target = tiny.llama(VOCAB)
    (prompt,) = tiny.prompts(1, VOCAB, seed=1)
    vanilla = list(
        DraftVerify(target, Lookahead.__mro__[1](target)).generate(Request([prompt], 60), NullClock())
    )
    text = prompt + [one.tokens[0][0] for one in vanilla]
    drafter = Lookahead(target, level=level, window=3, guess=7, pool_from_prompt=True)
    rounds = list(DraftVerify(target, drafter).generate(Request([text], 40), NullClock()))
    assert max(one.accepted[0] for one in rounds[1:]) == level - 1


def test_the_first_row_is_of_the_prompt_and_the_same_each_time() -> None:
    drafter = Lookahead(None, level=5, window=7)
    row = drafter.first_row([3, 1, 4, 1, 5])
    assert row == drafter.first_row([3, 1, 4, 1, 5])
    assert len(row) == 9
    assert set(row) <= {1, 3, 4, 5}


@pytest.mark.parametrize("options", [{"level": 1}, {"window": 0}, {"guess": 0}])
def test_nonsense_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="level must be at least 2"):
        Lookahead(None, **options)
