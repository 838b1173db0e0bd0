"""torch.cuda's part in a capture, on a CPU, so that what captures and replays graphs can be tested without a GPU.

A graph computes again what was computed while it was captured, and nothing else: numbers of the host stay what they
were, results stand where they stood, and until the first replay there are none. What a GPU would have to be read for,
or sent, while it captures is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_reads import reads, telling
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specbench.models import fixed_pass

SENDING = {"lift_fresh", "pin_memory"}
RESERVED = 1000  # bytes that each capture takes
REFUSAL = "operation not permitted when stream is capturing"
BROKEN = "CUDA error: operation failed due to a previous error during capture"


class FakeGraph(TorchDispatchMode):
    """The operations called while it is open, with the tensors they were called on."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if reads(func, args, kwargs) or name in SENDING:
            _refuse(name)
        if _own_generator(args, kwargs):
            _refuse(f"{name} with a generator of its own")
        out = func(*args, **kwargs)
        self._steps.append((func, args, kwargs, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self._steps:
            for old, new in zip(_tensors(out), _tensors(func(*args, **kwargs)), strict=True):
                if new.data_ptr() != old.data_ptr():  # neither a view of an argument nor the argument
                    old.copy_(new)

    def spoil(self) -> None:
        """A capture computes nothing: nobody may take what stands there now for a result."""
        for _, args, kwargs, out in self._steps:
            given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
            for tensor in _tensors(out):
                if tensor.untyped_storage().data_ptr() not in given:
                    tensor.fill_(float("nan") if tensor.is_floating_point() else 1)


class FakeCuda:
    """What happened, in order; and the stream that is current."""

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.reserved = 0
        self.default, self.side = (SimpleNamespace(wait_stream=self._wait) for _ in range(2))
        self.current = self.default

    def _wait(self, _other: object) -> None:
        self.happened.append("wait")

    def set_stream(self, stream: Any) -> None:
        self.current = stream

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def graph(self, made: FakeGraph, pool: object, stream: object, capture_error_mode: str) -> Iterator[None]:
        assert (pool, stream, capture_error_mode) == ("pool", self.side, "thread_local")
        self.happened.append("capture")
        self.current = self.side
        with _breaking(), telling(_refuse), made:
            yield
        self.current = self.default
        self.reserved += RESERVED
        made.spoil()
        self.happened.append("captured")

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
        fixed_pass._side_stream.cache_clear()
        for name, value in {
            "device": lambda device: nullcontext(),
            "Stream": lambda device: self.side,
            "stream": self.stream,
            "current_stream": lambda device: self.current,
            "set_stream": self.set_stream,
            "CUDAGraph": FakeGraph,
            "graph": self.graph,
            "graph_pool_handle": lambda: "pool",
            "memory_reserved": lambda device: self.reserved,
            "empty_cache": lambda: self.happened.append("empty"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        return self


def _refuse(what: str) -> None:
    raise RuntimeError(f"{REFUSAL}: {what}")


def _own_generator(args: Any, kwargs: Any) -> bool:
    """Whether random numbers are drawn from a generator that no graph knows of: it takes the device's own alone."""
    return any(isinstance(given, torch.Generator) for given in (*args, *kwargs.values()))


@contextmanager
def _breaking() -> Iterator[None]:
    """What ends a capture early comes out as torch has it, behind an error of its own (and its stream stays)."""
    try:
        yield
    except RuntimeError:
        raise RuntimeError(BROKEN)  # noqa: B904


def _tensors(nested: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, torch.Tensor)]
