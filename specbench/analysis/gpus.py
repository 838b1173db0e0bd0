"""Published peak numbers of well-known GPUs, for limits on a device that is not at hand.

Bytes a second of the memory, and dense operations a second (without sparsity, 32-bit accumulation) by the width of
the numbers, from the vendors' data sheets and architecture papers: NVIDIA A100 (2021), L4 and L40S (2023), H100
(2023), H200 (2024) and HGX B200 (2025) data sheets, the GA102, Ada and RTX Blackwell whitepapers (appendix tables
of the RTX 3090, 4090 and 5090), AMD Instinct MI300X and MI325X data sheets. Real kernels reach about 70 to 90% of
both; `--gpu measured` says what this device does.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from specbench.analysis.roofline import Device
from specbench.errors import SpecbenchError

GB = 1e9
TERA = 1e12


@dataclass(frozen=True)
class Gpu:
    """Gigabytes, gigabytes a second, and teraoperations a second in float32, in 16 bits and in 8 bits."""

    memory_gb: float
    gb_s: float
    float32: float
    half: float
    float8: float | None = None

    def rate(self, dtype: str) -> float:
        """Operations a second with weights of `dtype`; int8 and int4 ones are widened to 16 bits first."""
        named = {"float32": self.float32, "fp8": self.float8 or self.half}
        return named.get(dtype, self.half) * TERA


GPUS = {
    "b200": Gpu(180, 8000, 80, 2250, 4500),
    "h200": Gpu(141, 4800, 67, 989, 1979),
    "h100": Gpu(80, 3350, 67, 989, 1979),
    "h100-nvl": Gpu(94, 3900, 60, 835, 1671),
    "h100-pcie": Gpu(80, 2000, 51, 756, 1513),
    "a100": Gpu(80, 2039, 19.5, 312),
    "a100-40gb": Gpu(40, 1555, 19.5, 312),
    "l40s": Gpu(48, 864, 91.6, 362, 733),
    "l4": Gpu(24, 300, 30.3, 121, 242),
    "rtx5090": Gpu(32, 1792, 104.8, 209.5, 419),
    "rtx4090": Gpu(24, 1008, 82.6, 165.2, 330.3),
    "rtx3090": Gpu(24, 936, 35.6, 71),
    "mi300x": Gpu(192, 5300, 163.4, 1307, 2615),
    "mi325x": Gpu(256, 6000, 163.4, 1307, 2615),
}
SHORT = {"4090": "rtx4090", "3090": "rtx3090", "5090": "rtx5090", "a100-80gb": "a100", "h100-sxm": "h100"}


def known_gpu(name: str, dtype: str, count: int = 1) -> Device:
    """`count` of them as one device, as if they shared the work without talking.

    Raises:
        SpecbenchError: no such GPU is known.
    """
    wanted = name.lower().replace("_", "-").replace(" ", "-")
    found = GPUS.get(SHORT.get(wanted, wanted))
    if found is None:
        near = difflib.get_close_matches(wanted, [*GPUS, *SHORT], n=2, cutoff=0.5)
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        raise SpecbenchError(
            f"the GPU {name!r} is not known", f"{meant}known are {', '.join(GPUS)}; or --gpu measured"
        )
    many = f"{count} x {wanted}" if count > 1 else wanted
    return Device(f"{many} (published peak)", count * found.gb_s * GB, count * found.rate(dtype),
                  count * found.memory_gb * GB)  # fmt: skip
