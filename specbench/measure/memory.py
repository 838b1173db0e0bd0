"""The memory of one untimed generation, and the bytes a module holds as stored (design §5).

Measured apart from time. Unknown is None, never 0.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from specbench.measure.nvml import Gpu

KEYS = (
    "peak_bytes",
    "before_bytes",
    "after_bytes",
    "reserved_bytes",
    "rss_peak_bytes",
    "rss_before_bytes",
    "nvml_used_bytes",
    "nvml_process_bytes",
)


def measure_memory(
    run: Callable[[], None], device: Any, gpu: Gpu | None = None, proc: Path = Path("/proc")
) -> dict[str, int | None]:
    """Run once, untimed, and say what memory that took. What `run` raises comes through.

    Args:
        run: one whole generation, with nothing else going on.
        device: the torch device of the target.
        gpu: the same device seen by NVML, where there is one.
        proc: where the kernel's files are (tests).

    Returns bytes under `KEYS`:
        peak, before, after: on a CUDA device the allocator's, over all devices in use (weights are in all
            three; peak - before is what the generation took); on a CPU the resident set's peak, and its size
            at both ends.
        reserved: what the allocator has taken from the device at its peak; None on a CPU.
        rss_peak, rss_before: the process's resident set, on every device.
        nvml_used, nvml_process: of the whole device, and of this process on it, right after the run.
    """
    gc.collect()
    _trim_heap()
    cuda = str(device).startswith("cuda")
    allocator = _CudaAllocator() if cuda else None
    rss_before = _status_bytes(proc, "VmRSS")
    resettable = _reset_peak_rss(proc)
    run()
    rss_peak = _status_bytes(proc, "VmHWM") if resettable else None
    reading: dict[str, int | None] = dict.fromkeys(KEYS)
    reading["rss_peak_bytes"], reading["rss_before_bytes"] = rss_peak, rss_before
    if allocator is not None:
        reading |= allocator.read()
    elif str(device).startswith("cpu"):
        reading |= {
            "peak_bytes": rss_peak,
            "before_bytes": rss_before,
            "after_bytes": _status_bytes(proc, "VmRSS"),
        }
    if gpu is not None:
        reading["nvml_used_bytes"] = gpu.used_bytes()
        reading["nvml_process_bytes"] = gpu.process_bytes()
    return reading


class _CudaAllocator:
    """PyTorch's allocator, summed over all devices (a target may be spread). Peaks count from here."""

    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda
        self._cuda.synchronize()
        self._cuda.empty_cache()
        self._devices = range(self._cuda.device_count())
        for number in self._devices:
            self._cuda.reset_peak_memory_stats(number)
        self._before = self._sum(self._cuda.memory_allocated)

    def read(self) -> dict[str, int]:
        for number in self._devices:
            self._cuda.synchronize(number)
        return {
            "peak_bytes": self._sum(self._cuda.max_memory_allocated),
            "before_bytes": self._before,
            "after_bytes": self._sum(self._cuda.memory_allocated),
            "reserved_bytes": self._sum(self._cuda.max_memory_reserved),
        }

    def _sum(self, reader: Callable[[int], int]) -> int:
        return sum(reader(number) for number in self._devices)


def _trim_heap() -> None:
    """Give freed memory back to the system, so that one method's leftovers are not in the next one's peak."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):
        return  # not glibc


def _reset_peak_rss(proc: Path) -> bool:
    """Set the kernel's peak (VmHWM) back to the present size. False where that is not allowed or unknown."""
    try:
        (proc / "self" / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status_bytes(proc: Path, name: str) -> int | None:
    """A field of /proc/self/status, which counts in kB, in bytes."""
    try:
        for line in (proc / "self" / "status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def module_bytes(*modules: torch.nn.Module) -> int:
    """Bytes of the parameters and buffers of these modules, as stored: quantised weights count packed, with
    their scales; what is shared, within a module or between them, counts once; copies packed for a CPU kernel
    (`models.kernels`) count too.
    """
    packed: Iterator[Any] = (
        layer.packed for m in modules for layer in m.modules() if hasattr(layer, "packed")
    )
    return tensor_bytes(chain((t for m in modules for t in (*m.parameters(), *m.buffers())), packed))


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes these tensors occupy. Views of one storage count their distinct parts, at most the storage."""
    total = 0
    views: dict[int, tuple[int, set[tuple[int, int]]]] = {}
    keep = []  # a storage made on the fly must live, or its address comes up again
    for tensor in _stored(tensors):
        if tensor.is_mkldnn:  # packed by oneDNN: no storage to look at
            total += tensor.numel() * tensor.element_size()
            continue
        storage = tensor.untyped_storage()
        keep.append(storage)
        _, parts = views.setdefault(storage._cdata, (storage.nbytes(), set()))
        parts.add((int(tensor.storage_offset()), tensor.numel() * tensor.element_size()))
    return total + sum(min(size, sum(length for _, length in parts)) for size, parts in views.values())


def _stored(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors that hold the data: the inner ones of a wrapper (torchao), and bitsandbytes' scales."""
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            yield from _stored(getattr(tensor, name) for name in names)
            continue
        yield tensor
        yield from _tensors_in(getattr(tensor, "quant_state", None))
        yield from _tensors_in(getattr(tensor, "SCB", None))


def _tensors_in(state: Any) -> Iterator[torch.Tensor]:
    """The tensors of a bitsandbytes quantisation state, nested states included."""
    import torch

    if isinstance(state, torch.Tensor):
        yield state
    elif hasattr(state, "__dict__"):
        for value in vars(state).values():
            yield from _tensors_in(value)
