"""One line a trial, for spreadsheets and notebooks: the numbers, without texts, token ids and single rounds.

Those are in `--format parquet`, which keeps their types.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from specbench.report import csv
from specbench.report.base import Format, Summary

if TYPE_CHECKING:
    from specbench.store import Trial

PLAIN = (
    *(
        "task",
        "question",
        "category",
        "turn",
        "method",
        "batch_size",
        "concurrency",
        "request_rate",
        "repeat",
    ),
    *("block", "batch", "order", "attempt", "state", "lossless", "finish", "error", "excluded", "contended"),
    *("prompt_tokens", "output_tokens", "batch_s", "prefill_s", "decode_s", "total_s", "sent_s", "retries"),
    *("cpu_s", "load"),
)
PARTS = {
    "spans": ("draft", "verify", "accept", "other"),
    "agreement": ("same", "first_difference", "logit_gap", "same_text"),
    "acceptance": ("accepted", "drafted", "verify_steps", "target_steps", "source", "scope"),
    "memory": ("weights_bytes", "draft_weights_bytes", "kv_bytes", "graph_bytes", "peak_bytes"),
    "nvml": ("joules", "power_w", "sm_mhz_mean", "sm_mhz_min", "temperature_c", "throttle_reasons"),
}


def ordered(summary: Summary, runs: Sequence[Any]) -> Iterator[tuple[str, Trial]]:
    """(run's name, trial) of all runs, in the order of measuring whatever the order in the files."""
    for extract, run in zip(summary["runs"], runs, strict=True):
        for trial in sorted(run.trials, key=_position):
            yield extract["name"], trial


def _position(trial: Trial) -> tuple[Any, ...]:
    t = trial
    return (t.block, t.attempt, t.order, t.batch_size, t.concurrency or 0, t.request_rate or 0.0, *t.key)


def record(run: str, trial: Trial) -> dict[str, Any]:
    """A trial's numbers under flat names: `spans_draft`, `agreement_same`."""
    rounds = trial.rounds
    parts = {
        f"{name}_{part}": (getattr(trial, name) or {}).get(part)
        for name, parts in PARTS.items()
        for part in parts
    }
    counts = {f"{name}_sum": _total(getattr(rounds, name)) for name in ("drafted", "accepted", "emitted")}
    return {
        "run": run,
        **{name: getattr(trial, name) for name in PLAIN},
        **parts,
        "rounds": rounds.total,
        **counts,
    }


def _total(column: Sequence[int | None] | None) -> int | None:
    """The sum; None where a round does not tell, as some engines' do not."""
    if column is None:
        return None
    counts = [count for count in column if count is not None]
    return sum(counts) if len(counts) == len(column) else None


def render(summary: Summary, runs: Sequence[Any] = ()) -> str:
    """CSV; unknown is an empty cell, and no text is a formula."""
    return csv.lines(record(name, trial) for name, trial in ordered(summary, runs))


FORMAT = Format("trials-csv", "trials.csv", render)
