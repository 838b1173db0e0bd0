"""NVML that works, is missing, lacks fields, fails midway or hangs; and which GPU a name means."""

from __future__ import annotations

import itertools
import os
import threading
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import pytest
from fake_nvml import FakeNvml

from specbench.measure import sampler as sampling
from specbench.measure.nvml import GIVE_UP, Gpu, Sample, ask, open_gpu, visible
from specbench.measure.sampler import Sampler, throttled


def opened(lib: Any, device: str = "cuda:0", **environ: str) -> tuple[Gpu | None, list[str]]:
    warnings: list[str] = []
    return open_gpu(device, lib, environ, uuid="", warn=warnings.append), warnings


def test_a_working_gpu_is_read() -> None:
    lib = FakeNvml()
    gpu, warnings = opened(lib)
    assert gpu is not None
    assert warnings == []
    assert (gpu.joules(), gpu.power_w(), gpu.sm_mhz(), gpu.temperature_c()) == (5.0, 250.0, 1980, 45)
    assert (gpu.used_bytes(), gpu.process_bytes(), gpu.throttle_reasons()) == (9_000, 600, ())
    lib.bits = 0x1 | 0x4 | 0x20
    assert gpu.throttle_reasons() == ("sw_power_cap", "sw_thermal")
    assert gpu.facts() == {
        "name": "Fake GPU-aaa-1",
        "driver": "570.1",
        "driver_cuda": "12.8",
        "memory_bytes": 10_000,
        "max_sm_mhz": 1980,
        "max_memory_mhz": 3201,
        "power_limit_w": 700.0,
        "mig": False,
    }


@pytest.mark.parametrize(
    ("device", "listed", "handle"),
    [
        ("cuda", None, "GPU-aaa-1"),
        ("cuda:0", "1,0", "MIG-s1"),  # a divided GPU named by number: its first slice
        ("cuda:1", "1,0", "GPU-aaa-1"),
        ("cuda:0", "GPU-aaa-1", "GPU-aaa-1"),
        ("cuda:0", "GPU-aa", "GPU-aaa-1"),  # CUDA takes the beginning of a UUID
        ("cuda:0", "MIG-s2", "MIG-s2"),
        ("MIG-s1", None, "MIG-s1"),
        ("GPU-aaa-1", "", "GPU-aaa-1"),
    ],
)
def test_the_gpu_a_name_means(device: str, listed: str | None, handle: str) -> None:
    gpu, warnings = opened(FakeNvml(), device, **({} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}))
    assert gpu is not None
    assert warnings == []
    assert gpu.facts()["name"] == f"Fake {handle}"


def test_torchs_uuid_settles_what_a_number_means() -> None:
    gpu = open_gpu("cuda:1", FakeNvml(), {}, uuid="aaa-1")
    assert gpu is not None
    assert gpu.facts()["name"] == "Fake GPU-aaa-1"


def test_a_slice_knows_its_memory_but_not_the_whole_gpus_energy() -> None:
    gpu, warnings = opened(FakeNvml(), "MIG-s2")
    assert gpu is not None
    assert warnings == []
    assert gpu.mig
    assert (gpu.joules(), gpu.power_w()) == (None, None)
    assert (gpu.used_bytes(), gpu.sm_mhz()) == (7_000, 1980)


def test_visible_devices_end_at_the_first_that_is_none() -> None:
    assert visible("cuda:2", {}) == 2
    assert visible("cuda:1", {"CUDA_VISIBLE_DEVICES": "3,-1,1"}) is None
    assert visible("cuda:0", {"CUDA_VISIBLE_DEVICES": ""}) is None


@pytest.mark.parametrize(
    ("lib", "device", "said"),
    [
        (FakeNvml(("nvmlInit",)), "cuda:0", "Init Not Supported"),
        (FakeNvml(), "cuda:5", "does not know the device"),
        (FakeNvml(), "GPU-zzz", "does not know the device"),
        (object(), "cuda:0", "no NVML"),
    ],
)
def test_missing_nvml_is_none_and_one_warning(lib: Any, device: str, said: str) -> None:
    gpu, warnings = opened(lib, device)
    assert gpu is None
    assert len(warnings) == 1
    assert said in warnings[0]


def test_a_processor_needs_no_nvml() -> None:
    assert opened(object(), "cpu") == (None, [])


def test_lacking_fields_are_none_with_one_warning_and_not_asked_again() -> None:
    lib = FakeNvml(
        (
            "nvmlDeviceGetTotalEnergyConsumption",
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetCurrentClocksThrottleReasons",
            "nvmlDeviceGetComputeRunningProcesses",
        )
    )
    gpu, warnings = opened(lib)
    assert gpu is not None
    before = lib.calls
    sample = gpu.sample()
    assert lib.calls - before == 4
    assert (sample.joules, sample.reasons, gpu.process_bytes()) == (None, None, None)
    assert (sample.power_w, sample.used_bytes) == (250.0, 9_000)
    assert len(warnings) == 1
    assert "energy" in warnings[0]
    assert "clock-event reasons" in warnings[0]


def test_an_old_driver_has_another_name_for_the_reasons() -> None:
    lib = FakeNvml(("nvmlDeviceGetCurrentClocksEventReasons",))
    lib.bits = 0x40
    gpu, warnings = opened(lib)
    assert gpu is not None
    assert gpu.throttle_reasons() == ("hw_thermal",)
    assert warnings == []


def test_a_driver_that_fails_midway_leaves_nothing_and_one_warning() -> None:
    lib = FakeNvml()
    gpu, warnings = opened(lib)
    assert gpu is not None
    lib.lacking = {"everything"}
    for _ in range(5):
        sample = gpu.sample()
    assert (sample.joules, sample.power_w, sample.sm_mhz, sample.reasons, sample.used_bytes) == (None,) * 5
    assert len(warnings) == 1
    before = lib.calls
    gpu.sample()
    assert lib.calls == before  # given up


def test_answers_of_another_kind_are_failures_too() -> None:
    assert ask(SimpleNamespace(f=lambda: None), "f", take=lambda v: v.used)[0] is None


class Scripted:
    """A GPU that gives these samples' values, one a look, then keeps silent."""

    def __init__(self, *samples: Sample) -> None:
        self.samples = list(samples)

    def sample(self) -> Sample:
        return self.samples.pop(0) if len(self.samples) > 1 else self.samples[0]


def seen(at: float, joules: float | None = None, **values: Any) -> Sample:
    given = {"power_w": None, "sm_mhz": None, "temperature_c": None, "reasons": None, "used_bytes": None}
    return Sample(at=at, joules=joules, **{**given, **values})


def window_of(samples: list[Sample], t0: float, t1: float) -> dict[str, Any] | None:
    stopped = Sampler(None)
    stopped._samples.extend(samples)
    return stopped.window(t0, t1)


def test_a_window_sums_up_what_was_seen_in_it() -> None:
    samples = [
        seen(0.0, 0.0, sm_mhz=100, temperature_c=99, reasons=("hw_thermal",), used_bytes=99),
        seen(1.0, 100.0, sm_mhz=1900, temperature_c=50, reasons=(), used_bytes=5),
        seen(2.0, 300.0, sm_mhz=1500, temperature_c=60, reasons=("sw_power_cap",), used_bytes=7),
        seen(3.0, 400.0, sm_mhz=100, temperature_c=99, reasons=("hw_thermal",), used_bytes=99),
    ]
    window = window_of(samples, 0.5, 2.5)
    assert window == {
        "joules": pytest.approx(300.0),  # 50 to 350, on the line between the looks
        "power_w": pytest.approx(150.0),
        "sm_mhz_mean": pytest.approx(1700.0),
        "sm_mhz_min": 1500,
        "temperature_c": 60,
        "throttle_reasons": ["sw_power_cap"],
        "used_bytes": 7,
        "samples": 2,
    }
    assert not throttled(window)
    assert throttled(window_of(samples, 2.5, 3.0))
    assert not throttled(None)


def test_a_window_without_looks_or_without_a_counter() -> None:
    assert window_of([], 0.0, 1.0) is None
    assert window_of([seen(0.5)], 0.0, 1.0) is None  # a look that saw nothing
    assert window_of([seen(50.0, 1.0)], 0.0, 1.0) is None
    window = window_of([seen(0.2, power_w=100.0), seen(0.8, power_w=300.0)], 0.0, 1.0)
    assert window is not None
    assert (window["joules"], window["power_w"], window["sm_mhz_min"]) == (None, 200.0, None)
    assert window["throttle_reasons"] is None
    assert window_of([seen(0.5, 7.0)], 0.0, 1.0)["joules"] is None  # one side only


def test_the_thread_samples_a_run_and_ends() -> None:
    gpu, _ = opened(lib := FakeNvml())
    with Sampler(gpu, hz=200) as sampler:
        t0 = sampling.perf_counter()
        sleep(0.05)
        lib.millijoules = 9000
        t1 = sampling.perf_counter()
        window = sampler.window(t0, t1)
        assert sampler._thread is not None
    assert sampler._thread is None
    assert not [t for t in threading.enumerate() if t.name == "nvml-sampler"]
    assert window is not None
    assert window["joules"] == pytest.approx(4.0, abs=4.0)
    assert (window["sm_mhz_mean"], window["used_bytes"]) == (1980, 9_000)
    assert window["samples"] >= 2


def test_without_a_gpu_the_sampler_does_nothing() -> None:
    with Sampler(None) as sampler:
        assert sampler._thread is None
        assert sampler.window(0.0, 1.0) is None


def test_a_driver_that_hangs_does_not_hold_up_the_run() -> None:
    release = threading.Event()
    gpu = SimpleNamespace(sample=lambda: release.wait(10) and seen(0.0), warn=lambda line: None)
    sampler = Sampler(gpu).start()  # type: ignore[arg-type]
    begin = monotonic()
    assert sampler.window(0.0, 1.0) is None
    assert monotonic() - begin < 1
    release.set()
    sampler.stop()


def hangs_at(look: int, lib: FakeNvml) -> tuple[threading.Event, threading.Event]:
    """Have the temperature call hang from this look on: (it does, let it go on)."""
    reached, release, looks = threading.Event(), threading.Event(), itertools.count(1)

    def temperature(handle: str, sensor: int) -> int:
        if next(looks) >= look:
            reached.set()
            release.wait(30)
        return 45

    lib.nvmlDeviceGetTemperature = temperature  # type: ignore[method-assign]
    return reached, release


def test_a_driver_that_hangs_midway_leaves_nothing_and_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "HANGS_S", 0.02)
    gpu, warnings = opened(lib := FakeNvml())
    reached, release = hangs_at(4, lib)
    with Sampler(gpu, hz=200) as sampler:
        assert reached.wait(10)
        sleep(0.05)
        for _ in range(3):
            t0 = sampling.perf_counter()
            assert sampler.window(t0, t0 + 0.001) is None
        assert warnings == ["NVML stopped answering during the run; what it misses stays empty"]
    assert len(warnings) == 1
    release.set()


def test_a_hang_that_only_the_end_of_a_run_finds_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "HANGS_S", 0.02)
    gpu, warnings = opened(lib := FakeNvml())
    _, release = hangs_at(1, lib)
    Sampler(gpu).start().stop()
    release.set()
    assert len(warnings) == 1
    assert "stopped answering" in warnings[0]


def test_a_refused_list_of_processes_is_none_and_one_warning() -> None:
    lib = FakeNvml(("nvmlDeviceGetComputeRunningProcesses",))
    gpu, warnings = opened(lib)
    assert gpu is not None
    assert [gpu.process_bytes(), gpu.process_bytes()] == [None, None]
    assert gpu.used_bytes() == 9_000
    assert len(warnings) == 1
    assert "memory by process (DeviceGetComputeRunningProcesses Not Supported)" in warnings[0]


def test_a_list_of_processes_refused_midway_is_warned_of_once() -> None:
    lib = FakeNvml()
    gpu, warnings = opened(lib)
    assert gpu is not None
    lib.lacking = {"nvmlDeviceGetComputeRunningProcesses"}
    assert [gpu.process_bytes() for _ in range(5)] == [None] * 5
    assert len(warnings) == 1
    assert "memory by process" in warnings[0]


def test_a_container_that_hides_or_renumbers_processes_leaves_null() -> None:
    lib = FakeNvml()
    gpu, warnings = opened(lib)
    assert gpu is not None
    hidden = SimpleNamespace(pid=os.getpid(), usedGpuMemory=None)  # seen, but not what it uses
    for running in ([], [SimpleNamespace(pid=1, usedGpuMemory=8000)], [hidden]):
        lib.nvmlDeviceGetComputeRunningProcesses = lambda handle, found=running: found  # type: ignore[method-assign]
        assert gpu.process_bytes() is None
    assert warnings == []


def test_a_field_that_fails_for_a_moment_comes_back() -> None:
    lib = FakeNvml()
    gpu, warnings = opened(lib)
    assert gpu is not None
    lib.lacking = {"nvmlDeviceGetPowerUsage"}
    assert [gpu.power_w() for _ in range(GIVE_UP - 1)] == [None] * (GIVE_UP - 1)
    lib.lacking = set()
    assert gpu.power_w() == 250.0
    lib.lacking = {"nvmlDeviceGetPowerUsage"}
    assert gpu.sample().power_w is None
    assert gpu.sample().sm_mhz == 1980, "the other fields go on"
    assert len(warnings) == 1


@pytest.mark.parametrize(("uuid", "handle"), [("bbb-2", "MIG-s1"), ("s2", "MIG-s2")])
def test_torchs_uuid_may_be_a_slices(uuid: str, handle: str) -> None:
    """Of a divided GPU torch gives either the GPU's UUID or the slice's, by version."""
    gpu = open_gpu("cuda:0", FakeNvml(), {}, uuid=uuid)
    assert gpu is not None
    assert gpu.facts()["name"] == f"Fake {handle}"


def test_a_list_of_devices_by_uuid_is_not_overruled_by_torch() -> None:
    gpu = open_gpu("cuda:1", FakeNvml(), {"CUDA_VISIBLE_DEVICES": "GPU-aaa-1,MIG-s2"}, uuid="aaa-1")
    assert gpu is not None
    assert gpu.facts()["name"] == "Fake MIG-s2"
