"""Drafts of a batch as tensors: token trees, their masks, and the walk from judged nodes to an accepted path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import torch
from torch.nn.functional import pad

from specbench.decoding.draft import Draft, Ids
from specbench.models.device import send

MOST_NODES = 1024  # of a draft: who sees whom is a mask of its square, and each node has its logits


@dataclass(frozen=True)
class Tree:
    """The nodes of one pass, a row a sequence; column 0 is the root (the last committed token).

    Shapes: B rows, T columns (root, then nodes, then probes, then padding).
        tokens: int64 [B, T]
        parents: int64 [B, T], a column; the root's is 0
        depth: int64 [B, T]
        visible: bool [B, T, T], ancestors and self (for probes: what they asked for)
        candidate: bool [B, T], drafted nodes (not the root, probes or padding)
        live: bool [B, T], all but padding
        drafted: nodes of each row
        widths: columns of each row before its padding (root, nodes, probes)
        probs: float [B, T, V] q of each node (one-hot where deterministic), None if no draft has any
        full: True if all columns of all rows are live
        chain: True if every row is a plain chain, so that column j is at depth j
        siblings: the most children any node has
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depth: torch.Tensor
    visible: torch.Tensor
    candidate: torch.Tensor
    live: torch.Tensor
    drafted: list[int]
    widths: list[int]
    probs: torch.Tensor | None
    full: bool
    chain: bool
    siblings: int

    @property
    def verified(self) -> torch.Tensor:
        """Bool `[B, T]`: root and candidates, whose logits follow the text or a draft of it; no probes or padding."""
        return torch.cat([self.live[:, :1], self.candidate[:, 1:]], 1)


def check_nodes(most: int) -> None:
    """Raise ValueError where drafts of up to `most` nodes, probes included, are more than a pass can hold."""
    if most > MOST_NODES:
        raise ValueError(f"a draft of up to {most} nodes is too large, {MOST_NODES} is the most")


def collate(roots: torch.Tensor, drafts: Sequence[Draft], active: Sequence[bool], vocab: int) -> Tree:
    """One `Tree` of a draft a row.

    Args:
        roots: int64 `[B]`, the last committed token of each row.
        drafts: one a row.
        active: rows that still generate; the others become padding.
        vocab: the target's vocabulary size V, for `probs`.
    """
    device = roots.device
    drafted = [len(draft) for draft in drafts]
    riders = [0 if draft.probes is None else len(draft.probes.tokens) for draft in drafts]
    widths = [1 + n + p for n, p in zip(drafted, riders, strict=True)]
    width = max(widths)
    if width == 1:
        tokens = roots[:, None]
    else:
        tokens = torch.cat(
            [roots[:, None], _stack([_row_tokens(d, device) for d in drafts], width - 1, device)], 1
        )
    chain = not any(riders) and all(draft.parents is None for draft in drafts)
    column = arange(width, device)
    full = all(active) and not any(riders) and min(drafted) == width - 1
    if full:
        live, candidate = (cells.expand(len(drafts), -1) for cells in _full_layout(width, device))
    else:
        ends = send(
            [[n, n + p] if on else [-1, -1] for n, p, on in zip(drafted, riders, active, strict=True)], device
        )
        live = column <= ends[:, 1:]
        candidate = (column <= ends[:, :1]) & (column > 0)
    if chain:
        parents, depth, visible = _chain_layout(width, device)
        rows = len(drafts)
        parents, depth = parents.expand(rows, -1), depth.expand(rows, -1)
        visible, siblings = visible.expand(rows, -1, -1), 1
    else:
        parents, depth, visible = _tree_layout(drafts, width, device)
        visible, depth = _place_probes(drafts, visible, depth)
        siblings = _most_siblings(drafts, parents, candidate)
    return Tree(
        tokens, parents, depth, visible, candidate, live, drafted, widths,
        _collate_probs(drafts, width, vocab, device), full, chain, siblings,
    )  # fmt: skip


def walk(tree: Tree, matched: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The deepest path whose every node is in `matched` (bool `[B, T]`; candidates only, one a family).

    Returns:
        accepted int64 `[B]`: the path's length without the root;
        last int64 `[B]`: the column of its end;
        path int64 `[B, T]`: its columns, root first; entries past `accepted` are meaningless.
    """
    if tree.chain:
        accepted = matched[:, 1:].long().cumprod(1).sum(1)
        return accepted, accepted, arange(tree.tokens.shape[1], accepted.device).expand_as(tree.tokens)
    matched = matched.clone()
    matched[:, 0] = True
    whole = ~(tree.visible & ~matched[:, None, :]).any(-1) & matched
    accepted, last = torch.where(whole, tree.depth, -1).max(1)
    on_path = tree.visible.gather(1, last[:, None, None].expand(-1, 1, tree.visible.shape[2]))[:, 0]
    # Parents stand before children, so a path's columns in rising order are the path from the root down.
    columns = arange(tree.tokens.shape[1], last.device)
    return accepted, last, torch.where(on_path, columns, columns.numel() - 1).sort(1).values


def earlier_siblings(tree: Tree) -> torch.Tensor:
    """Bool `[B, T, T]`: [b, i, j] is true if candidate j is an earlier sibling of candidate i."""
    same = tree.parents[:, :, None] == tree.parents[:, None, :]
    both = tree.candidate[:, :, None] & tree.candidate[:, None, :]
    return (same & both).tril(-1)


@cache
def arange(n: int, device: torch.device) -> torch.Tensor:
    """0..n-1, kept for good, since captured passes read it where it stands: for reading only."""
    return torch.arange(n, device=device)


@lru_cache(maxsize=1024)
def _full_layout(width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """`live` and `candidate` of a row without padding, `[1, T]`."""
    live = torch.ones(1, width, dtype=torch.bool, device=device)
    return live, arange(width, device)[None] > 0


@lru_cache(maxsize=256)
def _chain_layout(width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    depth = torch.arange(width, device=device)[None]
    visible = torch.ones(width, width, dtype=torch.bool, device=device).tril()[None]
    return (depth - 1).clamp(min=0), depth, visible


def _row_tokens(draft: Draft, device: torch.device) -> Ids:
    if draft.probes is None:
        return draft.tokens
    return torch.cat([send(ids, device, torch.long) for ids in (draft.tokens, draft.probes.tokens)])


def _stack(rows: Sequence[Ids], width: int, device: torch.device, fill: int = 0) -> torch.Tensor:
    """Rows of ids, padded on the right to `[B, width]`: one transfer if they are lists, none if on the device."""
    if any(isinstance(row, torch.Tensor) for row in rows):
        tensors = [send(row, device, torch.long) for row in rows]
        return torch.stack([pad(row, (0, width - row.numel()), value=fill) for row in tensors])
    lists = [list(row) + [fill] * (width - len(row)) for row in rows]
    return send(lists, device, torch.long)


def _tree_layout(
    drafts: Sequence[Draft], width: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Parents and depth int64 `[B, T]`, and who sees whom, bool `[B, T, T]`, of trees; padding hangs on the root."""
    rows = [range(-1, len(draft) - 1) if draft.parents is None else draft.parents for draft in drafts]
    lists = [row for row in rows if not isinstance(row, torch.Tensor)]
    if len(lists) == len(rows):
        return _host_layout(tuple(map(tuple, lists)), width, device)
    parents = pad(_stack(rows, width - 1, device, fill=-1) + 1, (1, 0))
    deepest = [len(draft) if draft.deepest is None else draft.deepest for draft in drafts]
    visible = _ancestors(parents, max(deepest))
    return parents, visible.sum(-1) - 1, visible


@lru_cache(maxsize=64)
def _host_layout(
    rows: tuple[tuple[int, ...], ...], width: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same of parents that the host knows, kept (for reading only), since many drafters' trees have one shape.

    A set of nodes is a number with their bits: that is faster than tensors.
    """
    parents: list[list[int]] = []
    depth: list[list[int]] = []
    packed = bytearray()
    size = (width + 7) // 8
    for row in rows:
        above = [0, *(parent + 1 for parent in row)]
        above += [0] * (width - len(above))
        deep, seen = [0], [1]
        for node, parent in enumerate(above[1:], 1):
            deep.append(deep[parent] + 1)
            seen.append(seen[parent] | 1 << node)
        parents.append(above)
        depth.append(deep)
        packed += b"".join([bits.to_bytes(size, "little") for bits in seen])
    bits = np.frombuffer(packed, np.uint8).reshape(len(rows), width, size)
    visible = np.unpackbits(bits, axis=-1, count=width, bitorder="little").view(np.bool_)
    on_device = send([parents, depth], device)
    return on_device[0], on_device[1], send(torch.from_numpy(visible), device)


def _ancestors(parents: torch.Tensor, deepest: int) -> torch.Tensor:
    """Ancestors and self, bool `[B, T, T]`, by pointer jumping: each step looks twice as far up (nothing is read)."""
    column = arange(parents.shape[1], parents.device)
    seen = (parents[..., None] == column) | (column[:, None] == column)
    for _ in range(max(deepest - 1, 0).bit_length()):
        seen = seen | seen.gather(1, parents[..., None].expand_as(seen))
        parents = parents.gather(1, parents)
    return seen


def _place_probes(
    drafts: Sequence[Draft], visible: torch.Tensor, depth: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if any(draft.probes is not None for draft in drafts):
        visible, depth = visible.clone(), depth.clone()
    for row, draft in enumerate(drafts):
        if draft.probes is not None:
            first, count = 1 + len(draft), len(draft.probes.tokens)
            visible[row, first : first + count] = False
            visible[row, first : first + count, : first + count] = send(draft.probes.visible, visible.device)
            depth[row, first : first + count] = send(draft.probes.depth, depth.device)
    return visible, depth


def _most_siblings(drafts: Sequence[Draft], parents: torch.Tensor, candidate: torch.Tensor) -> int:
    """Needed only where siblings were sampled; a chain or deterministic tree need not be read for it."""
    if all(draft.probs is None for draft in drafts):
        return 1
    if all(draft.siblings is not None for draft in drafts if len(draft)):
        return max([draft.siblings or 1 for draft in drafts])
    counts = torch.zeros_like(parents).scatter_add_(1, parents, candidate.long())
    return max(int(counts.max()), 1)


def _collate_probs(
    drafts: Sequence[Draft], width: int, vocab: int, device: torch.device
) -> torch.Tensor | None:
    if all(draft.probs is None for draft in drafts):
        return None
    q = torch.zeros(len(drafts), width, vocab, device=device)
    for row, draft in enumerate(drafts):
        if not len(draft):
            continue
        if draft.probs is None:  # a deterministic proposal is one sampled from a one-hot q
            q[row, 1 : len(draft) + 1].scatter_(1, send(draft.tokens, device)[:, None], 1.0)
        else:
            q[row, 1 : len(draft) + 1, : draft.probs.shape[-1]] = draft.probs
    return q
