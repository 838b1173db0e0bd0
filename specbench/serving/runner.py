"""The schedule of a run, carried out on an engine: blocks of requests over HTTP, one server a method."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from time import perf_counter
from typing import Any

from specbench.build import VANILLA, Named
from specbench.conversation import chat
from specbench.decoding.method import Method
from specbench.engines.base import Engine, Limits, Prompt, Setup
from specbench.engines.prometheus import delta
from specbench.engines.record import Reply
from specbench.errors import SpecbenchError, first_line
from specbench.measure.cpu import load_average
from specbench.plan import Block, in_order
from specbench.runner import WARMUP_NEW_TOKENS, Answer, Batch, Runner
from specbench.serving.answers import (
    NoAnswer,
    Request,
    asked_again,
    from_text,
    read_answer,
    with_count,
    with_opening,
)
from specbench.serving.client import Exchange
from specbench.serving.fleet import Fleet, Host
from specbench.serving.load import closed_loop, open_loop
from specbench.serving.rows import Answered, fill
from specbench.store import Trial
from specbench.trial import blank, seed_of

SETTLE_S = 0.05  # counters are written at the end of a request, a little after its last event
SEED_BITS = 31  # engines take signed 32-bit seeds


class NoBaseline(SpecbenchError):
    """Vanilla's server cannot be had at all: there is nothing to compare with, and no other need be started."""


class EngineMethod(Method):
    """A server's configuration as the runner knows a method. It generates through `EngineRunner`, not by itself."""

    def __init__(self, setup: Setup, draft: str | None) -> None:
        self.setup, self._draft = setup, draft
        self.lossless = setup.native is None or setup.native.lossless
        self.warm = setup.native is not None and setup.native.learns

    def draft_identity(self) -> dict[str, Any] | None:
        return None if self._draft is None else {"name": self._draft, "ref": self._draft}


@dataclass
class EngineRunner(Runner):
    """`Runner` for an engine. Blocks are sent in a closed loop (concurrency) or an open one (request rate).

    Args:
        engine, fleet: what runs and where.
        note: takes what the user should know, once each.
    """

    engine: Engine = field(kw_only=True)
    fleet: Fleet = field(kw_only=True)
    note: Callable[[str], None] = field(kw_only=True, default=lambda line: None)
    _loop: asyncio.Runner = field(default_factory=asyncio.Runner)
    _noted: set[Hashable] = field(default_factory=set)

    def measure(self, blocks: Sequence[Block]) -> str:
        with self._loop:
            try:
                return super().measure(blocks)
            finally:
                self._loop.run(self.fleet.close())

    def _prepare(self, blocks: Sequence[Block]) -> None:
        """Nothing here: each server is warmed up when it has started."""

    def _begin_pass(self, block: Block, finished: Sequence[Block]) -> None:
        """A server that learns starts anew, and where a run goes on, from what it had learned by then."""
        (named,) = (named for named in self.methods if named.label == block.only)
        if named.method.warm:
            self._loop.run(self.fleet.down(named.label))
            for earlier in finished:
                batch = self._batch(earlier)
                same = (earlier.only, earlier.repeat, earlier.concurrency, earlier.request_rate)
                if batch.prompts and same == (
                    block.only,
                    block.repeat,
                    block.concurrency,
                    block.request_rate,
                ):
                    self._loop.run(self._trial(batch, named, 0))

    # -- one block -------------------------------------------------------------------------------------------

    def _attempt(self, batch: Batch, attempt: int) -> list[Trial]:
        fitting = {named.label: named for named in self._fitting(batch.block)}
        rows = {
            label: self._loop.run(self._trial(batch, fitting[label], order))
            for order, label in enumerate(in_order(list(fitting), batch.block))
        }
        self._compare(batch, rows)
        return [row for label in fitting for row in rows[label]]

    async def _trial(self, batch: Batch, named: Named, order: int) -> list[Trial]:
        """One method's requests of a block. A fault is its rows' `error`: the run goes on."""
        block = replace(batch.block, questions=tuple(batch.block.questions[i] for i in batch.rows))
        rows = [blank(block, named, row, order) for row in range(len(batch.rows))]
        for row, prompt in zip(rows, batch.prompts, strict=True):
            row.batch, row.load, row.prompt_tokens = batch.block.batch, load_average(), len(prompt)
        try:
            host = await self._host(named, batch)
            await self._fill(rows, batch, named, host)
        except NoBaseline:
            raise
        except SpecbenchError as error:
            _fail(rows, error.message)
        except Exception as error:  # noqa: BLE001 - a server may send anything, and an adapter stumble over it
            _fail(rows, first_line(error))
        return rows

    async def _fill(self, rows: list[Trial], batch: Batch, named: Named, host: Host) -> None:
        setup = _setup(named)
        requests = [
            self.engine.request(prompt, self._limits(batch.block, question, named.label), setup, host.model)
            for prompt, question in zip(self._prompts(batch), (row.question for row in rows), strict=True)
        ]
        before = await self._counters(host, setup)
        begin = perf_counter()
        exchanges = await self._send(batch.block, host, requests)
        end = perf_counter()
        after = await self._counters(host, setup)
        counted = None if before is None or after is None else delta(before, after)
        replies = [
            await self._reply(row, exchange, request, host, setup, batch.block.max_new_tokens)
            for row, exchange, request in zip(rows, exchanges, requests, strict=True)
        ]
        good = [i for i, reply in enumerate(replies) if reply is not None]
        whole = counted if len(good) == len(rows) else None  # a failed request is in the counters too
        answered = [reply for reply in replies if reply is not None]
        if whole is not None and not self.engine.accounts_for(answered, whole):
            self._once(
                ("foreign", named.label),
                f"{named.label}: its server counted other drafts than those of this run's answers, of requests that "
                "are not ours or at another time: what only its counters tell is left unknown there",
            )
            whole = None
        records = self.engine.record(answered, whole, setup)
        first_drafts = self.engine.first_drafts and setup.native is not None
        first_sent = min(exchange.sent_at for exchange in exchanges)
        batch_s = _last_token(replies) - first_sent if good else None
        nvml = self.instruments.sampler.window(begin, end)
        for i, record in zip(good, records, strict=True):
            reply = replies[i]
            assert reply is not None
            assert batch_s is not None
            seen = Answered(exchanges[i], with_opening(self.target.tokenizer, reply), record, first_drafts)
            fill(rows[i], seen, batch_s, self.config.text)
            rows[i].sent_s = exchanges[i].sent_at - first_sent
            rows[i].nvml = nvml
            self._check_prompt_tokens(named.label, rows[i], len(batch.prompts[i]))
        if any(exchange.retries for exchange in exchanges):
            self._once(
                ("retried", named.label),
                f"{named.label}: requests that the server turned away, or whose connection it closed, were sent "
                "again; their own times count from then (`retries` in trials.jsonl)",
            )

    async def _send(self, block: Block, host: Host, requests: Sequence[Request]) -> list[Exchange]:
        async def send(number: int) -> Exchange:
            return await host.client.stream(*requests[number])

        if block.request_rate is not None:
            return await open_loop(
                send, len(requests), block.request_rate, f"{self.config.seed} {block.batch}"
            )
        return await closed_loop(send, len(requests), block.concurrency or 1)

    async def _reply(
        self, row: Trial, exchange: Exchange, request: Request, host: Host, setup: Setup, most: int
    ) -> Reply | None:
        """What a request brought, its tokens counted; None with the row's `error` set if it failed."""
        try:
            reply = read_answer(self.engine, exchange, setup)
        except NoAnswer as problem:
            row.error, row.finish, row.retries = str(problem), "error", exchange.retries
            return None
        if reply.completion_tokens is not None:
            return reply
        tokens = await asked_again(host.client, request, reply) if self.engine.counts_unstreamed else None
        if tokens is not None:
            return with_count(reply, tokens, most, exact=True)
        line = f"{self.engine.name} does not say how many tokens it sent: its texts are tokenised again"
        self._once("counted", line)
        return with_count(reply, from_text(self.target.tokenizer, reply), most, exact=False)

    # -- servers ---------------------------------------------------------------------------------------------

    async def _host(self, named: Named, batch: Batch) -> Host:
        try:
            host = await self.fleet.host(named.label)
        except SpecbenchError as error:
            if named.label == VANILLA and not self._answers:
                raise NoBaseline(error.message, error.hint) from error
            self._once(("start", named.label), f"{named.label}: {error.message}: {error.hint}")
            raise
        load = (batch.block.concurrency, batch.block.request_rate)
        if load not in host.warmed:  # engines prepare for a batch's size when they first meet it
            host.warmed.add(load)
            await self._warm_up(host, named, batch)
        return host

    async def _warm_up(self, host: Host, named: Named, batch: Batch) -> None:
        """Untimed requests of the block's size; with their ids shuffled, a server that learns learns nothing."""
        limits = self._limits(batch.block, "warm-up", named.label)
        limits = replace(limits, max_new_tokens=min(limits.max_new_tokens, WARMUP_NEW_TOKENS))
        draw = Random(self.config.seed)
        prompts = [self._as_prompt(draw.sample(ids, len(ids))) for ids in batch.prompts]
        requests = [self.engine.request(prompt, limits, _setup(named), host.model) for prompt in prompts]
        most = batch.block.concurrency or len(requests)  # at a rate, all of a block may meet
        failed: list[str] = []
        for _ in range(self.config.warmup):
            sent = await closed_loop(
                lambda number: host.client.stream(*requests[number]), min(most, len(requests)), most
            )
            failed += [exchange.error for exchange in sent if exchange.error]
        if failed:
            self._once(("warm-up", named.label), f"{named.label}: its warm-up failed: {failed[0]}")

    async def _counters(self, host: Host, setup: Setup) -> dict[str, int] | None:
        """The server's counters; None where there are none. Vanilla has nothing to count."""
        if self.engine.metrics is None or setup.native is None:
            return None
        await asyncio.sleep(SETTLE_S)
        status, text = await host.client.get(self.engine.metrics)
        return self.engine.counters(text) if status == 200 else None

    # -- prompts ---------------------------------------------------------------------------------------------

    def _prompts(self, batch: Batch) -> list[Prompt]:
        return [
            self._as_prompt(ids, self._messages(batch.block, row))
            for row, ids in zip(batch.rows, batch.prompts, strict=True)
        ]

    def _as_prompt(self, ids: list[int], messages: list[dict[str, str]] | None = None) -> Prompt:
        text = self.target.tokenizer.decode(ids[self._added(ids) :])
        return Prompt(ids, text, messages or [{"role": "user", "content": text}])

    def _added(self, ids: list[int]) -> int:
        """How many of the first ids a server that adds special tokens to a text would add once more."""
        if not self.engine.adds_special:
            return 0
        added = self.target.tokenizer("")["input_ids"]
        return len(added) if ids[: len(added)] == added else 0

    def _messages(self, block: Block, row: int) -> list[dict[str, str]]:
        turns = block.questions[row].turns[: block.turn + 1]
        return chat(turns, self._earlier(block, row) or [])

    def _limits(self, block: Block, question: str, label: str) -> Limits:
        config = self.config
        seed = seed_of(config.seed, block.task.name, question, block.turn, block.repeat, label)
        return Limits(
            block.max_new_tokens,
            config.temperature,
            config.top_p,
            config.top_k,
            seed % 2**SEED_BITS,
            config.ignore_eos,
        )

    def _check_prompt_tokens(self, label: str, row: Trial, sent: int) -> None:
        """The prompt as the server counts it and as we do: a difference is a second template or BOS."""
        if row.prompt_tokens not in (0, sent):
            self._once(
                (label, row.prompt_tokens - sent),
                f"{label}: the server counts {row.prompt_tokens} prompt tokens where {sent} were sent "
                f"({row.task} {row.question}): a template or special tokens are added there",
            )

    def _once(self, key: Hashable, line: str) -> None:
        if key not in self._noted:
            self._noted.add(key)
            self.note(line)

    # -- agreement -------------------------------------------------------------------------------------------

    def _agreement(self, prompt: list[int], reference: Answer, row: Trial) -> dict[str, Any] | None:
        """By ids where both have them, else by text, which is compared beside them. An engine's logits are not at
        hand: no gap."""
        known = reference.text is not None and row.text is not None
        same_text = reference.text == row.text if known else None
        found: dict[str, Any] = {"first_difference": None, "logit_gap": None, "same_text": same_text}
        if not (reference.ids and row.output_ids):
            return {"same": same_text, **found} if known else None
        if reference.ids != row.output_ids:
            pairs = zip(reference.ids, row.output_ids, strict=False)
            shorter = min(len(reference.ids), len(row.output_ids))
            found["first_difference"] = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
        return {"same": reference.ids == row.output_ids, **found}


def _setup(named: Named) -> Setup:
    assert isinstance(named.method, EngineMethod)
    return named.method.setup


def _fail(rows: Sequence[Trial], error: str) -> None:
    for row in rows:
        row.error, row.finish = error, "error"


def _last_token(replies: Sequence[Reply | None]) -> float:
    """The moment at which the last token of all came."""
    return max(reply.arrivals[-1].at for reply in replies if reply is not None)
