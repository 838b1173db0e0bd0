"""Saved baselines: small, the same bytes each time, and as good as the run for a comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_folder import trials, write_run
from tiny_folder import specbench

from specbench.analysis.compare import METRICS, compare
from specbench.analysis.summary import summarise
from specbench.store import read_run

REFERENCE = Path(__file__).parents[1] / "results" / "reference" / "cpu-2core-smollm2"
OF_ROUND_TIMES = {"round_s"}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    given = trials(
        memory={"peak_bytes": 1000},
        text="said",
        output_ids=[1, 2],
        nvml={"joules": 2.0, "throttle_reasons": ["sw_thermal_slowdown"], "samples": [1]},
    )
    for t in given:
        decode = t.decode_s or 0
        t.spans = {
            "draft": 0.1 * decode,
            "verify": 0.8 * decode,
            "accept": 0.05 * decode,
            "other": 0.05 * decode,
        }
    write_run(tmp_path / "results" / "night", given)
    return tmp_path / "results"


def call(results: Path, *words: Any) -> Any:
    return specbench("baseline", *words, "--results", results)


def test_a_baseline_compares_as_its_run(results: Path) -> None:
    saved = call(results, "save", "night", "--as", "good")
    assert saved.code == 0
    folder = Path(saved.out.strip())
    assert folder == results / "reference" / "good"
    run, baseline = read_run(results / "night"), read_run(folder)
    found = compare(baseline, run, tuple(METRICS))
    assert {row["verdict"] for row in found["rows"]} == {"no change"}
    assert all(row["change"]["point"] == 1 for row in found["rows"])
    assert not found["missing"]
    full, kept = (summarise([side])["rows"] for side in (run, baseline))
    for a, b in zip(full, kept, strict=True):
        differ = {name for name in a if a[name] != b[name]}
        assert differ <= OF_ROUND_TIMES | {"run"} | {name for name in differ if name.startswith("itl")}


def test_a_baseline_is_small_and_the_same_each_time(results: Path) -> None:
    call(results, "save", "night", "--as", "one")
    call(results, "save", "night", "--as", "two")
    one, two = (results / "reference" / name / "trials.jsonl" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    assert one.stat().st_size < 0.6 * (results / "night" / "trials.jsonl").stat().st_size
    row = json.loads(one.read_text().splitlines()[0])
    assert not row.keys() & {"text", "output_ids", "load", "cpu_s", "error"}
    assert row["nvml"] == {"joules": 2.0, "throttle_reasons": ["sw_thermal_slowdown"]}
    assert row["rounds"].keys() == {"drafted", "depth", "accepted", "emitted"}
    manifest = json.loads((one.parent / "manifest.json").read_text())
    assert (manifest["name"], manifest["baseline_of"]) == ("one", "night")


def test_nothing_is_overwritten_by_accident(results: Path) -> None:
    assert call(results, "save", "night").code == 0
    again = call(results, "save", "night")
    assert again.code == 2
    assert "there is a baseline" in again.err
    assert call(results, "save", results / "night", "--replace").code == 0
    assert "is the run itself" in call(results, "save", "night", "--to", results, "--replace").err
    assert read_run(results / "night").trials[0].text == "said"


@pytest.mark.parametrize("name", ["../x", "a/b", "..", ""])
def test_a_name_is_no_path(results: Path, name: str) -> None:
    result = call(results, "save", "night", "--as", name)
    assert result.code == 2 or name == ""  # an empty name is the run's
    assert not (results.parent / "x").exists()


def test_an_empty_run_is_no_baseline(results: Path) -> None:
    write_run(results / "empty", [])
    assert "no measured trial" in call(results, "save", "empty").err


def test_show(results: Path) -> None:
    assert "no baselines" in call(results, "show").out
    call(results, "save", "night", "--as", "good")
    out = call(results, "show").out
    assert "good" in out
    assert "tiny" in out
    (facts,) = json.loads(call(results, "show", "--json").out)
    assert (facts["baseline"], facts["trials"], facts["tasks"]) == ("good", 80, "chat, code")
    one = call(results, "show", "good").out
    assert "vanilla, fast" in one
    assert "speedup" in one
    assert json.loads(call(results, "show", "good", "--json").out)["runs"][0]["name"] == "good"
    bad = call(results, "show", "bad")
    assert bad.code == 2
    assert bad.err.splitlines() == [
        f"error: there is no baseline 'bad' in {results / 'reference'}",
        "  hint: see `specbench baseline show`",
    ]


def test_show_prints_no_hidden_characters(results: Path) -> None:
    nasty = "x\x1b[31m\u202e"
    given = [t for t in trials(tasks=(nasty,)) if t.method == "vanilla"]
    changed = {
        "target__name": nasty,
        "tasks": [{"name": nasty}],
        "methods": [{"label": nasty}],
        "start": nasty,
    }
    write_run(results / "reference" / "bad", given, machine={"cpu": {"model": nasty}}, **changed)
    for words in ((), ("bad",)):
        out = call(results, "show", *words).out
        assert "x\\x1b[31m\\u202e" in out.replace("\n", "")
        assert not set("\x1b\u202e") & set(out)


def test_the_committed_baseline() -> None:
    """A comparison with it needs nothing else; against itself nothing has changed."""
    baseline = read_run(REFERENCE)
    found = compare(baseline, baseline, tuple(METRICS))
    assert {row["verdict"] for row in found["rows"]} == {"no change"}
    assert {row["method"] for row in found["rows"]} == {"vanilla", "prompt-lookup", "oracle", "hf-generate"}
