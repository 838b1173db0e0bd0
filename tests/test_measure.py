"""Clocks, contention and bandwidth, on invented devices and kernels."""

from __future__ import annotations

import math
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace

import pytest

from specbench.measure import bandwidth, clock, cpu
from specbench.measure.clock import Clock, EventStamps, NullClock
from specbench.measure.cpu import CpuProbe


class Device:
    """A device whose events have its own time and, like CUDA's, can be read only once it is synchronised."""

    def __init__(self) -> None:
        self.time = 100.0
        self.created = self.syncs = 0
        self.pending: list[SimpleNamespace] = []
        self.stamps = EventStamps(self.create, self.record, self.synchronize)

    def create(self) -> SimpleNamespace:
        self.created += 1
        event = SimpleNamespace(at=0.0, done=False)
        event.elapsed_time = lambda later: self.between(event, later)
        return event

    def record(self, event: SimpleNamespace) -> None:
        event.at, event.done = self.time, False
        self.pending.append(event)

    def synchronize(self) -> None:
        self.syncs += 1
        for event in self.pending:
            event.done = True

    def between(self, begin: SimpleNamespace, end: SimpleNamespace) -> float:
        assert begin.done, "read before the device got there"
        assert end.done, "read before the device got there"
        return (end.at - begin.at) * 1e3


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device, with the host's clock showing the same time."""
    made = Device()
    monkeypatch.setattr(clock, "perf_counter", lambda: made.time)
    return made


def spend(device: Device, timer: Clock, *steps: tuple[str, float]) -> None:
    """Let time pass inside spans; a step called "-" passes outside any."""
    for name, seconds in steps:
        if name == "-":
            device.time += seconds
            continue
        with timer.span(name):
            device.time += seconds


def one_trial(device: Device) -> clock.Timings:
    timer = Clock("cuda", device.stamps)
    timer.start()
    spend(device, timer, ("prefill", 2.0), ("draft", 0.5), ("-", 0.25))
    timer.end_prefill()
    spend(device, timer, ("draft", 1.0), ("verify", 4.0), ("accept", 0.5), ("draft", 2.0), ("-", 0.125))
    timer.end_round()
    spend(device, timer, ("draft", 3.0), ("verify", 5.0), ("accept", 0.25))
    timer.end_round()
    spend(device, timer, ("-", 0.0625))
    return timer.stop()


def test_clock_splits_a_trial_into_prefill_spans_and_rounds(device: Device) -> None:
    timings = one_trial(device)
    assert timings.prefill_s == pytest.approx(2.75)  # what was marked before the first token is prefill
    assert timings.decode_s == pytest.approx(15.9375)
    assert timings.total_s == pytest.approx(18.6875)
    assert timings.spans == pytest.approx({"draft": 6.0, "verify": 9.0, "accept": 0.75, "other": 0.1875})
    assert timings.draft_s == pytest.approx([3.0, 3.0])  # the first round drafted twice
    assert timings.verify_s == pytest.approx([4.0, 5.0])
    assert timings.round_s == pytest.approx([7.625, 8.25])


def test_clock_synchronises_at_both_ends_only_and_reuses_its_events(device: Device) -> None:
    one_trial(device)
    assert device.syncs == 2
    created = device.created
    assert one_trial(device).decode_s == pytest.approx(15.9375)
    assert device.created == created


def test_clock_refuses_calls_that_would_make_numbers_wrong(device: Device) -> None:
    timer = Clock("cuda", device.stamps)
    timer.start()
    with pytest.raises(RuntimeError, match="before end_prefill"):
        timer.end_round()
    nested = pytest.raises(RuntimeError, match="'verify' opened inside span 'draft'")
    with nested, timer.span("draft"), timer.span("verify"):
        pass
    for call in (timer.end_prefill, timer.stop):
        with pytest.raises(RuntimeError, match="inside span 'accept'"), timer.span("accept"):
            call()
    timer.end_prefill()
    with pytest.raises(RuntimeError, match="twice"):
        timer.end_prefill()


def test_what_nobody_marked_is_unknown_and_a_trial_without_token_is_all_prefill(device: Device) -> None:
    timer = Clock("cuda", device.stamps)
    timer.start()
    timer.end_prefill()
    spend(device, timer, ("-", 2.0))
    timer.end_round()
    timings = timer.stop()
    assert (timings.draft_s, timings.verify_s, timings.round_s) == (None, None, [2.0])
    assert timings.spans["other"] == pytest.approx(timings.decode_s)
    timer = Clock("cuda", device.stamps)
    timer.start()
    device.time += 3
    timings = timer.stop()
    assert (timings.prefill_s, timings.decode_s, timings.spans["other"]) == (3.0, 0.0, 0.0)


def test_cpu_clock_is_cheap_and_agrees_with_the_wall() -> None:
    def once() -> float:
        timer = Clock("cpu")
        timer.start()
        timer.end_prefill()
        begin = perf_counter()
        for _ in range(2000):
            with timer.span("draft"):
                pass
        cost = (perf_counter() - begin) / 2000
        timings = timer.stop()
        assert 0 < timings.spans["draft"] < timings.decode_s < timings.total_s
        assert sum(timings.spans.values()) == pytest.approx(timings.decode_s)
        return cost

    assert min(once() for _ in range(7)) < 3e-6


def test_null_clock_measures_nothing() -> None:
    timer = NullClock()
    timer.start()
    with timer.span("draft"), timer.span("verify"):
        pass
    timer.end_prefill()
    timer.end_round()
    timings = timer.stop()
    assert math.isnan(timings.total_s)
    assert math.isnan(timings.spans["verify"])


class Kernel:
    """A /proc with two threads on two processors, and the host's clocks."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.wall, self.mine = folder, 50.0, 10.0
        monkeypatch.setattr(cpu, "perf_counter", lambda: self.wall)
        monkeypatch.setattr(cpu, "process_time", lambda: self.mine)
        self.write(waits=(1.0, 2.0), busy=(100.0, 200.0))

    def write(self, waits: tuple[float, ...], busy: tuple[float, ...]) -> None:
        for task, wait in enumerate(waits):
            path = self.folder / "self" / "task" / str(task)
            path.mkdir(parents=True, exist_ok=True)
            (path / "schedstat").write_text(f"123456 {int(wait * 1e9)} 77\n")
        lines = [f"cpu{n} {int(s * 50)} 0 {int(s * 50)} 99999 88 0 0 0 0 0" for n, s in enumerate(busy)]
        (self.folder / "stat").write_text(
            "\n".join(["cpu 1 2 3", *lines, f"cpu7 {int(self.wall * 1000)} 0 0 0 0 0 0 0 0 0"])
        )

    def trial(self, threads: int, wall: float, mine: float, waits, busy) -> cpu.CpuReading:
        probe = CpuProbe(threads, self.folder, {0, 1})
        probe.start()
        self.wall, self.mine = self.wall + wall, self.mine + mine
        self.write(waits, busy)
        return probe.stop(wall)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(cpu.os, "sysconf", lambda name: 100)
    return Kernel(tmp_path, monkeypatch)


def test_a_quiet_trial_is_not_contended(kernel: Kernel) -> None:
    reading = kernel.trial(2, wall=2.0, mine=4.0, waits=(1.01, 2.02), busy=(102.0, 202.0))
    assert not reading.contended
    assert reading.wait_s == pytest.approx(0.03)
    assert reading.longest_wait_s == pytest.approx(0.02)
    assert reading.others == pytest.approx(0.0)
    assert reading.share == pytest.approx(4.0 / 4.03)


def test_one_thread_kept_waiting_makes_a_trial_contended(kernel: Kernel) -> None:
    reading = kernel.trial(2, wall=2.0, mine=3.0, waits=(1.0, 2.3), busy=(101.5, 201.5))
    assert reading.contended
    # a thread born during the trial has waited since zero
    reading = kernel.trial(2, wall=2.0, mine=4.0, waits=(1.0, 2.3, 0.5), busy=(103.5, 203.5))
    assert reading.contended
    assert reading.longest_wait_s == pytest.approx(0.5)


def test_cores_others_use_make_a_trial_contended_unless_they_were_free(kernel: Kernel) -> None:
    assert kernel.trial(2, wall=2.0, mine=3.0, waits=(1.0, 2.0), busy=(102.0, 202.0)).contended
    reading = kernel.trial(1, wall=2.0, mine=2.0, waits=(1.0, 2.0), busy=(104.0, 204.0))
    assert reading.others == pytest.approx(1.0)
    assert not reading.contended
    # ticks say nothing about a trial this short
    assert kernel.trial(2, wall=0.1, mine=0.1, waits=(1.0, 2.0), busy=(104.5, 204.5)).others is None


def test_without_a_kernel_that_tells_nothing_is_contended(tmp_path: Path) -> None:
    probe = CpuProbe(4, tmp_path / "nothing")
    probe.start()
    (tmp_path / "self" / "task" / "1").mkdir(parents=True)  # a kernel built without schedstat
    assert CpuProbe(4, tmp_path)._thread_waits() is None
    reading = probe.stop(1.0)
    assert (reading.wait_s, reading.longest_wait_s, reading.others, reading.share) == (None,) * 4
    assert not reading.contended
    assert reading.cpu_s >= 0


def test_this_kernel_is_read() -> None:
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("no schedstat here")
    probe = CpuProbe(1)
    probe.start()
    reading = probe.stop()
    assert reading.wait_s is not None
    assert probe._busy_s() is not None


def test_bandwidth_counts_bytes_over_the_best_time() -> None:
    device = Device()
    seconds = iter([0.5, 0.25, 1.0, 0.5, 0.2, 0.4, 1.0, 1.0, 1.0])

    def now() -> SimpleNamespace:
        event = EventStamps.now(device.stamps)
        if len(device.stamps._used) % 2:
            device.time += next(seconds)
        return event

    device.stamps.now = now  # type: ignore[method-assign]
    measured = bandwidth.measure_bandwidth("cpu", 0.0, 4_000_000, device.stamps)
    assert measured.copy_gb_s == pytest.approx(2 * 0.004 / 0.25)
    assert measured.read_gb_s == pytest.approx(0.004 / 0.2)
    assert measured.buffer_bytes == 4_000_000
