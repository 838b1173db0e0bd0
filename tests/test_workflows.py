"""The GitHub workflows: valid YAML, and every `specbench` command in them exists with the options it is given."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from specbench.cli import app

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ENDS = (">", ">>", "|", "||", "&&", ";")
OPTIONAL = re.compile(r"\$\{\w+:\+(.*?)\}")  # ${TARGET:+--target "$TARGET"}: as if it were set


def parse(path: Path) -> dict[str, Any]:
    loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    loaded["on"] = loaded.pop(True, loaded.get("on"))  # YAML 1.1 reads `on` as a truth value
    return loaded


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in parse(path)["jobs"].values():
        yield from job["steps"]


def scripts(path: Path) -> Iterator[str]:
    yield from (step["run"] for step in steps(path) if "run" in step)


def commands(script: str) -> Iterator[list[str]]:
    """The words of each `specbench` command of a shell script."""
    for line in OPTIONAL.sub(r"\1", script.replace("\\\n", " ")).splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["specbench"]:
            end = next((i for i, word in enumerate(words) if word in ENDS), len(words))
            yield words[1:end]


def check(words: list[str]) -> None:
    """Parse a command line as it would be, without running anything."""
    group: Any = typer.main.get_command(app)
    context = group.make_context("specbench", [], resilient_parsing=True)
    name, command, rest = group.resolve_command(context, list(words))
    assert command is not None, f"no such command: {words[0]}"
    command.make_context(name, rest, parent=context)


NIGHTLY = [words for path in WORKFLOWS for script in scripts(path) for words in commands(script)]


def test_there_are_workflows() -> None:
    assert {path.name for path in WORKFLOWS} >= {"ci.yml", "nightly.yml"}
    assert {words[0] for words in NIGHTLY} >= {"run", "compare", "history", "report", "doctor"}


@pytest.mark.parametrize("words", NIGHTLY, ids=" ".join)
def test_commands_exist(words: list[str]) -> None:
    check(words)


def test_the_check_finds_what_does_not_exist() -> None:
    for words in (["compare", "a", "b", "--fail-under", "1"], ["compere", "a"], ["compare", "a"]):
        with pytest.raises(Exception, match=r"(?i)no such|missing"):
            check(words)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_form(path: Path) -> None:
    workflow = parse(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["group"]
    for job in workflow["jobs"].values():
        assert job["runs-on"]
    for step in steps(path):
        if "uses" in step:
            assert re.fullmatch(r"[\w.-]+/[\w.-]+@v\d+", step["uses"])
    # What others write (a branch's name, a title) never reaches a shell as text.
    assert not [script for script in scripts(path) if "${{" in script]


def test_nightly() -> None:
    workflow = parse(ROOT / ".github" / "workflows" / "nightly.yml")
    assert "schedule" in workflow["on"]
    assert "vars.SPECBENCH_RUNNER" in workflow["jobs"]["measure"]["runs-on"]
    assert "ubuntu-latest" in workflow["jobs"]["measure"]["runs-on"]
    default = re.search(r"SPECBENCH_BASELINE \|\| '(.+?)'", workflow["env"]["BASELINE"])
    assert default
    assert (ROOT / "results" / "reference" / default[1] / "manifest.json").is_file()
    shown, gate = (s for s in scripts(ROOT / ".github/workflows/nightly.yml") if "specbench compare" in s)
    assert '>> "$GITHUB_STEP_SUMMARY"' in shown
    assert "||" not in gate
    (words,) = commands(gate)
    assert {"--overall", "--strict"} <= set(words)  # five questions a task are too few to fail on
