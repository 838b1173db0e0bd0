"""The schedule of a run, carried out: memory pass, warm-up, blocks in ABBA order, resume, faults (design §5).

Nothing measured is lost: a block's rows are on disk before the next block begins, and whatever ends a run
(Ctrl-C, a full disk, the time budget) leaves the finished blocks and a manifest that says how it ended.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from specbench.build import VANILLA, Named
from specbench.config import RunConfig
from specbench.conversation import check_prompt, render
from specbench.decoding.method import Request
from specbench.measure.memory import measure_memory
from specbench.measure.sampler import throttled
from specbench.plan import Block, in_order
from specbench.store import RunStore, Trial, by_key
from specbench.trial import Instruments, Measured, agreement, blank, generate, rows_of, seed_of

if TYPE_CHECKING:
    from specbench.measure.nvml import Gpu
    from specbench.models.target import Target
    from specbench.precision import Precision

WARMUP_NEW_TOKENS = 32
COMPLETE, UNTIL_REACHED, TIME_BUDGET = "complete", "until reached", "time budget"
AnswerKey = tuple[str, str, int, Hashable, int]  # task, question, turn, load, repeat


class Answer(NamedTuple):
    """What vanilla said. An engine that sends no ids has the text alone."""

    ids: list[int]
    text: str | None


@dataclass
class Batch:
    """The rows of a block that can be run: their places in the block, and their prompts."""

    block: Block
    rows: list[int]
    prompts: list[list[int]]


@dataclass
class Runner:
    """One run over `blocks`; `measure` does them all.

    Args:
        store: where rows go.
        done: trials measured by an earlier start of the same run.
        on_block: called after each block with it and its rows (progress).
        budget_s: no block is begun after this many seconds.
        until: a rule that says when enough is known; blocks of that batch size are then left out.
    """

    config: RunConfig
    target: Target
    methods: list[Named]
    store: RunStore
    instruments: Instruments
    done: Sequence[Trial] = ()
    on_block: Callable[[Block, list[Trial]], None] = lambda block, rows: None
    budget_s: float | None = None
    until: Precision | None = None
    gpu: Gpu | None = None
    memory: dict[tuple[str, int], dict[str, int | None] | None] = field(default_factory=dict)
    _answers: dict[AnswerKey, Answer] = field(default_factory=dict)

    def measure(self, blocks: Sequence[Block]) -> str:
        """Everything still missing, and how it ended: `complete`, `until reached` or `time budget`."""
        began = monotonic()
        finished = {trial.block for trial in self.done}
        for trial in by_key(self.done).values():
            if trial.method == VANILLA and trial.error is None:
                self._answers[_answer_key(trial)] = Answer(trial.output_ids, trial.text)
        todo = [block for block in blocks if block.index not in finished]
        if not todo:
            return COMPLETE
        left_out = 0
        with settled_heap():
            self._prepare(blocks)
            before = None
            for block in todo:
                if self.until is not None and self.until.reached(block.batch_size):
                    left_out += 1
                    continue
                if self.budget_s is not None and monotonic() - began > self.budget_s:
                    return TIME_BUDGET
                if block.only is not None and _pass_of(block) != before:
                    self._begin_pass(block, [other for other in blocks if other.index in finished])
                before = _pass_of(block)
                rows = self._block(block)
                self.store.append(rows)
                self.on_block(block, rows)
                if self.until is not None:
                    self.until.add(block.batch_size, rows)
        return UNTIL_REACHED if left_out else COMPLETE

    def _begin_pass(self, block: Block, finished: Sequence[Block]) -> None:
        """A method that learns starts from nothing, or, where a run goes on, from what it had learned by then."""
        (named,) = (named for named in self.methods if named.label == block.only)
        named.method.forget()
        if named.method.warm:
            for earlier in finished:
                batch = self._batch(earlier)
                if _pass_of(earlier) == _pass_of(block) and batch.prompts:
                    generate(named, self._request(batch, named))

    # -- before the clock runs -------------------------------------------------------------------------------

    def _prepare(self, blocks: Sequence[Block]) -> None:
        """The memory pass, then the warm-up blocks, on the first prompts that can be run."""
        first_turns = (replace(block, only=None) for block in blocks if block.turn == 0)
        runnable = (batch for batch in map(self._batch, first_turns) if batch.prompts)
        warm: list[Batch] = []
        for batch in runnable:
            size = batch.block.batch_size
            if not any((named.label, size) in self.memory for named in self.methods):
                self._memory_pass(batch)
            if len(warm) < self.config.warmup:
                warm.append(batch)
            sizes = {known for _, known in self.memory}
            if len(warm) == self.config.warmup and sizes == set(self.config.batch_sizes):
                break
        for batch in warm:
            for named in self._fitting(batch.block):
                self._untimed(named, batch)
        for named in self.methods:
            named.method.forget()

    def _memory_pass(self, batch: Batch) -> None:
        """Each method in turn, alone with the target: what its generation holds and peaks (design §5).

        `peak_bytes` is the weights of target and drafter plus what the generation added, so that it does not
        depend on which other drafters happen to be loaded.
        """
        for named in self._fitting(batch.block):
            self.memory[named.label, batch.block.batch_size] = self._memory_of(named, batch)

    def _memory_of(self, named: Named, batch: Batch) -> dict[str, int | None] | None:
        """One method's reading; None if it fails, which its trials will tell."""

        def generation() -> None:
            if self._untimed(named, batch).error is not None:
                raise RuntimeError("the generation failed")

        try:
            generation()  # weights are mapped and kernels chosen on first use: not this method's memory
            for other in self.methods:
                other.method.release()
            reading = measure_memory(generation, self.target.device, self.gpu)
            drafter = named.method.weights_bytes()
            own = self.target.weights_bytes() + drafter
            peak, before = reading["peak_bytes"], reading["before_bytes"]
            reading["weights_bytes"], reading["draft_weights_bytes"] = own, drafter
            reading["kv_bytes"] = named.method.kv_bytes()
            reading["peak_bytes"] = None if peak is None or before is None else own + max(0, peak - before)
        except Exception:  # noqa: BLE001 - a plug-in may raise anything
            return None
        return reading

    def _memory_with_graphs(self, named: Named, size: int) -> dict[str, int | None] | None:
        """What the memory pass read, and what graphs hold after a trial: they are made all through a run."""
        reading = self.memory.get((named.label, size))
        return None if reading is None else {**reading, "graph_bytes": named.method.graph_bytes()}

    def _untimed(self, named: Named, batch: Batch) -> Measured:
        request = self._request(batch, named)
        request = replace(request, max_new_tokens=min(request.max_new_tokens, WARMUP_NEW_TOKENS))
        self._tell_answer(named, batch)
        return generate(named, request)

    # -- one block -------------------------------------------------------------------------------------------

    def _block(self, block: Block) -> list[Trial]:
        batch = self._batch(block)
        rows = self._refused(batch)
        if not batch.prompts:
            return rows
        first = self._attempt(batch, 0)
        reason = next((row.excluded for row in first if row.excluded), None)
        if reason is None:
            return rows + first
        if any(named.method.warm for named in self._fitting(block)):
            for (
                row
            ) in first:  # a second attempt would know the answer of the first: this one counts, `contended`
                row.excluded = None
            return rows + first
        for row in first:
            row.excluded = reason
        second = self._attempt(batch, 1)
        for row in second:  # a second attempt counts, come what may: endless repeating measures nothing
            row.excluded = None
        return rows + first + second

    def _attempt(self, batch: Batch, attempt: int) -> list[Trial]:
        """One pass of all methods over the batch. Rows of a disturbed trial come back marked excluded."""
        fitting = {named.label: named for named in self._fitting(batch.block)}
        rows: dict[str, list[Trial]] = {}
        for order, label in enumerate(in_order(list(fitting), batch.block)):
            named = fitting[label]
            self._tell_answer(named, batch)
            measured = generate(named, self._request(batch, named), self.instruments)
            rows[label] = rows_of(
                measured,
                replace(batch.block, questions=tuple(batch.block.questions[i] for i in batch.rows)),
                named,
                batch.prompts,
                order=order,
                attempt=attempt,
                stop=self._stop,
                memory=self._memory_with_graphs(named, batch.block.batch_size),
            )
            disturbed = _disturbance(measured)
            for row in rows[label]:
                row.batch, row.excluded = batch.block.batch, disturbed
        self._compare(batch, rows)
        return [row for label in fitting for row in rows[label]]

    def _compare(self, batch: Batch, rows: dict[str, list[Trial]]) -> None:
        """Keep vanilla's answers for later turns, fill in agreement (greedy only) and texts."""
        for row in rows.get(VANILLA, ()):
            if row.error is None:
                self._answers[_answer_key(row)] = Answer(row.output_ids, row.text)
        for group in rows.values():
            for prompt, row in zip(batch.prompts, group, strict=True):
                if row.error is not None:
                    continue
                if self.config.text and self.target.tokenizer is not None and row.text is None:
                    row.text = self._decode(row.output_ids)
                reference = self._answer(_answer_key(row))
                if self.config.sampling.greedy and reference is not None and row.method != VANILLA:
                    row.agreement = self._agreement(prompt, reference, row)

    def _agreement(self, prompt: list[int], reference: Answer, row: Trial) -> dict[str, Any] | None:
        return agreement(self.target, prompt, reference.ids, row.output_ids)

    def _answer(self, key: AnswerKey) -> Answer | None:
        """Vanilla's answer. Where a reversed pass comes before vanilla's, the first repeat's: greedy, so the same."""
        return self._answers.get(key) or self._answers.get((*key[:-1], 0))

    # -- prompts ---------------------------------------------------------------------------------------------

    def _batch(self, block: Block) -> Batch:
        """The rows of a block that have a prompt that fits."""
        batch = Batch(block, [], [])
        for row in range(len(block.questions)):
            prompt, reason = self._prompt(block, row)
            if reason is None:
                batch.rows.append(row)
                batch.prompts.append(prompt)
        return batch

    def _prompt(self, block: Block, row: int) -> tuple[list[int], str | None]:
        """A row's prompt, continued from vanilla's own answers, and why it cannot be run (None if it can)."""
        question = block.questions[row]
        answers = self._earlier(block, row)
        if answers is None:
            return [], "an earlier turn has no answer of vanilla's to continue from"
        ids = render(
            question,
            block.turn,
            answers,
            self.target.tokenizer,
            self.config.template_args,
            vocab_size=self.target.vocab_size,
            seed=self.config.seed,
            avoid=self.target.stop,
        )
        return ids, check_prompt(ids, block.max_new_tokens, self.target.context)

    def _earlier(self, block: Block, row: int) -> list[str] | None:
        """Vanilla's answers to the turns before this one; None if one is missing."""
        question = block.questions[row].id
        keys = [(block.task.name, question, turn, _load(block), block.repeat) for turn in range(block.turn)]
        found = [answer for key in keys if (answer := self._answer(key)) is not None]
        texts = [self._decode(answer.ids) if answer.ids else answer.text or "" for answer in found]
        return texts if len(texts) == len(keys) else None

    def _refused(self, batch: Batch) -> list[Trial]:
        """Error rows, for every method, of the questions that have no prompt to run."""
        rows = []
        for row in range(len(batch.block.questions)):
            if row in batch.rows:
                continue
            _, reason = self._prompt(batch.block, row)
            for order, named in enumerate(self._fitting(batch.block)):
                trial = blank(batch.block, named, row, order)
                trial.error, trial.finish = reason, "error"
                rows.append(trial)
        return rows

    def _request(self, batch: Batch, named: Named) -> Request:
        block, config = batch.block, self.config
        generators = None
        if not config.sampling.greedy:
            generators = [
                torch.Generator(self.target.device).manual_seed(
                    seed_of(
                        config.seed,
                        block.task.name,
                        block.questions[row].id,
                        block.turn,
                        block.repeat,
                        named.label,
                    )
                )
                for row in batch.rows
            ]
        return Request(batch.prompts, block.max_new_tokens, self._stop, config.sampling, generators)

    def _tell_answer(self, named: Named, batch: Batch) -> None:
        """Give an oracle the target's own answer, from an untimed pass."""
        if named.method.wants_answer:
            vanilla = self.methods[0]
            named.method.set_answer(generate(vanilla, self._request(batch, vanilla)).tokens)

    def _decode(self, ids: list[int]) -> str:
        tokenizer = self.target.tokenizer
        if tokenizer is None:
            return " ".join(map(str, ids))
        return tokenizer.decode(ids, skip_special_tokens=True)

    def _fitting(self, block: Block) -> list[Named]:
        """The methods that the block is for and that run at its batch size."""
        return [
            named
            for named in self.methods
            if block.only in (None, named.label) and (named.method.batches or block.batch_size == 1)
        ]

    @property
    def _stop(self) -> frozenset[int]:
        return frozenset() if self.config.ignore_eos else self.target.stop


@contextlib.contextmanager
def settled_heap() -> Iterator[None]:
    """What is loaded by now is no garbage: a collection in the middle of a trial need not look at it."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _pass_of(block: Block) -> Hashable:
    return block.only, _load(block), block.repeat


def _answer_key(trial: Trial) -> AnswerKey:
    return (trial.task, trial.question, trial.turn, _load(trial), trial.repeat)


def _load(of: Block | Trial) -> Hashable:
    return of.batch_size, of.concurrency, of.request_rate


def _disturbance(measured: Measured) -> str | None:
    """Why a trial should be repeated: the machine, not the method, made its time."""
    if measured.error:
        return None
    if measured.captured:
        return "captured"
    if throttled(measured.nvml):
        return "throttled"
    if measured.cpu is not None and measured.cpu.contended:
        return "contended"
    return None
