"""The servers of a run: started when they are needed, or attached to, and stopped at its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specbench.engines.base import Engine, Launch, Setup
from specbench.errors import SpecbenchError
from specbench.serving.client import Client, api_key
from specbench.serving.probe import Probe
from specbench.serving.server import Server, free_port

PORTS = 3  # tries, where somebody else takes the port before the engine does
STARTS = 2  # of a server that dies while it serves


@dataclass
class Host:
    """Something that answers: its client, the model's name as it knows it, and the server if it is ours.

    version: the engine's, where a server that is not ours tells it.
    warmed: the loads (concurrency, request rate) that it has been warmed up for.
    """

    client: Client
    model: str
    server: Server | None = None
    version: str | None = None
    warmed: set[Hashable] = field(default_factory=set)

    @property
    def alive(self) -> bool:
        return self.server is None or self.server.alive

    async def close(self) -> None:
        await self.client.close()
        if self.server is not None:
            await asyncio.to_thread(self.server.stop)


class Fleet:
    """Hosts by a method's label.

    Args:
        launch: what all servers have in common; each gets a port of its own.
        found: the engine as installed; None when attached.
        together: keep all running; else one at a time.
        on_line: takes the last line of a starting server's log.
    """

    def __init__(
        self, engine: Engine, setups: Mapping[str, Setup], launch: Callable[[int], Launch], found: Probe | None,
        logs: Path, *, together: bool, on_line: Callable[[str, str], None] = lambda label, line: None,
    ) -> None:  # fmt: skip
        self._engine, self._setups, self._launch, self._found = engine, setups, launch, found
        self._logs, self._together, self._on_line = logs, together, on_line
        self._hosts: dict[str, Host] = {}
        self._starts: dict[str, int] = {}
        self._failed: dict[str, SpecbenchError] = {}

    async def host(self, label: str) -> Host:
        """The host of a method, started if it does not run.

        Raises:
            SpecbenchError: it cannot be started; asked again, the same without another try.
        """
        found = self._hosts.get(label)
        if found is not None and found.alive:
            return found
        if label in self._failed:
            raise self._failed[label]
        if found is not None:
            await self.down(label)
        if not self._together:
            for other in list(self._hosts):
                await self.down(other)
        self._starts[label] = self._starts.get(label, 0) + (found is not None)
        try:
            if self._starts[label] > STARTS:
                raise SpecbenchError(
                    f"{self._engine.name} keeps dying under {label}", f"see {self.log(label)}"
                )
            self._hosts[label] = await self._start(label)
        except SpecbenchError as error:
            self._failed[label] = error
            raise
        return self._hosts[label]

    async def down(self, label: str) -> None:
        host = self._hosts.pop(label, None)
        if host is not None:
            await host.close()

    async def close(self) -> None:
        for label in list(self._hosts):
            await self.down(label)

    def log(self, label: str) -> Path:
        safe = "".join(c if c.isalnum() or c in "-_.=" else "-" for c in label)
        return self._logs / f"{self._engine.name}-{safe}.log"

    async def _start(self, label: str) -> Host:
        assert self._found is not None
        assert self._found.words is not None
        setup = self._setups[label]
        for attempt in range(PORTS):
            launch = self._launch(free_port())
            command = self._engine.command(self._found.words, setup, launch, self._found.flags)
            server = Server(self._engine, command, launch.port, self.log(label))
            client = Client(server.url)
            host = Host(client, launch.target, server)
            try:
                await server.wait_ready(client, lambda line: self._on_line(label, line))
            except BaseException:
                taken = server.port_was_taken
                await host.close()
                if not taken or attempt == PORTS - 1:
                    raise
                continue
            return host
        raise AssertionError("the last try returns or raises")


class Attached(Fleet):
    """Servers that somebody else runs: one for the baseline, one for every method.

    Args:
        target: the names that the target goes by, what the user calls it first.
        baselines: labels of what does not speculate.
    """

    def __init__(
        self, engine: Engine, target: Sequence[str], url: str, baseline_url: str | None,
        baselines: Collection[str],
    ) -> None:  # fmt: skip
        super().__init__(engine, {}, _no_launch, None, Path(), together=True)
        self._target, self._baselines = target, baselines
        self._url, self._baseline_url = url, baseline_url or url

    def url(self, label: str) -> str:
        return self._baseline_url if label in self._baselines else self._url

    async def _start(self, label: str) -> Host:
        url = self.url(label)
        client = Client(url, api_key())
        status, body = await client.get(self._engine.health)
        if not status:
            await client.close()
            raise SpecbenchError(f"nothing answers at {url}", "start the server, or check its address")
        if not self._engine.ready(status, body):
            await client.close()
            raise SpecbenchError(f"the server at {url} is not ready (HTTP {status})", "wait until it is")
        try:
            await self._check(client, url, speculating=label not in self._baselines)
            model = await served_model(client, url, self._target)
            return Host(client, model, version=await self._version(client))
        except BaseException:
            await client.close()
            raise

    async def _check(self, client: Client, url: str, *, speculating: bool) -> None:
        """Refuse a server that is not what it is taken for, as far as it tells."""
        if self._engine.evidence is None:
            return
        status, body = await client.get(self._engine.evidence)
        found = self._engine.speculates(body) if status == 200 else None
        if found is not None and found != speculating:
            raise SpecbenchError(
                f"the server at {url} {'speculates' if found else 'does not speculate'}",
                "--url is the server that speculates, --baseline-url the one that does not",
            )

    async def _version(self, client: Client) -> str | None:
        if self._engine.version_at is None:
            return None
        route, key = self._engine.version_at
        status, body = await client.get(route)
        try:
            told = str(json.loads(body)[key]) if status == 200 else "unknown"
        except (ValueError, KeyError, TypeError):
            return None
        return None if "unknown" in told else told  # llama.cpp built outside its repository: b0-unknown


async def served_model(client: Client, url: str, asked: Sequence[str]) -> str:
    """The name to send: that of the target if the server has it, else its only one.

    Raises:
        SpecbenchError: it has several, and none is the target's.
    """
    status, body = await client.get("/v1/models")
    try:
        served = [str(model["id"]) for model in json.loads(body)["data"]] if status == 200 else []
    except (ValueError, KeyError, TypeError):
        served = []
    if not served:
        return asked[0]
    called = called_so(served, asked)
    if called is None and len(served) > 1:
        raise SpecbenchError(
            f"the server at {url} serves {', '.join(served)}: none is called {asked[0]}",
            "give --target by the name of one of them, or a folder of that name",
        )
    return called or served[0]


def called_so(served: Sequence[str], asked: Sequence[str]) -> str | None:
    """That of the names served which is one of those asked for: the same, or a path or id that ends alike."""
    ends = {_end(name) for name in asked}
    alike = next((name for name in served if _end(name) in ends), None)
    return next((name for name in served if name in asked), alike)


def _end(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].casefold()


def _no_launch(port: int) -> Launch:
    raise AssertionError("an attached server is not launched")
