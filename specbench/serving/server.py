"""A server of an engine that we start: on a free loopback port, its log kept, stopped whatever happens."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic

from specbench.engines.base import Engine
from specbench.engines.terms import LOOPBACK, Command
from specbench.errors import SpecbenchError, first_line
from specbench.serving import guard
from specbench.serving.client import KEY_VARIABLES, Client

READY_S = 1800.0  # a large model from a cold disk takes long
GRACE_S = 15.0  # between SIGTERM and SIGKILL
POLL_S = 0.05
SEARCHED = 200  # last lines of a log that are searched for why a server ended
TAKEN = re.compile(
    r"address already in use|errno 98|couldn't bind|port \d+ is (already )?in use", re.IGNORECASE
)
RAISED = re.compile(
    r"\b(?:\w+\.)*\w*(?:Error|Exception): \S.*"
)  # the line of a stack trace that says what happened
REASONS = 3  # of them, or of last lines, that are shown


class Server:
    """A running command. `url` is where it listens.

    Args:
        command: what is run; its files are written first.
        port: on loopback, in the command's arguments.
        log: where its output goes, added to.
    """

    def __init__(self, engine: Engine, command: Command, port: int, log: Path) -> None:
        self.engine, self.command, self.log = engine, command, log
        self.url = f"http://{LOOPBACK}:{port}"
        for path, content in command.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            out.write(f"$ {shown(command)}\n".encode())
            out.flush()
            self._from = out.tell()
            self._process = subprocess.Popen(
                [sys.executable, guard.__file__, str(GRACE_S), *command.argv],
                stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                env={**_environment(), "PYTHONUNBUFFERED": "1", **command.env},
            )  # fmt: skip

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    async def wait_ready(
        self, client: Client, on_line: Callable[[str], None] = lambda line: None, within_s: float = READY_S
    ) -> None:
        """Wait until requests may be sent; `on_line` gets the log's last line now and then.

        Raises:
            Died: the server ended by itself; the message holds why, as far as its log says.
            SpecbenchError: it is not ready in time.
        """
        until = monotonic() + within_s
        pause, shown_line = POLL_S, ""
        while True:
            if self.alive:
                status, body = await client.get(self.engine.health)
                if status and self.engine.ready(status, body):
                    return
            if not self.alive:
                raise self._died()
            if monotonic() > until:
                raise SpecbenchError(
                    f"{self.engine.name} was not ready after {within_s:.0f} s; its log ends: {self._reason()}",
                    f"see {self.log}; a smaller model starts faster",
                )
            line = self.last_lines(1)
            if line and line[0] != shown_line:
                shown_line = line[0]
                on_line(shown_line)
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 1.0)

    def last_lines(self, count: int) -> list[str]:
        """The last lines of the log that this start wrote and that say something."""
        with self.log.open("rb") as file:
            file.seek(max(self._from, self.log.stat().st_size - 64_000))
            lines = file.read().decode(errors="replace").splitlines()
        return [line.rstrip() for line in lines if line.strip()][-count:]

    @property
    def port_was_taken(self) -> bool:
        return not self.alive and any(TAKEN.search(line) for line in self.last_lines(50))

    def _died(self) -> SpecbenchError:
        code, reason = self._process.returncode, self._reason()
        known = [cure for sign, cure in self.engine.cures.items() if sign in reason.casefold()]
        return SpecbenchError(
            f"{self.engine.name} stopped by itself (exit {code}): {reason}",
            "; ".join([*known, f"see its log, {self.log}"]),
        )

    def _reason(self) -> str:
        lines = self.last_lines(SEARCHED)
        raised = [found.group() for line in lines if (found := RAISED.search(line))]
        told = list(dict.fromkeys(raised)) or [line.strip() for line in lines]
        return " | ".join(told[-REASONS:]) or "nothing in its log"

    def stop(self) -> None:
        """SIGTERM to the command, then to what it leaves, SIGKILL after the grace period (`serving.guard`).

        Returns once it is gone.
        """
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(GRACE_S + 5)
        except subprocess.TimeoutExpired:  # the guard itself hangs
            self._process.kill()
            self._process.wait()


def _environment() -> dict[str, str]:
    """Ours, without the keys: a server might print what it finds there."""
    return {name: value for name, value in os.environ.items() if name not in KEY_VARIABLES}


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


def shown(command: Command) -> str:
    """The command as a shell would take it."""
    return shlex.join([*(f"{name}={value}" for name, value in command.env.items()), *command.argv])


def without_home(word: str) -> str:
    """With `~/` for the user's home folder: results are shared, and whose machine it was is nobody's business."""
    return word.replace(f"{Path.home()}{os.sep}", f"~{os.sep}")


def output_of(argv: Sequence[str], within_s: float = 180.0) -> tuple[int | None, str]:
    """Exit status and what a short command prints (help, version); None and why where it cannot be run or hangs."""
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=within_s,
            check=False,
        )  # fmt: skip
    except OSError as error:
        return None, first_line(error)
    except subprocess.TimeoutExpired:
        return None, f"it was not done after {within_s:g} s"
    return done.returncode, done.stdout + done.stderr
