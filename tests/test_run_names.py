"""Runs of one name stay apart in a report."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from trial_factory import FakeRun, blocks

from specbench.analysis.compare import compare
from specbench.analysis.history import history
from specbench.analysis.run_names import run_names
from specbench.analysis.summary import summarise
from specbench.report import FORMATS


def run(name: str | None, path: str, seconds: float = 5.0) -> FakeRun:
    trials = blocks(6, {"vanilla": {}, "fast": {"seconds": seconds, "accepted": [1] * 5}})
    return FakeRun(trials, {"name": name, "target": {"name": "tiny"}}, path=Path(path))


@pytest.mark.parametrize(
    ("runs", "names"),
    [
        ([("x", "results/x"), ("y", "results/y")], ["x", "y"]),
        ([(None, "results/x"), (None, ".")], ["x", "run-2"]),
        ([("x", "results/a/x"), ("x", "results/b/x")], ["a/x", "b/x"]),
        ([("x", "a/results/x"), ("y", "y"), ("x", "/b/results/x")], ["a/results/x", "y", "b/results/x"]),
        ([("x", "results/x"), ("x", "x")], ["results/x", "x"]),
        ([("x", "/x"), ("x", "x")], ["/x", "x"]),
        ([("x", "results/x"), ("x", "results/x.old1")], ["x", "x.old1"]),  # moved aside by --fresh
        ([("x", "a/x"), ("x", "a/x"), ("x", "b/x")], ["a/x", "a/x (2)", "b/x"]),
        ([("x", "a/p"), ("x", "a/q"), ("q", "b/z")], ["p", "q", "q (2)"]),
        ([], []),
    ],
)
def test_names_tell_runs_apart(runs: list[tuple[str | None, str]], names: list[str]) -> None:
    assert run_names([run(*each) for each in runs]) == names


def test_runs_without_a_folder_are_numbered() -> None:
    """Whoever calls `summarise` from a notebook has trials and a manifest, and may have no folder."""
    runs = [SimpleNamespace(trials=run("x", "").trials, manifest={"name": "x"}) for _ in range(2)]
    assert run_names(runs) == ["x", "x (2)"]
    assert [one["name"] for one in summarise(runs)["runs"]] == ["x", "x (2)"]


@pytest.mark.parametrize("form", [name for name in FORMATS if name != "parquet"])
def test_reports_keep_runs_of_one_name_apart(form: str) -> None:
    runs = [run("x", "results/a/x", 5.0), run("x", "results/b/x", 2.0)]
    summary = summarise(runs)
    assert [one["name"] for one in summary["runs"]] == ["a/x", "b/x"]
    speedups = {row["run"]: row["speedup"]["point"] for row in summary["rows"] if row["method"] == "fast"}
    assert speedups == pytest.approx({"a/x": 10.5 / 5.5, "b/x": 10.5 / 2.5})
    assert {warning["run"] for warning in summary["warnings"]} <= {"a/x", "b/x", ""}
    text = FORMATS[form].render(summary, runs)
    text = text.decode() if isinstance(text, bytes) else text
    assert "a/x" in text
    assert "b/x" in text


def test_so_do_comparisons_and_histories() -> None:
    runs = [run("x", "results/reference/x"), run("x", "results/x", 2.0)]
    compared = compare(*runs)
    assert [compared[side]["name"] for side in ("base", "new")] == ["reference/x", "results/x"]
    ((series,),) = (group["series"] for group in history(runs, "speedup")["groups"])
    assert [point["run"] for point in series["points"]] == ["reference/x", "results/x"]
