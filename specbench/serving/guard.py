"""Run a command and let it not outlive us: `python guard.py GRACE_S COMMAND…`. Standard library only.

The command gets a process group of its own. It is stopped as soon as our standard input ends: whoever started us
closes it to stop the command, and the kernel closes it when they die, kill -9 included. SIGTERM goes to the command
alone, which knows in what order its workers go; then to what it leaves in its group, which may want to clear up too
(multiprocessing's tracker unlinks the shared memory of vLLM's workers); SIGKILL to what is still there after the
grace period.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

LEFT_S = 3.0  # at most, for what outlives its command: a zombie that no init takes stays for good
POLL_S = 0.02


def main(grace_s: float, command: list[str]) -> int:
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    signal.signal(signal.SIGTERM, lambda *_: os.close(0))  # asked by name: the same as being abandoned
    threading.Thread(target=_until_abandoned, args=(child, grace_s), daemon=True).start()
    code = child.wait()
    _end_group(child.pid, min(grace_s, LEFT_S))
    return code if code >= 0 else 128 - code


def _until_abandoned(child: subprocess.Popen[bytes], grace_s: float) -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 1024):
            pass
    child.terminate()
    time.sleep(grace_s)
    _signal_group(child.pid, signal.SIGKILL)


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
