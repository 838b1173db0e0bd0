"""Acceptance: which drafted tokens the target keeps, and the one token it adds.

Two rules, both exact for chains and trees:

* **match** (greedy, and drafts without q): the target names one token at every node, its argmax or one sample, and
  the path that agrees is kept. A sample agrees with a deterministic child x with probability p(x), and given that
  it agrees with none it has the distribution p with all children removed: what rejecting them one by one gives.
* **rejection** (drafts sampled with q): child x of distribution q is kept with probability min(1, r(x)/q(x)), where
  r starts as p and becomes norm(max(r - q, 0)) after each rejected sibling; the added token is drawn from the last
  r (Leviathan et al. 2023; for siblings, SpecInfer 2024 and EAGLE-1). With siblings drawn without replacement each
  node's q is the one it was drawn from, earlier siblings removed.

p and q are both taken after temperature, top-k and top-p. All rows and nodes are judged at once, on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from specbench.decoding.sampling import Sampling, draw, probabilities, uniforms
from specbench.decoding.tree import Tree, earlier_siblings, walk


@dataclass(frozen=True)
class Verdict:
    """accepted int64 [B]; bonus int64 [B], the token the target adds; path int64 [B, T] (see `tree.walk`)."""

    accepted: torch.Tensor
    bonus: torch.Tensor
    path: torch.Tensor


def verify(
    tree: Tree, logits: torch.Tensor, sampling: Sampling, generators: Sequence[torch.Generator] | None
) -> Verdict:
    """Judge the nodes of `tree` by the target's `logits` `[B, T, V]` (logits at a node judge its children)."""
    if sampling.greedy:
        return _match(tree, logits.argmax(-1))
    assert generators is not None, "sampling needs a generator a row"
    p = probabilities(logits, sampling)
    if tree.probs is None:
        return _match(tree, draw(p, generators, tree.widths))
    return _reject(tree, p, tree.probs, generators)


def _match(tree: Tree, named: torch.Tensor) -> Verdict:
    """Keep the path that agrees with the tokens `named` int64 `[B, T]`, one a node."""
    if tree.tokens.shape[1] == 1:  # nothing was drafted
        return Verdict(torch.zeros_like(named[:, 0]), named[:, 0], torch.zeros_like(named))
    matched = (tree.tokens == named.gather(1, tree.parents)) & tree.candidate
    if not tree.chain:
        # Of siblings with the same token only the first may count: choosing the luckier twin would be biased.
        twins = earlier_siblings(tree) & (tree.tokens[:, :, None] == tree.tokens[:, None, :])
        matched &= ~twins.any(-1)
    accepted, last, path = walk(tree, matched)
    return Verdict(accepted, named.gather(1, last[:, None])[:, 0], path)


def _reject(tree: Tree, p: torch.Tensor, q: torch.Tensor, generators: Sequence[torch.Generator]) -> Verdict:
    """Rejection sampling over families of siblings; one step a sibling rank, all nodes of that rank at once."""
    rows, width, vocab = p.shape
    # None for the root: a row without a draft draws its bonus alone, as it would by the other rule.
    u = pad(uniforms(width - 1, generators, [w - 1 for w in tree.widths]), (1, 0))
    rank = earlier_siblings(tree).sum(-1)
    q_token = q.gather(2, tree.tokens[..., None])[..., 0]
    # Column `width` takes the writes of nodes that have nothing to say.
    residual = torch.cat([p, p.new_zeros(rows, 1, vocab)], 1)
    taken = torch.zeros(rows, width + 1, dtype=torch.bool, device=p.device)
    matched = torch.zeros_like(tree.candidate)
    for step in range(tree.siblings):
        judged = tree.candidate & (rank == step) & ~taken.gather(1, tree.parents)
        r = residual.gather(1, tree.parents[..., None].expand(-1, -1, vocab))
        kept = judged & (u * q_token < r.gather(2, tree.tokens[..., None])[..., 0])
        matched |= kept
        taken.scatter_(1, torch.where(kept, tree.parents, width), True)
        left = (r - q).clamp_(min=0)
        mass = left.sum(-1, keepdim=True)
        fallback = p.gather(1, tree.parents[..., None].expand(-1, -1, vocab))
        left = torch.where(mass > 0, left / mass.clamp(min=torch.finfo(left.dtype).tiny), fallback)
        target = torch.where(judged & ~kept, tree.parents, width)
        residual.scatter_(1, target[..., None].expand(-1, -1, vocab), left)
    accepted, last, path = walk(tree, matched)
    final = residual.gather(1, last[:, None, None].expand(-1, 1, vocab))
    return Verdict(accepted, draw(final, generators, [1] * rows)[:, 0], path)
