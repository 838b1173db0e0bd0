"""No server outlives its run: not one that is killed, and not one that ignores SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

HOLDER = """
import sys
from pathlib import Path
from specbench.engines.base import Engine
from specbench.engines.terms import Command
from specbench.serving import server
server.GRACE_S = 0.3
one = server.Server(Engine(), Command([sys.executable, "-c", sys.argv[1]]), 1, Path(sys.argv[2]))
print("started", flush=True)
sys.stdin.read()
"""
# A server with a worker of its own; both deaf to SIGTERM.
DEAF = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 1:
    subprocess.Popen([sys.executable, "-c", open("/proc/self/cmdline").read().split(chr(0))[2], "worker"])
print("up", flush=True)
time.sleep(60)
"""


def wait_for(condition: object, seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="the worker finds its own code there")
def test_a_killed_run_leaves_no_orphan(tmp_path: Path) -> None:
    log = tmp_path / "log"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, DEAF, str(log)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline()
    wait_for(lambda: log.read_text(encoding="utf-8").count("up\n") == 2)
    family = psutil.Process(holder.pid).children(recursive=True)
    assert len(family) == 3  # the guard, the server, its worker
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive
