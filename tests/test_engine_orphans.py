"""No server outlives its run: not if that is killed, not if it ignores SIGTERM. One that stops can clear up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from specbench.engines.base import Engine
from specbench.engines.terms import Command
from specbench.serving import guard
from specbench.serving.server import Server

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

# A server that stops its worker itself, and a helper that clears up once both are gone.
TIDY = """
import os, signal, subprocess, sys, time
def say(line):
    os.write(1, f"{line}\\n".encode())
def told(*_):
    if role == "server":
        worker.stdin.close()
        say(f"worker ended with {worker.wait()}")
        sys.exit()
    say(f"{role} signalled")
role = sys.argv[1]
signal.signal(signal.SIGTERM, told)
if role == "server":
    lost, held = os.pipe()
    code = open("/proc/self/cmdline").read().split(chr(0))[2]
    subprocess.Popen([sys.executable, "-c", code, "helper"], stdin=lost)
    worker = subprocess.Popen([sys.executable, "-c", code, "worker"], stdin=subprocess.PIPE)
    time.sleep(60)
say(f"{role} up")
sys.stdin.read()
time.sleep(0.3)
say(f"{role} cleared up")
"""


# A server that ends at SIGTERM, though not at once.
SLOW_TO_END = """
import signal, sys, time
def told(*_):
    print("told", flush=True)
    time.sleep(1.0)
    print("ended", flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, told)
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


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="the worker finds its own code there")
def test_a_server_stops_its_workers_itself_and_what_it_leaves_may_clear_up(tmp_path: Path) -> None:
    log = tmp_path / "log"
    one = Server(Engine(), Command([sys.executable, "-c", TIDY, "server"]), 1, log)
    wait_for(lambda: log.read_text(encoding="utf-8").count(" up\n") == 2)
    one.stop()
    said = log.read_text(encoding="utf-8").splitlines()
    assert "worker ended with 0" in said
    assert "worker signalled" not in said
    assert "helper cleared up" in said


@pytest.mark.parametrize("times", [1, 2])
def test_a_guard_that_is_stopped_by_name_stops_its_server(tmp_path: Path, times: int) -> None:
    """By the first SIGTERM; the second, while the server ends, changes nothing."""
    log = tmp_path / "log"
    argv = [sys.executable, guard.__file__, "20", sys.executable, "-c", SLOW_TO_END]
    with log.open("wb") as out:
        one = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=out, stderr=out)
    try:
        wait_for(lambda: "up\n" in log.read_text(encoding="utf-8"))
        family = psutil.Process(one.pid).children()
        for _ in range(times):
            one.send_signal(signal.SIGTERM)
            wait_for(lambda: "told\n" in log.read_text(encoding="utf-8"))
        assert one.wait(20) == 0
        assert log.read_text(encoding="utf-8").split() == ["up", "told", "ended"]
        assert not psutil.wait_procs(family, timeout=20)[1]
    finally:
        one.kill()
        one.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own word is Linux's")
def test_a_server_is_told_when_its_guard_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    argv = [sys.executable, guard.__file__, "20", sys.executable, "-c", SLOW_TO_END]
    with log.open("wb") as out:
        one = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=out, stderr=out)
    wait_for(lambda: "up\n" in log.read_text(encoding="utf-8"))
    family = psutil.Process(one.pid).children()
    one.kill()
    one.communicate()
    assert not psutil.wait_procs(family, timeout=20)[1]
    assert log.read_text(encoding="utf-8").split() == ["up", "told", "ended"]
