"""What engines tell of a request and of speculation, in one form for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Literal

Source = Literal["response", "metrics-delta", "derived", "none"]
Scope = Literal["request", "server"]


@dataclass(frozen=True)
class Event:
    """One server-sent event: its JSON object and when its last byte arrived (`perf_counter` seconds)."""

    at: float
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Arrival:
    """Tokens that came in one event; `tokens` is None where the engine does not say how many."""

    at: float
    tokens: int | None


@dataclass(frozen=True)
class Reply:
    """What one request brought. Unknown is None; counts come from usage or ids, never from counting events.

    ids: output token ids; None where the engine sends text only.
    arrivals: the events that bore tokens, in order; the first one is the time to first token.
    finish: `eos` or `length`.
    told: whatever else the engine said of this request (timings, metrics, meta_info): `Engine.told` reads it.
    opening: the first text that came: of the first event where that does not tell its tokens.
    """

    text: str
    arrivals: list[Arrival]
    ids: list[int] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish: str | None = None
    told: Mapping[str, Any] = field(default_factory=dict)
    opening: str = ""


@dataclass(frozen=True)
class Acceptance:
    """The normalised record of one request: what speculation did, None where nobody knows.

    accepted, drafted: tokens, the bonus not among them.
    verify_steps: target passes that checked a draft. target_steps: all of them, the prefill included.
    per_position: drafts that were accepted at least 1, 2, … tokens deep.
    steps: `(drafted, accepted)` of each verify step in order, where the engine tells them apart.
    source: where `accepted` comes from. scope: `server` if from counters that all of its requests share.
    """

    accepted: int | None = None
    drafted: int | None = None
    verify_steps: int | None = None
    target_steps: int | None = None
    completion_tokens: int | None = None
    per_position: list[int] | None = None
    steps: list[tuple[int, int]] | None = None
    source: Source = "none"
    scope: Scope = "request"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


COUNTS = ("accepted", "drafted", "verify_steps", "target_steps")  # of an Acceptance; also names of counters


def plain(tokens: int | None) -> Acceptance:
    """Of a request without speculation: one token a target step, the first from the prefill."""
    return Acceptance(0, 0, 0, tokens, tokens, source="derived")


def with_steps(record: Acceptance) -> Acceptance:
    """Target steps that nobody counted: each emits one token of its own beside those it accepted.

    Not quite so at EOS, where the last step's own token, or accepted ones too, may follow it: there are at least as
    many steps as verified drafts and the prefill.
    """
    known = record.accepted is not None and record.completion_tokens is not None
    if record.target_steps is not None or not known:
        return record
    steps = record.completion_tokens - record.accepted  # type: ignore[operator]
    return replace(record, target_steps=max(steps, (record.verify_steps or 0) + 1))


def shared_out(total: int, weights: Sequence[int]) -> list[int]:
    """`total` over requests in proportion to `weights`, in whole numbers whose sum is exactly `total`."""
    whole = sum(weights) or 1
    edges = [0, *(round(total * part / whole) for part in accumulate(weights))]
    return [after - before for before, after in pairwise(edges)]


def shared_within(total: int, weights: Sequence[int], most: Sequence[int]) -> list[int]:
    """`shared_out` where a weight above 0 means one at least, and `most` is as many as each can have.

    The sum is exactly `total` even where these bounds do not allow it.
    """
    shares: list[int] = []
    for row, (weight, highest) in enumerate(zip(weights, most, strict=True)):
        left, later = total - sum(shares), weights[row + 1 :]
        fair = round(left * weight / (weight + sum(later) or 1))
        least = max(min(1, weight, left), left - sum(most[row + 1 :]))
        highest = min(highest, left - sum(min(1, other) for other in later))
        shares.append(max(least, min(fair, highest)))
    return shares


def from_counters(
    delta: Mapping[str, int], replies: Sequence[Reply], told: Sequence[Acceptance]
) -> list[Acceptance]:
    """A block's counters as one record a request: only their sums are measured, each one's part is an estimate.

    Shared out by output tokens; where every response told (`told`) what it drafted and accepted, verify steps by the
    one and positions by the other, within what they allow.
    """
    tokens = [reply.completion_tokens or 0 for reply in replies]
    shares = {name: shared_out(total, tokens) for name, total in delta.items()}
    if all(one.drafted is not None and one.accepted is not None for one in told):
        shares |= _by_drafts(delta, replies, told)
    positions = [shares[name] for name in _positions(delta)]
    return [
        Acceptance(
            **{name: shares[name][row] for name in COUNTS if name in shares},  # type: ignore[arg-type]
            per_position=[share[row] for share in positions] or None,
            completion_tokens=reply.completion_tokens,
            source="metrics-delta",
            scope="server",
        )
        for row, reply in enumerate(replies)
    ]


def _positions(delta: Mapping[str, int]) -> list[str]:
    names = (f"per_position@{at}" for at in range(len(delta)))
    return [name for name in names if name in delta]


def _by_drafts(
    delta: Mapping[str, int], replies: Sequence[Reply], told: Sequence[Acceptance]
) -> dict[str, list[int]]:
    """Verify steps and positions of requests whose drafted and accepted tokens are known.

    A verify step drafts a token or more, and emits one of its own unless an EOS ended it; each position is reached
    no more often than the one before.
    """
    drafted, left = [one.drafted or 0 for one in told], [one.accepted or 0 for one in told]
    steps = [
        (reply.completion_tokens or 0) - accepted - (reply.finish != "eos")
        for reply, accepted in zip(replies, left, strict=True)
    ]
    most = [max(min(pair), 0) for pair in zip(drafted, steps, strict=True)]
    shares = {}
    if "verify_steps" in delta:
        most = shares["verify_steps"] = shared_within(delta["verify_steps"], drafted, most)
    for name in _positions(delta):
        most = shares[name] = shared_within(delta[name], left, most)
        left = [max(before - taken, 0) for before, taken in zip(left, most, strict=True)]
    return shares
