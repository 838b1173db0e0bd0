"""The schedule: which blocks, in which order, and which method goes first (design §5). Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from specbench.config import RunConfig
from specbench.questions import Question, Task


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

    @property
    def batch(self) -> str:
        """What the rows of one batch share."""
        return "+".join(question.id for question in self.questions)


def plan(config: RunConfig, tasks: Sequence[Task]) -> list[Block]:
    """All blocks of a run. Tasks take turns, so that a run cut short has something of each."""
    blocks: list[Block] = []
    for batch_size in config.batch_sizes:
        for repeat in range(config.repeats):
            batches = [_batches(task, batch_size) for task in tasks]
            for abreast in zip_longest(*batches):
                for task, questions in zip(tasks, abreast, strict=True):
                    limit = config.max_new_tokens or task.max_new_tokens
                    for turn in range(max((len(q.turns) for q in questions or ()), default=0)):
                        here = tuple(q for q in questions if turn < len(q.turns))
                        blocks.append(Block(len(blocks), task, here, turn, batch_size, repeat, limit))
    return blocks


def _batches(task: Task, size: int) -> Iterator[tuple[Question, ...]]:
    for start in range(0, len(task.questions), size):
        yield task.questions[start : start + size]


def in_order(methods: Sequence[str], block: int) -> list[str]:
    """V, M1 … Mn on even blocks and the reverse on odd ones (ABBA), so that slow drift cancels."""
    return list(methods) if block % 2 == 0 else list(reversed(methods))


def counts(blocks: Sequence[Block], batches: Sequence[bool]) -> dict[str, int]:
    """Trials, and the most tokens they may make; `batches` says of each method whether it takes several rows."""
    counted = {"trials": 0, "new_tokens_at_most": 0}
    for block in blocks:
        methods = sum(several or block.batch_size == 1 for several in batches)
        counted["trials"] += methods * len(block.questions)
        counted["new_tokens_at_most"] += methods * len(block.questions) * block.max_new_tokens
    return counted
