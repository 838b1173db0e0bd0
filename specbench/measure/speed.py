"""How fast this device reads and multiplies, measured once and kept: what a run's roofline rests on (design §6)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from specbench.measure.bandwidth import measure_bandwidth, measure_matmul
from specbench.measure.machine import cpu_facts
from specbench.models.kept import DISTURBED, kept, measured

FOLDER = "speed"  # in the cache
VERSION = 1  # raise when the way of measuring changes


@dataclass(frozen=True)
class Speed:
    """`copy_gb_s` counts bytes read and bytes written; `matmul_tflop_s` is of `dtype`, those that were multiplied.

    `device` is its model; `disturbed`: other processes ran meanwhile, so that it is faster than this.
    """

    device: str
    dtype: str
    threads: int | None
    copy_gb_s: float
    read_gb_s: float
    matmul_tflop_s: float
    disturbed: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def device_speed(
    device: Any, dtype: Any, folder: Path, notify: Callable[[str], None], again: bool = False
) -> Speed | None:
    """The speed of a torch device, from `folder` or measured now, in about a second; None if it cannot be measured.

    Args:
        dtype: of the matrices, torch's. float8 ones are multiplied as they are or in bfloat16, whichever is faster
            here; integers in bfloat16.
        folder: specbench's cache; a measurement that other processes disturbed is not kept.
        notify: is told if they did.
        again: measure although it is known (the machine was busy then).
    """
    import torch

    device = torch.device(device)
    name = _name(device)
    threads = torch.get_num_threads() if device.type == "cpu" else None
    kinds = _multiplied(dtype)
    said = f"{VERSION} {name} {' '.join(kinds)} {threads} {torch.__version__}"
    file = folder / FOLDER / f"{hashlib.sha256(said.encode()).hexdigest()[:16]}.json"
    known = None if again else kept(file)
    if isinstance(known, dict) and known.keys() == Speed.__dataclass_fields__.keys():
        return Speed(**known)

    def measure() -> dict[str, Any]:
        memory = measure_bandwidth(device, 0.5)
        rate, kind = max((_rate(device, kind), kind) for kind in kinds)
        return Speed(name, kind, threads, memory.copy_gb_s, memory.read_gb_s, rate / 1e12).to_json()

    try:
        found, quiet = measured(file, measure, threads or 1)
    except (RuntimeError, MemoryError):
        return None
    if not quiet:
        notify(f"measured how fast {name} reads and multiplies")
        notify(DISTURBED)
    return replace(Speed(**found), disturbed=not quiet)


def _multiplied(dtype: Any) -> tuple[str, ...]:
    """The dtypes in which matrices of `dtype` may be multiplied; the first one always can be."""
    kind = str(dtype).removeprefix("torch.")
    if dtype.is_floating_point and dtype.itemsize > 1:
        return (kind,)
    return ("bfloat16", kind) if dtype.is_floating_point else ("bfloat16",)


def _rate(device: Any, kind: str) -> float:
    """Operations a second; 0 for float8 where the device does not multiply it."""
    import torch

    try:
        return measure_matmul(device, getattr(torch, kind), 0.4)
    except RuntimeError:
        if not kind.startswith("float8"):
            raise
        return 0.0


def _name(device: Any) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_facts()["model"] or "unknown processor" if device.type == "cpu" else device.type
