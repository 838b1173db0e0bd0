"""The time of one trial: total, prefill, the spans of decode, and each round (design §5).

    clock = Clock(device)
    clock.start()
    ...                        # the pass over the prompt, the first token
    clock.end_prefill()
    while ...:
        with clock.span("draft"): ...
        with clock.span("verify"): ...
        with clock.span("accept"): ...
        clock.end_round()
    timings = clock.stop()

A stamp is a float on a CPU and a CUDA event on a GPU. The loop only takes stamps; `stop` synchronises once
and turns them into seconds, so that measuring neither waits for the device nor shows in what is measured.
Devices other than CPUs and CUDA GPUs are synchronised at both ends and their spans are the host's time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter, process_time
from typing import Any, Protocol

SPANS = ("draft", "verify", "accept")


@dataclass
class Timings:
    """Seconds of one trial.

    `spans` holds draft, verify, accept and other; they sum to `decode_s`: time that no span covers is seen.
    `draft_s`, `verify_s`, `round_s` have one entry a round; the first two are None where that span was never
    marked (an engine, transformers' own loop). `cpu_s` is the process's CPU time, all threads.
    """

    total_s: float
    prefill_s: float
    decode_s: float
    cpu_s: float
    spans: dict[str, float] = field(default_factory=dict)
    draft_s: list[float] | None = None
    verify_s: list[float] | None = None
    round_s: list[float] = field(default_factory=list)


class Stamps(Protocol):
    """Where stamps come from. `release` says that the stamps given out will not be read again."""

    def now(self) -> Any: ...

    def synchronize(self) -> None: ...

    def seconds(self, begin: Any, end: Any) -> float: ...

    def release(self) -> None: ...


class HostStamps:
    """`perf_counter` readings, for CPUs and for devices without events of their own."""

    now = staticmethod(perf_counter)

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize

    def synchronize(self) -> None:
        if self._synchronize is not None:
            self._synchronize()

    def seconds(self, begin: Any, end: Any) -> float:
        return end - begin

    def release(self) -> None:
        """Nothing is held."""


class EventStamps:
    """Device events from a pool that lasts as long as this object: after the first trial none are created.

    Args:
        create: makes one event that can be timed.
        record: records an event on the stream the trial runs on.
        synchronize: waits until the device has done everything asked of it.

    An event offers `elapsed_time(later) -> milliseconds`, valid once both were reached.
    """

    def __init__(
        self, create: Callable[[], Any], record: Callable[[Any], None], synchronize: Callable[[], None]
    ) -> None:
        self._create, self._record, self._synchronize = create, record, synchronize
        self._free: list[Any] = []
        self._used: list[Any] = []

    def now(self) -> Any:
        event = self._free.pop() if self._free else self._create()
        self._used.append(event)
        self._record(event)
        return event

    def synchronize(self) -> None:
        self._synchronize()

    def seconds(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1e3

    def release(self) -> None:
        self._free += self._used
        self._used = []


_cuda_stamps: dict[str, EventStamps] = {}


def stamps_for(device: str) -> Stamps:
    """The stamps of a device ("cpu", "cuda", "cuda:1"). A CUDA device's are made once and reused."""
    kind = device.partition(":")[0]
    if kind == "cpu":
        return HostStamps()
    if kind == "cuda":
        if device not in _cuda_stamps:
            _cuda_stamps[device] = cuda_stamps(device)
        stamps = _cuda_stamps[device]
        stamps.release()  # what an aborted trial held
        return stamps
    import torch

    return HostStamps(lambda: torch.accelerator.synchronize(torch.device(device)))


def cuda_stamps(device: str) -> EventStamps:
    """New stamps of a CUDA device, for what may be measured while a trial holds those of `stamps_for`."""
    import torch

    where = torch.device(device)

    def record(event: Any) -> None:  # the stream of now: a captured graph may have been given its own
        event.record(torch.cuda.current_stream(where))

    return EventStamps(
        create=lambda: torch.cuda.Event(enable_timing=True),
        record=record,
        synchronize=lambda: torch.cuda.synchronize(where),
    )


class Span:
    """A stretch of time that may be entered again and again, but not inside another one."""

    __slots__ = ("_clock", "_now", "closed", "name", "opened")

    def __init__(self, clock: Clock, name: str, now: Callable[[], Any]) -> None:
        self._clock, self._now, self.name = clock, now, name
        self.opened: list[Any] = []
        self.closed: list[Any] = []

    def __enter__(self) -> None:
        if self._clock._open is not None:
            raise RuntimeError(f"span {self.name!r} opened inside span {self._clock._open!r}")
        self._clock._open = self.name
        self.opened.append(self._now())

    def __exit__(self, *error: object) -> None:
        self.closed.append(self._now())
        self._clock._open = None


class _NoSpan:
    """Marks without measuring: the prefill, which `end_prefill` delimits, and every span of a NullClock."""

    __slots__ = ()

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


_NO_SPAN = _NoSpan()


class Clock:
    """The time of one trial; start and stop it once.

    Args:
        device: the torch device the target's first token comes from, as text or as a `torch.device`.
        stamps: another source of stamps (tests).

    Raises RuntimeError where calls come in an order that would make the numbers wrong: a span inside a span,
    a round or the prefill ended inside a span, a round before the first token.
    """

    def __init__(self, device: Any = "cpu", stamps: Stamps | None = None) -> None:
        self._stamps = stamps or stamps_for(str(device))
        self._open: str | None = None
        self._first: Any = None  # the stamp of the first token
        self._rounds: list[tuple[Any, int, int]] = []  # stamp, draft and verify spans closed so far
        now = self._stamps.now
        self._draft, self._verify, self._accept = (Span(self, name, now) for name in SPANS)
        self._spans: dict[str, Span | _NoSpan] = {
            "prefill": _NO_SPAN,
            "draft": self._draft,
            "verify": self._verify,
            "accept": self._accept,
        }
        self.span: Callable[[str], Span | _NoSpan] = self._spans.__getitem__

    def start(self) -> None:
        """Wait for the device, then let time run from zero."""
        self._stamps.synchronize()
        self._cpu_zero = process_time()
        self._zero_s = perf_counter()
        self._zero = self._stamps.now()

    def end_prefill(self) -> None:
        """The first token is out. Spans marked before this moment belong to the prefill and are forgotten."""
        self._refuse_open("end_prefill")
        if self._first is not None:
            raise RuntimeError("end_prefill called twice in one trial")
        for span in (self._draft, self._verify, self._accept):
            span.opened.clear()
            span.closed.clear()
        self._first = self._stamps.now()

    def end_round(self) -> None:
        """A round is over; the next one begins at this moment."""
        self._refuse_open("end_round")
        if self._first is None:
            raise RuntimeError("end_round called before end_prefill")
        self._rounds.append((self._stamps.now(), len(self._draft.closed), len(self._verify.closed)))

    def stop(self) -> Timings:
        """Wait for the device once and read everything. What follows the last round counts as `other`."""
        self._refuse_open("stop")
        self._stamps.synchronize()
        total_s = perf_counter() - self._zero_s
        cpu_s = process_time() - self._cpu_zero
        timings = self._read(total_s, cpu_s)
        self._stamps.release()
        return timings

    def _read(self, total_s: float, cpu_s: float) -> Timings:
        if self._first is None:  # no token came: everything was prefill
            return Timings(total_s, total_s, 0.0, cpu_s, dict.fromkeys((*SPANS, "other"), 0.0))
        prefill_s = self._stamps.seconds(self._zero, self._first)
        decode_s = total_s - prefill_s
        draft, verify, accept = (self._lengths(s) for s in (self._draft, self._verify, self._accept))
        spans = {"draft": math.fsum(draft), "verify": math.fsum(verify), "accept": math.fsum(accept)}
        spans["other"] = decode_s - math.fsum(spans.values())
        return Timings(
            total_s,
            prefill_s,
            decode_s,
            cpu_s,
            spans,
            draft_s=_by_round(draft, [drafts for _, drafts, _ in self._rounds]),
            verify_s=_by_round(verify, [verifies for _, _, verifies in self._rounds]),
            round_s=self._round_lengths(),
        )

    def _lengths(self, span: Span) -> list[float]:
        return [self._stamps.seconds(a, b) for a, b in zip(span.opened, span.closed, strict=True)]

    def _round_lengths(self) -> list[float]:
        edges = [self._first, *(stamp for stamp, _, _ in self._rounds)]
        return [self._stamps.seconds(a, b) for a, b in pairwise(edges)]

    def _refuse_open(self, call: str) -> None:
        if self._open is not None:
            raise RuntimeError(f"{call} called inside span {self._open!r}")


def _by_round(lengths: list[float], counts: list[int]) -> list[float] | None:
    """Sum span lengths round by round; `counts` is how many had closed when each round ended."""
    if not lengths:
        return None
    return [math.fsum(lengths[a:b]) for a, b in pairwise([0, *counts])]


class NullClock:
    """A clock for untimed passes: same calls, no measuring, timings NaN so that none is taken for one."""

    def span(self, name: str) -> _NoSpan:
        return _NO_SPAN

    def start(self) -> None: ...

    def end_prefill(self) -> None: ...

    def end_round(self) -> None: ...

    def stop(self) -> Timings:
        nan = math.nan
        return Timings(nan, nan, nan, nan, dict.fromkeys((*SPANS, "other"), nan))
