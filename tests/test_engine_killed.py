"""A run on an engine that is ended from outside: no server survives, finished blocks do, and the run goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from engine_kit import at_work
from tiny_folder import Workplace

RUN = "import sys; from specbench.cli import main; sys.exit(main())"
PATIENCE_S = 120.0


@pytest.fixture
def place(make_place: Callable[[str], Workplace], monkeypatch: pytest.MonkeyPatch) -> Workplace:
    """Where vLLM's imitation answers slowly enough to be caught at it."""
    made = at_work(make_place("killed"), "vllm", monkeypatch, slow=0.05)
    monkeypatch.setenv("SPECBENCH_API_KEY", "sesame-open")
    monkeypatch.setenv("OPENAI_API_KEY", "open-sesame")
    return made


def begin(place: Workplace) -> subprocess.Popen[str]:
    """Start a run, and wait until something of it is on disk and the next block is on its way."""
    argv = [str(word) for word in place.argv("--method", "prompt-lookup", "--repeats", 1)]
    run = subprocess.Popen([sys.executable, "-c", RUN, *argv], stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + PATIENCE_S
    while not (place.trials_file().exists() and place.rows()):
        assert run.poll() is None, run.stderr and run.stderr.read()
        assert time.monotonic() < until
        time.sleep(0.02)
    return run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_server_survives_and_the_run_goes_on(
    place: Workplace, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    run = begin(place)
    family = psutil.Process(run.pid).children(recursive=True)
    assert any("fake_wire.py" in " ".join(one.cmdline()) for one in family)
    for one in [psutil.Process(run.pid), *family]:
        assert "sesame" not in " ".join(one.cmdline())
    os.kill(run.pid, number)
    _, said = run.communicate(timeout=PATIENCE_S)
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert not alive
    kept = place.trials_file().read_bytes()
    if number == signal.SIGINT:
        assert run.returncode == 130
        assert "interrupted: the finished blocks are in" in " ".join(said.split())
        assert "Traceback" not in said
        assert place.manifest()["status"] == "interrupted"
    monkeypatch.setenv("FAKE_WIRE", "{}")  # it need not be slow any more
    result = place.run("--method", "prompt-lookup", "--repeats", 1)
    assert result.code == 0, result.err
    assert place.trials_file().read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    rows = place.rows()
    assert [row["method"] for row in rows] == ["vanilla"] * 4 + ["prompt-lookup"] * 4
    assert {row["error"] for row in rows} == {None}
    for file in Path(place.path).rglob("*"):
        if file.is_file():
            assert b"sesame" not in file.read_bytes(), file
    assert place.manifest()["status"] == "complete"
