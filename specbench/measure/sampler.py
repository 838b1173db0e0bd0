"""A background thread that looks at a GPU during a run, and what it saw between two moments (design §5).

The run never waits for the thread: it samples on its own and `window` reads what has been sampled.
"""

from __future__ import annotations

import threading
from collections import deque
from itertools import pairwise
from statistics import fmean
from time import perf_counter
from types import TracebackType
from typing import Any

from specbench.measure.nvml import Gpu, Sample
from specbench.thresholds import THROTTLED

KEPT = 36_000
"""Samples held: an hour at 10 Hz. Windows are asked for right after their trial."""

HANGS_S = 1.0
"""Seconds beyond two periods without a look after which the driver is taken to hang."""


class Sampler:
    """Samples a GPU from `start` to `stop` (or in a `with`). Without a GPU it does nothing; windows are None.

    A driver that hangs leaves windows None, and is warned of once (`Gpu.warn`).

    Args:
        gpu: from `open_gpu`; None where there is none.
        hz: looks a second. A look takes about a millisecond of this thread, outside Python's lock.
    """

    def __init__(self, gpu: Gpu | None, hz: float = 10) -> None:
        self._gpu = gpu
        self._period_s = 1 / hz
        self._samples: deque[Sample] = deque(maxlen=KEPT)
        self._changed = threading.Condition()
        self._wanted = False
        self._stopping = self._warned = False
        self._started = 0.0
        self._thread: threading.Thread | None = None

    def start(self) -> Sampler:
        if self._gpu is not None and self._thread is None:
            self._stopping = False
            self._started = perf_counter()
            self._thread = threading.Thread(target=self._work, name="nvml-sampler", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        """End the thread; a driver that hangs is left behind."""
        if self._thread is None:
            return
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout=HANGS_S)
        if self._thread.is_alive():
            self._warn_of_hang()
        self._thread = None

    def __enter__(self) -> Sampler:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def window(self, t0: float, t1: float) -> dict[str, Any] | None:
        """What happened between two `perf_counter` readings; None if nothing was seen.

        Waits up to a quarter of a second for a look later than `t1`, so call it outside the timed part.

        Returns: joules (the counter's difference, interpolated to t0 and t1), power_w (joules over time, or
        the mean of the readings), sm_mhz_mean, sm_mhz_min, temperature_c (highest), throttle_reasons (all
        that occurred), used_bytes (highest), samples (how many lay inside). Each None where unknown.
        """
        self._look_now(t1)
        with self._changed:
            samples = list(self._samples)
        inside = [s for s in samples if t0 <= s.at <= t1]
        near = inside or [s for s in samples if t0 - self._period_s <= s.at <= t1 + self._period_s]
        if not any(_seen(s) for s in near):
            return None
        clocks = [s.sm_mhz for s in near if s.sm_mhz is not None]
        powers = [s.power_w for s in near if s.power_w is not None]
        known = [s.reasons for s in near if s.reasons is not None]
        joules = _energy(samples, t0, t1)
        return {
            "joules": joules,
            "power_w": joules / (t1 - t0) if joules is not None else fmean(powers) if powers else None,
            "sm_mhz_mean": fmean(clocks) if clocks else None,
            "sm_mhz_min": min(clocks, default=None),
            "temperature_c": max(
                (s.temperature_c for s in near if s.temperature_c is not None), default=None
            ),
            "throttle_reasons": sorted({reason for reasons in known for reason in reasons})
            if known
            else None,
            "used_bytes": max((s.used_bytes for s in near if s.used_bytes is not None), default=None),
            "samples": len(inside),
        }

    def _look_now(self, later_than: float) -> None:
        """Ask the thread for a look and wait for it, but not for long, and not for a driver that hangs."""
        with self._changed:
            if self._thread is None or not self._thread.is_alive():
                return
            last = self._samples[-1].at if self._samples else self._started
            hangs = perf_counter() - last > HANGS_S + 2 * self._period_s
            if hangs and self._warned:
                return
            self._wanted = True
            self._changed.notify_all()
            seen = self._changed.wait_for(
                lambda: self._samples and self._samples[-1].at >= later_than, timeout=0.25
            )
        if hangs and not seen:
            self._warn_of_hang()

    def _warn_of_hang(self) -> None:
        if self._gpu is not None and not self._warned:
            self._warned = True
            self._gpu.warn("NVML stopped answering during the run; what it misses stays empty")

    def _work(self) -> None:
        assert self._gpu is not None
        due = perf_counter()
        while True:
            sample = self._gpu.sample()
            due = max(due + self._period_s, perf_counter())
            with self._changed:
                self._samples.append(sample)
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: self._wanted or self._stopping, timeout=max(0.0, due - perf_counter())
                )
                self._wanted = False
                if self._stopping:
                    return


def throttled(window: dict[str, Any] | None) -> bool:
    """Whether heat or a failing supply slowed the GPU down in this window."""
    return bool(window and THROTTLED.intersection(window.get("throttle_reasons") or ()))


def _seen(sample: Sample) -> bool:
    values = (sample.joules, sample.power_w, sample.sm_mhz, sample.temperature_c, sample.used_bytes)
    return sample.reasons is not None or any(value is not None for value in values)


def _energy(samples: list[Sample], t0: float, t1: float) -> float | None:
    """Joules between two moments; None unless the counter was read on both sides of each."""
    counter = [(s.at, s.joules) for s in samples if s.joules is not None]
    begin, end = _at(counter, t0), _at(counter, t1)
    return None if begin is None or end is None or t1 <= t0 else max(0.0, end - begin)


def _at(counter: list[tuple[float, float]], moment: float) -> float | None:
    """The counter at a moment, on the straight line between the looks around it."""
    for (t0, e0), (t1, e1) in pairwise(counter):
        if t0 <= moment <= t1:
            return e0 if t1 == t0 else e0 + (e1 - e0) * (moment - t0) / (t1 - t0)
    return None
