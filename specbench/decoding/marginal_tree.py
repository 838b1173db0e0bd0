"""The likeliest tree of a product of marginals, which is what a drafter that guesses every position at once gives.

DDTree (Ringel & Romano 2026, arXiv 2604.12989; liranringel/ddtree): the `nodes` most probable prefixes, where a
prefix x1..xd has probability p1(x1) … pd(xd). The official code takes them off a heap on the host; here they come
level by level on the device: a prefix is never likelier than its parent, so the best `nodes` prefixes of a level are
continuations of the best `nodes` of the level before, and the best of all levels together are the tree.
"""

from __future__ import annotations

import torch

from specbench.models.device import send


def best_first(log_probs: torch.Tensor, nodes: int, depths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The `nodes` most probable prefixes of each row, most probable first. Reads nothing from the device.

    Args:
        log_probs: `[B, D, V]`, of the token at each depth.
        nodes: how many, at least 1.
        depths: how deep each row's tree may be, at most D (0: no tree).

    Returns:
        tokens and parents int64 `[B, N]`, parents before children, -1 = the root; each row has the first of these
        nodes, as many as `count_nodes` says.
    """
    rows, deepest, vocab = log_probs.shape
    deepest = min(deepest, max(depths, default=0))
    best, token = log_probs.topk(min(nodes, vocab), dim=-1)
    cut = send(depths, log_probs.device)[:, None] if min(depths, default=0) < deepest else None
    score = log_probs.new_zeros(rows, 1)
    scores: list[torch.Tensor] = []
    tokens: list[torch.Tensor] = []
    parents: list[torch.Tensor] = []
    sizes: list[int] = []
    first = -1  # where the level before begins
    for depth in range(deepest):
        branches = best.shape[-1]
        ahead = (score[..., None] + best[:, depth, None]).flatten(1)
        score, index = ahead.topk(min(nodes, ahead.shape[1]), dim=1)
        scores.append(score if cut is None else torch.where(depth < cut, score, -torch.inf))
        tokens.append(token[:, depth].gather(1, index % branches))
        parents.append(first + index // branches)
        first = sum(sizes)
        sizes.append(score.shape[1])
    if not sizes:
        empty = torch.empty(rows, 0, dtype=torch.long, device=log_probs.device)
        return empty, empty
    # Stable: of equals the shallower comes first, so that no node is ranked before its parent.
    order = torch.cat(scores, 1).sort(dim=1, descending=True, stable=True).indices[:, :nodes]
    return torch.cat(tokens, 1).gather(1, order), _renumber(torch.cat(parents, 1), order)


def count_nodes(nodes: int, vocab: int, depth: int) -> int:
    """How many of `nodes` a tree has that may be so deep."""
    level, seen = 1, 0
    for _ in range(depth):
        level = min(nodes, level * min(nodes, vocab))
        seen += level
    return min(nodes, seen)


def _renumber(parents: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Parents by rank instead of by candidate; -1 stays."""
    place = parents.new_full((len(parents), parents.shape[1] + 1), -1)
    ranks = torch.arange(order.shape[1], device=order.device).expand_as(order)
    place.scatter_(1, order + 1, ranks)
    return place.gather(1, parents.gather(1, order) + 1)
