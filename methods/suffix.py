"""Suffix decoding: what most often followed the longest repeated ends of the text, as long as it is worth it.

Source: Oliaro et al. 2024, "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications" (arXiv
2411.04975); snowflakedb/ArcticInference, arctic_inference/suffix_decoding. As there, two trees are asked, one of the
prompt and its answer and one of answers alone, and the draft with the higher sum of probabilities is taken. Unlike
there, nothing is kept between prompts unless `warm=true`, and the rows of a batch then do not see each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import torch

from specbench.decoding.answers import Answers
from specbench.decoding.draft import Draft, Drafter, Outcome
from specbench.decoding.suffix_tree import Rule, Speculation, SuffixTree, Text


class Suffix(Drafter):
    """The likeliest continuation by what followed earlier occurrences of the text's end, the longer the surer.

    Options:
        k: most tokens proposed.
        factor, offset: no more than factor x length of the match + offset; a negative offset leaves short matches
            unused.
        min_prob: no token that fewer than this share of the occurrences led to.
        tree: branch where occurrences went different ways; else propose a chain.
        depth: longest match and continuation together.
        answers: answers kept in the tree of answers, the oldest leaving first; 0 for no such tree. A token kept takes
            about half a kilobyte, and those that left up to as much again until the tree is made anew of the others.
        warm: keep the answers of earlier prompts, for every row; else each prompt has a tree of its own answer.
    """

    def __init__(
        self,
        target: object,
        *,
        k: int = 32,
        factor: float = 1.0,
        offset: float = 0.0,
        min_prob: float = 0.1,
        tree: bool = False,
        depth: int = 64,
        answers: int = 10_000,
        warm: bool = False,
    ) -> None:
        super().__init__(target)
        if k < 1 or depth < 2 or answers < 0 or factor < 0:
            raise ValueError("k must be at least 1, depth at least 2, factor and answers at least 0")
        if not (isfinite(factor) and isfinite(offset)):
            raise ValueError("factor and offset must be finite")
        if not 0 <= min_prob <= 1:
            raise ValueError("min_prob must lie in [0, 1]")
        if warm and not answers:
            raise ValueError("warm=true keeps answers, and answers=0 keeps none")
        self.rule = Rule(k, factor, offset, min_prob, tree)
        self.depth, self.answers, self.warm = depth, answers, warm
        self.max_nodes = k
        self._kept = Answers(depth, answers)
        self._rows: list[_Row] = []

    def begin(self, prompts: list[list[int]]) -> None:
        self._rows = [
            _Row(prompt, self._kept if self.warm else Answers(self.depth, self.answers)) for prompt in prompts
        ]

    def forget(self) -> None:
        self._kept = Answers(self.depth, self.answers)

    def release(self) -> None:
        self._rows = []

    def observe(self, outcome: Outcome) -> None:
        for row, tokens in zip(self._rows, outcome.tokens, strict=True):
            row.extend(tokens)

    def propose(self, budgets: list[int], generators: Sequence[torch.Generator] | None) -> list[Draft]:
        return [self._draft(row, budget) for row, budget in zip(self._rows, budgets, strict=True)]

    def _draft(self, row: _Row, budget: int) -> Draft:
        found = row.speculate(self.rule, budget) if budget else None
        if not found or not found.tokens:
            return Draft()
        return Draft(found.tokens, found.parents if self.rule.tree else None)


class _Row:
    """The two trees of one sequence."""

    def __init__(self, prompt: list[int], answers: Answers) -> None:
        self.own, self.text = SuffixTree(answers.tree.depth), Text()
        self.own.append(self.text, prompt)
        self.answers, self.answer = answers, answers.start()

    def extend(self, tokens: list[int]) -> None:
        self.own.append(self.text, tokens)
        self.answers.tree.append(self.answer, tokens)

    def speculate(self, rule: Rule, budget: int) -> Speculation:
        context = self.text.tokens[-self.own.depth :]
        own, others = (tree.speculate(context, rule, budget) for tree in (self.own, self.answers.tree))
        return own if own.score >= others.score else others
