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


def served() -> FakeRun:
    """A request of an engine in an open loop."""
    one = run()
    first = one.trials[0]
    first.request_rate, first.sent_s, first.retries = 2.5, 0.125, 1
    first.agreement = {"same": None, "same_text": True}
    first.acceptance = {
        "accepted": 7,
        "drafted": 9,
        "verify_steps": 3,
        "target_steps": 4,
        "completion_tokens": 11,
    }
    first.acceptance |= {
        "per_position": [3, 2, 2],
        "steps": None,
        "source": "metrics-delta",
        "scope": "server",
    }
    first.arrivals = {"at_s": [0.25, 0.5], "tokens": [1, None]}
    first.rounds.count, first.rounds.experts = (
        [1] * len(first.rounds.emitted),
        [2.5] * len(first.rounds.emitted),
    )
    return one


def test_csv_has_what_engines_tell() -> None:
    first, second = trials_csv(served())[:2]
    assert [first[name] for name in ("request_rate", "sent_s", "retries", "agreement_same_text")] == [
        *("2.5", "0.125", "1", "true")
    ]
    told = {
        name.removeprefix("acceptance_"): v for name, v in first.items() if name.startswith("acceptance_")
    }
    assert told == {
        "accepted": "7",
        "drafted": "9",
        "verify_steps": "3",
        "target_steps": "4",
        "source": "metrics-delta",
        "scope": "server",
    }
    assert (second["sent_s"], second["acceptance_source"]) == ("", "")


def test_parquet_has_what_engines_tell() -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    one = served()
    content = FORMATS["parquet"].render(summarise([one]), [one])
    assert isinstance(content, bytes)
    first, second = parquet.read_table(io.BytesIO(content)).to_pylist()[:2]
    assert (first["request_rate"], first["sent_s"], first["retries"]) == (2.5, 0.125, 1)
    assert (first["acceptance_accepted"], first["acceptance_source"]) == (7, "metrics-delta")
    assert first["acceptance_per_position"] == [3, 2, 2]
    assert (first["arrivals_at_s"], first["arrivals_tokens"]) == ([0.25, 0.5], [1, None])
    assert (first["rounds_count"][0], first["rounds_experts"][0], first["rounds_probes"]) == (1, 2.5, None)
    assert (second["arrivals_at_s"], second["acceptance_per_position"], second["sent_s"]) == (
        None,
        None,
        None,
    )


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
