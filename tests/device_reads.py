"""A spy for tests: how often code would wait for a GPU, seen on a CPU.

It counts reads (`tolist`, `item`, a tensor as a condition, shapes that depend on the data) and uploads that wait
(`torch.tensor(numbers, device=…)`; `specbench.models.device.send` does not).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
READING = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.equal.default,
    aten.repeat_interleave.Tensor,
}


class DeviceReads(TorchDispatchMode):
    """Counts while active; `names` tells what was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func in (aten.index.Tensor, aten.index_put_.default) and any(
            part is not None and part.dtype == torch.bool for part in args[1]
        )
        if func in READING or by_mask:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def device_reads() -> Iterator[DeviceReads]:
    spy = DeviceReads()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("tolist", "cpu", "numpy"):
            patch.setattr(torch.Tensor, name, _told(spy, name, getattr(torch.Tensor, name)))
        for name in ("tensor", "as_tensor"):
            patch.setattr(torch, name, _told_upload(spy, name, getattr(torch, name)))
        with spy:
            yield spy


def _told(spy: DeviceReads, name: str, plain: Any) -> Any:
    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        spy.names.append(name)
        return plain(tensor, *args, **kwargs)

    return call


def _told_upload(spy: DeviceReads, name: str, plain: Any) -> Any:
    def call(data: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None and not isinstance(data, torch.Tensor):
            spy.names.append(f"{name} to a device")
        return plain(data, *args, **kwargs)

    return call
