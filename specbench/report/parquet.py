"""One row a trial with everything in it, types kept, for notebooks: `pandas.read_parquet("trials.parquet")`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from specbench.errors import SpecbenchError
from specbench.report.base import Format, Summary
from specbench.report.trials_csv import ordered, record

WORDS = ("run", "task", "question", "category", "method", "batch", "state", "finish", "error", "excluded")
FLAGS = ("lossless", "contended", "agreement_same")
FRACTIONS = ("batch_s", "prefill_s", "decode_s", "total_s", "cpu_s", "load", "agreement_logit_gap")
COUNTS_OF_ROUNDS = ("drafted", "depth", "accepted", "emitted")
SECONDS_OF_ROUNDS = ("draft_s", "verify_s", "round_s")


def render(summary: Summary, runs: Sequence[Any] = ()) -> bytes:
    """A Parquet file. The flat columns are those of `trials.csv`; beside them stand `text`, the list column
    `output_ids`, and one list column for each column of the rounds (`rounds_accepted`, `rounds_round_s`, …).

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
    rounds = {
        f"rounds_{name}": getattr(trial.rounds, name) for name in (*COUNTS_OF_ROUNDS, *SECONDS_OF_ROUNDS)
    }
    found = record(run, trial) | {"text": trial.text, "output_ids": trial.output_ids} | rounds
    return {name: _writable(value) for name, value in found.items()}


def _writable(value: Any) -> Any:
    """Text as UTF-8 can hold it: a lone surrogate is replaced."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _type(name: str, pa: Any) -> Any:
    """The column's type, from its name: a column of nothing but nulls has the same type as a full one."""
    part = name.removeprefix("rounds_")
    if name in (*WORDS, "text"):
        return pa.string()
    if name in FLAGS:
        return pa.bool_()
    if name == "output_ids" or (part != name and part in COUNTS_OF_ROUNDS):
        return pa.list_(pa.int64())
    if part != name and part in SECONDS_OF_ROUNDS:
        return pa.list_(pa.float64())
    if name.startswith("nvml_"):
        return pa.list_(pa.string()) if name.endswith("reasons") else pa.float64()
    return pa.float64() if name in FRACTIONS or name.startswith("spans_") else pa.int64()


FORMAT = Format("parquet", "trials.parquet", render)
