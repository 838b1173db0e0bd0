"""One row a trial with everything in it, types kept, for notebooks: `pandas.read_parquet("trials.parquet")`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from specbench.errors import SpecbenchError
from specbench.report.base import Format, Summary
from specbench.report.trials_csv import ordered, record

WORDS = (
    *(
        "run",
        "task",
        "question",
        "category",
        "method",
        "batch",
        "state",
        "finish",
        "error",
        "excluded",
        "text",
    ),
    *("acceptance_source", "acceptance_scope"),
)
FLAGS = ("lossless", "contended", "agreement_same", "agreement_same_text")
FRACTIONS = (
    *("request_rate", "batch_s", "prefill_s", "decode_s", "total_s", "sent_s", "cpu_s", "load"),
    "agreement_logit_gap",
)
COUNTS_OF_ROUNDS = ("drafted", "depth", "accepted", "emitted", "count", "with_draft", "probes")
FRACTIONS_OF_ROUNDS = ("draft_s", "verify_s", "round_s", "experts")
LISTS_OF_COUNTS = (
    *("output_ids", "acceptance_per_position", "arrivals_tokens"),
    *(f"rounds_{name}" for name in COUNTS_OF_ROUNDS),
)
LISTS_OF_FRACTIONS = ("arrivals_at_s", *(f"rounds_{name}" for name in FRACTIONS_OF_ROUNDS))


def render(summary: Summary, runs: Sequence[Any] = ()) -> bytes:
    """A Parquet file. The flat columns are those of `trials.csv`; beside them stand `text`, and as list
    columns `output_ids`, `acceptance_per_position`, `arrivals_at_s` with `arrivals_tokens`, and each column of the
    rounds (`rounds_accepted`, `rounds_round_s`, …).

    Raises:
        SpecbenchError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise SpecbenchError(
            "--format parquet needs pyarrow, which is not installed", "pip install 'specbench-llm[parquet]'"
        ) from None
    records = [_record(name, trial) for name, trial in ordered(summary, runs)]
    names = list(records[0]) if records else []
    schema = pa.schema([(name, _type(name, pa)) for name in names])
    columns = {name: [entry[name] for entry in records] for name in names}
    out = io.BytesIO()
    parquet.write_table(pa.table(columns, schema=schema), out, compression="zstd")
    return out.getvalue()


def _record(run: str, trial: Any) -> dict[str, Any]:
    lists = {
        "acceptance_per_position": (trial.acceptance or {}).get("per_position"),
        **{f"arrivals_{name}": (trial.arrivals or {}).get(name) for name in ("at_s", "tokens")},
        **{
            f"rounds_{name}": getattr(trial.rounds, name)
            for name in (*COUNTS_OF_ROUNDS, *FRACTIONS_OF_ROUNDS)
        },
    }
    found = record(run, trial) | {"text": trial.text, "output_ids": trial.output_ids} | lists
    return {name: _writable(value) for name, value in found.items()}


def _writable(value: Any) -> Any:
    """Text as UTF-8 can hold it: a lone surrogate is replaced."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _type(name: str, pa: Any) -> Any:
    """The column's type, from its name: a column of nothing but nulls has the same type as a full one."""
    if name in WORDS:
        return pa.string()
    if name in FLAGS:
        return pa.bool_()
    if name in LISTS_OF_COUNTS:
        return pa.list_(pa.int64())
    if name in LISTS_OF_FRACTIONS:
        return pa.list_(pa.float64())
    if name.startswith("nvml_"):
        return pa.list_(pa.string()) if name.endswith("reasons") else pa.float64()
    return pa.float64() if name in FRACTIONS or name.startswith("spans_") else pa.int64()


FORMAT = Format("parquet", "trials.parquet", render)
