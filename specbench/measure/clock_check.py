"""Whether a device's event spans say what a host clock says around the same, synchronised passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from specbench.measure.clock import Stamps

LENGTHS_S = (0.02, 0.05, 0.1)  # of passes: long against what starting and waiting cost the host
REPEATS = 3
TOLERANCE = 0.01


@dataclass(frozen=True)
class ClockCheck:
    """One pass length, as both clocks saw it. The repeat counts in which they came closest."""

    host_s: float
    events_s: float

    @property
    def difference(self) -> float:
        """Of the events from the host, as a share; the host sees a little more."""
        return abs(self.events_s - self.host_s) / self.host_s

    @property
    def agrees(self) -> bool:
        return self.difference <= TOLERANCE

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "difference": self.difference, "agrees": self.agrees}


def compare_clocks(
    stamps: Stamps,
    work: Callable[[], object],
    lengths_s: Sequence[float] = LENGTHS_S,
    host: Callable[[], float] = perf_counter,
) -> list[ClockCheck]:
    """Both clocks over passes of about these lengths, made of `work` again and again.

    Args:
        stamps: of the device that `work` runs on.
        work: starts something on the device that takes much less than the shortest length.
        host: a clock of the host (tests).
    """
    _time(stamps, work, 3, host)  # whatever happens once
    each = max(_time(stamps, work, 20, host).host_s / 20, 1e-9)
    checks = []
    for length in lengths_s:
        count = max(1, round(length / each))
        repeats = [_time(stamps, work, count, host) for _ in range(REPEATS)]
        checks.append(min(repeats, key=lambda check: check.difference))
    return checks


def _time(stamps: Stamps, work: Callable[[], object], count: int, host: Callable[[], float]) -> ClockCheck:
    stamps.synchronize()
    began = host()
    begin = stamps.now()
    for _ in range(count):
        work()
    end = stamps.now()
    stamps.synchronize()
    host_s = host() - began
    events_s = stamps.seconds(begin, end)
    stamps.release()
    return ClockCheck(host_s, events_s)


def check_cuda_clock(device: str = "cuda:0") -> list[ClockCheck]:
    """The spans of a CUDA device against the host's clock, over copies of a buffer that no cache holds."""
    import torch

    from specbench.measure.clock import stamps_for

    source = torch.ones(2**26, device=device)
    target = torch.empty_like(source)
    return compare_clocks(stamps_for(device), lambda: target.copy_(source))
