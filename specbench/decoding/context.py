"""The committed tokens of a batch in a target's cache, and the passes that extend them.

Token i of a row has position i and lives in slot i + 1. The nodes of a draft take the slots after the committed
ones in column order; once a path is accepted its nodes are moved together, so that the rule holds again.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from specbench.decoding.tree import Tree, arange
from specbench.models.target import Pass, Target, round_up


class Context:
    """Lengths of the rows in `target`'s cache; `lengths[b]` committed tokens stand in slots 1..lengths[b]."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.lengths: list[int] = []

    def prefill(self, prompts: list[list[int]]) -> Pass:
        """Start over with `prompts`; logits `[B, 1, V]` at each row's last token."""
        result = self.target.prefill(prompts)
        self.lengths = [len(prompt) for prompt in prompts]
        return result

    def verify(self, tree: Tree) -> Pass:
        """A pass over the nodes of `tree`, none of which is committed yet."""
        width = tree.tokens.shape[1]
        read = self._read(width)
        start = torch.tensor(self.lengths, device=self.target.device)[:, None]
        positions = start + tree.depth
        slots = torch.where(tree.live, start + 1 + arange(width, start.device), 0)
        return self.target.forward(
            tree.tokens, positions, slots, self._masks(tree, start, positions, slots, read)
        )

    def append(self, tokens: torch.Tensor, counts: list[int]) -> Pass:
        """Commit `counts[b]` tokens of each row of `tokens` `[B, T]` (right-padded), in one causal pass."""
        rows, width = tokens.shape
        depth = arange(width, tokens.device)
        live = torch.ones(1, 1, dtype=torch.bool, device=tokens.device).expand(rows, width)
        if min(counts) < width:
            live = depth < torch.tensor(counts, device=tokens.device)[:, None]
        tree = Tree(
            tokens, (depth - 1).clamp(min=0).expand(rows, -1), depth.expand(rows, -1), depth[:, None] >= depth,
            live, live, counts, counts, None, True, 1,
        )  # fmt: skip
        result = self.verify(tree)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        return result

    def commit(self, accepted: list[int], paths: list[list[int]] | None, finished: list[bool]) -> None:
        """Keep the root and `accepted[b]` nodes of each row; `paths` are their columns, None for chains."""
        if paths is not None:
            self._compact(accepted, paths)
        for row, count in enumerate(accepted):
            if not finished[row]:
                self.lengths[row] += count + 1

    def rewind(self, lengths: list[int]) -> None:
        """Forget what stands beyond `lengths`."""
        self.lengths = list(lengths)

    def _read(self, width: int) -> int:
        return min(round_up(max(self.lengths) + width + 1), self.target.cache.slots)

    def _compact(self, accepted: list[int], paths: list[list[int]]) -> None:
        longest = max(accepted, default=0)
        source = [[0] * longest for _ in accepted]
        target = [[0] * longest for _ in accepted]
        moved = False
        for row, (count, path) in enumerate(zip(accepted, paths, strict=True)):
            for step in range(1, count + 1):
                if path[step] != step:
                    moved = True
                    source[row][step - 1] = self.lengths[row] + 1 + path[step]
                    target[row][step - 1] = self.lengths[row] + 1 + step
        if moved:
            device = self.target.device
            self.target.cache.move(torch.tensor(source, device=device), torch.tensor(target, device=device))

    def _masks(
        self, tree: Tree, start: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, read: int
    ) -> dict[str, torch.Tensor]:
        """Additive masks `[B, 1, T, read]` by layer type: committed slots, ancestors and self are seen."""
        slot = arange(read, start.device)
        rows, width = tree.tokens.shape
        if tree.chain:
            seen = (slot >= 1) & (slot <= positions[..., None] + 1)
        else:
            seen = ((slot >= 1) & (slot <= start))[:, None, :].repeat(1, width, 1)
            own = tree.visible & tree.live[:, None, :]
            seen.scatter_(2, slots[:, None, :].expand(rows, width, width), own)
        masks = {}
        for kind in self.target.kinds:
            allowed = seen
            if kind == "sliding_attention" and self.target.window is not None:
                where = (slot - 1).expand(rows, -1).clone().scatter_(1, slots, positions)
                allowed = seen & (positions[..., None] - where[:, None, :] < self.target.window)
            masks[kind] = _additive(allowed, self.target.dtype)
        return masks


def _additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where allowed, the least finite number elsewhere (never -inf: a row that sees nothing must not be NaN)."""
    zero, least = _bounds(dtype, allowed.device)
    return torch.where(allowed, zero, least)[:, None]


@lru_cache(maxsize=32)
def _bounds(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros((), dtype=dtype, device=device), torch.full(
        (), torch.finfo(dtype).min, dtype=dtype, device=device
    )
