"""The columns of the tables: heading, definition and cell, written once for every format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from specbench.analysis.definitions import DEFINITIONS
from specbench.report import words
from specbench.report.base import Row

GROUPS = {
    "speed": "Speed",
    "rounds": "Tokens per round",
    "limits": "What limits it",
    "time": "Where the time goes",
    "latency": "Rates and latency",
    "memory": "Memory and energy",
    "output": "Output and trials",
}
PERCENTILES = ("p50", "p95", "p99")


@dataclass(frozen=True)
class Column:
    """A column of numbers of a summary row.

    Args:
        group: of GROUPS.
        field: of the row; `round_s.p95` for a part of one.
        title: the heading in a document.
        form: the field's number as text; None where only `show` will do.
        show: the cell where it says more than the number: its interval, the words beside it.
        note: what the cell adds to the field's definition.
        heading: the heading in a terminal, lines kept short.
        keep: how long a narrow terminal keeps it; 0 is not shown there at all.
        main: whether it stands in a document's first table.
        beside: the field of the column beside which it stands there too, where the two say different things.
    """

    group: str
    field: str
    title: str
    form: Callable[[Any], str] | None = words.number
    show: Callable[[Row], str] | None = None
    note: str = ""
    heading: str = ""
    keep: int = 0
    main: bool = False
    beside: str = ""

    @property
    def root(self) -> str:
        """The field of the row that it is, or is a part of."""
        return self.field.partition(".")[0]

    @property
    def meaning(self) -> str:
        """What it means, in whole sentences, with the unit."""
        return " ".join([DEFINITIONS[self.root].replace("`", ""), self.note]).strip()

    def value(self, row: Row) -> Any:
        """The number to sort by, the point of an estimate; None where it is unknown."""
        found: Any = row
        for name in self.field.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        return found.get("point") if isinstance(found, dict) else found

    def cell(self, row: Row) -> str:
        """What a document shows."""
        return self.show(row) if self.show else self.terse(row)

    def terse(self, row: Row) -> str:
        """What a terminal shows: the number, without its interval where it is not the headline."""
        return self.form(self.value(row)) if self.form else self.show(row) if self.show else words.NONE


def known(columns: Iterable[Column], rows: Sequence[Row]) -> list[Column]:
    """The columns in which at least one of the rows has something to say."""
    return [column for column in columns if any(column.cell(row) != words.NONE for row in rows)]


def chief(rows: Sequence[Row]) -> list[Column]:
    """The columns of a document's first table."""
    return [column for column in known(COLUMNS, rows) if column.main or differs(column, rows)]


def differs(column: Column, rows: Sequence[Row]) -> bool:
    """Whether a column says something else than the one beside which it stands."""
    other = next((c for c in COLUMNS if c.field == column.beside), None)
    return other is not None and any(
        column.value(row) is not None and column.terse(row) != other.terse(row) for row in rows
    )


def definitions(columns: Iterable[Column]) -> Iterator[tuple[str, str, str]]:
    """(title, field, meaning) of each field that the columns show, the parts of one field together."""
    fields: dict[str, list[Column]] = {}
    for column in columns:
        fields.setdefault(column.root, []).append(column)
    for field, parts in fields.items():
        yield ", ".join(column.title for column in parts), field, parts[0].meaning


def _with_interval(name: str, suffix: str, row: Row) -> str:
    """The interval too, but for vanilla: against itself it has none."""
    estimate = row[name]
    return words.interval(estimate | {"low": None} if row["method"] == words.BASELINE else estimate, suffix)


def _whole(value: float | None) -> str:
    return words.number(value, 0)


def _percentiles(group: str, field: str, title: str) -> tuple[Column, ...]:
    return tuple(Column(group, f"{field}.{p}", f"{title} {p}", words.seconds) for p in PERCENTILES)


SPEED = (
    Column(
        "speed",
        "speedup",
        "speedup (end to end)",
        None,
        words.speedup,
        note="n= stands where there are too few questions for an interval.",
        heading="speedup\nend to end",
        keep=9,
        main=True,
    ),
    Column(
        "speed",
        "decode_speedup",
        "decode speedup",
        words.times,
        partial(_with_interval, "decode_speedup", "x"),
        heading="decode\nspeedup",
        keep=7,
        main=True,
    ),
    Column("speed", "speedup_bias", "speedup's bias", partial(words.percent, digits=1, signed=True)),
    Column("speed", "geomean_speedup", "geometric mean", words.times),
    Column("speed", "spec_bench_speedup", "Spec-Bench's formula", words.times),
)

ROUNDS = (
    Column(
        "rounds",
        "tau",
        "τ (tokens/round, bonus included)",
        words.number,
        partial(_with_interval, "tau", ""),
        heading="τ tokens/\nround,\nbonus\nincluded",
        keep=8,
        main=True,
    ),
    Column(
        "rounds",
        "tau_drafted",
        "τ of rounds with a draft (bonus included)",
        note="Where every round has a draft it is τ.",
        heading="τ of\nrounds\nwith a\ndraft",
        keep=5,
        beside="tau",
    ),
    Column("rounds", "alpha", "α (accepted/round, bonus excluded)"),
    Column("rounds", "counts_source", "counted by", None, words.counts),
    Column(
        "rounds",
        "acceptance_rate",
        "acceptance rate",
        words.percent,
        heading="accept.\nrate",
        keep=5,
        main=True,
    ),
)

LIMITS = (
    Column("limits", "predicted_speedup", "predicted", words.times),
    Column(
        "limits",
        "predicted_residual",
        "measured against predicted",
        partial(words.percent, digits=1, signed=True),
    ),
    Column("limits", "verify_inflation", "verify inflation", words.times),
    Column("limits", "free_draft_limit", "with a free draft", words.times),
    Column("limits", "closed_form_speedup", "closed form", words.times),
    Column("limits", "best_k", "best k", _whole),
    Column("limits", "roofline_limit", "roofline limit", words.times),
    Column("limits", "roofline_share", "share of roofline", words.percent),
    Column("limits", "experts", "experts woken a pass", partial(words.number, digits=1)),
)

TIME = (
    Column("time", "draft_share", "draft share", words.percent, heading="draft\nshare", keep=3, main=True),
    Column("time", "verify_share", "verify share", words.percent),
    Column("time", "accept_share", "accept share", words.percent),
    Column("time", "other_share", "other share", words.percent),
    *_percentiles("time", "round_s", "round"),
)

LATENCY = (
    Column(
        "latency",
        "tokens_per_s",
        "tok/s",
        partial(words.number, digits=1),
        heading="tok/s",
        keep=4,
        main=True,
    ),
    Column(
        "latency",
        "requests_per_s",
        "requests/s, of those offered",
        None,
        words.requests,
        heading="requests/s\nof those\noffered",
        keep=5,
        main=True,
    ),
    Column("latency", "queue_growth", "queue growth"),
    Column("latency", "ttft_s", "TTFT", words.seconds, main=True),
    *_percentiles("latency", "ttft", "TTFT"),
    Column("latency", "latency_s", "latency of a request", words.seconds),
    Column("latency", "tpot_s", "TPOT", words.seconds),
    *_percentiles("latency", "itl_s", "ITL"),
)

MEMORY = (
    Column(
        "memory",
        "memory_overhead_bytes",
        "memory above vanilla",
        partial(words.size, signed=True),
        heading="memory\nabove\nvanilla",
        keep=2,
        main=True,
    ),
    Column("memory", "weights_bytes", "weights", words.size, heading="weights", keep=3, main=True),
    Column("memory", "draft_weights_bytes", "of these the drafter's", words.size),
    Column("memory", "kv_bytes", "KV", words.size),
    Column("memory", "graph_bytes", "graphs", words.size),
    Column("memory", "peak_bytes", "peak", words.size),
    Column("memory", "joules_per_token", "J/token"),
)

OUTPUT = (
    Column(
        "output",
        "identical",
        "output = vanilla's",
        None,
        words.output,
        note="Identical / compared; lossy: the method does not promise the target's output.",
        heading="output =\nvanilla's",
        keep=6,
        main=True,
    ),
    Column("output", "compared_by", "compared by", None, words.compared_by),
    Column("output", "state", "state", None, words.state, heading="state", keep=1, main=True),
    Column("output", "near_ties", "near-ties", _whole),
    Column("output", "first_difference_median", "first difference", _whole),
    Column("output", "tokens", "tokens", _whole),
    Column("output", "trials", "trials", _whole),
    Column("output", "failed", "failed", _whole),
    Column("output", "excluded", "excluded", _whole),
    Column("output", "outliers", "outliers", _whole),
)

COLUMNS = (*SPEED, *ROUNDS, *LIMITS, *TIME, *LATENCY, *MEMORY, *OUTPUT)
BY_FIELD = {column.field: column for column in COLUMNS}
