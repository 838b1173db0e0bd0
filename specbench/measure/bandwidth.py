"""The memory bandwidth and the matmul rate this device reaches: what the roofline divides by (design §6).

Decimal gigabytes a second, and operations a second. Buffers are several times the caches, and the best of several
passes counts: an interruption can only make a pass look slower than the device is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from specbench.measure.clock import Stamps, stamps_for

CPU_BYTES = 256 * 2**20
GPU_BYTES = 2**30
PASSES_AT_LEAST = 3
SIDES = (512, 1024, 2048, 4096, 8192)  # of the square matrices tried
LONG_ENOUGH_S = 0.02  # a product of this many seconds is as fast as one can be


@dataclass(frozen=True)
class Bandwidth:
    """copy_gb_s counts bytes read and bytes written; read_gb_s is the best of the reductions tried."""

    copy_gb_s: float
    read_gb_s: float
    buffer_bytes: int
    threads: int | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_bandwidth(
    device: Any = "cpu", seconds: float = 1.0, buffer_bytes: int | None = None, stamps: Stamps | None = None
) -> Bandwidth:
    """Measure copying and reading on a torch device, in about `seconds` and with two buffers.

    Args:
        device: where; a CPU is measured with torch's present number of threads.
        seconds: time for all passes together; each kind gets at least three.
        buffer_bytes: of one buffer; None chooses one clearly larger than the caches.
        stamps: the source of time (tests).

    Raises RuntimeError (torch's) if the buffers do not fit.
    """
    import torch

    size = buffer_bytes or default_buffer_bytes(str(device))
    source = torch.ones(size // 4, device=device)
    target = torch.zeros_like(source)
    kinds: list[Callable[[], Any]] = [
        lambda: target.copy_(source),
        source.sum,
        lambda: torch.dot(source, source),
    ]
    stamps = stamps or stamps_for(str(device))
    best = [_best_s(kind, stamps, seconds / len(kinds)) for kind in kinds]
    moved = source.numel() * 4 / 1e9
    threads = torch.get_num_threads() if source.device.type == "cpu" else None
    return Bandwidth(2 * moved / best[0], moved / min(best[1:]), source.numel() * 4, threads)


def measure_matmul(
    device: Any = "cpu", dtype: Any = None, seconds: float = 0.5, stamps: Stamps | None = None
) -> float:
    """Operations a second (2 n³ a product) of square matrices, the best of the sizes tried, in about `seconds`.

    Args:
        device, stamps: as of `measure_bandwidth`.
        dtype: of the numbers; None: float32. Products of float8 ones come out in bfloat16, as models want them.

    Raises RuntimeError (torch's) if the matrices do not fit, or the device cannot multiply such numbers.
    """
    import torch

    stamps = stamps or stamps_for(str(device))
    best = 0.0
    for side in SIDES:
        # Random: zeros take less power, and a GPU computes them faster than anything real.
        left, right = (torch.randn(side, side, device=device).to(dtype or torch.float32) for _ in range(2))
        took = _best_s(_product(left, right), stamps, seconds / len(SIDES))
        best = max(best, 2 * side**3 / took)
        if took > LONG_ENOUGH_S:
            break
    return best


def _product(left: Any, right: Any) -> Callable[[], Any]:
    """Multiplying the two square matrices; in float8 by the right one's transpose, which its kernels want."""
    import torch

    if left.itemsize > 1:
        return partial(torch.matmul, left, right, out=torch.empty_like(left))
    scale = torch.ones((), device=left.device)
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": left.is_cuda}
    return partial(torch._scaled_mm, left, right.t(), scale, scale, **options)


def default_buffer_bytes(device: str, sys_cpu: Path = Path("/sys/devices/system/cpu")) -> int:
    """A buffer clearly larger than the caches, and at most an eighth of the free memory."""
    if not device.startswith("cpu"):
        import torch

        free = torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else 8 * GPU_BYTES
        return min(GPU_BYTES, free // 8)
    import psutil

    wanted = max(CPU_BYTES, 4 * last_level_cache_bytes(sys_cpu))
    return min(wanted, psutil.virtual_memory().available // 8)


def last_level_cache_bytes(sys_cpu: Path = Path("/sys/devices/system/cpu")) -> int:
    """All level-3 caches together; 0 where the kernel does not say."""
    caches: dict[str, int] = {}
    for folder in sys_cpu.glob("cpu[0-9]*/cache/index3"):
        try:
            size = (folder / "size").read_text().strip()
            shared_by = (folder / "shared_cpu_list").read_text().strip()
        except OSError:
            continue
        if size.endswith("K") and size[:-1].isdigit():
            caches[shared_by] = int(size[:-1]) * 1024
    return sum(caches.values())


def _best_s(work: Callable[[], Any], stamps: Stamps, seconds: float) -> float:
    """Seconds of the fastest pass, after one that is not counted."""
    work()
    best = float("inf")
    passes = 0
    until = perf_counter() + seconds
    while passes < PASSES_AT_LEAST or perf_counter() < until:
        begin = stamps.now()
        work()
        end = stamps.now()
        stamps.synchronize()
        best = min(best, stamps.seconds(begin, end))
        stamps.release()
        passes += 1
    return best
