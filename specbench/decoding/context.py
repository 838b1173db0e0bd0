"""The committed tokens of a batch in a model's cache, and where the passes that extend them write and look.

Token i of a row has position i and lives in slot i + 1. The nodes of a draft take the slots after the committed
ones in column order; once a path is accepted its nodes are moved together, so that the rule holds again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

from specbench.decoding.tree import Tree, arange
from specbench.models.buckets import round_up
from specbench.models.cache import SlotCache
from specbench.models.device import send
from specbench.models.target import Pass, Target


class Cached(Protocol):
    """What a context needs of a model: a target, or a drafter's own network."""

    cache: SlotCache
    kinds: tuple[str, ...]
    window: int | None

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True)
class Layout:
    """Positions and slots, int64 `[B, T]`, and additive masks `[B, 1, T, L]` by layer type, of one pass."""

    positions: torch.Tensor
    slots: torch.Tensor
    masks: dict[str, torch.Tensor]


class Context:
    """Lengths of the rows in `model`'s cache; `lengths[b]` committed tokens stand in slots 1..lengths[b]."""

    def __init__(self, model: Cached) -> None:
        self.model = model
        self.lengths: list[int] = []

    def verify(self, target: Target, tree: Tree) -> Pass:
        """A pass of `target` over the nodes of `tree`, none of which is committed yet."""
        live = None if tree.full else tree.live
        at = self.layout(tree.depth, live, None if tree.chain else tree.visible)
        return target.forward(tree.tokens, at.positions, at.slots, at.masks)

    def append(self, target: Target, tokens: torch.Tensor, counts: list[int]) -> Pass:
        """Commit `counts[b]` tokens of each row of `tokens` `[B, T]` (right-padded), in one causal pass."""
        at = self.extend(tokens.shape[1], counts)
        return target.forward(tokens, at.positions, at.slots, at.masks)

    def extend(self, width: int, counts: list[int]) -> Layout:
        """Commit `counts[b]` tokens a row, right-padded to `width`: where their causal pass writes and looks."""
        column = arange(width, self.model.device)
        live = None if min(counts) == width else column < send(counts, column.device)[:, None]
        at = self.layout(column.expand(len(counts), -1), live)
        self.grow(counts)
        return at

    def grow(self, counts: list[int]) -> None:
        """`counts[b]` more tokens a row are committed."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def places(self, width: int, start: torch.Tensor, count: torch.Tensor, read: int) -> Layout:
        """What `extend` says, of numbers that are on the device: `start` and `count` int64 `[B, 1]`, `read` slots.

        Padding stands where column 0 does, and looks at what that looks at.
        """
        column = arange(width, start.device)
        live = column < count
        return self.layout(torch.where(live, column, 0), live, start=start, read=read)

    def occupy(self, width: int, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Commit `counts[b]` tokens a row in a pass that only writes: its positions and slots, `[B, width]`."""
        start, count = send([self.lengths, counts], self.model.device)[..., None]
        column = arange(width, self.model.device)
        self.grow(counts)
        positions = start + column
        return positions, torch.where(column < count, positions + 1, 0)

    def layout(
        self,
        depth: torch.Tensor,
        live: torch.Tensor | None,
        visible: torch.Tensor | None = None,
        earlier: int = 0,
        start: torch.Tensor | None = None,
        read: int | None = None,
    ) -> Layout:
        """Where a pass over T uncommitted nodes writes and looks.

        Args:
            depth: int64 `[B, T]`, positions counted from the first uncommitted one.
            live: bool `[B, T]`; other columns are padding. None: there is none.
            visible: bool `[B, T, earlier + T]`, which nodes each node attends to besides what is committed;
                None for a chain.
            earlier: nodes of earlier passes that are still uncommitted (a tree drafted level by level).
            start: `lengths` on the device, int64 `[B, 1]`, if it is there already.
            read: the slots attention looks at, if that is known already.
        """
        width = depth.shape[1]
        if read is None:
            read = self.reach(earlier + width)
        if start is None:
            start = self.starts()
        positions = start + depth
        own = start + arange(1 + earlier + width, depth.device)[1 + earlier :]
        slots = own if live is None else torch.where(live, own, 0)
        slot = arange(read, depth.device)
        last = positions + 1 if visible is None else start
        # Slot 0 is scratch: where it is compared with what is not below it, it is seen by nobody.
        seen = (_shown(read, depth.device) <= last[..., None]).expand(-1, width, -1)
        if visible is not None:
            every = start + arange(1 + earlier + width, depth.device)[1:] if live is None else slots
            if live is not None:
                visible = visible.clone()
                visible[:, :, earlier:] &= live[:, None, :]
                if earlier:
                    every = torch.cat([start + arange(1 + earlier, depth.device)[1:], slots], 1)
            seen = seen.clone().scatter_(2, every[:, None, :].expand(-1, width, -1), visible)
        return Layout(positions, slots, self._masks(seen, positions, slots, slot))

    def reach(self, nodes: int) -> int:
        """The slots that attention looks at with so many uncommitted nodes: a whole bucket."""
        return min(round_up(max(self.lengths) + nodes + 1), self.model.cache.slots)

    def starts(self) -> torch.Tensor:
        """`lengths` on the device, int64 `[B, 1]`."""
        return send(self.lengths, self.model.device)[:, None]

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
            device = self.model.device
            self.model.cache.move(send(source, device), send(target, device))

    def _masks(
        self, seen: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, slot: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """`seen` bool `[B, T, L]` as additive masks; sliding layers look back no further than their window."""
        masks = {}
        for kind in self.model.kinds:
            allowed = seen
            if kind == "sliding_attention" and self.model.window is not None:
                where = (slot - 1).expand(len(slots), -1).clone().scatter_(1, slots, positions)
                allowed = seen & (positions[..., None] - where[:, None, :] < self.model.window)
            masks[kind] = _additive(allowed, self.model.dtype)
        return masks


def _additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where allowed, the least finite number elsewhere (never -inf: a row that sees nothing must not be NaN)."""
    zero, least = _bounds(dtype, allowed.device)
    return torch.where(allowed, zero, least)[:, None]


# Kept for good: captured passes read them where they stand.
@cache
def _shown(read: int, device: torch.device) -> torch.Tensor:
    """Slots 0..read-1, but for slot 0, which no mask shows: a number above all others stands there."""
    shown = torch.arange(read, device=device)
    shown[0] = 2**62
    return shown


@cache
def _bounds(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros((), dtype=dtype, device=device), torch.full(
        (), torch.finfo(dtype).min, dtype=dtype, device=device
    )
