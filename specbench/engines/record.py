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
    """

    text: str
    arrivals: list[Arrival]
    ids: list[int] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish: str | None = None
    told: Mapping[str, Any] = field(default_factory=dict)


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


def from_counters(delta: Mapping[str, int], tokens: Sequence[int]) -> list[Acceptance]:
    """A block's counters as one record a request, shared out by output tokens: only their sums are measured."""
    shares = {name: shared_out(total, tokens) for name, total in delta.items()}
    deep = sum(key.startswith("per_position@") for key in delta)
    positions = [shares.get(f"per_position@{i}") for i in range(deep)]
    return [
        Acceptance(
            **{name: shares[name][row] for name in COUNTS if name in shares},  # type: ignore[arg-type]
            per_position=[share[row] for share in positions if share is not None] or None,
            completion_tokens=count,
            source="metrics-delta",
            scope="server",
        )
        for row, count in enumerate(tokens)
    ]
