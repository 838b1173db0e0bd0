"""Results on disk: a folder a run, `manifest.json` and `trials.jsonl` (design §7).

A block's rows are written together and synced once, so that a killed run loses at most the block in flight.
Readers accept every older schema version and drop a half-written last block with a warning.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

SCHEMA = 1


@dataclass
class Rounds:
    """The rounds of one trial after its prefill, as columns of equal length. Times are None where unknown."""

    drafted: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    draft_s: list[float] | None = None
    verify_s: list[float] | None = None
    round_s: list[float] | None = None


@dataclass
class Trial:
    """One request: one line of `trials.jsonl`. Field names are the schema; unknown is None.

    `batch_s` is the whole batch's seconds, end to end, and repeats on each row of the batch. `spans` are the
    batch's too. A failed trial has `error` set, `finish` "error", and takes its block out of its method's
    estimates. `excluded` holds the reason a first attempt was not counted ("contended", "throttled").
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
    state: str = "cold"
    prompt_tokens: int = 0
    output_tokens: int = 0
    output_ids: list[int] = field(default_factory=list)
    text: str | None = None
    finish: str | None = None
    batch_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    total_s: float | None = None
    spans: dict[str, float] | None = None
    rounds: Rounds = field(default_factory=Rounds)
    cpu_s: float | None = None
    load: float | None = None
    memory: dict[str, int | None] | None = None
    nvml: dict[str, Any] | None = None
    agreement: dict[str, Any] | None = None
    lossless: bool | None = None
    excluded: str | None = None
    error: str | None = None
    schema: int = SCHEMA

    @property
    def key(self) -> tuple[str, str, int, str, int, int]:
        """What makes a row one row: (task, question, turn, method, batch size, repeat)."""
        return (self.task, self.question, self.turn, self.method, self.batch_size, self.repeat)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Trial:
        """A trial from a line of any schema version up to ours; unknown fields are ignored."""
        known = {f.name for f in fields(cls)}
        values = {name: value for name, value in row.items() if name in known}
        columns = {f.name for f in fields(Rounds)}
        values["rounds"] = Rounds(**{k: v for k, v in (row.get("rounds") or {}).items() if k in columns})
        return cls(**values)
