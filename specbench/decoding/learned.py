"""Drafters with weights of their own: who they are, what memory they hold, and their passes of fixed shape."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from specbench.decoding.context import Context, Layout
from specbench.decoding.draft import Drafter
from specbench.decoding.method import Request
from specbench.decoding.tree import arange
from specbench.measure.memory import module_bytes
from specbench.models.buckets import buckets
from specbench.models.cache import SlotCache
from specbench.models.device import send
from specbench.models.fixed_pass import Compute, Tensors
from specbench.models.identity import ModelIdentity
from specbench.models.passes import Passes
from specbench.models.target import Target

# Inputs `[B, T, …]`, where the pass over them writes and looks, and each row's last column, int64 `[B]`, that is no
# padding (0 where there is none): outputs.
Feed = Callable[[Tensors, Layout, torch.Tensor], Tensors]


class LearnedDrafter(Drafter):
    """A drafter that is a network. Its steps run as the target's passes do: captured, or as they are.

    Args:
        network: all weights it holds beyond the target's.
        identity: who they are; None: nobody knows.
        cache: its keys and values, if it keeps any.
        passes: the network's, if it has some of its own already (a whole model).
    """

    def __init__(
        self,
        target: Target,
        network: nn.Module,
        identity: ModelIdentity | None,
        cache: SlotCache | None = None,
        passes: Passes | None = None,
    ) -> None:
        super().__init__(target)
        self._network, self._identity, self._cache = network, identity, cache
        self.passes = target.passes.like("draft network") if passes is None else passes

    def draft_identity(self) -> dict[str, Any] | None:
        return None if self._identity is None else self._identity.to_json()

    def weights_bytes(self) -> int:
        return module_bytes(self._network)

    def kv_bytes(self) -> int:
        return 0 if self._cache is None else self._cache.nbytes()

    def graph_bytes(self) -> int:
        return self.passes.nbytes()

    def release(self) -> None:
        if self._cache is not None:
            self._cache.release()
        self.passes.clear()

    def make_ahead(self, request: Request, longest: int) -> None:
        """Untimed: make the passes that have come up so far for all contexts that `request` may come to.

        Args:
            longest: tokens of a row in the network's cache, drafts included; room for them is reserved.
        """
        rows, lengths = len(request.prompts), [0]
        if self._cache is not None:
            if not self._cache.ready:
                return
            lengths = buckets(request.longest_prompt, longest, self._cache.slots)
        self.passes.ahead(rows, self._version, lengths)

    def fixed(
        self, variant: Hashable, compute: Compute, inputs: Tensors, length: int = 0, *, bucket: bool = False
    ) -> Tensors:
        """`compute(inputs, length)` in a pass of fixed shape, where that serves: see `Passes.run`."""
        return self.passes.run(variant, self._version, compute, inputs, length, bucket=bucket)

    def feed(
        self,
        variant: Hashable,
        context: Context,
        compute: Feed,
        counts: list[int],
        inputs: Tensors,
        fixed: bool = True,
    ) -> Tensors:
        """Commit `counts[b]` tokens a row in one causal pass, `compute(inputs, at, last)`, likewise.

        Args:
            context: of the network's cache.
            compute: see `Feed`. What it gives is `[B, 1, …]`: padding is cut off.
            inputs: `[B, T, …]` each, right-padded.
            fixed: whether a fixed shape may serve: prompts are of every length.
        """
        name, source = next(iter(inputs.items()))
        if self.passes.off is not None or not fixed:
            at = context.extend(source.shape[1], counts)
            return compute(inputs, at, send([max(n - 1, 0) for n in counts], source.device))
        start, count = send([context.lengths, counts], source.device)[..., None]

        def whole(given: Tensors, length: int) -> Tensors:
            begin, number = given["start"][:, :1], given["count"][:, :1]
            at = context.places(given[name].shape[1], begin, number, length)
            return compute(given, at, (number[:, 0] - 1).clamp(min=0))

        given = {**inputs, "start": start, "count": count}
        found = self.fixed(variant, whole, given, context.reach(source.shape[1]), bucket=True)
        context.grow(counts)
        return found

    def depth(self, needed: int, whole: int) -> int:
        """How deep to draft where `needed` is the deepest that any row may go.

        By passes of fixed shape always as deep as the `whole` draft, so that near an end no others come up.
        """
        return min(needed, whole) if self.passes.off is not None else whole

    @property
    def _version(self) -> int:
        return 0 if self._cache is None else self._cache.version


def column_of(states: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Of `states` `[B, T, H]`, each row's at its column of `columns` int64 `[B]`: `[B, H]`."""
    return states[arange(len(columns), columns.device), columns]
