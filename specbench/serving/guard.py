"""Run a command and let it not outlive us: `python guard.py GRACE_S COMMAND…`. Standard library only.

The command gets a process group of its own. It is stopped as soon as our standard input ends: whoever started us
closes it to stop the command, and the kernel closes it when they die, kill -9 included. SIGTERM to us does the same.
It is passed to the command alone, which knows in what order its workers go; then to what it leaves in its group,
which may want to clear up too (multiprocessing's tracker unlinks the shared memory of vLLM's workers); SIGKILL to
what is still there after the grace period. Should we be killed ourselves, Linux sends the command its SIGTERM: once
a thread of ours, so that there is but one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

LEFT_S = 3.0  # at most, for what outlives its command: a zombie that no init takes stays for good
POLL_S = 0.02
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def main(grace_s: float, command: list[str]) -> int:
    news, tell = os.pipe()
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda number, _: os.write(tell, bytes([number])))
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_with_us()
        )
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    _until_asked(child, news)
    child.terminate()
    try:
        code = child.wait(grace_s)
    except subprocess.TimeoutExpired:
        _signal_group(child.pid, signal.SIGKILL)
        code = child.wait()
    _end_group(child.pid, min(grace_s, LEFT_S))
    return code if code >= 0 else 128 - code


def _with_us() -> Callable[[], None] | None:
    """What a child does before it becomes the command: ask for a SIGTERM when we die. None: no such thing here."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    return ask


def _until_asked(child: subprocess.Popen[bytes], news: int) -> None:
    """Wait until the child is to be stopped, or has ended."""
    with contextlib.suppress(OSError):  # no standard input: nobody is there
        while child.poll() is None:
            ready, _, _ = select.select([0, news], [], [])
            if news in ready and signal.SIGTERM in os.read(news, 1024):
                return
            if 0 in ready and not os.read(0, 1024):
                return


def _end_group(group: int, within_s: float) -> None:
    """Stop what is left of a group whose leader has ended."""
    until = time.monotonic() + within_s
    there = _signal_group(group, signal.SIGTERM)
    while there and time.monotonic() < until:
        time.sleep(POLL_S)
        there = _signal_group(group, 0)
    _signal_group(group, signal.SIGKILL)


def _signal_group(group: int, number: int) -> bool:
    """Whether there was anyone to signal; 0 only asks."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
