"""A run that was cut short goes on where it stopped: killed, interrupted, truncated, out of time."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_folder import Workplace, write_task

SLOW = """
import os, time
from specbench.decoding.draft import Drafter

class Mine(Drafter):
    def begin(self, prompts):
        time.sleep(float(os.environ.get("NAP", 0)))
"""
QUESTIONS = [[f"question number {number}"] for number in range(6)]
TWO = ("--method", "prompt-lookup")


@pytest.fixture(scope="module")
def place(make_place: Any) -> Workplace:
    """A place with a whole run `r` of six blocks of two rows."""
    made = make_place("resume")
    write_task(made.task, QUESTIONS)
    assert made.run(*TWO).code == 0
    assert len(made.rows()) == 12
    return made


def copy(place: Workplace, name: str, keep: int | None = None) -> Path:
    """Run `r` under another name, its file of trials cut after `keep` bytes."""
    shutil.copytree(place.results / "r", place.results / name)
    file = place.trials_file(name)
    if keep is not None:
        os.truncate(file, keep)
    manifest = place.manifest(name) | {"name": name, "status": "running", "end": None}
    (place.results / name / "manifest.json").write_text(json.dumps(manifest))
    return file


def keys(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(r["task"], r["question"], r["turn"], r["method"], r["batch_size"], r["repeat"]) for r in rows]


# -- cut files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "offset", "kept_blocks", "warned"),
    [
        (0, 0, 0, False),  # no line at all
        (0, 1, 0, True),  # the first byte of the first line
        (5, 40, 2, True),  # in the middle of a line, after one line of its block
        (5, -1, 2, True),  # all of a line but its end
        (5, 0, 2, True),  # after one line of the block, at its end
        (6, 0, 3, False),  # between two blocks
        (6, 2, 3, True),  # a few bytes into the first line of a block
        (11, -1, 5, True),  # the very last byte
    ],
)
def test_truncated_anywhere(
    place: Workplace, request: pytest.FixtureRequest, line: int, offset: int, kept_blocks: int, warned: bool
) -> None:
    """The file ends `offset` bytes after the start of line `line` (negative: before the end of it)."""
    whole = place.trials_file().read_bytes()
    lines = whole.splitlines(keepends=True)
    start = sum(map(len, lines[: line + (offset < 0)]))
    name = f"cut{line}_{offset}"
    file = copy(place, name, start + offset)
    result = place.run(*TWO, name=name)
    assert result.code == 0, result.err
    kept = b"".join(lines[: 2 * kept_blocks])
    assert file.read_bytes().startswith(kept)  # to the byte
    assert keys(place.rows(name)) == keys(place.rows("r"))
    assert ("is left out" in result.err) == warned
    assert place.manifest(name)["status"] == "complete"
    assert len(place.manifest(name)["resumed"]) == 1
    assert f"{6 - kept_blocks} blocks to measure" in result.err


def test_a_broken_line_in_the_middle_is_refused(place: Workplace) -> None:
    file = copy(place, "broken")
    lines = file.read_bytes().split(b"\n")
    lines[3] = lines[3][:-10]
    file.write_bytes(b"\n".join(lines))
    before = file.read_bytes()
    result = place.run(*TWO, name="broken")
    assert result.code == 2
    assert len(result.error_lines) == 2
    assert "trials.jsonl line 4 is not a trial" in result.err
    assert file.read_bytes() == before


def test_rows_without_a_manifest_are_not_added_to(place: Workplace) -> None:
    copy(place, "orphan")
    (place.results / "orphan" / "manifest.json").unlink()
    result = place.run(*TWO, name="orphan")
    assert (result.code, len(result.error_lines)) == (2, 2)
    assert "holds trials.jsonl but no manifest.json" in result.err
    assert place.run(*TWO, "--fresh", name="orphan").code == 0


def test_a_whole_run_is_shown_again(place: Workplace) -> None:
    before = place.trials_file().read_bytes()
    result = place.run(*TWO)
    assert result.code == 0
    assert "prompt-lookup" in result.out
    assert place.trials_file().read_bytes() == before


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (("--seed", 5), "seed: 0 -> 5"),
        (("--limit", 2), "limit: 0 -> 2"),
        (("--method", "oracle"), "methods: ['prompt-lookup'] -> ['prompt-lookup', 'oracle']"),
    ],
)
def test_another_config_is_refused(place: Workplace, change: tuple[str, Any], difference: str) -> None:
    before = place.trials_file().read_bytes()
    result = place.run(*TWO, *change)
    assert (result.code, len(result.error_lines)) == (2, 2)
    assert difference in result.error_lines[0]
    assert "--fresh" in result.error_lines[1]
    assert place.trials_file().read_bytes() == before


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("target", "with other weights"),
        ("tasks", "with other task files"),
        ("machine_fingerprint", "machine"),
    ],
)
def test_another_target_task_or_machine_is_refused(place: Workplace, what: str, said: str) -> None:
    name = f"other-{what}"
    file = copy(place, name, 0)
    manifest = place.manifest(name) | {what: "another"}
    (place.results / name / "manifest.json").write_text(json.dumps(manifest))
    result = place.run(*TWO, name=name)
    assert (result.code, len(result.error_lines)) == (2, 2)
    assert said in result.error_lines[0]
    assert place.manifest(name) == manifest  # refused before anything was written
    assert file.read_bytes() == b""


def test_fresh_moves_the_old_run_aside(place: Workplace) -> None:
    copy(place, "moved")
    before = place.trials_file("moved").read_bytes()
    result = place.run(*TWO, "--fresh", "--seed", 5, "--limit", 1, name="moved")
    assert result.code == 0
    assert str(place.results / "moved.old1") in result.err
    assert place.trials_file("moved.old1").read_bytes() == before
    assert len(place.rows("moved")) == 2
    assert place.run(*TWO, "--fresh", "--limit", 1, name="moved").code == 0
    assert (place.results / "moved.old2").is_dir()


def test_fresh_keeps_the_old_run_if_the_new_one_cannot_start(place: Workplace) -> None:
    copy(place, "kept")
    assert place.run(*TWO, "--fresh", "--target", "./nowhere", name="kept").code == 2
    assert len(place.rows("kept")) == 12


def test_a_resumed_conversation_goes_on_from_vanillas_answer(place: Workplace, tmp_path: Path) -> None:
    task = write_task(tmp_path / "talk.jsonl", [["first turn", "second turn"]])
    options = ("--task", task, *TWO)
    assert place.run(*options, name="talk").code == 0
    rows = place.rows("talk")
    file = place.trials_file("talk")
    first_block = b"".join(file.read_bytes().splitlines(keepends=True)[:2])
    file.write_bytes(first_block)
    assert place.run(*options, name="talk").code == 0
    again = place.rows("talk")
    assert [r["prompt_tokens"] for r in again] == [r["prompt_tokens"] for r in rows]
    assert [r["output_ids"] for r in again] == [r["output_ids"] for r in rows]


# -- time ----------------------------------------------------------------------------------------------------


def test_a_time_budget_ends_early_and_resumes(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()  # the runner looks at the clock once at first and once before each block
    monkeypatch.setattr("specbench.runner.monotonic", lambda: float(next(seconds)))
    result = place.run(*TWO, "--time-budget", "2.5s", name="budget")
    assert result.code == 0, result.err
    assert "--name budget goes on" in result.err
    rows = place.rows("budget")
    assert place.manifest("budget")["status"] == "time budget"
    assert len(rows) == 4
    assert place.run(*TWO, "--time-budget", "1h", name="budget").code == 0
    assert place.manifest("budget")["status"] == "complete"
    assert place.rows("budget")[:4] == rows
    assert len(place.rows("budget")) == 12


def test_a_time_budget_too_short_for_one_block_is_exit_2(place: Workplace) -> None:
    result = place.run(*TWO, "--time-budget", "0s", name="no-time")
    assert (result.code, len(result.error_lines)) == (2, 2)
    assert "nothing was measured of vanilla, prompt-lookup: no block was finished" in result.error_lines[0]
    assert "more time" in result.error_lines[1]


# -- signals, in a process of its own ------------------------------------------------------------------------


def start(place: Workplace, *args: object, name: str) -> subprocess.Popen[str]:
    """The command with a method so slow that there is time to hit it, begun and two blocks into its run."""
    argv = [sys.executable, "-m", "specbench", *map(str, place.argv(*args, name=name))]
    process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"NAP": "0.4"}
    )
    file = place.trials_file(name)
    wait_for(process, lambda: file.is_file() and file.read_bytes().count(b"\n") >= 4)
    return process


def wait_for(process: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    patience = time.monotonic() + 90
    while not reached():
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < patience, "it did not get there"
        time.sleep(0.05)


def test_kill_9_loses_at_most_the_block_in_flight(place: Workplace) -> None:
    spec = place.plug_in(SLOW, file="kill.py")
    process = start(place, "--method", spec, name="killed")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    before = place.trials_file("killed").read_bytes()
    assert place.manifest("killed")["status"] == "running"
    result = place.run("--method", spec, name="killed")
    assert result.code == 0, result.err
    assert place.trials_file("killed").read_bytes().startswith(before)
    counted = [row for row in place.rows("killed") if row["excluded"] is None]
    assert len(set(keys(counted))) == len(counted) == 12
    assert place.manifest("killed")["status"] == "complete"


def test_ctrl_c_keeps_the_finished_blocks(place: Workplace) -> None:
    spec = place.plug_in(SLOW, file="interrupt.py")
    process = start(place, "--method", spec, "--json", name="interrupted")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "the same --name interrupted resumes" in err
    assert json.loads(out)["runs"][0]["name"] == "interrupted"
    before = place.trials_file("interrupted").read_bytes()
    manifest = place.manifest("interrupted")
    assert manifest["status"] == "interrupted"
    assert manifest["end"] is not None
    assert place.run("--method", spec, name="interrupted").code == 0
    assert place.trials_file("interrupted").read_bytes().startswith(before)
    assert place.manifest("interrupted")["status"] == "complete"


def test_ctrl_c_before_anything_is_measured(place: Workplace) -> None:
    """While a method file is being loaded, which takes its time."""
    spec = place.plug_in(
        "import pathlib, time\npathlib.Path(__file__).with_suffix('.here').touch()\ntime.sleep(60)\n",
        file="early.py",
    )
    argv = [sys.executable, "-m", "specbench", *map(str, place.argv("--method", spec, name="early"))]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(process, (place.path / "early.here").exists)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert not (place.results / "early").exists()


def test_a_terminal_without_greek_letters(place: Workplace) -> None:
    argv = [sys.executable, "-m", "specbench", *map(str, place.argv(*TWO))]  # the whole run, shown again
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=90, env=ascii_only)
    assert done.returncode == 0, done.stderr
    assert "\\u03c4 tokens" in done.stdout


def test_exit_codes_of_the_installed_command(place: Workplace) -> None:
    """Through a shell's eyes: the entry point's own exit code and two lines."""
    command = Path(sys.executable).with_name("specbench")
    done = subprocess.run([command, "run", "--method", "vanila"], capture_output=True, text=True, timeout=90)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 2


def test_an_edited_method_file_is_another_method(place: Workplace) -> None:
    spec = place.plug_in(SLOW, file="edited.py")
    assert place.run("--method", spec, name="edited").code == 0
    assert place.run("--method", spec, name="edited").code == 0
    place.plug_in(SLOW + "\n# mended\n", file="edited.py")
    result = place.run("--method", spec, name="edited")
    assert result.code == 2
    assert "was begun with another version of a method's file" in result.err
