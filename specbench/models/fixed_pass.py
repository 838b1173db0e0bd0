"""A pass of a fixed shape: run on buffers that stay where they are, as it is or captured as a CUDA graph.

A decoding pass is a thousand small kernels, which Python starts more slowly than a large GPU runs them. A graph
starts them all at once. It needs every shape and address to be the same each time: so a pass is padded to a bucket
of columns (padding is written to the scratch slot and looks at what column 0 looks at; it changes nothing and, in a
mixture of experts, wakes no expert that column 0 does not), attention reads a bucket of slots, and inputs are copied
into buffers of the pass. What comes out is copied as well: it is the caller's to keep.

`FixedPass` is all of that but the capture, and runs anywhere: what tests check on a CPU is what a GPU replays.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any

import torch

from specbench.models.attention_choice import choices

Tensors = dict[str, torch.Tensor]
Compute = Callable[[Tensors, int], Tensors]  # inputs and how many slots attention reads: outputs

WIDEST = 128  # columns; a wider pass keeps a GPU busy whatever Python does
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

    Attributes:
        reserved: bytes that capturing took for the pool; what the driver keeps of a graph itself nobody tells.
    """

    def __init__(self, compute: Compute, inputs: Tensors, length: int, pool: Any, results: Results) -> None:
        super().__init__(compute, inputs, length)
        device = next(iter(inputs.values())).device
        with torch.cuda.device(device):
            results.make(self._warm_up(device))
            torch.cuda.empty_cache()  # as capturing does: what is reserved from here on is the graph's own
            before = torch.cuda.memory_reserved(device)
            self._graph = torch.cuda.CUDAGraph()
            self._outputs = self._capture(device, pool, results)
            self.reserved = max(0, torch.cuda.memory_reserved(device) - before)

    def run(self) -> Tensors:
        self._graph.replay()
        return self._outputs

    def _warm_up(self, device: torch.device) -> Tensors:
        """Run where capturing will, so that libraries have their workspaces there already, and choose kernels."""
        outputs: Tensors = {}
        stream = _side_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream), choices.choosing():
            for _ in range(WARM_UPS):
                outputs = self._compute(self.inputs, self._length)
        torch.cuda.current_stream(device).wait_stream(stream)
        return outputs

    def _capture(self, device: torch.device, pool: Any, results: Results) -> Tensors:
        """The buffers that each replay writes its outputs to."""
        before, stream = torch.cuda.current_stream(device), _side_stream(device)
        try:
            # Thread-local: what other threads do with the driver meanwhile does not spoil the capture.
            with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                return results.keep(self._compute(self.inputs, self._length))
        finally:
            torch.cuda.set_stream(before)  # a capture that fails leaves its own in place


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

    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def clear(self) -> None:
        self._buffers.clear()


@lru_cache(maxsize=8)
def _side_stream(device: torch.device) -> Any:
    """One a device: graphs that share memory must be captured on the same one."""
    return torch.cuda.Stream(device)


def _column_dim(dims: int) -> int:
    return 2 if dims == 4 else 1


def _kind_of(name: str, tensor: torch.Tensor) -> Hashable:
    return name, tuple(tensor.shape), tensor.dtype, tensor.device


@lru_cache(maxsize=512)
def _padding(width: int, full: int, device: torch.device) -> torch.Tensor:
    """Columns 0..width-1, then column 0 again and again."""
    return torch.tensor([*range(width), *[0] * (full - width)], device=device)
