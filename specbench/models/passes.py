"""Passes of a fixed shape: run on buffers that stay where they are, captured once as a CUDA graph and replayed.

A decoding pass is a thousand small kernels, which Python starts more slowly than a large GPU runs them. A graph
starts them all at once. It needs every shape and address to be the same each time: so a pass is padded to a bucket
of columns (padding is written to the scratch slot and looks at what column 0 looks at; it changes nothing and, in a
mixture of experts, wakes no expert that column 0 does not), attention reads a bucket of slots, and inputs are copied
into buffers of the pass. What comes out is copied as well: it is the caller's to keep.

`FixedPass` is all of that but the capture, and runs anywhere: what tests check on a CPU is what a GPU replays.
"""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch

from specbench.errors import first_line

Tensors = dict[str, torch.Tensor]
Compute = Callable[[Tensors, int], Tensors]  # inputs and how many slots attention reads: outputs

WIDEST = 128  # columns; a wider pass keeps a GPU busy whatever Python does
MOST = 192  # passes kept, the least recently used goes first
MOST_KINDS = 48  # remembered, to make their passes ahead
ONCE = 1  # a kind of pass that comes up only so often is not worth a capture
WARM_UPS = 2  # runs before a capture: libraries set themselves up and kernels are compiled
SLOTS = "slots"  # the one input whose padding is 0 (the scratch slot) and not column 0's


class FixedPass:
    """A function of tensors, run on buffers of its own.

    Args:
        compute: must do the same work whatever the inputs hold.
        inputs: the buffers, of a full pass. Columns are dimension 2 of four, else dimension 1.
        length: how many slots attention reads.
    """

    def __init__(self, compute: Compute, inputs: Tensors, length: int) -> None:
        self._compute, self.inputs, self._length = compute, inputs, length
        self._width = WIDEST  # columns of `slots` that may hold something

    def prepare(self, inputs: Tensors) -> None:
        """Copy in inputs of this pass's shape, or of fewer columns, which are padded."""
        for name, source in inputs.items():
            buffer = self.inputs[name]
            dim = _column_dim(source.dim())
            width, full = source.shape[dim], buffer.shape[dim]
            if name == SLOTS:
                buffer[:, :width].copy_(source)
                if width < self._width:
                    buffer[:, width:].zero_()
                self._width = width
            elif width == full:
                buffer.copy_(source)
            else:
                torch.index_select(source, dim, _padding(width, full, source.device), out=buffer)

    def run(self) -> Tensors:
        """The outputs, columns of padding included. The next run of any pass may overwrite them."""
        return self._compute(self.inputs, self._length)

    def nbytes(self) -> int:
        """Bytes this pass holds while it is not running."""
        return sum(tensor.nbytes for tensor in self.inputs.values())


class CapturedPass(FixedPass):
    """The same as a CUDA graph, captured when it is made.

    Args:
        pool: memory for what lies between inputs and outputs, shared by passes that never run at the same time.
        results: buffers for outputs, shared likewise.
    """

    def __init__(self, compute: Compute, inputs: Tensors, length: int, pool: Any, results: Results) -> None:
        super().__init__(compute, inputs, length)
        device = next(iter(inputs.values())).device
        with torch.cuda.device(device):
            before = torch.cuda.memory_reserved(device)
            results.make(self._warm_up(device))
            self._graph = torch.cuda.CUDAGraph()
            # Thread-local: what other threads do with the driver meanwhile does not spoil the capture.
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                self._outputs = results.keep(compute(inputs, length))
            self._taken = max(0, torch.cuda.memory_reserved(device) - before)

    def run(self) -> Tensors:
        self._graph.replay()
        return self._outputs

    def nbytes(self) -> int:
        return super().nbytes() + self._taken

    def _warm_up(self, device: torch.device) -> Tensors:
        """Run on a stream of its own, as capturing does."""
        outputs: Tensors = {}
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                outputs = self._compute(self.inputs, self._length)
        torch.cuda.current_stream(device).wait_stream(stream)
        return outputs


class Results:
    """One buffer for all outputs of a name and shape, whichever pass they come from."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, torch.Tensor] = {}

    def make(self, outputs: Tensors) -> None:
        for name, tensor in outputs.items():
            if (key := _kind_of(name, tensor)) not in self._buffers:
                self._buffers[key] = torch.empty_like(tensor, memory_format=torch.contiguous_format)

    def keep(self, outputs: Tensors) -> Tensors:
        """The buffers that `outputs` have been copied to."""
        return {name: self._buffers[_kind_of(name, t)].copy_(t) for name, t in outputs.items()}

    def clear(self) -> None:
        self._buffers.clear()


@dataclass(frozen=True)
class Kind:
    """What passes have in common that differ in the slots they read alone: variant, rows and columns."""

    variant: Hashable
    rows: int
    width: int


@dataclass
class _Asked:
    """How often a kind was asked for, and how to make it: its inputs as (shape, dtype, device)."""

    compute: Compute
    inputs: dict[str, tuple[tuple[int, ...], torch.dtype, torch.device]]
    times: int = 0

    def buffers(self, width: int, length: int) -> Tensors:
        """Zeros."""
        made = {}
        for name, (shape, dtype, device) in self.inputs.items():
            full = (shape[0], width, *shape[2:]) if len(shape) < 4 else (*shape[:2], width, length)
            made[name] = torch.zeros(full, dtype=dtype, device=device)
        return made


Make = Callable[[Compute, Tensors, int], FixedPass]


class Passes:
    """The fixed passes of one model, each made when its shape comes up, or ahead of that.

    A kind of pass that comes up for the first time runs as it is: what happens once is not worth a capture.

    Args:
        name: of the model, for messages and the manifest.
        make: makes a pass; None captures CUDA graphs.
        off: why every pass runs as it is, or None.
        most: how many passes are kept.

    Attributes:
        off: the reason, once there is one: the first pass that cannot be captured ends it for all.
        made: passes made so far.
    """

    made_by_all: ClassVar[int] = 0

    def __init__(self, name: str, make: Make | None = None, off: str | None = None, most: int = MOST) -> None:
        self.name, self.off, self.made = name, off, 0
        self._make, self._most = make, most
        self._kept: OrderedDict[tuple[Kind, int], FixedPass] = OrderedDict()
        self._asked: OrderedDict[Kind, _Asked] = OrderedDict()
        self._shapes: set[tuple[int, int, int]] = set()
        self._version: Hashable = None
        self._pool: Any = None
        self._results = Results()
        _everyone.add(self)

    def like(self, name: str) -> Passes:
        """As these, for another model."""
        return Passes(name, self._make, self.off, self._most)

    def run(
        self,
        variant: Hashable,
        version: Hashable,
        compute: Compute,
        inputs: Tensors,
        length: int,
        *,
        bucket: bool = True,
    ) -> Tensors:
        """The outputs of `compute(inputs, length)`, the caller's to keep.

        Args:
            variant: what `compute` does differently at the same shapes.
            version: of what `compute` reads and writes besides; another one makes all passes worthless.
            inputs: tokens and the like `[B, T, …]`, `slots` `[B, T]`, masks `[B, 1, T, length]`.
            bucket: pad T to a power of two (outputs then are `[B, T, …]`); otherwise every T has its own passes.
        """
        rows, width = next(iter(inputs.values())).shape[:2]
        if self.off is not None or width > WIDEST:
            return compute(inputs, length)
        self._check(version)
        kind = Kind(variant, rows, bucket_of(width) if bucket else width)
        asked = self._ask(kind, compute, inputs)
        found = self._find(kind, length, inputs) if asked.times > ONCE else None
        if found is None:
            return compute(inputs, length)
        found.prepare(inputs)
        outputs = found.run()
        if kind.width == width:
            return {name: tensor.clone() for name, tensor in outputs.items()}
        return {name: tensor[:, :width].clone() for name, tensor in outputs.items()}

    def variants(self, rows: int) -> list[Any]:
        """The variants that passes of so many rows have come up in."""
        return list(dict.fromkeys(kind.variant for kind in self._asked if kind.rows == rows))

    def ahead(self, rows: int, variant: Hashable, version: Hashable, lengths: Iterable[int]) -> None:
        """Make the passes of the kinds that have come up, for reading so many slots.

        Untimed, and before a batch begins: while they are made they run, on zeros, and write where those say.
        """
        self._check(version)
        for kind, asked in list(self._asked.items()):
            if (kind.rows, kind.variant) == (rows, variant) and asked.times > ONCE:
                for length in lengths:
                    if self.off is None:
                        self._find(kind, length)

    def clear(self) -> None:
        """Drop all passes and their memory."""
        self._kept.clear()
        self._results.clear()
        self._pool = None

    def nbytes(self) -> int:
        """Bytes held for passes while none is running."""
        return sum(each.nbytes() for each in self._kept.values())

    def facts(self) -> dict[str, Any]:
        """For the manifest: the shapes made, as rows x columns x slots, and why passes run as they are."""
        return {
            "model": self.name,
            "shapes": ["x".join(map(str, shape)) for shape in sorted(self._shapes)],
            "eager": self.off,
        }

    def _check(self, version: Hashable) -> None:
        if version != self._version:
            self.clear()
            self._version = version

    def _ask(self, kind: Kind, compute: Compute, inputs: Tensors) -> _Asked:
        asked = self._asked.get(kind)
        if asked is None:
            specs = {name: (tuple(t.shape), t.dtype, t.device) for name, t in inputs.items()}
            asked = self._asked[kind] = _Asked(compute, specs)
            if len(self._asked) > MOST_KINDS:
                self._asked.popitem(last=False)
        self._asked.move_to_end(kind)
        asked.times += 1
        return asked

    def _find(self, kind: Kind, length: int, inputs: Tensors | None = None) -> FixedPass | None:
        """The pass for these shapes; None where it cannot be made, and from then on there are none.

        While it is made it runs: in the middle of a batch on these `inputs`, which write what belongs there.
        """
        key = kind, length
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        asked = self._asked[kind]
        try:
            buffers = asked.buffers(kind.width, length)
            if inputs is not None:
                FixedPass(asked.compute, buffers, length).prepare(inputs)
            made = (self._make or self._capture)(asked.compute, buffers, length)
        except Exception as error:  # noqa: BLE001 - a model's code, the driver and compilers fail in many ways
            self.clear()
            self.off = first_line(error)
            _log.warning("the %s runs without CUDA graphs: %s", self.name, self.off)
            return None
        self.made += 1
        Passes.made_by_all += 1
        self._shapes.add((kind.rows, kind.width, length))
        self._kept[key] = made
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return made

    def _capture(self, compute: Compute, inputs: Tensors, length: int) -> FixedPass:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return CapturedPass(compute, inputs, length, self._pool, self._results)


_log = logging.getLogger("specbench")
_everyone: weakref.WeakSet[Passes] = weakref.WeakSet()


def made() -> int:
    """Passes made in this process so far: a trial in which one was made paid for it."""
    return Passes.made_by_all


def held_bytes() -> int:
    """Bytes that all models' passes hold now."""
    return sum(each.nbytes() for each in _everyone)


def facts() -> list[dict[str, Any]]:
    """What the manifest says of all models' passes."""
    return sorted((each.facts() for each in _everyone), key=lambda fact: fact["model"])


def bucket_of(width: int) -> int:
    """Columns of the pass that takes `width`: 1, 2, 4, 8…"""
    return 1 << (width - 1).bit_length()


def _column_dim(dims: int) -> int:
    return 2 if dims == 4 else 1


def _kind_of(name: str, tensor: torch.Tensor) -> Hashable:
    return name, tuple(tensor.shape), tensor.dtype, tensor.device


@lru_cache(maxsize=512)
def _padding(width: int, full: int, device: torch.device) -> torch.Tensor:
    """Columns 0..width-1, then column 0 again and again."""
    return torch.tensor([*range(width), *[0] * (full - width)], device=device)
