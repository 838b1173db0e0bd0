"""SAM decoding: the longest end of the text that has occurred before, and what followed it there.

Source: Hu et al. 2024, "SAM Decoding: Speculative Decoding via Suffix Automaton" (arXiv 2411.10666);
hyx1999/SAM-Decoding, samd/draft.py and samd/sam. The text so far is a suffix automaton that grows with it; a corpus
is searched by its suffix array, as the method rest does. Where no match is long enough, another drafter is asked.

Unlike the official code, a draft is not filled up with token 0 and never runs from one document of the corpus into
the next, a match that nothing follows is none, and what the fallback learns is reset at every prompt unless it is
`warm` itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from specbench.decoding.combined import Combined, joined
from specbench.decoding.draft import Draft, Drafter, Outcome
from specbench.decoding.suffix_automaton import SuffixAutomaton
from specbench.models.datastore import Datastore, open_datastore
from specbench.models.target import Target
from specbench.spec import Spec

FALLBACK = Spec("token-recycling", {"tree": "sam"})


class Sam(Combined):
    """What followed the first occurrence of the longest matching end, else the draft of another method.

    Options:
        k: most tokens copied (the official n_predicts also counts the last token of the text).
        threshold: shortest match that is used.
        bias: how much longer a match in the corpus must be than one in the text.
        corpus: a datastore, its path or name; made with `specbench datastore build`.
        fallback: the method asked otherwise, a SPEC in parentheses (by default token recycling with the tree that
            the official code has for it), or none.
    """

    def __init__(
        self,
        target: Target,
        *,
        k: int = 39,
        threshold: int = 5,
        bias: int = 5,
        corpus: str | Datastore | None = None,
        fallback: Spec | Drafter | Literal["none"] = FALLBACK,
    ) -> None:
        if k < 1 or threshold < 1 or bias < 0:
            raise ValueError("k and threshold must be at least 1, bias at least 0")
        assert not isinstance(fallback, Spec), "whoever makes a method makes those in its SPEC before"
        super().__init__(target, [fallback] if isinstance(fallback, Drafter) else [])
        self.k, self.threshold, self.bias = k, threshold, bias
        self.corpus = open_datastore(corpus) if isinstance(corpus, str) else corpus
        if self.corpus is not None:
            self.corpus.check_target(target)
        self.max_nodes = max(k, self.max_nodes)
        self._rows: list[_Row] = []

    def draft_identity(self) -> dict[str, Any] | None:
        of_parts = super().draft_identity()
        of_corpus = None if self.corpus is None else self.corpus.identity()
        return joined([identity for identity in (of_corpus, of_parts) if identity is not None])

    def begin(self, prompts: list[list[int]]) -> None:
        super().begin(prompts)
        self._rows = [_Row(self, prompt) for prompt in prompts]

    def release(self) -> None:
        super().release()
        self._rows = []

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        for row, tokens in zip(self._rows, outcome.tokens, strict=True):
            row.extend(tokens)

    def propose(self, budgets: list[int], generators: Sequence[torch.Generator] | None) -> list[Draft]:
        copies = [
            row.copy(min(budget, self.k)) if budget else []
            for row, budget in zip(self._rows, budgets, strict=True)
        ]
        drafts = [Draft(tokens) for tokens in copies]
        self.authors = [None] * len(drafts)
        for fallback in self.parts:
            left = [0 if tokens else budget for tokens, budget in zip(copies, budgets, strict=True)]
            others = fallback.propose(left, generators)
            self.authors = [fallback if len(other) else None for other in others]
            drafts = [copy if len(copy) else other for copy, other in zip(drafts, others, strict=True)]
        return drafts


class _History(SuffixAutomaton):
    """The automaton of one text, with the place where each state's strings first ended (tokens before it)."""

    def __init__(self) -> None:
        self.first_end: list[int] = []
        super().__init__()

    def add_state(self, length: int, copied: int | None) -> int:
        self.first_end.append(length if copied is None else self.first_end[copied])
        return super().add_state(length, copied)


class _Row:
    """One sequence: its text, and how long its end may at most be found in the corpus."""

    def __init__(self, options: Sam, prompt: list[int]) -> None:
        self.options = options
        self.tokens: list[int] = []
        self.history, self.end = _History(), 0
        self.reach = 0
        self.extend(prompt)

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            self.end = self.history.extend(self.end, token)
        self.reach += len(tokens)

    def copy(self, most: int) -> list[int]:
        """Up to `most` tokens that followed the longest match, nothing if it is too short."""
        repeated = max(self.history.link[self.end], 0)
        length = self.history.length[repeated]
        found = self._of_corpus(most, max(length + 1, self.options.threshold) + self.options.bias)
        if found or length < self.options.threshold:
            return found
        return self._of_text(repeated, most)

    def _of_text(self, state: int, most: int) -> list[int]:
        """What followed the first occurrence of the longest match with k tokens behind it, or of the shortest match.

        As in the official code, the text's last token is not known yet, and one token more than k must follow.
        """
        history, known = self.history, len(self.tokens) - 1
        while history.link[state] > 0 and known - history.first_end[state] <= self.options.k:
            state = history.link[state]
        place = history.first_end[state]
        return self.tokens[place : min(place + most, known)]

    def _of_corpus(self, most: int, shortest: int) -> list[int]:
        """What followed the first occurrence in the corpus of the longest match there, of `shortest` or more."""
        corpus, vocab = self.options.corpus, self.options.target.vocab_size
        if corpus is None or self.reach < shortest:
            return []
        length, matches = corpus.longest_end(self.tokens, self.reach, shortest, vocab)
        # Each further token makes a match at most one longer.
        self.reach = length or shortest - 1
        followed = (shard.first_following(entries, length, most, vocab) for shard, entries in matches)
        return next(filter(None, followed), [])
