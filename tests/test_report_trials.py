"""Trials as tables: CSV for a spreadsheet, Parquet for a notebook."""

from __future__ import annotations

import csv
import io
import sys

import pytest
from report_run import hostile, run
from trial_factory import FakeRun

from specbench.analysis.summary import summarise
from specbench.errors import SpecbenchError
from specbench.report import FORMATS


def trials_csv(one: FakeRun) -> list[dict[str, str]]:
    text = FORMATS["trials-csv"].render(summarise([one]), [one])
    assert isinstance(text, str)
    return list(csv.DictReader(io.StringIO(text, newline="")))


def test_csv_has_a_line_a_trial() -> None:
    one = run()
    rows = trials_csv(one)
    assert len(rows) == len(one.trials)
    first = rows[0]
    assert (first["run"], first["task"], first["question"], first["method"]) == (
        "page",
        "chat",
        "chat-0",
        "vanilla",
    )
    fast = next(row for row in rows if row["method"] == "fast:k=5")
    assert float(fast["decode_s"]) == pytest.approx(4.0)
    assert (fast["rounds"], fast["accepted_sum"], fast["emitted_sum"]) == ("5", "5", "10")
    assert (fast["spans_verify"], fast["agreement_same"], fast["memory_peak_bytes"]) == (
        "3.0",
        "false",
        "1300000000",
    )
    assert fast["nvml_joules"] == ""


def test_csv_texts_are_no_formulas() -> None:
    one = run({"=cmd()": 2.0})
    one.trials[0].question = "@sum\n|x"
    rows = trials_csv(one)
    assert rows[0]["question"] == "'@sum |x"
    assert {row["method"] for row in rows} == {"vanilla", "'=cmd()"}


def test_parquet_keeps_everything_and_its_types() -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    one = run()
    one.trials[0].nvml = {"joules": 2.5, "throttle_reasons": ["power"]}
    content = FORMATS["parquet"].render(summarise([one]), [one])
    assert isinstance(content, bytes)
    rows = parquet.read_table(io.BytesIO(content)).to_pylist()
    assert len(rows) == len(one.trials)
    assert set(rows[0]) > set(trials_csv(one)[0])
    fast = next(row for row in rows if row["method"] == "fast:k=5")
    assert fast["rounds_accepted"] == [1, 1, 0, 2, 1]
    assert fast["rounds_round_s"] == pytest.approx([0.8] * 5)
    assert fast["text"].startswith("The quick")
    assert fast["agreement_same"] is False
    assert rows[0]["lossless"] is None
    assert (rows[0]["nvml_joules"], rows[0]["nvml_throttle_reasons"]) == (2.5, ["power"])


def test_parquet_takes_any_text() -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    one = hostile()
    content = FORMATS["parquet"].render(summarise([one]), [one])
    assert isinstance(content, bytes)
    table = parquet.read_table(io.BytesIO(content))
    assert "\u202e" in table.column("text")[0].as_py()  # a notebook wants the text as it was


def test_parquet_without_pyarrow_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SpecbenchError, match="needs pyarrow") as error:
        FORMATS["parquet"].render(summarise([]), [])
    assert error.value.hint == "pip install 'specbench-llm[parquet]'"


def test_nothing_measured() -> None:
    assert trials_csv(FakeRun([])) == []
    assert FORMATS["parquet"].render(summarise([FakeRun([])]), [FakeRun([])])
