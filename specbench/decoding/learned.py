"""Drafters with weights of their own: who they are, and what memory they hold."""

from __future__ import annotations

from typing import Any

from torch import nn

from specbench.decoding.draft import Drafter
from specbench.measure.memory import module_bytes
from specbench.models.cache import SlotCache
from specbench.models.identity import ModelIdentity
from specbench.models.target import Target


class LearnedDrafter(Drafter):
    """A drafter that is a network.

    Args:
        network: all weights it holds beyond the target's.
        identity: who they are; None: nobody knows.
        cache: its keys and values, if it keeps any.
    """

    def __init__(
        self,
        target: Target,
        network: nn.Module,
        identity: ModelIdentity | None,
        cache: SlotCache | None = None,
    ) -> None:
        super().__init__(target)
        self._network, self._identity, self._cache = network, identity, cache

    def draft_identity(self) -> dict[str, Any] | None:
        return None if self._identity is None else self._identity.to_json()

    def weights_bytes(self) -> int:
        return module_bytes(self._network)

    def kv_bytes(self) -> int:
        return 0 if self._cache is None else self._cache.nbytes()

    def release(self) -> None:
        if self._cache is not None:
            self._cache.release()
