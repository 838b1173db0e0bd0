"""The real thing, as a user runs it: SmolLM2-135M through the command line, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specbench.config import RunConfig
from specbench.engines import find_engine
from specbench.serving.model import open_target
from specbench.store import read_run

TARGET = "smollm2-135m@q4_1"  # pinned: needs PyPI or the cache, never the Hub


def specbench(*arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command as a user would; fails with what it said."""
    command = [sys.executable, "-m", "specbench", *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("smollm2")
    methods = [
        "prompt-lookup",
        "draft-model:k=3",
        "oracle:rate=0.7,tree=12",
        "hf-generate",
        "hf-prompt-lookup",
    ]
    done = specbench(
        "run", "--target", TARGET, "--draft", TARGET, *(part for m in methods for part in ("--method", m)),
        "--task", "chat", "--limit", 2, "--max-new-tokens", 14, "--batch-size", "1,2",
        "--name", "real", "--threads", 1, "--quiet",
        folder=folder,
    )  # fmt: skip
    return folder, done


def test_every_method_gives_the_targets_own_answer(
    run: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    trials = [t for t in read_run(run[0] / "results" / "real").trials if t.excluded is None]
    assert len({t.method for t in trials}) == 6
    assert {t.batch_size for t in trials} == {1, 2}
    answers = {(t.question, t.turn, t.batch_size): t.output_ids for t in trials if t.method == "vanilla"}
    references = {(t.question, t.turn): t.output_ids for t in trials if t.method == "hf-generate"}
    for trial in trials:
        assert trial.error is None
        assert trial.output_ids == answers[trial.question, trial.turn, trial.batch_size], trial.method
        if trial.turn == 0:
            assert trial.output_ids == references[trial.question, 0]
        if trial.method != "vanilla":
            assert trial.agreement == {"same": True, "first_difference": None, "logit_gap": None}


def test_the_target_as_its_own_draft(run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    for trial in read_run(run[0] / "results" / "real").trials:
        if trial.method.startswith("draft-model"):
            assert trial.rounds.accepted[:-1] == [3] * (len(trial.rounds.accepted) - 1)


def test_the_user_sees_a_table_and_the_report(run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = run
    assert "τ" in done.stdout
    assert "bonus" in done.stdout
    assert TARGET in done.stdout
    report = Path(done.stdout.strip().splitlines()[-1].removeprefix("report: "))
    text = (folder / report).read_text()
    assert "prompt-lookup" in text
    assert "output identical" in text
    assert json.loads(specbench("report", "real", "--format", "json", "--output", "-", folder=folder).stdout)[
        "rows"
    ]


def test_the_answers_are_sensible(run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """Broken weights or a broken tokenizer would give noise: the model must speak the question's language."""
    texts = [t.text for t in read_run(run[0] / "results" / "real").trials if t.method == "vanilla"]
    words = " ".join(text or "" for text in texts).lower().split()
    assert len({"the", "a", "of", "is", "to", "and", "you", "i"} & set(words)) >= 4


def test_an_engine_that_loads_a_folder_knows_what_its_weights_were_made_from() -> None:
    """A report of both then does not call it another precision than our own loop's."""
    config = RunConfig(TARGET, methods=("vanilla",), tasks=("chat",), dtype="float32")
    target = open_target(config, find_engine("transformers"), {}, lambda line: None)
    assert target.identity.quantization == "q4_1"
