"""Lookahead decoding: the target itself guesses n-grams in a window that runs ahead of the text, for later rounds.

Source: Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding" (arXiv
2402.02057); hao-ai-lab/LookaheadDecoding, lade/decoding.py. One pass does both branches: the window rides along as
probes, and the n-grams of the pool that begin with the last token are verified as a tree.

Unlike the official code, an n-gram that matches whole is accepted whole (there one token short), what the pool
learns of the text is the text (there a repeated last token), n-grams with a common beginning share its nodes, and
the window starts after the first token instead of within the prefill, which is the same for every method here.

This drafter reads the device once a round in addition to the loop's one read: the n-grams of its pool are the host's,
and what the target made of the window is known with the pass, but is no part of what the loop reads.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from functools import lru_cache

import torch

from specbench.decoding.draft import Draft, Drafter, Outcome, Probes
from specbench.decoding.tree import arange
from specbench.decoding.trie import merged
from specbench.models.device import send


class Lookahead(Drafter):
    """n-grams that the target has guessed in a window running ahead of the text.

    A row whose budget is 0, because another drafter has drafted for it, sends no window and learns nothing from it.

    Options:
        level: n of the n-grams; the window has level - 1 rows.
        window: columns of the window, which are the n-grams found a round.
        guess: n-grams kept for each token they begin with; the least recently found goes first.
        pool_from_prompt: also keep the n-grams of the text itself.
    """

    sends_probes = True

    def __init__(
        self,
        target: object,
        *,
        level: int = 5,
        window: int = 7,
        guess: int = 7,
        pool_from_prompt: bool = False,
    ) -> None:
        super().__init__(target)
        if level < 2 or window < 1 or guess < 1:
            raise ValueError("level must be at least 2, window and guess at least 1")
        self.level, self.window, self.guess = level, window, guess
        self.pool_from_prompt = pool_from_prompt
        # The window narrows by a column a row as it fills; with so many rows it has the most cells.
        rows = min(level - 1, (window + level - 1) // 2)
        self.max_nodes = guess * (level - 1) + rows * (window + level - 1 - rows) - 1
        self._rows: list[_Row] = []

    def begin(self, prompts: list[list[int]]) -> None:
        self._rows = [_Row(self, prompt) for prompt in prompts]

    def first_row(self, prompt: list[int]) -> list[int]:
        """What the window starts from: random tokens of the prompt, the same ones for the same prompt."""
        dice = random.Random(zlib.crc32(repr(prompt).encode()))
        return dice.choices(prompt, k=self.window + self.level - 3)

    def observe(self, outcome: Outcome) -> None:
        if outcome.tree is not None:
            self._advance(outcome, outcome.tree.drafted)
        for row, tokens in zip(self._rows, outcome.tokens, strict=True):
            row.extend(tokens)

    def _advance(self, outcome: Outcome, drafted: list[int]) -> None:
        """Read what the target made of the last row of each window: the drafter's one read of the device.

        Windows that have ridden less often are wider: all are read at the width of the widest.
        """
        riding = [number for number, row in enumerate(self._rows) if row.riding]
        if not riding:
            return
        columns = [self._rows[number].last_columns(1 + drafted[number]) for number in riding]
        widest = max(map(len, columns))
        padded = [own + [0] * (widest - len(own)) for own in columns]
        device = outcome.logits.device
        at = send(riding, device)[:, None], send(padded, device)
        read = outcome.logits[at].argmax(-1).tolist()
        for number, own, guesses in zip(riding, columns, read, strict=True):
            self._rows[number].advance(guesses[: len(own)])

    def propose(self, budgets: list[int], generators: Sequence[torch.Generator] | None) -> list[Draft]:
        device = getattr(self.target, "device", torch.device("cpu"))
        return [row.draft(budget, device) for row, budget in zip(self._rows, budgets, strict=True)]


class _Row:
    """Window and pool of one sequence.

    `window[j][i]` is the guess for the token i + j places after the last one, which is itself `window[0][0]` and
    is left out there. The window is filled row by row, a column narrower each time, and is then `options.window`
    wide.
    """

    def __init__(self, options: Lookahead, prompt: list[int]) -> None:
        self.options = options
        self.window = [options.first_row(prompt)]
        self.pool: dict[int, dict[tuple[int, ...], None]] = {}
        self.text: list[int] = []  # its end, as long as an n-gram
        self.riding = False  # whether the window was in the last pass
        self.extend(prompt)

    @property
    def full(self) -> bool:
        return len(self.window) == self.options.level - 1

    @property
    def width(self) -> int:
        return 1 + len(self.window[0])

    def extend(self, tokens: list[int]) -> None:
        level = self.options.level
        if not self.options.pool_from_prompt:
            self.text = (self.text + tokens)[-level:]
            return
        for token in tokens:
            self.text = [*self.text[-level + 1 :], token]
            if len(self.text) == level:
                self.keep(self.text[0], tuple(self.text[1:]))

    def keep(self, token: int, rest: tuple[int, ...]) -> None:
        """Put the n-gram into the pool as the newest that begins with `token`."""
        known = self.pool.setdefault(token, {})
        known.pop(rest, None)
        known[rest] = None
        if len(known) > self.options.guess:
            del known[next(iter(known))]

    def draft(self, budget: int, device: torch.device) -> Draft:
        self.riding = budget > 0
        if not self.riding:
            return Draft()
        known = self.pool.get(self.text[-1], {}) if self.full else {}
        tokens, parents = merged(rest[:budget] for rest in known)
        depth, visible = _layout(len(self.window), self.width, len(tokens), device)
        probes = Probes([token for row in self.window for token in row], depth, visible)
        return Draft(tokens, parents, probes=probes)

    def last_columns(self, first: int) -> list[int]:
        """Where the window's last row stands in a pass whose probes start at column `first`."""
        if len(self.window) == 1:
            return [0, *range(first, first + self.width - 1)]
        stop = first + len(self.window) * self.width - 1
        return list(range(stop - self.width, stop))

    def advance(self, guesses: list[int]) -> None:
        """Take in what the target guessed after each token of the last row."""
        if not self.full:
            self.window = [row[1:] for row in [*self.window, guesses]]
            return
        begins = [self.text[-1], *self.window[0]]
        for token, rest in zip(begins, zip(*self.window[1:], guesses, strict=True), strict=True):
            self.keep(token, rest)
        first, *others = [*self.window[1:], guesses]
        self.window = [first[1:], *others]


@lru_cache(maxsize=256)
def _layout(rows: int, width: int, nodes: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Depths and visibility (see `Probes`) of a window of so many rows and columns, with `nodes` candidates.

    A token sees the first row up to its own column, the last token of the text included, and its own column.
    """
    below = torch.ones(rows, rows).tril()
    first = torch.zeros(rows, rows)
    first[:, 0] = 1
    sees = torch.kron(first, torch.ones(width, width).tril()) + torch.kron(below, torch.eye(width)) > 0
    hidden = torch.zeros(rows * width - 1, nodes, dtype=torch.bool)
    visible = torch.cat([sees[1:, :1], hidden, sees[1:, 1:]], 1)
    depth = arange(rows, sees.device)[:, None] + arange(width, sees.device)
    return depth.flatten()[1:].to(device), visible.to(device)
