"""Runs of several engines in one table: which belong together, and what is said of each."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from report_run import hostile
from rich.console import Console
from trial_factory import FakeRun, blocks
from typer.testing import CliRunner

from specbench.analysis.comparable import other_model
from specbench.analysis.summary import summarise
from specbench.cli import report as command
from specbench.report import FORMATS, figures, words
from specbench.report.engines import tables
from specbench.report.terminal import render
from specbench.store import RunStore, Trial

TARGET = {"name": "tiny", "dtype": "float32", "quantization": None, "files": {"model.safetensors": "aa"}}
PACKED = {
    "name": "tiny",
    "dtype": "q4_1",
    "quantization": "q4_1",
    "parameters": 9,
    "files": {"tiny.gguf": "bb"},
}
MACHINE = {"cpu": {"model": "CPU"}}
TASKS = [{"name": "chat", "sha256": "c1", "questions": 6}]


def run(name: str, engine: str | None, seconds: float = 5.0, **fields: Any) -> FakeRun:
    """Six questions, `fast` by default twice as fast as vanilla; an engine's counts are of its answers."""
    fast = {
        "seconds": seconds - 0.5,
        "batch_s": seconds,
        "total_s": seconds,
        "accepted": [1] * 5,
        "lossless": True,
    }
    trials = blocks(6, {"vanilla": {"seconds": 9.5, "batch_s": 10.0, "total_s": 10.0}, "fast": fast})
    for number, one in enumerate(trials):
        one.output_ids = [1, 2]
        if one.method == "fast":
            one.agreement = {"same": number != 1, "first_difference": None, "logit_gap": None}
        if engine is not None:
            one.concurrency = 1
            one.acceptance = {"source": "response", "scope": "request"}
    known = {
        "name": name,
        "target": TARGET if engine is None else PACKED,
        "config": {"temperature": 0},
        "tasks": TASKS,
        "machine": MACHINE,
        "machine_fingerprint": "m1",
        "versions": {"specbench-llm": "9.9"},
    }
    if engine is not None:
        known["engine"] = {"name": engine, "version": "b7", "attached": False}
    return FakeRun(trials, known | fields)


def native() -> FakeRun:
    return run("ours", None, 4.0)


def served() -> FakeRun:
    return run("theirs", "llama.cpp")


def groups(*runs: FakeRun) -> list[list[str]]:
    return [group["runs"] for group in summarise(runs)["engines"]]


def warned(*runs: FakeRun) -> list[str]:
    return [w["message"] for w in summarise(runs)["warnings"] if w["code"] == "engines"]


def test_a_precision_that_was_left_to_the_engine() -> None:
    (table,) = tables(summarise([native(), run("theirs", "vllm", target=TARGET | {"dtype": "auto"})]))
    assert (
        "the weights are run at different precisions: ours float32, theirs the engine's choice" in table.notes
    )


# -- which belong together -----------------------------------------------------------------------------------


def test_engines_of_one_target_and_task_stand_in_one_table() -> None:
    third = run("third", "vllm")
    assert groups(native(), served(), third) == [["ours", "theirs", "third"]]
    assert groups(served(), run("again", "llama.cpp")) == [], "one engine is no table"
    assert groups(native()) == []
    other = run("other", "vllm", target=PACKED | {"name": "large"})
    assert groups(native(), other, served()) == [["ours", "theirs"]]
    assert warned(native(), other) == [], "another target is no surprise"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"config": {"temperature": 0.5}}, "temperature 0 and 0.5"),
        ({"tasks": [{"name": "code"}]}, "tasks chat and code"),
        ({"tasks": [TASKS[0] | {"sha256": "c2"}]}, "other prompts of chat"),
        ({"chat_template": "t2"}, "other prompts of chat"),
    ],
)
def test_what_keeps_them_apart_is_said(fields: dict[str, Any], said: str) -> None:
    other = run("theirs", "llama.cpp", **fields)
    assert groups(native(), other) == []
    (message,) = warned(native(), other)
    assert message.startswith("another engine on the same target as ours, but in no table with it: ")
    assert said in message


def test_a_format_is_no_other_model_and_other_weights_are() -> None:
    packed, whole = {"target": PACKED}, {"target": TARGET}
    assert other_model(whole, packed) == []
    assert other_model(packed, {"target": PACKED | {"files": {"tiny.gguf": "cc"}}}) == ["hash of tiny.gguf"]
    assert other_model(whole, {"target": TARGET | {"revision": "r", "name": "x"}}) == ["name tiny and x"]


# -- what the table says -------------------------------------------------------------------------------------


def printed(runs: list[FakeRun], width: int = 120) -> str:
    out = io.StringIO()
    Console(width=width, file=out, force_terminal=False).print(render(summarise(runs), width))
    return out.getvalue()


def test_each_engine_against_its_own_vanilla() -> None:
    (table,) = tables(summarise([native(), served()]))
    assert table.title == "Engines on tiny (chat)"
    assert [names for names, _ in table.lines] == [
        ["specbench/native 9.9", "vanilla"],
        ["specbench/native 9.9", "fast"],
        ["llama.cpp b7", "vanilla"],
        ["llama.cpp b7", "fast"],
    ]
    cells = {column.title: [column.cell(row) for _, row in table.lines] for column in table.columns}
    assert [cell.partition("x")[0] for cell in cells["speedup over own vanilla"]] == [
        "1.00",
        "2.50",
        "1.00",
        "2.00",
    ]
    assert cells["tok/s"] == ["1.1", "2.8", "1.1", "2.2"]
    assert cells["output = own vanilla's"] == ["–", "5/6", "–", "5/6"]
    assert cells["compared by"] == ["–", "ids", "–", "ids"]
    assert cells["promise"] == ["–", "lossless", "–", "lossless"]
    assert cells["counted by"] == ["–", "–", "response, by request", "response, by request"]
    assert "the weights are run at different precisions: ours float32, theirs q4_1" in table.notes
    assert any("not with another engine's" in note for note in table.notes)


def test_texts_are_counted_beside_ids() -> None:
    one = served()
    for trial in one.trials:
        if trial.agreement is not None:
            trial.agreement["same_text"] = True
    row = summarise([one])["rows"][-1]
    assert (row["identical"], row["compared"], row["compared_by"]) == (5, 6, "ids")
    assert words.compared_by(row) == "ids (texts 6/6)"
    for trial in one.trials:
        trial.output_ids = []
    row = summarise([one])["rows"][-1]
    assert (row["compared_by"], row["identical_text"], row["compared_text"]) == ("text", 5, 6)
    assert words.compared_by(row) == "text"


def test_tokens_per_second_of_two_machines_share_no_column() -> None:
    other = run("theirs", "llama.cpp", machine={"cpu": {"model": "Other"}}, machine_fingerprint="m2")
    summary = summarise([native(), other])
    (table,) = tables(summary)
    rates = [column for column in table.columns if column.field == "tokens_per_s"]
    assert [column.title for column in rates] == ["tok/s on machine 1", "tok/s on machine 2"]
    assert [[column.cell(row) for column in rates] for _, row in table.lines] == [
        ["1.1", "–"],
        ["2.8", "–"],
        ["–", "1.1"],
        ["–", "2.2"],
    ]
    assert "machine 2 (theirs): Other" in table.notes
    unknown = [run(name, name, machine_fingerprint=None) for name in ("a", "b")]
    (group,) = summarise(unknown)["engines"]
    assert len(group["machines"]) == 2, "who does not say which machine it was stands alone"


def test_it_stands_in_every_format() -> None:
    runs = [native(), served()]
    summary = json.loads(json.dumps(summarise(runs)))  # from the summary alone
    markdown: Any = FORMATS["md"].render(summary, [])
    assert "## Engines on tiny (chat)" in markdown
    assert "| llama.cpp b7 | fast | 2.00x" in markdown
    html: Any = FORMATS["html"].render(summary, runs)
    assert '<a href="#engines">' in html
    assert "Engines on tiny (chat)" in html
    assert "specbench/native 9.9" in html
    lines = list(csv.DictReader(io.StringIO(str(FORMATS["csv"].render(summary, [])))))
    assert {(line["engine"], line["engine_version"], line["engine_table"]) for line in lines} == {
        ("specbench/native", "9.9", "1"),
        ("llama.cpp", "b7", "1"),
    }
    text = printed(runs, 140)
    assert "Engines on tiny (chat)" in text
    assert "response, by request" in text
    assert "Engines on" not in printed(runs[:1])


def test_the_command_prints_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    for one in (native(), served()):
        store = RunStore(tmp_path / "results" / one.manifest["name"])
        store.write_manifest(one.manifest | {"methods": [{"label": "vanilla"}, {"label": "fast"}]})
        store.append(one.trials)
    options = ["report", "ours", "theirs", "--format", "csv", "--figures", "svg"]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, done.output
    assert "Engines on tiny (chat)" in done.output
    assert "llama.cpp b7" in done.output
    assert done.output.splitlines()[-1].startswith("reports/ours+1/figures/")
    to_stdout = CliRunner().invoke(app, ["report", "ours", "theirs", "--format", "csv", "--output", "-"])
    assert to_stdout.output.startswith("run,method,"), "nothing but the format"
    assert "Engines on" not in CliRunner().invoke(app, ["report", "ours", "--format", "csv"]).output


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_terminal_fits_its_width(width: int) -> None:
    assert max(map(len, printed([native(), served()], width).splitlines())) <= width


def test_hostile_names_stay_text() -> None:
    one, other = hostile(), hostile()
    other.manifest |= {"engine": {"name": one.manifest["name"] + "2", "version": "<b>", "attached": True}}
    other.manifest["name"] += "2"
    summary = summarise([one, other])
    assert len(summary["engines"]) == 1
    html: Any = FORMATS["html"].render(summary, [one, other])
    assert "<script>window.harmed" not in html
    assert "\x1b" not in printed([one, other])


def swept(one: FakeRun, axis: str) -> FakeRun:
    trials: list[Trial] = []
    for size in (1, 2, 4):
        setting = {"batch_size": 1, "concurrency": None} | {axis: size}
        trials += [replace(t, **setting, batch=f"{t.question}-{size}") for t in one.trials]
    return FakeRun(trials, one.manifest)


def test_batch_sizes_and_concurrencies_share_an_axis() -> None:
    summary = summarise([swept(native(), "batch_size"), swept(served(), "concurrency")])
    (table,) = tables(summary)
    assert table.heads == ["engine", "load", "method"]
    assert [names[1] for names, _ in table.lines[4:8:2]] == ["batch size 2", "concurrency 2"]
    with figures.style.styled():
        said = {d.drawing.name: d.said for d in figures.draw_engines(table)}
    assert list(said) == ["engines-speedup", "engines-throughput"]
    assert [part.partition(":")[0] for part in said["engines-speedup"].split("; ")] == [
        "specbench/native 9.9 fast",
        "llama.cpp b7 fast",
    ]
    assert "llama.cpp b7 vanilla: 1 1.1 tok/s, 2 " in said["engines-throughput"]
    text = " ".join(printed([swept(native(), "batch_size"), swept(served(), "concurrency")]).split())
    assert "ours: fast pays at every batch size measured" in text
    assert "theirs: fast pays at every concurrency measured" in text


@pytest.mark.parametrize(
    ("versions", "labels"),
    [
        (("0.8.5", "0.9.1"), ["specbench/native 9.9 fast", "vllm 0.8.5 fast", "vllm 0.9.1 fast"]),
        (("b7", "b7"), ["specbench/native 9.9 ours fast", "vllm b7 a fast", "vllm b7 b fast"]),
    ],
)
def test_versions_and_runs_of_an_engine_are_lines_of_their_own(
    versions: tuple[str, str], labels: list[str]
) -> None:
    both = [run(name, "vllm") for name in "ab"]
    for one, version in zip(both, versions, strict=True):
        one.manifest["engine"]["version"] = version
    served_ones = [swept(one, "concurrency") for one in both]
    (table,) = tables(summarise([swept(native(), "batch_size"), *served_ones]))
    with figures.style.styled():
        said = {d.drawing.name: d.said for d in figures.draw_engines(table)}["engines-speedup"]
    lines = [part.partition(": ") for part in said.split("; ")]
    assert [label for label, _, _ in lines] == labels
    assert all([point.split()[0] for point in points.split("], ")] == ["1", "2", "4"] for *_, points in lines)


# -- both tokens-per-round figures ---------------------------------------------------------------------------


def test_tau_of_drafted_rounds_stands_beside_tau_where_it_differs() -> None:
    """Half of the rounds have no draft: 1.5 tokens a round in all, 2 in those that have one."""
    one = native()
    for trial in one.trials:
        if trial.method == "fast":
            rounds = trial.rounds
            rounds.accepted, rounds.emitted = [1, 0] * 3, [2, 1] * 3
            rounds.drafted, rounds.depth = [4, 0] * 3, [4, 0] * 3
            rounds.draft_s = rounds.verify_s = None
            rounds.round_s = [0.5] * 6
    row = summarise([one])["rows"][-1]
    assert row["tau"]["point"] == pytest.approx(1.5)
    assert row["tau_drafted"] == 2.0
    markdown: Any = FORMATS["md"].render(summarise([one]), [])
    head = next(line for line in markdown.splitlines() if line.startswith("| method"))
    assert "τ (tokens/round, bonus included) | τ of rounds with a draft (bonus included) |" in head
    html: Any = FORMATS["html"].render(summarise([one]), [])
    overall = html[html.index('id="overall1"') : html.index("By task")]
    assert "τ of rounds with a draft" in overall
    text = printed([one])
    assert all(word in text for word in ("with a", "bonus", "2.00"))
    board: Any = FORMATS["leaderboard"].render(summarise([one]), [])
    assert "(2.00 where there was a draft)" in board


def test_where_both_are_the_same_there_is_one() -> None:
    markdown: Any = FORMATS["md"].render(summarise([native()]), [])
    head = next(line for line in markdown.splitlines() if line.startswith("| method"))
    assert "τ (tokens/round, bonus included)" in head
    assert "with a draft" not in head
    assert "with a" not in printed([native()])
