"""Engines by methods in one table, for every format: each against its own vanilla, on the same target and prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from specbench.analysis.setting import in_words, setting_of
from specbench.report import words
from specbench.report.base import Row, Summary
from specbench.report.columns import BY_FIELD, Column, differs, known

SPEEDUP = Column(
    "",
    "speedup",
    "speedup over own vanilla",
    None,
    words.speedup,
    heading="speedup\nover own\nvanilla",
    keep=9,
)
DECODE = Column("", "decode_speedup", "decode speedup", words.times, heading="decode\nspeedup", keep=2)
OUTPUT = Column(
    "",
    "identical",
    "output = own vanilla's",
    None,
    words.output,
    note="Identical / compared; lossy: the method does not promise the target's output.",
    heading="output =\nown\nvanilla's",
    keep=7,
)
COMPARED = Column("", "compared_by", "compared by", None, words.compared_by, heading="compared\nby", keep=6)
PROMISE = Column("", "lossless", "promise", None, words.promise, heading="promise", keep=5)
COUNTS = Column("", "counts_source", "counted by", None, words.counts, heading="counted\nby", keep=1)


@dataclass(frozen=True)
class EngineTable:
    """Lines of different engines; a line is an overall row.

    Args:
        title: the target and the tasks.
        columns: what is known of the lines, the names of engine and method aside.
        notes: what a reader must know of it, in sentences without a full stop.
    """

    title: str
    lines: Sequence[tuple[list[str], Row]]
    heads: list[str]
    columns: list[Column]
    notes: list[str]
    one_machine: bool


def tables(summary: Summary) -> Iterator[EngineTable]:
    """One a group of runs that stand in one table (`summary["engines"]`)."""
    runs = {run["name"]: run for run in summary["runs"]}
    for group in summary.get("engines", ()):
        rows = [
            row for row in summary["rows"] if row["run"] in group["runs"] and row["task"] == words.OVERALL
        ]
        rows.sort(key=lambda row: (*_load(row), group["runs"].index(row["run"])))
        again = len({_engine(runs[name]) for name in group["runs"]}) < len(group["runs"])
        loads = any(map(in_words, rows))
        heads = ["engine", *(["run"] if again else []), *(["load"] if loads else []), "method"]
        names = [
            [
                _engine(runs[row["run"]]),
                *([row["run"]] if again else []),
                *([", ".join(in_words(row)) or "one at a time"] if loads else []),
                row["method"],
            ]
            for row in rows
        ]
        over = ", ".join(group["tasks"])
        yield EngineTable(
            f"Engines on {group['target'] or 'unknown target'} ({over})",
            list(zip(names, rows, strict=True)),
            heads,
            _columns(group, rows),
            list(_notes(group)),
            len(group["machines"]) == 1,
        )


def _load(row: Row) -> tuple[float, int]:
    """To sort by: a batch of N of our own loop stands with N requests in flight at an engine."""
    setting = setting_of(row)
    return setting.request_rate, setting.at_once


def _engine(run: dict[str, Any]) -> str:
    engine = run["engine"]
    version = f" {engine['version']}" if engine["version"] else ""
    return f"{engine['name']}{version}{' (attached)' if engine['attached'] else ''}"


def _columns(group: dict[str, Any], rows: Sequence[Row]) -> list[Column]:
    tau, drafted = replace(BY_FIELD["tau"], keep=4), replace(BY_FIELD["tau_drafted"], keep=3)
    taus = [tau, drafted] if differs(drafted, rows) else [tau]
    agreement = [OUTPUT, COMPARED, PROMISE]
    wanted = [SPEEDUP, *_rates(group), *agreement, DECODE, BY_FIELD["ttft_s"], *taus, COUNTS]
    return known(wanted, rows)


def _rates(group: dict[str, Any]) -> Iterator[Column]:
    """Tokens/s, in a column a machine: what stands in one column may be compared."""
    machines = group["machines"]
    for number, machine in enumerate(machines, 1):
        where = f" on machine {number}" if len(machines) > 1 else ""
        yield Column(
            "",
            "tokens_per_s",
            f"tok/s{where}",
            None,
            partial(_rate, machine["runs"]),
            heading=f"tok/s{where.replace(' on ', chr(10))}",
            keep=6,
        )


def _rate(runs: Sequence[str], row: Row) -> str:
    return words.number(row["tokens_per_s"], 1) if row["run"] in runs else words.NONE


def _notes(group: dict[str, Any]) -> Iterator[str]:
    yield (
        "each engine's speedup is over its own vanilla, and its output is compared with that one's, not with another "
        "engine's"
    )
    machines = group["machines"]
    if len(machines) > 1:
        for number, machine in enumerate(machines, 1):
            yield f"machine {number} ({', '.join(machine['runs'])}): {machine['machine'] or 'unknown machine'}"
        yield "tokens/s of different machines stand in columns of their own: they say nothing beside each other"
    else:
        yield f"all on one kind of machine: {machines[0]['machine'] or 'unknown machine'}"
    yield from group["notes"]
