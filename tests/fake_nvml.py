"""An invented NVML for tests."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any


class FakeNvml:
    """A `pynvml` with two GPUs; the second is divided into two MIG slices. Handles are UUIDs."""

    class NVMLError(Exception):
        pass

    def __init__(self, lacking: tuple[str, ...] = ()) -> None:
        self.lacking = set(lacking)
        self.gpus = ["GPU-aaa-1", "GPU-bbb-2"]
        self.slices = {"GPU-bbb-2": ["MIG-s1", "MIG-s2"]}
        self.millijoules = 5000
        self.bits = 0x1
        self.calls = 0

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml"):
            self.calls += 1
            if name in self.lacking or "everything" in self.lacking:
                raise self.NVMLError(f"{name[4:]} Not Supported")
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None: ...

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"570.1"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 12080

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in (*self.gpus, *self.slices["GPU-bbb-2"]):
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> bytes:
        return handle.encode()

    def nvmlDeviceGetMigMode(self, handle: str) -> tuple[int, int]:
        return (int(handle in self.slices), 0)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        return 7 if handle in self.slices else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:
        return self.slices[handle][index]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:
        return "GPU-bbb-2"

    def nvmlDeviceGetName(self, handle: str) -> str:
        return f"Fake {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(used=7_000 if handle.startswith("MIG") else 9_000, total=10_000)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        return self.millijoules

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 250_000

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return 700_000

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return 1980

    def nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:
        return 1980 if kind == 1 else 3201

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 45

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self.bits

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return self.bits

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=600),
            SimpleNamespace(pid=1, usedGpuMemory=8000),
        ]
