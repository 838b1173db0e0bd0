"""What would make code wait for a GPU, seen on a CPU: counted by a spy, and refused by captures (`fake_cuda`).

That is reads (`tolist`, `item`, a tensor as a condition, shapes that depend on the data) and uploads that wait
(`torch.tensor(numbers, device=…)`; `specbench.models.device.send` does not).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

READING = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "nonzero_numpy", "masked_select",
    "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "bincount", "argwhere",
}  # fmt: skip
REPEATING = {"aten.repeat_interleave.Tensor", "aten.repeat_interleave.self_Tensor"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


def reads(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation reads the device: for a number, or for the shape of what comes out."""
    name, overload = func.overloadpacket.__name__, str(func)
    if name in INDEXING:
        return any(part is not None and part.dtype == torch.bool for part in args[1])
    if overload in REPEATING:
        return kwargs.get("output_size") is None
    return name in READING or overload == "aten.where.default"  # of a condition alone


class DeviceReads(TorchDispatchMode):
    """Counts while active; `names` tells what was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if reads(func, args, kwargs):
            self.names.append(str(func))
        return func(*args, **kwargs)


@contextmanager
def device_reads() -> Iterator[DeviceReads]:
    spy = DeviceReads()
    with telling(spy.names.append), spy:
        yield spy


@contextmanager
def telling(tell: Callable[[str], object]) -> Iterator[None]:
    """While open, `tell` hears of each read and upload that is no operation of torch's own, before it happens."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("tolist", "cpu", "numpy"):
            patch.setattr(torch.Tensor, name, _told(tell, name, getattr(torch.Tensor, name)))
        for name in ("tensor", "as_tensor"):
            patch.setattr(torch, name, _told_upload(tell, name, getattr(torch, name)))
        yield


def _told(tell: Callable[[str], object], name: str, plain: Any) -> Any:
    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        tell(name)
        return plain(tensor, *args, **kwargs)

    return call


def _told_upload(tell: Callable[[str], object], name: str, plain: Any) -> Any:
    def call(data: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None and not isinstance(data, torch.Tensor):
            tell(f"{name} to a device")
        return plain(data, *args, **kwargs)

    return call
