"""The slot cache: a static key-value buffer a layer, whose rows are written to explicit slots.

Ragged acceptance at any batch size then is a matter of slots: nothing is left-padded, cropped or copied, and
addresses are fixed. Slot 0 is scratch: padding is written there and every mask hides it. What stands in slots that
a mask hides is never read into a result, so a rejected draft is forgotten by not being seen.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

Spec = tuple[int, int, torch.dtype, torch.device]  # heads, size of each, and of what numbers, where


class SlotCache(Cache):
    """A transformers `Cache` with buffers `[B, H_kv, S, D]` a layer, allocated when first written.

    Buffers of the same kind are parts of one tensor, so that moving slots is a kernel or two and not two a layer.

    Args:
        layers: how many.
        alike: whether all layers' buffers can be expected to be what the first one's are, and so be made at once.

    The owner sets where the next forward writes and how far it may read: `start_prefill` for the first pass of
    fresh rows (attention then sees this pass alone, causally, and needs no mask), `start` for later passes.
    """

    def __init__(self, layers: int, alike: bool = True) -> None:
        super().__init__(layers=[])
        self._alike = alike
        self._keys = _Buffers(layers)
        self._values = _Buffers(layers)
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
        self._keys.make_again(rows, slots)
        self._values.make_again(rows, slots)
        self._rows, self._slots = rows, slots

    def release(self) -> None:
        """Give all buffers back."""
        self._keys, self._values = _Buffers(len(self)), _Buffers(len(self))
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
        for stack in (*self._keys.stacks, *self._values.stacks):
            layers, _, heads, _, width = stack.shape
            read, write = (
                index.to(stack.device)[None, :, None, :, None].expand(layers, -1, heads, -1, width)
                for index in (source, target)
            )
            stack.scatter_(3, write, stack.gather(3, read))

    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(stack.nbytes for stack in (*self._keys.stacks, *self._values.stacks))

    @property
    def slots(self) -> int:
        """Slots a row, the scratch slot included."""
        return self._slots

    @property
    def ready(self) -> bool:
        """Whether every layer has its buffers."""
        return all(buffer is not None for buffer in self._keys.layers)

    # -- the model's side ------------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store this pass's keys and values `[B, H_kv, T, D]`; return what attention may look at."""
        keys, values = self._keys.layers[layer_idx], self._values.layers[layer_idx]
        if keys is None or values is None or self._index is None:
            room = self._rows, self._slots, self._alike
            keys = self._keys.fitting(layer_idx, key_states, *room)
            values = self._values.fitting(layer_idx, value_states, *room)
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
        return [False] * len(self)

    @property
    def is_linear(self) -> list[bool]:
        return [False] * len(self)

    @property
    def is_dummy(self) -> list[bool]:
        return [False] * len(self)

    def __len__(self) -> int:
        return len(self._keys.layers)


class _Buffers:
    """The keys, or the values, of all layers: `layers[i]` `[B, H_kv, S, D]` is a part of one of `stacks`."""

    def __init__(self, layers: int) -> None:
        self.layers: list[torch.Tensor | None] = [None] * layers
        self.stacks: list[torch.Tensor] = []

    def fitting(self, layer: int, states: torch.Tensor, rows: int, slots: int, alike: bool) -> torch.Tensor:
        """The buffer of a layer, which is made (and others with it, if `alike`) unless it is there and fits."""
        spec = _spec(states)
        buffer = self.layers[layer]
        if buffer is None or _spec(buffer) != spec:
            missing = [i for i, other in enumerate(self.layers) if other is None]
            self._make(spec, missing if alike and layer in missing else [layer], rows, slots)
        buffer = self.layers[layer]
        assert buffer is not None
        return buffer

    def make_again(self, rows: int, slots: int) -> None:
        """The buffers there are, with other room."""
        groups: dict[Spec, list[int]] = {}
        for layer, buffer in enumerate(self.layers):
            if buffer is not None:
                groups.setdefault(_spec(buffer), []).append(layer)
                buffer = self.layers[layer] = None  # freed before the new ones are made
        self.stacks.clear()
        for spec, layers in groups.items():
            self._make(spec, layers, rows, slots)

    def _make(self, spec: Spec, layers: list[int], rows: int, slots: int) -> None:
        """Zeros, not garbage: a hidden slot is multiplied by a zero weight, which NaN would survive."""
        heads, width, dtype, device = spec
        stack = torch.zeros(len(layers), rows, heads, slots, width, dtype=dtype, device=device)
        self.stacks.append(stack)
        for layer, buffer in zip(layers, stack, strict=True):
            self.layers[layer] = buffer


def _spec(states: torch.Tensor) -> Spec:
    return states.shape[1], states.shape[3], states.dtype, states.device


def _spread(index: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return index[:, None, :, None].expand(-1, like.shape[1], -1, like.shape[3])
