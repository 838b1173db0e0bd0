"""Prompt lookup: the last few tokens are searched in the text so far, and what followed them is proposed.

Source: A. Saxena, "Prompt Lookup Decoding" (2023), the function in the README of apoorvumang/prompt-lookup-decoding.
Like it, a match must have k whole tokens after it, unless `partial=true`. Unlike it, the text is indexed as it grows
and not scanned, so that a round costs the same at any length.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specbench.decoding.draft import Draft, Drafter, Outcome
from specbench.decoding.draft_length import K, draft_length


class PromptLookup(Drafter):
    """The leftmost earlier occurrence of the longest matching n-gram, and the k tokens after it.

    Options:
        k: most tokens proposed, or auto.
        ngram: longest n-gram looked for; shorter ones down to 1 are tried in turn.
        partial: also take a match with fewer than k tokens after it.
    """

    def __init__(self, target: object, *, k: K = 10, ngram: int = 3, partial: bool = False) -> None:
        super().__init__(target)
        if ngram < 1:
            raise ValueError("ngram must be at least 1")
        self.ngram, self.partial, self.length = ngram, partial, draft_length(k)
        self.max_nodes = self.length.longest
        self._rows: list[_Index] = []

    def begin(self, prompts: list[list[int]]) -> None:
        self.length.begin(len(prompts))
        self._rows = [_Index(prompt, self.ngram) for prompt in prompts]

    def observe(self, outcome: Outcome) -> None:
        self.length.observe(outcome)
        for row, tokens in zip(self._rows, outcome.tokens, strict=True):
            row.extend(tokens)

    def propose(self, budgets: list[int], generators: Sequence[torch.Generator] | None) -> list[Draft]:
        drafts = [
            Draft(row.continuation(length, self.partial)[:budget]) if budget else Draft()
            for row, length, budget in zip(self._rows, self.length.lengths, budgets, strict=True)
        ]
        return self.length.proposed(drafts)


class _Index:
    """Where each n-gram of a text first ends."""

    def __init__(self, tokens: list[int], ngram: int) -> None:
        self.tokens: list[int] = []
        self.first_end: list[dict[tuple[int, ...], int]] = [{} for _ in range(ngram)]
        self.extend(tokens)

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            for n, ends in enumerate(self.first_end, start=1):
                if n <= end:
                    ends.setdefault(tuple(self.tokens[end - n :]), end)

    def continuation(self, k: int, partial: bool) -> list[int]:
        """Up to `k` tokens after the leftmost match of the longest n-gram that has occurred before."""
        length = len(self.tokens)
        for n in range(len(self.first_end), 0, -1):
            if n > length:
                continue
            end = self.first_end[n - 1][tuple(self.tokens[length - n :])]
            whole = end + k <= length and end + n < length
            if whole or (partial and end < length):
                return self.tokens[end : end + k]
        return []
