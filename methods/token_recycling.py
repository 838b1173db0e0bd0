"""Token recycling: what the target last thought likely after each token is kept, and drafted as a fixed tree.

Source: Luo et al. 2024, "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token
Recycling" (arXiv 2408.08696); Luowaterbi/TokenRecycling, evaluation/inference_recycling.py.

Unlike the official code, nothing is kept between prompts unless `warm=true`; after a token never seen the k lowest
ids are proposed, so that siblings differ (there token 0, k times); of a token that stands on several nodes the last
node counts on every device (there undefined on a GPU).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specbench.decoding.draft import Draft, Drafter, Outcome
from specbench.decoding.largest import largest
from specbench.decoding.static_tree import named
from specbench.decoding.tree import arange
from specbench.models.device import send
from specbench.models.target import Target


class TokenRecycling(Drafter):
    """The k likeliest tokens after each token as the target last saw it, laid out by a static tree.

    Options:
        k: tokens kept after each token.
        tree: the tree's shape, by name.
        warm: keep what earlier prompts taught; each row of a batch has a table of its own.
    """

    def __init__(self, target: Target, *, k: int = 8, tree: str = "recycling", warm: bool = False) -> None:
        super().__init__(target)
        if k < 1:
            raise ValueError("k must be at least 1")
        self.k, self.warm = min(k, target.vocab_size), warm
        self.tree = named(tree).narrow(self.k)
        self.max_nodes = self.tree.width
        self._table: torch.Tensor | None = None  # int32 [B, V + 1, k]; what goes to row V is never read

    def begin(self, prompts: list[list[int]]) -> None:
        self._last = [prompt[-1] for prompt in prompts]
        if self._table is None or not self.warm:
            self._table = self.blank(len(prompts))
        elif len(self._table) < len(prompts):
            self._table = torch.cat([self._table, self.blank(len(prompts) - len(self._table))])

    def blank(self, rows: int) -> torch.Tensor:
        """Tables that know nothing."""
        unknown = torch.arange(self.k, dtype=torch.int32, device=self.target.device)
        return unknown.repeat(rows, self.target.vocab_size + 1, 1)

    def forget(self) -> None:
        self._table = None

    def release(self) -> None:
        if not self.warm:
            self.forget()

    def observe(self, outcome: Outcome) -> None:
        if outcome.tree is None:
            last = send(self._last, outcome.logits.device)[:, None]
            self.learn(last, torch.ones_like(last, dtype=torch.bool), outcome.logits)
        else:
            self.learn(outcome.tree.tokens, outcome.tree.verified, outcome.logits)
        self._last = [new[-1] if new else old for new, old in zip(outcome.tokens, self._last, strict=True)]

    def learn(self, tokens: torch.Tensor, live: torch.Tensor, logits: torch.Tensor) -> None:
        """Keep what is likeliest after each of `tokens` `[B, T]` (`live`: which are real) by `logits` `[B, T, V]`."""
        assert self._table is not None, "observe comes after begin"
        likeliest = largest(logits, self.k).int()
        twins = (tokens[:, :, None] == tokens[:, None, :]) & live[:, None, :]
        last = live & ~twins.triu(1).any(-1)
        to = torch.where(last, tokens, self.target.vocab_size)
        self._table[arange(len(tokens), to.device)[:, None], to] = likeliest

    def propose(self, budgets: list[int], generators: Sequence[torch.Generator] | None) -> list[Draft]:
        tree = self.tree.clip(max(budgets))
        if not tree.width:
            return [Draft()] * len(budgets)
        assert self._table is not None, "propose comes after begin"
        device = self._table.device
        row = arange(len(budgets), device)[:, None]
        parents = send(self._last, device)[:, None]
        levels = []
        for level in tree.levels(device):
            levels.append(level.pick(self._table[row, parents]))
            parents = levels[-1][:, level.inner]
        return tree.drafts(torch.cat(levels, 1).long(), budgets)
