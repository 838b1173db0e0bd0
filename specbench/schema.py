"""What a line of `trials.jsonl` holds (design §7)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

SCHEMA = 1
TIMES = ("draft_s", "verify_s", "round_s")  # of a round
Key = tuple[str, str, int, str, int, int, int, float]


@dataclass(slots=True)
class Rounds:
    """The rounds of one trial after its prefill, as columns of equal length. A column is None where unknown.

    Times are kept as arrays, whatever they are given as: a run holds millions, and a list takes four times as much.

    An engine that does not tell its rounds apart has one entry for all of them: `count` says how many rounds an
    entry stands for and `with_draft` how many of those had a draft; its `round_s` is their mean. None: one each.

    `experts`, of a mixture of experts: how many different ones the verify pass woke (all rows of its batch together),
    the mean over the MoE layers. `probes`: nodes that rode in the verify pass without being candidates, where a
    method sends such.
    """

    drafted: list[int] | None = field(default_factory=list)
    depth: list[int] | None = field(default_factory=list)
    accepted: list[int] | None = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    count: list[int] | None = None
    with_draft: list[int] | None = None
    draft_s: Sequence[float] | None = None
    verify_s: Sequence[float] | None = None
    round_s: Sequence[float] | None = None
    experts: list[float] | None = None
    probes: list[int] | None = None

    def __post_init__(self) -> None:
        for name in TIMES:
            column = getattr(self, name)
            setattr(self, name, None if column is None else array("d", column))

    @property
    def total(self) -> int:
        """How many rounds the entries stand for."""
        return len(self.emitted) if self.count is None else sum(self.count)


@dataclass(slots=True)
class Trial:
    """One request: one line of `trials.jsonl`. Field names are the schema; unknown is None.

    `batch_s` is the whole batch's seconds, end to end, and repeats on each row of the batch. `spans` are the
    batch's too. A failed trial has `error` set, `finish` "error", and takes its batch out of its method's
    estimates (of requests at an engine only itself, and its block's throughput and speedup). `excluded` holds the
    reason a first attempt was not counted ("contended", "throttled", "captured"); `contended` says that a trial,
    counted or not, got clearly less than its share of the machine.

    Of engines: `concurrency` requests were in flight, or `request_rate` a second were sent; `sent_s` is when this one
    was, in seconds after the first of its block; `acceptance` is the engine's own account
    (`specbench.engines.record.Acceptance`); `arrivals` has the seconds since the request was sent and the tokens
    (None: not told) of each event that bore some; `retries` counts attempts before this one. `agreement` of an
    engine's answer has `same_text` beside `same`, which is by token ids where there are some.
    """

    task: str
    question: str
    category: str | None
    turn: int
    method: str
    batch_size: int
    repeat: int
    block: int = 0
    batch: str = ""
    order: int = 0
    attempt: int = 0
    concurrency: int | None = None
    request_rate: float | None = None
    state: str | None = "cold"
    prompt_tokens: int = 0
    output_tokens: int = 0
    output_ids: list[int] = field(default_factory=list)
    text: str | None = None
    finish: str | None = None
    batch_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    total_s: float | None = None
    sent_s: float | None = None
    spans: dict[str, float] | None = None
    rounds: Rounds = field(default_factory=Rounds)
    cpu_s: float | None = None
    load: float | None = None
    memory: dict[str, int | None] | None = None
    nvml: dict[str, Any] | None = None
    agreement: dict[str, Any] | None = None
    acceptance: dict[str, Any] | None = None
    arrivals: dict[str, list[Any]] | None = None
    retries: int | None = None
    lossless: bool | None = None
    contended: bool | None = None
    excluded: str | None = None
    error: str | None = None
    schema: int = SCHEMA

    @property
    def key(self) -> Key:
        """What makes a row one row: (task, question, turn, method, batch size, repeat), and an engine's load."""
        load = (self.concurrency or 0, self.request_rate or 0.0)
        return (self.task, self.question, self.turn, self.method, self.batch_size, self.repeat, *load)

    def to_json(self) -> dict[str, Any]:
        row = asdict(self)
        row["rounds"] |= {name: list(column) for name in TIMES if (column := row["rounds"][name]) is not None}
        return row

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Trial:
        """A trial from a line of any schema version up to ours; unknown fields are ignored."""
        values = {name: value for name, value in row.items() if name in _TRIAL}
        columns = row.get("rounds") or {}
        values["rounds"] = Rounds(**{name: column for name, column in columns.items() if name in _ROUNDS})
        return cls(**values)


_TRIAL, _ROUNDS = (frozenset(f.name for f in fields(cls)) for cls in (Trial, Rounds))
