"""Whether a trial had the processor to itself (design §5).

Processor seconds alone do not tell: OpenMP threads spin while they wait for a sibling that another process
has pushed aside, so a trial may burn its threads' full share and still take four times as long. Linux counts
what matters: how long each thread stood in the run queue, ready and not running
(`/proc/self/task/*/schedstat`). One thread's wait holds up all, since they meet at the end of every
operation, so the longest wait is judged, not the mean. On large machines the scheduler spreads a competitor
over the threads until no single wait is long; there the time other processes used on our cores
(`/proc/stat`) tells.

Where a file is missing (macOS, hardened containers) its readings are None and mark nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time, sleep

WAIT_LIMIT = 0.10
"""Longest wait of one thread, as a part of the trial's wall time, above which the trial is contended.
A quiet 2-core machine reads below 0.01, one busy competitor 0.3-0.5."""

OTHERS_LIMIT = 0.25
"""Cores that other processes may use beyond those our threads leave free. A tick is 10 ms: see SHORTEST_S."""

SHORTEST_S = 0.25
"""Wall seconds below which `/proc/stat`, which counts in ticks, says nothing."""

USEFUL_FIELDS = (0, 1, 2, 5, 6, 7)
"""Of a `cpu` line of /proc/stat: user, nice, system, irq, softirq, steal. Not idle, iowait, guest."""


@dataclass(frozen=True)
class CpuReading:
    """What a trial got of the processor. None is unknown.

    cpu_s: processor seconds of this process, all threads.
    load: the load average of the last minute at the end (threads running or ready, the whole machine).
    wait_s: seconds our threads stood ready without running, summed.
    longest_wait_s: the same for the thread that waited longest.
    others: cores' worth of work that everything else did on the cores we may use.
    share: processor time got over processor time asked for, cpu_s / (cpu_s + wait_s).
    contended: clearly less than its threads' share: wall-clock ratios of this trial mean nothing.
    """

    cpu_s: float
    load: float | None
    wait_s: float | None
    longest_wait_s: float | None
    others: float | None
    share: float | None
    contended: bool


class CpuProbe:
    """Reads the counters on both sides of one trial; both calls belong outside the timed part (~0.2 ms each).

    Args:
        threads: threads the trial computes with (torch's on a CPU, 1 on a GPU).
        proc: where the kernel's files are (tests).
        cpus: the processors we may run on; None asks the kernel.
    """

    def __init__(self, threads: int, proc: Path = Path("/proc"), cpus: set[int] | None = None) -> None:
        self._threads = threads
        self._proc = proc
        self._cpus = usable_cpus() if cpus is None else cpus
        self._hertz = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100

    def start(self) -> None:
        self._waits = self._thread_waits()
        self._busy = self._busy_s()
        self._cpu_zero = process_time()
        self._zero = perf_counter()

    def stop(self, wall_s: float | None = None) -> CpuReading:
        """The reading since `start`. `wall_s`: the trial's own wall time; None means since `start`."""
        cpu_s = process_time() - self._cpu_zero
        since_s = perf_counter() - self._zero
        wall_s = since_s if wall_s is None else wall_s
        waits = self._waits_since(self._waits, self._thread_waits())
        others = self._others(cpu_s, since_s)
        wait_s = None if waits is None else sum(waits)
        longest = None if waits is None else max(waits, default=0.0)
        share = None if wait_s is None or cpu_s + wait_s <= 0 else cpu_s / (cpu_s + wait_s)
        contended = self._held_up(longest, wall_s) or self._crowded(others)
        return CpuReading(cpu_s, load_average(), wait_s, longest, others, share, contended)

    def _held_up(self, longest: float | None, wall_s: float) -> bool:
        return longest is not None and longest > WAIT_LIMIT * wall_s

    def _crowded(self, others: float | None) -> bool:
        if others is None:
            return False
        spare = max(0, len(self._cpus) - self._threads)
        return others > spare + max(OTHERS_LIMIT, 0.03 * self._threads)

    def _thread_waits(self) -> dict[str, float] | None:
        """Seconds each thread of this process has waited for a core since it began. None: not told here."""
        waits = {}
        try:
            tasks = os.listdir(self._proc / "self" / "task")
        except OSError:
            return None
        for task in tasks:
            try:
                fields = (self._proc / "self" / "task" / task / "schedstat").read_text().split()
                waits[task] = int(fields[1]) / 1e9
            except (OSError, ValueError, IndexError):
                continue  # a thread that has just ended, or a kernel without the file
        return waits or None

    @staticmethod
    def _waits_since(before: dict[str, float] | None, after: dict[str, float] | None) -> list[float] | None:
        if before is None or after is None:
            return None
        return [max(0.0, wait - before.get(task, 0.0)) for task, wait in after.items()]

    def _busy_s(self) -> float | None:
        """Seconds of work done on our cores, by anyone, since the machine began. None: not told here."""
        names = {f"cpu{number}" for number in self._cpus}
        ticks = 0
        seen = False
        try:
            for line in (self._proc / "stat").read_text().splitlines():
                name, *values = line.split() or [""]
                if name in names:
                    ticks += sum(int(values[i]) for i in USEFUL_FIELDS)
                    seen = True
        except (OSError, ValueError, IndexError):
            return None
        return ticks / self._hertz if seen else None

    def _others(self, cpu_s: float, since_s: float) -> float | None:
        busy = self._busy_s()
        if busy is None or self._busy is None or since_s < SHORTEST_S:
            return None
        return max(0.0, (busy - self._busy - cpu_s) / since_s)


def usable_cpus() -> set[int]:
    """The processors this process may run on, by number."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def load_average() -> float | None:
    """Threads running or ready over the last minute, the whole machine. None where the system has none."""
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return None


def busy_now(seconds: float = 0.5, probe: CpuProbe | None = None) -> float | None:
    """Cores that other processes keep busy right now, watched for `seconds` while we sleep. None: unknown."""
    probe = probe or CpuProbe(threads=1)
    probe.start()
    sleep(seconds)
    return probe.stop().others
