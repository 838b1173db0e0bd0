"""Trees that grow where the drafter is surest: EAGLE-2's dynamic draft tree, for a whole batch at once.

Source: Li et al. 2024, "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees" (arXiv 2406.16858),
and SafeAILab/EAGLE, eagle/model/cnets.py. The root gets its `top_k` likeliest children. Then, `depth` times, each of
`top_k` nodes of the last level gets its `top_k` likeliest children, and the best `top_k` of all these by the
probability of their whole path are expanded next. Of everything seen, the `total` - 1 best by that probability are
drafted. A tree is thus up to `depth` + 1 deep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specbench.decoding.draft import Draft
from specbench.decoding.tree import MOST_NODES, arange

# Of total_token, depth and top_k: far above what pays, and all of it can be held at once.
RANGES = ((2, MOST_NODES), (0, 64), (1, 256))

# One pass over the expanded nodes of a level: (tokens [B, k], hidden [B, k, h], visible bool [B, k, earlier + k],
# level) -> (logits [B, k, D], hidden [B, k, h] for their children).
Expand = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]
]  # fmt: skip


@dataclass
class _Seen:
    """All nodes seen so far, `[B, n]` each: target ids, log-probabilities of their paths, parents (-1 = the root)."""

    tokens: list[torch.Tensor]
    scores: list[torch.Tensor]
    parents: list[torch.Tensor]


class DynamicTree:
    """The shape of the trees to grow.

    Args:
        total: nodes of a tree, the root included (`total_token` of the official code).
        depth: how many levels of nodes are expanded.
        top_k: children of a node, and nodes expanded a level.

    Raises:
        ValueError: a number out of its range.
    """

    def __init__(self, total: int, depth: int, top_k: int) -> None:
        asked = {"total_token": total, "depth": depth, "top_k": top_k}
        for (name, value), (least, most) in zip(asked.items(), RANGES, strict=True):
            if not least <= value <= most:
                raise ValueError(f"{name} must be {least} to {most}, not {value}")
        self.total, self.depth, self.top_k = total, depth, top_k

    @property
    def nodes(self) -> int:
        """The most nodes a draft can have."""
        return min(self.total - 1, self.candidates(self.depth + 1, self.top_k))

    def candidates(self, depth: int, top_k: int) -> int:
        """Nodes seen down to `depth`."""
        return 0 if depth < 1 else top_k + (depth - 1) * top_k**2

    def drafts(
        self, tokens: torch.Tensor, parents: torch.Tensor, budgets: Sequence[int], vocab: int
    ) -> list[Draft]:
        """What `nodes_of` found, `[B, n]`, cut to what each row's budget allows; `vocab` tokens can be drafted."""
        k = min(self.top_k, vocab)
        return [
            Draft(tokens[row, :n], None if k == 1 else parents[row, :n], deepest=self.depth + 1, siblings=k)
            if n
            else Draft()
            for row, (_, n) in enumerate(self.limits(budgets, vocab))
        ]

    def limits(self, budgets: Sequence[int], vocab: int) -> list[list[int]]:
        """Of each row: how many of the nodes seen it may choose from, the first ones, and how many it gets."""
        seen = [self.candidates(min(b, self.depth + 1), min(self.top_k, vocab)) for b in budgets]
        return [[n, min(self.total - 1, n)] for n in seen]

    def nodes_of(
        self,
        logits: torch.Tensor,
        hidden: torch.Tensor,
        expand: Expand,
        ids: Callable[[torch.Tensor], torch.Tensor],
        deepest: int,
        limits: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and parents int64 `[B, n]` of the nodes of each row's tree, as many as its limits allow.

        Args:
            logits: `[B, D]`, for the children of the root.
            hidden: `[B, h]`, what goes in with each of them.
            expand: one pass over a level, see `Expand`.
            ids: target ids of draft ids.
            deepest: how deep trees are grown, 1 to `depth` + 1.
            limits: int64 `[B, 2]`, see the method of that name.
        """
        k = min(self.top_k, logits.shape[-1])
        scores, guesses = _best(logits, k)
        tokens = ids(guesses)
        seen = _Seen([tokens], [scores], [torch.full_like(tokens, -1)])
        place = arange(k, tokens.device).expand_as(tokens)
        hidden = hidden[:, None].expand(-1, k, -1)
        alone = torch.eye(k, dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
        visible = alone
        for level in range(deepest - 1):
            logits, out = expand(tokens, hidden, visible, level)
            gains, guesses = _best(logits, k)
            reached = (scores[..., None] + gains).flatten(1)
            children = ids(guesses).flatten(1)
            seen.tokens.append(children)
            seen.scores.append(reached)
            seen.parents.append(place.repeat_interleave(k, 1))
            if level == deepest - 2:
                break
            scores, best = reached.topk(k, -1)
            tokens = children.gather(1, best)
            place = k + level * k * k + best
            above = best // k
            hidden = out.gather(1, above[..., None].expand(-1, -1, out.shape[-1]))
            inherited = visible.gather(1, above[..., None].expand(-1, -1, visible.shape[-1]))
            visible = torch.cat([inherited, alone], -1)
        return self._prune(seen, limits)

    def _prune(self, seen: _Seen, limits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The best nodes of each row, in the order in which they were seen."""
        tokens, scores, parents = (torch.cat(part, 1) for part in (seen.tokens, seen.scores, seen.parents))
        allowed, count = limits[:, :1], limits[:, 1:]
        width, device = tokens.shape[1], tokens.device
        most = min(self.total - 1, width)
        scores = scores.masked_fill(arange(width, device) >= allowed, float("-inf"))
        # Stable, so that of equals the earlier seen comes first: no node is kept without its parent.
        kept = scores.sort(dim=-1, descending=True, stable=True).indices[:, :most]
        kept = kept.masked_fill(arange(most, device) >= count, width)
        kept = kept.sort(-1).values
        where = kept.clamp(max=width - 1)
        above = parents.gather(1, where)
        within_kept = torch.searchsorted(kept, above)
        above = torch.where(above < 0, above, within_kept)
        return tokens.gather(1, where), above


def _best(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and draft ids `[..., k]` of the likeliest tokens, best first."""
    top, ids = logits.topk(k, -1)
    return top - logits.logsumexp(-1, keepdim=True), ids
