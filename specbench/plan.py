"""The schedule: which blocks, in which order, and which method goes first (design §5). Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from specbench.analysis.setting import part_filled
from specbench.config import RunConfig
from specbench.questions import Question, Task
from specbench.thresholds import LAPS

RATE_BLOCK = 32  # requests in a block that come at a rate


@dataclass(frozen=True)
class Block:
    """The trials of all methods on the same batch: the unit that is measured, written and resumed whole."""

    index: int
    task: Task
    questions: tuple[Question, ...]
    turn: int
    batch_size: int
    repeat: int
    max_new_tokens: int
    reverse: bool = False
    only: str | None = None  # the one method it is for, by label: a block of a whole pass (see `passes`)
    concurrency: int | None = None  # requests of its questions in flight at once (engines)
    request_rate: float | None = None  # requests sent a second, whatever is in flight (engines)

    @property
    def batch(self) -> str:
        """What the rows of one batch share."""
        return "+".join(question.id for question in self.questions)


@dataclass(frozen=True)
class Load:
    """How a block's questions are sent, and how many a block has."""

    questions: int
    batch_size: int
    concurrency: int | None = None
    request_rate: float | None = None


def loads(config: RunConfig) -> list[Load]:
    """The settings a run sweeps: batch sizes, or of engines the concurrencies and the request rates.

    At concurrency N a block is LAPS x N questions, so that the thinning at its end is a small part of it.
    """
    if not (config.concurrency or config.request_rates):
        return [Load(size, size) for size in config.batch_sizes]
    closed = [Load(1 if n == 1 else LAPS * n, 1, concurrency=n) for n in config.concurrency]
    return closed + [Load(RATE_BLOCK, 1, request_rate=rate) for rate in config.request_rates]


def plan(config: RunConfig, tasks: Sequence[Task]) -> list[Block]:
    """All blocks of a run. Tasks take turns, so that a run cut short has something of each.

    Methods go in reverse on every other block (ABBA), counted so that the blocks of each task and turn alternate
    too: with an even number of tasks, plain alternation would give a task the same order every time.
    """
    blocks: list[Block] = []
    for load in loads(config):
        for repeat in range(config.repeats):
            batches = [_batches(task, load.questions) for task in tasks]
            for lap, abreast in enumerate(zip_longest(*batches)):
                for place, (task, questions) in enumerate(zip(tasks, abreast, strict=True)):
                    limit = config.max_new_tokens or task.max_new_tokens
                    for turn in range(max((len(q.turns) for q in questions or ()), default=0)):
                        here = tuple(q for q in questions if turn < len(q.turns))
                        reverse = (lap + repeat + place + turn) % 2 == 1
                        block = Block(len(blocks), task, here, turn, load.batch_size, repeat, limit, reverse)
                        blocks.append(
                            replace(block, concurrency=load.concurrency, request_rate=load.request_rate)
                        )
    return blocks


def passes(
    config: RunConfig, tasks: Sequence[Task], methods: Sequence[str], reversible: bool = True
) -> list[Block]:
    """The schedule of a run in which a method keeps what earlier prompts taught it: whole passes, one order.

    Each method goes through all questions alone, always in the same order, from nothing learned. The next repeat
    takes the methods in reverse (if `reversible`), so that slow drift cancels over an even number of repeats.
    """
    laps: dict[tuple[int, int], list[Block]] = {}
    for block in plan(config, tasks):  # an engine's pass holds all loads: a server takes long to start
        laps.setdefault((block.batch_size, block.repeat), []).append(block)
    blocks: list[Block] = []
    for (_, repeat), lap in laps.items():
        order = list(reversed(methods)) if reversible and repeat % 2 else list(methods)
        for method in order:
            for block in lap:
                blocks.append(replace(block, index=len(blocks), reverse=False, only=method))
    return blocks


def _batches(task: Task, size: int) -> Iterator[tuple[Question, ...]]:
    for start in range(0, len(task.questions), size):
        yield task.questions[start : start + size]


def in_order(methods: Sequence[str], block: Block) -> list[str]:
    """V, M1 … Mn, or the reverse on every other block, so that slow drift cancels; in a pass its one method."""
    chosen = [method for method in methods if block.only in (None, method)]
    return chosen[::-1] if block.reverse else chosen


def shortages(blocks: Sequence[Block]) -> list[str]:
    """A note for each batch size some of whose batches hold fewer prompts."""
    notes: list[str] = []
    for size in sorted({block.batch_size for block in blocks} - {1}):
        of_size = [block for block in blocks if block.batch_size == size]
        part = [block for block in of_size if len(block.questions) < size]
        if part:
            first_turn = any(block.turn == 0 for block in part)
            message, cure = part_filled(len(part), len(of_size), size, first_turn)
            notes.append(f"{message}: {cure}")
    return notes


def counts(blocks: Sequence[Block], batches: Mapping[str, bool]) -> dict[str, int]:
    """Trials, and the most tokens they may make; `batches` says of each method whether it takes several rows."""
    counted = {"trials": 0, "new_tokens_at_most": 0}
    for block in blocks:
        methods = sum(batches[label] or block.batch_size == 1 for label in in_order(list(batches), block))
        counted["trials"] += methods * len(block.questions)
        counted["new_tokens_at_most"] += methods * len(block.questions) * block.max_new_tokens
    return counted
