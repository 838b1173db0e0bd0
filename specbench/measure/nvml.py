"""What the NVIDIA driver tells about a GPU (NVML through `nvidia-ml-py`). `sampler` reads it during a run.

A measurement must never end a run: no exception leaves this module. What NVML does not tell is None; missing
NVML, fields a GPU lacks, and a driver that fails midway are each warned of once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

Warn = Callable[[str], None]
Take = Callable[[Any], Any] | None

CLOCK_SM, CLOCK_MEMORY, SENSOR_GPU = 1, 2, 0
GIVE_UP = 3
"""Failures in a row after which a field is not asked for again."""

REASONS = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
}
"""Clock-event reasons that slow a GPU down. Idle (0x1) and clocks the user set (0x2, 0x100) do not."""


@dataclass(frozen=True)
class Sample:
    """One look at a GPU: `at` in `perf_counter` seconds; `joules` is the driver's running counter."""

    at: float
    joules: float | None
    power_w: float | None
    sm_mhz: float | None
    temperature_c: float | None
    reasons: tuple[str, ...] | None
    used_bytes: int | None


class Gpu:
    """One GPU or one MIG slice. Every reading is None where the driver does not give it. Made by `open_gpu`.

    Args:
        lib: the `pynvml` module, initialised.
        handle: the device. Of a slice, memory is its own; power and energy are the whole GPU's, hence None.
        whole: the whole GPU: the very same object as `handle` unless that is a slice.
        warn: told once of what is lacking, and once of a failure midway; the sampler tells it of a driver that hangs.
    """

    def __init__(self, lib: Any, handle: Any, whole: Any, warn: Warn) -> None:
        self._lib, self._handle, self._whole, self.warn = lib, handle, whole, warn
        self.mig = handle is not whole
        self._failures: dict[str, str] = {}
        self._in_a_row: dict[str, int] = {}
        self._opened = self._warned = False
        new, old = (f"nvmlDeviceGetCurrentClocks{kind}Reasons" for kind in ("Event", "Throttle"))
        self._reasons_call = old if ask(lib, new, whole)[1] else new  # old: drivers before 535
        self.sample()
        self.process_bytes()
        if self._failures:
            lacking = ", ".join(f"{what} ({why})" for what, why in self._failures.items())
            warn(f"NVML does not give every reading of this GPU; left empty: {lacking}")
        self._in_a_row = dict.fromkeys(self._failures, GIVE_UP)
        self._opened = True

    def joules(self) -> float | None:
        """Energy used since the driver was loaded."""
        return None if self.mig else self._read("energy", "nvmlDeviceGetTotalEnergyConsumption", take=_milli)

    def power_w(self) -> float | None:
        return None if self.mig else self._read("power", "nvmlDeviceGetPowerUsage", take=_milli)

    def sm_mhz(self) -> float | None:
        return self._read("SM clock", "nvmlDeviceGetClockInfo", CLOCK_SM)

    def temperature_c(self) -> float | None:
        return self._read("temperature", "nvmlDeviceGetTemperature", SENSOR_GPU)

    def throttle_reasons(self) -> tuple[str, ...] | None:
        """The `REASONS` in force now; empty when none is."""
        return self._read("clock-event reasons", self._reasons_call, take=_reasons)

    def used_bytes(self) -> int | None:
        """Memory in use on the device, by every process."""
        name = "nvmlDeviceGetMemoryInfo"
        return self._read("memory", name, handle=self._handle, take=lambda memory: int(memory.used))

    def process_bytes(self) -> int | None:
        """Memory of this process on the device. None, unwarned, where a container hides or renumbers processes."""
        name = "nvmlDeviceGetComputeRunningProcesses"
        return self._read("memory by process", name, handle=self._handle, take=_mine)

    def facts(self) -> dict[str, Any]:
        """What a manifest says of the device: name, driver, memory, limits. Nothing identifies the unit."""

        def tell(name: str, *args: Any, take: Take = None) -> Any:
            return ask(self._lib, name, *args, take=take)[0]

        return {
            "name": tell("nvmlDeviceGetName", self._handle, take=_text),
            "driver": tell("nvmlSystemGetDriverVersion", take=_text),
            "driver_cuda": tell(
                "nvmlSystemGetCudaDriverVersion", take=lambda n: f"{n // 1000}.{n % 1000 // 10}"
            ),
            "memory_bytes": tell("nvmlDeviceGetMemoryInfo", self._handle, take=lambda m: int(m.total)),
            "max_sm_mhz": tell("nvmlDeviceGetMaxClockInfo", self._whole, CLOCK_SM),
            "max_memory_mhz": tell("nvmlDeviceGetMaxClockInfo", self._whole, CLOCK_MEMORY),
            "power_limit_w": tell("nvmlDeviceGetEnforcedPowerLimit", self._whole, take=_milli),
            "mig": self.mig,
        }

    def sample(self) -> Sample:
        """Everything that changes, now."""
        return Sample(
            at=perf_counter(),
            joules=self.joules(),
            power_w=self.power_w(),
            sm_mhz=self.sm_mhz(),
            temperature_c=self.temperature_c(),
            reasons=self.throttle_reasons(),
            used_bytes=self.used_bytes(),
        )

    def _read(self, what: str, name: str, *args: Any, handle: Any = None, take: Take = None) -> Any:
        """A reading; None after a failure, and not asked for after `GIVE_UP` of them in a row."""
        if self._in_a_row.get(what, 0) >= GIVE_UP:
            return None
        value, why = ask(self._lib, name, self._whole if handle is None else handle, *args, take=take)
        if why is None:
            self._in_a_row[what] = 0
            return value
        self._in_a_row[what] = self._in_a_row.get(what, 0) + 1
        self._failures[what] = why
        if self._opened and not self._warned:
            self._warned = True
            self.warn(f"NVML failed during the run ({what}: {why}); what it misses stays empty")
        return None


def open_gpu(
    device: Any = "cuda:0",
    lib: Any = None,
    environ: Mapping[str, str] | None = None,
    uuid: str | None = None,
    warn: Warn | None = None,
) -> Gpu | None:
    """The GPU that a torch device means, as NVML sees it; None for other devices and where NVML cannot say.

    Args:
        device: "cuda" or "cuda:1", counted as CUDA counts (through CUDA_VISIBLE_DEVICES), or the UUID of a
            GPU ("GPU-...") or of a MIG slice ("MIG-...").
        lib: the `pynvml` module; None imports it.
        environ: the environment; None takes the process's.
        uuid: torch's UUID of the device, which settles what a number means (CUDA numbers the fastest GPU
            first, NVML goes by the bus); None asks torch, "" goes without.
        warn: told, once, why there is no reading; None logs.
    """
    warn = warn or logging.getLogger("specbench").warning
    name = str(device)
    if not name.startswith(("cuda", "GPU-", "MIG-")):
        return None
    lib = lib or load()
    why = "pip install nvidia-ml-py" if lib is None else ask(lib, "nvmlInit")[1]
    if why is not None:
        warn(f"no NVML ({why}): energy, clocks and temperature stay empty")
        return None
    found = _find(lib, name, os.environ if environ is None else environ, uuid)
    if found is None:
        warn(f"NVML does not know the device {name}: energy, clocks and temperature stay empty")
        return None
    return Gpu(lib, *found, warn)


def ask(lib: Any, name: str, *args: Any, take: Take = None) -> tuple[Any, str | None]:
    """Call an NVML function: (what `take` makes of its answer, None), or (None, why there is none)."""
    try:
        value = getattr(lib, name)(*args)
        return value if take is None else take(value), None
    except Exception as error:  # noqa: BLE001 - ctypes and drivers fail in many ways; none may end a run
        return None, str(error) or type(error).__name__


def visible(device: str, environ: Mapping[str, str]) -> int | str | None:
    """What CUDA_VISIBLE_DEVICES makes of "cuda:N": a GPU's number, the beginning of a UUID, or nothing.

    As with CUDA, the list ends at its first entry that is no device.
    """
    _, _, number = device.partition(":")
    ordinal = int(number) if number.isdigit() else 0
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return ordinal
    entries: list[int | str] = []
    for entry in (part.strip() for part in listed.split(",")):
        if not entry.isdigit() and not entry.startswith(("GPU-", "MIG-")):
            break
        entries.append(int(entry) if entry.isdigit() else entry)
    return entries[ordinal] if ordinal < len(entries) else None


def cuda_uuid(device: str) -> str | None:
    """Torch's UUID of a CUDA device, without the "GPU-". None where torch has none."""
    try:
        import torch

        return str(torch.cuda.get_device_properties(device).uuid)
    except (ImportError, AttributeError, RuntimeError, AssertionError, ValueError):
        return None


def load() -> Any:
    """The `pynvml` module, None where it is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


Found = tuple[Any, Any]  # the device, the whole GPU it is or is a slice of


def _find(lib: Any, name: str, environ: Mapping[str, str], uuid: str | None) -> Found | None:
    wanted = name if name.startswith(("GPU-", "MIG-")) else visible(name, environ)
    if wanted is None or isinstance(wanted, str):
        return _by_uuid(lib, wanted) if wanted else None
    uuid = cuda_uuid(name) if uuid is None else uuid
    for kind in (
        ("GPU-", "MIG-") if uuid else ()
    ):  # of a divided GPU, torch gives its own or the slice's, by version
        if found := _by_uuid(lib, f"{kind}{uuid}"):
            return found
    handle, why = ask(lib, "nvmlDeviceGetHandleByIndex", wanted)
    return None if why else _slice_in_use(lib, handle)


def _by_uuid(lib: Any, uuid: str) -> Found | None:
    """The device of this UUID, or the one whose UUID begins so."""
    handle, why = ask(lib, "nvmlDeviceGetHandleByUUID", uuid)
    if why is not None:
        handle = next((each for each in _devices(lib, uuid) if _uuid(lib, each).startswith(uuid)), None)
    if handle is None:
        return None
    if uuid.startswith("MIG-"):
        whole, why = ask(lib, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
        return None if why else (handle, whole)
    return _slice_in_use(lib, handle)


def _devices(lib: Any, uuid: str) -> Iterator[Any]:
    """All GPUs, or all slices if the UUID is a slice's."""
    for number in range(ask(lib, "nvmlDeviceGetCount")[0] or 0):
        gpu, why = ask(lib, "nvmlDeviceGetHandleByIndex", number)
        if why is None:
            yield from _slices(lib, gpu) if uuid.startswith("MIG-") else (gpu,)


def _slices(lib: Any, gpu: Any) -> Iterator[Any]:
    for number in range(ask(lib, "nvmlDeviceGetMaxMigDeviceCount", gpu)[0] or 0):
        handle, why = ask(lib, "nvmlDeviceGetMigDeviceHandleByIndex", gpu, number)
        if why is None:
            yield handle


def _slice_in_use(lib: Any, gpu: Any) -> Found:
    """The GPU itself, or if it is divided, its first slice: the one CUDA takes when only the GPU is named."""
    mode, why = ask(lib, "nvmlDeviceGetMigMode", gpu)
    if why is None and mode[0]:
        return next(((part, gpu) for part in _slices(lib, gpu)), (gpu, gpu))
    return gpu, gpu


def _uuid(lib: Any, handle: Any) -> str:
    return ask(lib, "nvmlDeviceGetUUID", handle, take=_text)[0] or ""


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _milli(value: Any) -> float:
    return value / 1e3


def _reasons(bits: Any) -> tuple[str, ...]:
    return tuple(reason for bit, reason in REASONS.items() if bits & bit)


def _mine(running: Any) -> int | None:
    sizes = [entry.usedGpuMemory for entry in running if entry.pid == os.getpid()]
    known = [int(size) for size in sizes if size is not None]
    return sum(known) if known else None
