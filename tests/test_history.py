"""A metric over runs: what stands together, what apart, and how it is shown."""

from __future__ import annotations

import csv
import io
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from run_folder import run, trials, write_run
from tiny_folder import specbench

from specbench.analysis.history import history
from specbench.report.history import FORMATS, markdown, sparkline, terminal

NASTY = "<script>|`x`](javascript:alert(1))\n# head\x1b[31m"


def at(day: int, slower: float = 1.0, **changed: Any) -> Any:
    given = trials(slower=slower, questions=6, memory={"peak_bytes": 1000 + day})
    return run(given, name=f"night{day}", start=f"2026-01-{day:02}T00:00:00+00:00", **changed)


def points(found: dict[str, Any], group: int = 0, series: int = 0) -> list[str]:
    return [point["run"] for point in found["groups"][group]["series"][series]["points"]]


def test_a_series_is_in_the_order_of_time() -> None:
    found = history([at(3, 2), at(1), at(2, 1.5)], "speedup")
    (group,) = found["groups"]
    (series,) = group["series"]  # vanilla's speedup is 1 by definition
    assert series["method"] == "fast"
    assert points(found) == ["night1", "night2", "night3"]
    values = [point["point"] for point in series["points"]]
    assert values[1] == pytest.approx(values[0] / 1.5)
    assert series["points"][0]["low"] <= values[0] <= series["points"][0]["high"]


@pytest.mark.parametrize(
    "other",
    [
        {"target__dtype": "bfloat16"},
        {"target__files": {"model.safetensors": "12"}},
        {"config__temperature": 0.7},
        {"config__max_new_tokens": 9},
        {"tasks": [{"name": "chat", "sha256": "zz", "questions": 6}]},
    ],
)
def test_what_is_not_the_same_stands_apart(other: dict[str, Any]) -> None:
    found = history([at(1), at(2, **other), at(3)], "tau")
    assert [points(found, group) for group in (0, 1)] == [["night1", "night3"], ["night2"]]


def test_engines_stand_apart() -> None:
    """Two engines' runs of one method are no course of one thing; versions of one engine are."""
    served = {"name": "vllm", "version": "0.8.5", "attached": True}
    newer, other = served | {"version": "0.9.1"}, served | {"name": "sglang"}
    runs = [at(1), at(2, engine=served), at(3, engine=other), at(4, engine=newer), at(5)]
    found = history(runs, "tau")
    assert [group["engine"] for group in found["groups"]] == ["specbench/native", "vllm", "sglang"]
    assert [points(found, group) for group in (0, 1, 2)] == [
        ["night1", "night5"],
        ["night2", "night4"],
        ["night3"],
    ]
    versions = [point["engine_version"] for point in found["groups"][1]["series"][0]["points"]]
    assert versions == ["0.8.5", "0.9.1"]
    heads = [line for line in terminal(found).splitlines() if line.startswith("tiny")]
    assert [head.split(":")[0] for head in heads] == [
        "tiny float32",
        "tiny float32 on vllm",
        "tiny float32 on sglang",
    ]
    rows = list(csv.DictReader(io.StringIO(str(FORMATS["csv"](found)))))
    assert [(row["engine"], row["engine_version"]) for row in rows][2:4] == [
        ("vllm", "0.8.5"),
        ("vllm", "0.9.1"),
    ]


def test_machines_stand_apart_where_they_matter() -> None:
    runs = [at(1), at(2, machine_fingerprint="m2")]
    assert len(history(runs, "speedup")["groups"]) == 1
    assert history(runs, "speedup")["groups"][0]["machine"] is None
    assert len(history(runs, "tokens_per_s")["groups"]) == 2
    assert [s["method"] for s in history(runs, "memory")["groups"][0]["series"]] == ["vanilla", "fast"]


def test_sparkline() -> None:
    assert sparkline([1, 2, 3]) == "▁▅█"
    assert sparkline([2, 2]) == "▄▄"


def test_names_stay_text() -> None:
    given = trials(questions=6, tasks=("chat",))
    for t in given:
        t.method = NASTY if t.method == "fast" else t.method
    found = history([run(given, name=NASTY, target__name=NASTY)], "speedup")
    assert "\x1b" not in terminal(found)
    text = markdown(found)
    assert "<script" not in text
    assert not re.search(r"(?<!\\)\]\(javascript", text)
    assert "\n# head" not in text


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("history") / "results"
    for day, slower in ((1, 1.0), (2, 1.2)):
        start = f"2026-01-{day:02}T00:00:00+00:00"
        write_run(folder / f"night{day}", trials(questions=6, slower=slower), start=start)
    (folder / "broken").mkdir()
    (folder / "broken" / "manifest.json").write_text("{")
    return folder


def call(results: Path, *words: Any) -> Any:
    return specbench("history", *words, "--results", results)


def test_the_command(results: Path) -> None:
    result = call(results, "speedup")
    assert result.code == 0
    assert "█▁" in result.out
    assert "night1" in result.out
    assert "2026-01-02" in result.out
    assert "left out" in result.err
    assert "broken" in result.err
    assert len(json.loads(call(results, "speedup", "--json").out)["groups"]) == 1
    assert "night1" not in call(results, "tau", "night2").out


def test_formats(results: Path, tmp_path: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(call(results, "tau", "--format", "csv").out)))
    assert [row["run"] for row in rows] == ["night1", "night2"]
    assert float(rows[0]["point"]) == pytest.approx(3)
    for form, head in (("svg", b"<?xml"), ("png", b"\x89PNG")):
        files = [tmp_path / f"{number}.{form}" for number in (1, 2)]
        for file in files:
            assert call(results, "speedup", "--format", form, "--output", file).code == 0
        assert files[0].read_bytes().startswith(head)
        assert files[0].read_bytes() == files[1].read_bytes()
    assert "fast" in files[0].with_name("1.svg").read_text()


@pytest.mark.parametrize("name", ["x" * 400, "W" * 400, "long-name " * 200])
def test_a_figure_of_long_names_is_laid_out(name: str) -> None:
    given = trials(questions=6)
    for t in given:
        t.method = name if t.method == "fast" else t.method
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FORMATS["svg"](history([run(given, name=name, start=name, target__name=name)], "speedup"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("speed",), "there is no history of speed"),
        (("tau", "--format", "gif"), "--format gif: no such format"),
        (("tau", "--output", "x"), "--output needs a --format"),
        (("tau", "--format", "png"), "PNG is no text"),
        (("memory",), "has memory"),
        (("tau", "--method", "none"), "has tau of none"),
        (("tau", "nowhere"), "no run 'nowhere'"),
    ],
)
def test_refusals(results: Path, words: tuple[str, ...], said: str) -> None:
    result = call(results, *words)
    assert result.code == 2
    assert said in result.err
