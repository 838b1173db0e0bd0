"""`ls`, `--dry-run`, `--help` and `--version`: what needs no model, fast and readable anywhere."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_folder import Workplace, specbench

from specbench.cli import COMMANDS

HEAVY = ("torch", "transformers", "pandas", "scipy", "matplotlib", "datasets", "numpy")
FIRST = {"targets": "llama-8b", "methods": "prompt-lookup", "tasks": "translation"}


@pytest.fixture(scope="module")
def place(make_place: Any) -> Workplace:
    made = make_place("commands")
    assert made.run("--method", "prompt-lookup:k=3", "--limit", 1, name="a-run").code == 0
    return made


# -- ls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", FIRST)
def test_ls(what: str) -> None:
    rows = json.loads(specbench("ls", what, "--json").out)
    names = [next(iter(row.values())) for row in rows]
    assert FIRST[what] in names
    assert len(names) == len(set(names))
    lines = specbench("ls", what).out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == names  # a row is one line, its name whole
    for row, line in zip(rows, lines[2:], strict=True):
        assert all(str(value) in line for value in row.values() if value is not None)


def test_ls_runs(place: Workplace) -> None:
    (row,) = json.loads(specbench("ls", "runs", "--output", place.results, "--json").out)
    assert row["run"] == "a-run"
    assert row["methods"] == "vanilla, prompt-lookup:k=3"
    assert (row["trials"], row["status"]) == (4, "complete")
    assert "a-run" in specbench("ls", "runs", "--output", place.results).out


def test_ls_runs_with_a_damaged_one(place: Workplace, tmp_path: Path) -> None:
    for name, manifest in (("bad", "{"), ("good", '{"status": "complete"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(manifest)
    result = specbench("ls", "runs", "--output", tmp_path)
    assert result.code == 0
    assert "unreadable" in next(line for line in result.out.splitlines() if line.startswith("bad"))
    assert "complete" in next(line for line in result.out.splitlines() if line.startswith("good"))


def test_ls_runs_prints_no_hidden_characters(tmp_path: Path) -> None:
    nasty = "x\x1b[31m\u202e"
    (tmp_path / nasty).mkdir()
    manifest = {"target": {"name": nasty}, "methods": [{"label": nasty}], "status": nasty, "start": nasty}
    (tmp_path / nasty / "manifest.json").write_text(json.dumps(manifest))
    out = specbench("ls", "runs", "--output", tmp_path).out
    assert out.count("x\\x1b[31m\\u202e") == 5
    assert not set("\x1b\u202e") & set(out)


def test_ls_runs_where_there_is_none(tmp_path: Path) -> None:
    assert specbench("ls", "runs", "--output", tmp_path / "x").out == f"no runs in {tmp_path / 'x'}\n"
    assert specbench("ls", "runs", "--output", tmp_path / "x", "--json").out == "[]\n"


@pytest.mark.parametrize("columns", [80, 130])
def test_ls_on_a_terminal_cuts_no_word(columns: int) -> None:
    shown = on_a_terminal(["ls", "targets"], columns)
    rows = json.loads(specbench("ls", "targets", "--json").out)
    words = {word for row in rows for value in row.values() for word in str(value).split()}
    assert words <= set(shown.split())


def on_a_terminal(args: list[str], columns: int) -> str:
    """What the command prints on a terminal that many columns wide."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(COLUMNS=str(columns), TERM="dumb", NO_COLOR="1")
        os.execv(sys.executable, [sys.executable, "-m", "specbench", *args])
    shown = b""
    while True:
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # the other side is gone
            break
        if not piece:
            break
        shown += piece
    os.waitpid(pid, 0)
    return shown.decode()


# -- dry run -------------------------------------------------------------------------------------------------


def test_dry_run_loads_nothing(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    def loading(*_args: object) -> None:
        raise AssertionError("a dry run loads no weights")

    monkeypatch.setattr("specbench.build.open_target", loading)
    options = ("--method", "prompt-lookup", "--method", "hf-generate", "--batch-size", "1,2", "--dry-run")
    result = place.run(*options, name="dry")
    assert result.code == 0, result.err
    assert "vanilla, prompt-lookup, hf-generate" in result.out
    assert "work (3)" in result.out
    assert "7 blocks, 20 trials, at most 240 new tokens" in result.out
    assert "about " in result.out
    assert not (place.results / "dry").exists()
    facts = json.loads(place.run(*options, "--json", name="dry").out)
    assert (facts["blocks"], facts["trials"], facts["new_tokens_at_most"]) == (7, 20, 240)
    assert facts["estimate"]["seconds"] > 0


def test_dry_run_counts_what_the_run_then_measures(place: Workplace) -> None:
    options = ("--method", "prompt-lookup", "--method", "hf-generate", "--batch-size", "1,2")
    facts = json.loads(place.run(*options, "--dry-run", "--json", name="counted").out)
    assert place.run(*options, name="counted").code == 0
    assert len(place.rows("counted")) == facts["trials"]
    assert len({row["block"] for row in place.rows("counted")}) == facts["blocks"]


@pytest.mark.parametrize("wrong", [("--target", "llama-8c"), ("--method", "lookup"), ("--task", "chatt")])
def test_dry_run_refuses_what_the_run_would(place: Workplace, wrong: tuple[str, str]) -> None:
    result = place.run("--method", "prompt-lookup", *wrong, "--dry-run", name="dry")
    assert (result.code, len(result.error_lines)) == (2, 2)


# -- help ----------------------------------------------------------------------------------------------------

WATCH = f"""
import sys, time
began = time.process_time()
from specbench.cli import main
try:
    main()
except SystemExit as left:
    assert not left.code, left.code
print([name for name in {HEAVY} if name in sys.modules], time.process_time() - began, file=sys.stderr)
"""


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)], ids=lambda c: " ".join(c) or "-")
def test_help_imports_nothing_heavy(command: tuple[str, ...]) -> None:
    argv = [sys.executable, "-c", WATCH, *command, "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    assert "Usage" in done.stdout
    heavy, seconds = done.stderr.strip().splitlines()[-1].rsplit(" ", 1)
    assert heavy == "[]"
    assert float(seconds) < 2


def test_version() -> None:
    result = specbench("--version")
    assert result.code == 0
    assert result.out.startswith("specbench ")
