"""Drafters with weights of their own: who they are, what memory they hold, and their passes of fixed shape."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from specbench.decoding.context import Layout
from specbench.decoding.draft import Drafter
from specbench.decoding.method import Request
from specbench.measure.memory import module_bytes
from specbench.models.buckets import buckets
from specbench.models.cache import SlotCache
from specbench.models.fixed_pass import SLOTS, Compute, Tensors
from specbench.models.identity import ModelIdentity
from specbench.models.passes import Passes
from specbench.models.target import Target


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

    def fixed_pass(
        self, variant: Hashable, net: Callable[..., torch.Tensor], at: Layout, **inputs: torch.Tensor
    ) -> torch.Tensor:
        """`net(**inputs, at=at)` `[B, T, …]`, likewise.

        Args:
            net: the same function whenever `variant` is the same.
            at: with the mask of one layer type.
            inputs: `[B, T, …]` each.
        """
        ((kind, mask),) = at.masks.items()
        names = tuple(inputs)

        def compute(given: Tensors, _length: int) -> Tensors:
            place = Layout(given["positions"], given[SLOTS], {kind: given["mask"]})
            return {"out": net(**{name: given[name] for name in names}, at=place)}

        given = {**inputs, "positions": at.positions, SLOTS: at.slots, "mask": mask}
        return self.fixed(variant, compute, given, mask.shape[-1], bucket=True)["out"]

    @property
    def _version(self) -> int:
        return 0 if self._cache is None else self._cache.version
