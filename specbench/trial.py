"""One trial: one timed generation of one batch by one method, and the rows it leaves."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from specbench.build import VANILLA, Named, state
from specbench.decoding.method import Request, Round
from specbench.errors import first_line
from specbench.measure.clock import Clock, NullClock, Timings
from specbench.measure.cpu import CpuProbe, CpuReading
from specbench.models.passes import made
from specbench.plan import Block
from specbench.store import Rounds, Trial
from specbench.thresholds import NEAR_TIE

if TYPE_CHECKING:
    from specbench.measure.sampler import Sampler
    from specbench.models.target import Target


@dataclass(frozen=True)
class Measured:
    """What one generation of a batch brought: the tokens of each row, its rounds, and the readings."""

    tokens: list[list[int]]
    rounds: list[Round]
    timings: Timings
    cpu: CpuReading | None = None
    nvml: dict[str, Any] | None = None
    error: str | None = None
    experts: list[float] | None = None  # of each round
    captured: int = 0  # passes that were made meanwhile, at this trial's expense


@dataclass
class Instruments:
    """What watches a trial besides the clock."""

    device: str
    threads: int
    sampler: Sampler
    cpu: CpuProbe = field(init=False)

    def __post_init__(self) -> None:
        self.cpu = CpuProbe(self.threads)


def seed_of(seed: int, task: str, question: str, turn: int, repeat: int, method: str) -> int:
    """The seed of one row's generator, 63 bits."""
    text = repr((seed, task, question, turn, repeat, method)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


def generate(named: Named, request: Request, instruments: Instruments | None = None) -> Measured:
    """Run a method on a request. What it raises becomes the `error`: one fault must not end a run."""
    clock: Any = Clock(instruments.device) if instruments else NullClock()
    rounds: list[Round] = []
    out_of_memory = False
    try:
        named.method.prepare(request)
        if instruments:
            instruments.cpu.start()
        begin, passes_before = perf_counter(), made()
        clock.start()
        for one in named.method.generate(request, clock):
            rounds.append(one)
        timings = clock.stop()
        tokens = _tokens(rounds, len(request.prompts))
    except Exception as problem:  # noqa: BLE001 - plug-ins and drivers may raise anything; it is recorded
        error, out_of_memory = describe(problem), is_out_of_memory(problem)
    else:
        if not instruments:
            return Measured(tokens, rounds, timings)
        cpu = instruments.cpu.stop(timings.total_s)
        nvml = instruments.sampler.window(begin, perf_counter())
        captured = made() - passes_before
        return Measured(tokens, rounds, timings, cpu, nvml, experts=_experts(rounds), captured=captured)
    if out_of_memory:  # out here the exception is gone, and with it the frames that held the tensors
        _free(named)
    return Measured([[] for _ in request.prompts], [], NullClock().stop(), error=error)


def _tokens(rounds: Sequence[Round], rows: int) -> list[list[int]]:
    """The tokens of each row; ValueError for rounds that do not speak of every row (a faulty plug-in)."""
    for number, one in enumerate(rounds):
        columns: list[Sequence[Any]] = [one.tokens]
        columns += [] if one.prefill else [one.drafted, one.depth, one.accepted]
        if any(len(column) != rows for column in columns):
            raise ValueError(f"round {number} of the method does not have {rows} rows in every column")
    if not rounds or not rounds[0].prefill:
        raise ValueError("the method's first round is not its prefill")
    return [[token for one in rounds for token in one.tokens[row]] for row in range(rows)]


def _experts(rounds: Sequence[Round]) -> list[float] | None:
    """What the rounds know of the experts they woke, in one read."""
    found = [one.experts for one in rounds if not one.prefill]
    known = [value for value in found if value is not None]
    return torch.stack(known).tolist() if known and len(known) == len(found) else None


def _free(named: Named) -> None:
    """After running out of memory: give back what the next method can use."""
    with contextlib.suppress(Exception):  # a method's own fault here changes nothing
        named.method.release()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def is_out_of_memory(problem: BaseException) -> bool:
    text = str(problem)
    return isinstance(problem, torch.OutOfMemoryError | MemoryError) or (
        isinstance(problem, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
    )


def describe(problem: BaseException) -> str:
    """One line for a trial's `error`."""
    return "out of memory" if is_out_of_memory(problem) else first_line(problem)


def rows_of(
    measured: Measured,
    block: Block,
    named: Named,
    prompts: Sequence[Sequence[int]],
    *,
    order: int,
    attempt: int,
    stop: frozenset[int],
    memory: dict[str, int | None] | None,
) -> list[Trial]:
    """The rows of a trial, one a request of its batch. Texts and agreement are filled in by the runner."""
    return [
        _row(measured, block, named, row, len(prompt), order, attempt, stop, memory)
        for row, prompt in enumerate(prompts)
    ]


def _row(
    measured: Measured, block: Block, named: Named, row: int, prompt_tokens: int,
    order: int, attempt: int, stop: frozenset[int], memory: dict[str, int | None] | None,
) -> Trial:  # fmt: skip
    trial = blank(block, named, row, order, attempt)
    trial.prompt_tokens, trial.memory = prompt_tokens, memory
    if measured.error:
        trial.error, trial.finish = measured.error, "error"
        return trial
    time = measured.timings
    trial.output_ids = measured.tokens[row]
    trial.output_tokens = len(trial.output_ids)
    trial.finish = "eos" if trial.output_ids and trial.output_ids[-1] in stop else "length"
    trial.batch_s, trial.prefill_s = time.total_s, time.prefill_s
    trial.decode_s = _own_decode_s(measured, row)
    trial.total_s = trial.prefill_s + trial.decode_s
    trial.spans = time.spans if time.verify_s is not None else None
    trial.rounds = _rounds(measured, row)
    trial.nvml = measured.nvml
    if measured.cpu is not None:
        trial.cpu_s, trial.load, trial.contended = (
            measured.cpu.cpu_s,
            measured.cpu.load,
            measured.cpu.contended,
        )
    return trial


def blank(block: Block, named: Named, row: int, order: int, attempt: int = 0) -> Trial:
    """A row that says which trial it is and nothing more."""
    question = block.questions[row]
    return Trial(
        task=block.task.name,
        question=question.id,
        category=question.category,
        turn=block.turn,
        method=named.label,
        batch_size=block.batch_size,
        concurrency=block.concurrency,
        request_rate=block.request_rate,
        repeat=block.repeat,
        block=block.index,
        batch=block.batch,
        order=order,
        attempt=attempt,
        state=state(named.method),
        lossless=named.method.lossless,
    )


def _own_decode_s(measured: Measured, row: int) -> float:
    """Decode seconds until the row's own last round: a row that stops early does not wait for its batch."""
    rounds = [one for one in measured.rounds if not one.prefill]
    own = max((i for i, one in enumerate(rounds, 1) if one.drafted[row] is not None), default=0)
    times = measured.timings.round_s
    return measured.timings.decode_s if own == len(rounds) else math.fsum(times[:own])


def _rounds(measured: Measured, row: int) -> Rounds:
    time = measured.timings
    own = [
        (index, one)
        for index, one in enumerate(one for one in measured.rounds if not one.prefill)
        if one.drafted[row] is not None
    ]

    def column(values: list[float] | None) -> list[float] | None:
        return None if values is None else [values[index] for index, _ in own]

    return Rounds(
        drafted=[one.drafted[row] or 0 for _, one in own],
        depth=[one.depth[row] for _, one in own],
        accepted=[one.accepted[row] for _, one in own],
        emitted=[len(one.tokens[row]) for _, one in own],
        draft_s=column(time.draft_s),
        verify_s=column(time.verify_s),
        round_s=column(time.round_s),
        experts=column(measured.experts),
        probes=[one.probes[row] for _, one in own] if any(one.probes for _, one in own) else None,
    )


def agreement(
    target: Target, prompt: list[int], vanilla: list[int], other: list[int]
) -> dict[str, Any] | None:
    """Whether a greedy output is vanilla's, and if not, how close the target's decision was where they part.

    `logit_gap` is the difference of the target's two largest logits there, from one untimed teacher-forced
    pass; None where one output is the beginning of the other, since no tie explains stopping too early or too
    late. All of it is None (unknown) if there is no memory for that pass.
    """
    if other == vanilla:
        return {"same": True, "first_difference": None, "logit_gap": None}
    pairs = zip(vanilla, other, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if first is None:
        return {"same": False, "first_difference": min(len(vanilla), len(other)), "logit_gap": None}
    try:
        gap = _logit_gap(target, prompt + vanilla[:first])
    except (RuntimeError, MemoryError) as problem:
        if not is_out_of_memory(problem):
            raise
        return None
    return {"same": False, "first_difference": first, "logit_gap": gap}


def _logit_gap(target: Target, context: list[int]) -> float:
    target.reserve(1, len(context))
    top = target.prefill([context]).logits[0, -1].float().topk(2).values
    return float(top[0] - top[1])


def is_bug(trial: Trial, dtype: str) -> bool:
    """A lossless method that differs from vanilla in float32 where the target was not undecided."""
    found = trial.agreement
    if dtype != "float32" or not trial.lossless or trial.method == VANILLA or not found or found["same"]:
        return False
    return found["logit_gap"] is None or found["logit_gap"] > NEAR_TIE
