"""Which layers a self-speculating target may leave out: a search by what it has just written.

Source: Xia et al., "SWIFT: On-the-Fly Self-Speculative Decoding for LLM Inference Acceleration" (arXiv 2410.06916):
a set is judged by how well the shortened model foretells tokens that the whole model has generated. Theirs is a
random search with a Bayesian step every 25; this one changes a layer at a time, which fits the few tries that one
question has room for.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from specbench.decoding.context import Context
from specbench.decoding.tree import arange
from specbench.models.device import send
from specbench.models.target import Target

SEEN = 16  # tokens by which a set is judged
TRIES = 16  # sets judged in a question
ENOUGH = 0.95  # agreement at which the search ends


class LayerSearch:
    """The best set of layers so far, and the next to try.

    Args:
        depth: layers of the target, two or more.
        ratio: the share of them to leave out; of more than three layers the first and the last always stay.

    Raises:
        ValueError: a ratio that leaves out nothing or everything.
    """

    def __init__(self, depth: int, ratio: float) -> None:
        if not 0 < ratio < 1:
            raise ValueError("ratio must lie between 0 and 1")
        self._pool = range(1, depth - 1) if depth > 3 else range(1, depth)
        self._count = min(max(round(ratio * depth), 1), len(self._pool))
        self.begin(keep=False)

    def begin(self, keep: bool) -> None:
        """A new question: search anew, or, with `keep`, from the best set found for the last one."""
        if not keep:
            self._dice = random.Random(0)
            step = len(self._pool) / self._count
            self.best = frozenset(self._pool[int((place + 0.5) * step)] for place in range(self._count))
        self._score: float | None = None  # of `best`, by this question's tokens
        self._tries = 0

    @property
    def done(self) -> bool:
        settled = self._score is not None and (self._score >= ENOUGH or self._count == len(self._pool))
        return settled or self._tries >= TRIES

    def candidate(self) -> frozenset[int]:
        """The next set to judge: first the one in use, then neighbours of the best."""
        if self._score is None:
            return self.best
        out = self._dice.choice(sorted(self.best))
        kept = [layer for layer in self._pool if layer not in self.best]
        return self.best - {out} | {self._dice.choice(kept)}

    def judge(self, candidate: frozenset[int], score: float) -> None:
        """Take `candidate` if it is better than the best."""
        self._tries += 1
        if self._score is None or score > self._score:
            self.best, self._score = candidate, score


def agreement(
    target: Target,
    layers: frozenset[int],
    texts: Sequence[Sequence[int]],
    prompts: Sequence[int],
    rows: Sequence[bool],
) -> float:
    """The mean probability that the target without `layers` gives the `SEEN` tokens after the first new one.

    One pass over the first `SEEN` new tokens, each with the true keys and values of all before it; their own go to
    slots behind everything in use. The mean is one over `rows`, which have more new tokens than `SEEN`. A smoother
    measure than the share of equal argmaxes, which so few tokens make a coarse one. Reads the device once.

    Args:
        texts: prompt and new tokens of each row, all but the last of which stand in the cache.
        prompts: lengths of the prompts.
    """
    first, beyond = list(prompts), max(len(text) - n for text, n in zip(texts, prompts, strict=True))
    span = [text[n : n + SEEN + 1] for text, n in zip(texts, first, strict=True)]
    table = [line + [0] * (SEEN + 1 - len(line)) for line in map(list, span)]
    tokens = send(table, target.device)
    judged = send(list(rows), target.device)
    visible = torch.cat(
        [
            torch.ones(SEEN, beyond, device=target.device).tril(-1) > 0,
            torch.eye(SEEN, device=target.device) > 0,
        ],
        1,
    )
    context = Context(target)
    context.rewind(first)
    at = context.layout(
        arange(SEEN, target.device).expand(len(texts), -1),
        judged[:, None].expand(-1, SEEN),
        visible.expand(len(texts), -1, -1),
        earlier=beyond,
    )
    with target.skipping(layers):
        logits = target.forward(tokens[:, :SEEN], at.positions, at.slots, at.masks).logits
    given = logits.float().softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    return float(given.mean(1)[judged].mean())
