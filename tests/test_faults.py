"""What goes wrong: bad input is two lines and exit 2, one fault is a recorded row, nothing is lost."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tiny_folder import CONTEXT, DRAFTER, Result, Workplace, save_folder, write_task

from specbench import store
from specbench.measure.cpu import CpuProbe


@pytest.fixture(scope="module")
def place(make_place: Any) -> Workplace:
    return make_place("faults")


def refused(result: Result, *wanted: str, code: int = 2) -> None:
    """One line saying what, one saying what to do, no traceback."""
    assert result.code == code, result.err
    what, hint = result.error_lines
    assert what.startswith("error: ")
    assert hint.startswith("  hint: ")
    assert "Traceback" not in result.err
    for words in wanted:
        assert words in what + hint, (words, result.error_lines)


# -- bad input -----------------------------------------------------------------------------------------------


def test_more_threads_than_cores_are_noted(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbench.measure.cpu.usable_cpus", lambda: {0, 1})
    note = "note: --threads 3 on 2 usable cores: they will wait for each other"
    result = place.run("--method", "prompt-lookup", "--threads", 3, "--dry-run", name="threads")
    assert result.code == 0, result.err
    assert note in result.err
    assert "usable cores" not in place.run("--threads", 2, "--dry-run", name="threads").err


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["--target", "llama-8c"], ["unknown target 'llama-8c'", "llama-8b"]),
        (["--target", "./no/such"], ["no such folder: ./no/such"]),
        (["--method", "prompt-lokup"], ["unknown method 'prompt-lokup'", "did you mean prompt-lookup?"]),
        (["--method", "prompt-lookup:n=3"], ["no option 'n'", "k, ngram, partial"]),
        (["--method", "vanilla:k=3"], ["no option 'k'", "none"]),
        (["--method", "prompt-lookup:k=many"], ["k=many", "a whole number"]),
        (["--method", "prompt-lookup:k=0"], ["k must be at least 1"]),
        (["--method", "prompt-lookup:k"], ["is not key=value"]),
        (["--method", "oracle", "--method", "oracle"], ["oracle is given twice"]),
        (["--method", "draft-model"], ["needs a draft model", "--draft REF"]),
        (["--method", "draft-model:draft=nosuch"], ["unknown draft 'nosuch'"]),
        (["--method", "draft-model:draft=random:nosuch"], ["unknown draft 'nosuch'"]),
        (["--method", "./nowhere.py::Mine"], ["nowhere.py does not exist"]),
        (["--method", "hf-generate", "--batch-size", "2"], ["hf-generate runs at batch size 1 only"]),
        (["--task", "chatt"], ["unknown task 'chatt'", "chat"]),
        (["--task", "./none.jsonl"], ["none.jsonl: there is no such file"]),
        (["--batch-size", "1,x"], ["--batch-size 1,x"]),
        (["--batch-size", "0"], ["--batch-size 0"]),
        (["--limit", "-1"], ["--limit -1 is negative"]),
        (["--max-new-tokens", "0"], ["--max-new-tokens 0"]),
        (["--temperature", "-1"], ["--temperature -1"]),
        (["--temperature", "inf"], ["--temperature inf"]),
        (["--temperature", "1", "--method", "oracle"], ["greedy answer only"]),
        (["--top-p", "0"], ["--top-p 0"]),
        (["--threads", "some"], ["--threads some"]),
        (["--time-budget", "soon"], ["--time-budget soon is not a time"]),
        (["--time-budget", "nan"], ["--time-budget nan is not a time"]),
        (["--engine", "vllm"], ["--engine vllm"]),
        (["--dtype", "int3"], ["unknown dtype 'int3'"]),
        (["--device", "abacus"], ["unknown device 'abacus'"]),
        (["--template-arg", "x"], ["--template-arg 'x' is not K=V"]),
        (["--config", "./none.json"], ["none.json", "No such file"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("--") else "",
)
def test_refused_with_two_lines(place: Workplace, args: list[str], wanted: list[str]) -> None:
    result = place.run("--method", "prompt-lookup", *args, "--json", name="refused")
    refused(result, *wanted)
    assert result.out == ""
    assert not (place.results / "refused").exists()


def test_names_are_not_paths(place: Workplace) -> None:
    for name in ("a/b", "..", "/tmp/x"):
        refused(place.run("--method", "prompt-lookup", name=name), "is a path")


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"colour": 1}', "unknown settings: colour"),
        ('{"limit": "three"}', 'limit="three"'),
        ('{"methods": "oracle"}', 'methods="oracle"'),
        ('{"temperature": true}', "temperature=true"),
        ('{"target": null}', "target=null"),
    ],
)
def test_config_files_that_are_none(place: Workplace, tmp_path: Path, config: str, wanted: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(config)
    refused(place.run("--config", file, name="config"), wanted)


def test_a_malformed_row_is_named_by_its_line(place: Workplace, tmp_path: Path) -> None:
    task = write_task(tmp_path / "broken.jsonl", [["one"], ["two"], ["three"]])
    lines = task.read_text().splitlines()
    task.write_text("\n".join([lines[0], lines[1][:-4], lines[2]]))
    refused(place.run("--task", task, name="row"), "broken.jsonl, line 2: not JSON")


def test_a_draft_with_another_tokenizer(place: Workplace, tmp_path: Path) -> None:
    other = save_folder(tmp_path / "other", alphabet="".join(chr(c) for c in range(126, 31, -1)) + "\n")
    result = place.run("--method", "draft-model", "--draft", other, name="draft")
    refused(result, "another vocabulary", "same tokenizer")


def test_a_folder_that_is_no_model(place: Workplace, tmp_path: Path) -> None:
    refused(place.run("--target", tmp_path, "--method", "prompt-lookup", name="empty"), "has no config.json")


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("1 +\n", "does not load: SyntaxError"),
        ("import no_such_thing\n", "does not load: ModuleNotFoundError"),
        ("class Other: ...\n", "has no class 'Mine'"),
        ("class Mine: ...\n", "is not a Drafter or a Method"),
        (
            DRAFTER + "class Mine(Drafter):\n    def __init__(self, target):\n        1 / 0\n",
            "ZeroDivisionError",
        ),
        (DRAFTER + "class Mine(Drafter):\n    def __init__(self, target, deep): ...\n", "deep"),
    ],
)
def test_method_files_that_do_not_work(place: Workplace, tmp_path: Path, source: str, wanted: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    refused(place.run("--method", f"{file}::Mine", name="file"), wanted)


# -- the disk ------------------------------------------------------------------------------------------------


def test_an_output_folder_that_cannot_be_written(place: Workplace, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with mock.patch("specbench.build.open_target") as loading:
        result = place.run("--output", tmp_path / "file" / "results", "--method", "prompt-lookup")
    refused(result, "cannot write to", "--output")
    assert not loading.called  # known before anything is loaded


def test_a_full_disk_keeps_what_is_measured(fresh: Workplace) -> None:
    real, blocks = store._sync, []

    def full(file: Any) -> None:
        real(file)
        if file.name.endswith("trials.jsonl"):
            blocks.append(1)
        if len(blocks) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    with mock.patch.object(store, "_sync", full):
        refused(fresh.run("--method", "prompt-lookup"), "No space left on device", "--name r")
    before = fresh.trials_file().read_bytes()
    assert {row["block"] for row in fresh.rows()} >= {0, 1}
    assert fresh.run("--method", "prompt-lookup").code == 0
    assert fresh.trials_file().read_bytes().startswith(before)
    assert fresh.manifest()["status"] == "complete"


def test_a_report_that_cannot_be_written_is_no_failure(fresh: Workplace) -> None:
    (fresh.path / "reports").write_text("in the way")
    result = fresh.run("--method", "prompt-lookup")
    assert result.code == 0
    assert "no report: cannot write" in result.err
    assert len(fresh.rows()) == 8


# -- prompts that cannot be run ------------------------------------------------------------------------------


def test_unusable_prompts_are_recorded_and_the_run_goes_on(fresh: Workplace, tmp_path: Path) -> None:
    task = write_task(tmp_path / "mixed.jsonl", [[" "], ["fine"], ["x" * CONTEXT], ["first", "", "third"]])
    options = ("--task", task, "--method", "prompt-lookup", "--batch-size", "1,2")
    result = fresh.run(*options)
    assert result.code == 0
    errors = {(row["question"], row["turn"], row["error"]) for row in fresh.rows() if row["error"]}
    too_long = f"prompt too long: {CONTEXT + 4} tokens + 12 new exceed the context of {CONTEXT}"
    unasked = "an earlier turn has no answer of vanilla's to continue from"
    assert errors == {
        ("q1", 0, "empty prompt"),
        ("q3", 0, too_long),
        ("q4", 1, "empty prompt"),
        ("q4", 2, unasked),
    }
    assert {row["finish"] for row in fresh.rows() if row["error"]} == {"error"}
    good = {(r["question"], r["turn"], r["method"], r["batch_size"]) for r in fresh.rows() if not r["error"]}
    wanted = {("q2", 0), ("q4", 0)}
    assert good == {(*q, m, size) for q in wanted for m in ("vanilla", "prompt-lookup") for size in (1, 2)}
    assert "16 of 24 trials failed" in result.err
    assert fresh.run(*options, "--strict").code == 1


def test_nothing_measured_is_exit_2(fresh: Workplace, tmp_path: Path) -> None:
    task = write_task(tmp_path / "long.jsonl", [["x" * CONTEXT]])
    refused(
        fresh.run("--task", task, "--method", "prompt-lookup"),
        "nothing was measured of vanilla, prompt-lookup",
    )
    assert len(fresh.rows()) == 2
    assert fresh.manifest()["status"] == "complete"


# -- a machine that is not quiet -----------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["contended", "throttled", "captured"])
def test_a_disturbed_block_is_measured_once_more(fresh: Workplace, reason: str) -> None:
    """The third trial of the run is disturbed, and so is every trial of the repeated block."""
    real, calls = CpuProbe.stop, []

    def stop(self: CpuProbe, *args: Any) -> Any:
        calls.append(1)
        disturbed = reason == "contended" and 3 <= len(calls) <= 6
        return replace(real(self, *args), contended=disturbed)

    def throttled(_window: Any) -> bool:
        return reason == "throttled" and 3 <= len(calls) <= 6

    def made() -> int:
        """One more pass by the end of trials 3 to 6 than at their beginning."""
        return min(max(len(calls), 2), 6) if reason == "captured" else 0

    with (
        mock.patch.object(CpuProbe, "stop", stop),
        mock.patch("specbench.runner.throttled", throttled),
        mock.patch("specbench.trial.made", made),
    ):
        result = fresh.run("--method", "prompt-lookup", "--json")
    assert result.code == 0, result.err
    rows = [row for row in fresh.rows() if row["block"] == 1]
    marks = [(row["attempt"], row["method"], row["excluded"]) for row in rows]
    labels = ("vanilla", "prompt-lookup")
    assert marks == [(0, label, reason) for label in labels] + [(1, label, None) for label in labels]
    assert {row["attempt"] for row in fresh.rows() if row["block"] != 1} == {0}
    if reason == "contended":
        assert [row["contended"] for row in rows if row["attempt"] == 1] == [True, True]
    vanilla = next(r for r in json.loads(result.out)["rows"] if r["task"] == "overall")
    assert (vanilla["trials"], vanilla["excluded"]) == (5, 1)
    counted = [row for row in fresh.rows() if row["method"] == "vanilla" and row["excluded"] is None]
    assert vanilla["tokens"] == sum(row["output_tokens"] for row in counted)
