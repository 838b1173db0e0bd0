"""The oracle: a drafter that knows the target's answer and is right as often as it is told to be, at no cost.

The measured upper bound for any drafter with that acceptance, and the way to time verification on random weights.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence

import torch

from specbench.decoding.draft import Draft, Drafter, Outcome


class Oracle(Drafter):
    """Proposes the target's own answer, each token right with probability `rate`.

    Options:
        rate: probability that a proposed token is the answer's.
        k: depth of the draft.
        tree: nodes of the draft: a path of depth k, and wrong siblings along it for the rest. 0: a chain.
    """

    wants_answer = True

    def __init__(self, target: object, *, rate: float = 0.8, k: int = 4, tree: int = 0) -> None:
        super().__init__(target)
        if not 0 <= rate <= 1 or k < 1 or tree < 0:
            raise ValueError("rate must lie in [0, 1], k be at least 1, tree be 0 or more")
        self.rate, self.k, self.tree = rate, k, tree
        self.max_nodes = max(k, tree)

    def begin(self, prompts: list[list[int]]) -> None:
        assert self.answer is not None, "the runner sets the answer before each batch"
        # By content, so that a question's draft does not depend on its place in the run.
        self._random = [random.Random(zlib.crc32(repr(prompt).encode())) for prompt in prompts]
        self._done = [0] * len(prompts)

    def observe(self, outcome: Outcome) -> None:
        self._done = [done + len(new) for done, new in zip(self._done, outcome.tokens, strict=True)]

    def propose(self, budgets: list[int], generators: Sequence[torch.Generator] | None) -> list[Draft]:
        assert self.answer is not None
        return [
            self._draft(answer[done : done + min(self.k, budget)], dice)
            for answer, done, budget, dice in zip(self.answer, self._done, budgets, self._random, strict=True)
        ]

    def _draft(self, truth: list[int], dice: random.Random) -> Draft:
        size = self.target.vocab_size
        path = [token if dice.random() < self.rate else (token + 1) % size for token in truth]
        if not self.tree:
            return Draft(path)
        depth = min(len(path), self.tree)
        tokens, parents = path[:depth], list(range(-1, depth - 1))
        # Distractors level by level, round and round: distinct from the path's token there, and wrong.
        for extra in range(self.tree - depth if depth else 0):
            lap, level = divmod(extra, depth)
            tokens.append((truth[level] + 2 + lap) % size)
            parents.append(level - 1)
        return Draft(tokens, parents)
