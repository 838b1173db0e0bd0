"""From what a request brought to its row on disk: times, tokens, rounds (design §7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbench.engines.record import Acceptance, Arrival, Reply
from specbench.serving.client import Exchange
from specbench.store import Rounds, Trial


@dataclass(frozen=True)
class Answered:
    """A request that was answered: as it went, what it brought, and what speculation did.

    first_drafts: the step over the prompt verified a draft too.
    """

    exchange: Exchange
    reply: Reply
    record: Acceptance
    first_drafts: bool = False


def fill(trial: Trial, answered: Answered, batch_s: float, keep_text: bool) -> None:
    """Write into `trial` (which says which one it is) what was measured.

    The first event ends the prefill. `decode_s` lasts until the last token, so that TPOT is
    decode_s / (output_tokens - those of the first event) however the tokens were packed into events. A prompt whose
    tokens the server does not tell keeps the length that `trial` has.
    """
    exchange, reply, record = answered.exchange, answered.reply, answered.record
    first, last = reply.arrivals[0].at, reply.arrivals[-1].at
    if reply.prompt_tokens is not None:
        trial.prompt_tokens = reply.prompt_tokens
    trial.output_tokens = reply.completion_tokens or 0
    trial.output_ids = reply.ids or []
    trial.text = reply.text if keep_text or not reply.ids else None
    trial.finish = reply.finish
    trial.batch_s = batch_s
    trial.prefill_s, trial.decode_s, trial.total_s = (
        first - exchange.sent_at,
        last - first,
        last - exchange.sent_at,
    )
    trial.retries = exchange.retries
    trial.acceptance = record.to_json()
    trial.arrivals = {
        "at_s": [round(arrival.at - exchange.sent_at, 6) for arrival in reply.arrivals],
        "tokens": [arrival.tokens for arrival in reply.arrivals],
    }
    trial.rounds = rounds_of(record, reply.arrivals, first_drafts=answered.first_drafts)


def rounds_of(record: Acceptance, arrivals: Sequence[Arrival], *, first_drafts: bool = False) -> Rounds:
    """The rounds after the prefill, as far as the engine tells: each of them, or one entry for all, or nothing.

    Where the step over the prompt drafts too (`first_drafts`) it is a round as well, and all tokens are of rounds;
    its own time is not known.
    """
    tokens, steps = record.completion_tokens, record.target_steps
    if not tokens or steps is None:
        return Rounds()
    decodes = steps - 1
    emitted, steps = (tokens, steps) if first_drafts else (tokens - 1, decodes)
    if emitted < 1 or steps < 1:
        return Rounds()
    if record.steps is not None:
        return _told_apart(record.steps, emitted)
    seconds = arrivals[-1].at - arrivals[0].at
    return Rounds(
        drafted=None if record.drafted is None else [record.drafted],
        depth=[0] if record.drafted == 0 else None,
        accepted=None if record.accepted is None else [record.accepted],
        emitted=[emitted],
        count=[steps],
        with_draft=None if record.verify_steps is None else [record.verify_steps],
        round_s=[seconds / decodes] if decodes else None,
    )


def _told_apart(steps: Sequence[tuple[int, int]], emitted: int) -> Rounds:
    """One entry a verify step, and one for all steps without a draft, which emit a token each.

    What an engine accepted beyond the token limit was not emitted: it is cut off the last steps.
    """
    table: list[tuple[int, ...]] = []
    left = emitted
    for drafted, accepted in steps:
        if left < 1:
            break
        out = min(accepted + 1, left)
        left -= out
        table.append((drafted, drafted, min(accepted, out), out, 1, int(drafted > 0)))
    if left:
        table.append((0, 0, 0, left, left, 0))
    drafted_, depth, accepted_, emitted_, count, with_draft = map(list, zip(*table, strict=True))
    return Rounds(drafted_, depth, accepted_, emitted_, count, with_draft)
