"""The slot cache: a static key-value buffer a layer, whose rows are written to explicit slots.

Ragged acceptance at any batch size then is a matter of slots: nothing is left-padded, cropped or copied, and
addresses are fixed. Slot 0 is scratch: padding is written there and every mask hides it. What stands in slots that
a mask hides is never read into a result, so a rejected draft is forgotten by not being seen.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache


class SlotCache(Cache):
    """A transformers `Cache` with buffers `[B, H_kv, S, D]` a layer, allocated when first written.

    The owner sets where the next forward writes and how far it may read: `start_prefill` for the first pass of
    fresh rows (attention then sees this pass alone, causally, and needs no mask), `start` for later passes.
    """

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[])
        self._keys: list[torch.Tensor | None] = [None] * layers
        self._values: list[torch.Tensor | None] = [None] * layers
        self._rows = self._slots = 0
        self._index: torch.Tensor | None = None
        self._read = 0
        self.version = 0  # of the buffers' addresses

    # -- the owner's side ------------------------------------------------------------------------------------

    def reserve(self, rows: int, slots: int) -> None:
        """Make room for `rows` sequences of `slots` slots; buffers that are large enough are kept as they are."""
        if rows <= self._rows and slots <= self._slots:
            return
        self.version += 1
        for layer, (keys, values) in enumerate(zip(self._keys, self._values, strict=True)):
            if keys is not None and values is not None:
                # Free the old buffer before the new one is made.
                self._keys[layer] = self._values[layer] = None
                k_spec, v_spec = (
                    (keys.shape, keys.dtype, keys.device),
                    (values.shape, values.dtype, values.device),
                )
                del keys, values
                self._keys[layer] = _buffer(k_spec, rows, slots)
                self._values[layer] = _buffer(v_spec, rows, slots)
        self._rows, self._slots = rows, slots

    def release(self) -> None:
        """Give all buffers back."""
        self._keys, self._values = [None] * len(self), [None] * len(self)
        self._rows = self._slots = 0
        self.version += 1

    def start_prefill(self) -> None:
        """The next forward writes its T tokens to slots 1..T and attends to them alone."""
        self._index, self._read = None, 0

    def start(self, slots: torch.Tensor, read: int) -> None:
        """The next forward writes to `slots` int64 `[B, T]` and reads the first `read` slots."""
        self._index, self._read = slots, read

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy slots `source` to `target`, both int64 `[B, n]`, in every layer (compaction of a tree's path)."""
        for buffers in (self._keys, self._values):
            for buffer in buffers:
                if buffer is not None:
                    here = buffer.device
                    read, write = source.to(here), target.to(here)
                    kept = buffer.gather(2, _spread(read, buffer))
                    buffer.scatter_(2, _spread(write, buffer), kept)

    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(b.nbytes for buffers in (self._keys, self._values) for b in buffers if b is not None)

    @property
    def slots(self) -> int:
        """Slots a row, the scratch slot included."""
        return self._slots

    @property
    def ready(self) -> bool:
        """Whether every layer has its buffers."""
        return None not in self._keys

    # -- the model's side ------------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store this pass's keys and values `[B, H_kv, T, D]`; return what attention may look at."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if keys is None or values is None:
            keys = self._keys[layer_idx] = _buffer_like(key_states, self._rows, self._slots)
            values = self._values[layer_idx] = _buffer_like(value_states, self._rows, self._slots)
        if len(key_states) < self._rows:
            keys, values = keys[: len(key_states)], values[: len(key_states)]
        if self._index is None:
            length = key_states.shape[2]
            keys[:, :, 1 : length + 1].copy_(key_states)
            values[:, :, 1 : length + 1].copy_(value_states)
            return key_states, value_states
        index = self._index.to(keys.device)
        if index.shape[0] == 1:
            keys.index_copy_(2, index[0], key_states)
            values.index_copy_(2, index[0], value_states)
        else:
            keys.scatter_(2, _spread(index, key_states), key_states)
            values.scatter_(2, _spread(index, value_states), value_states)
        return keys[:, :, : self._read], values[:, :, : self._read]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # asked only for default positions and masks, which only a prefill leaves to the model

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return (query_length, 0) if self._index is None else (self._read, 0)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self._slots

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        return self._slots

    @property
    def is_initialized(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self._keys)

    @property
    def is_linear(self) -> list[bool]:
        return [False] * len(self._keys)

    @property
    def is_dummy(self) -> list[bool]:
        return [False] * len(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _spread(index: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return index[:, None, :, None].expand(-1, like.shape[1], -1, like.shape[3])


def _buffer_like(states: torch.Tensor, rows: int, slots: int) -> torch.Tensor:
    return _buffer((states.shape, states.dtype, states.device), rows, slots)


def _buffer(spec: tuple[torch.Size, torch.dtype, torch.device], rows: int, slots: int) -> torch.Tensor:
    """Zeros, not garbage: a hidden slot is multiplied by a zero weight, which NaN would survive."""
    (_, heads, _, width), dtype, device = spec
    return torch.zeros(rows, heads, slots, width, dtype=dtype, device=device)
