"""Run a command and let it not outlive us: `python guard.py GRACE_S COMMAND…`. Standard library only.

The command gets a process group of its own. It is stopped (SIGTERM to the group, SIGKILL after the grace period) as
soon as our standard input ends: whoever started us closes it to stop the command, and the kernel closes it when
they die, kill -9 included.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time


def main(grace_s: float, command: list[str]) -> int:
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    signal.signal(signal.SIGTERM, lambda *_: os.close(0))  # asked by name: the same as being abandoned
    threading.Thread(target=_until_abandoned, args=(child.pid, grace_s), daemon=True).start()
    code = child.wait()
    _signal_group(child.pid, signal.SIGKILL)  # what it leaves behind in its group
    return code if code >= 0 else 128 - code


def _until_abandoned(group: int, grace_s: float) -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 1024):
            pass
    _signal_group(group, signal.SIGTERM)
    time.sleep(grace_s)
    _signal_group(group, signal.SIGKILL)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
