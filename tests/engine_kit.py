"""What the tests of adapters have in common: setups, launches, streams read, programs of `fake_wire` run."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import fake_wire
import pytest
from fake_server import Answer, FakeServer
from tiny_folder import Workplace

from specbench.engines import find_engine
from specbench.engines.base import Engine
from specbench.engines.record import Acceptance, Reply
from specbench.engines.terms import Launch, Limits, Prompt, Setup
from specbench.serving import client, runner, server
from specbench.serving.client import Client, events
from specbench.serving.fleet import Fleet, Host
from specbench.serving.probe import Probe, probe
from specbench.spec import parse_spec

GOLDEN = Path(__file__).parents[2] / "shared" / "golden"
golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason="the captured responses are not here")
PROMPT = Prompt([1, 20, 21], "fg", [{"role": "user", "content": "fg"}])
GREEDY = Limits(12, seed=7)


def setup_of(engine: Engine, text: str = "vanilla", draft: str | None = None, **extra: str) -> Setup:
    return engine.setup(text, None if text == "vanilla" else parse_spec(text), draft, extra)


def launch(**more: Any) -> Launch:
    return Launch(**{"target": "/m", "port": 8123, "folder": Path("logs"), **more})


def line_of(engine: Engine, setup: Setup, *, known: frozenset[str] | None = None, **more: Any) -> str:
    """The command as a shell would take it."""
    return shlex.join(engine.command(engine.usual_words(), setup, launch(**more), known).argv)


def joined(*answers: Answer) -> Answer:
    """Several answers' pieces as one."""
    return Answer([piece for answer in answers for piece in answer.pieces])


def read(engine: Engine, answer: Answer, setup: Setup) -> Reply:
    """A stream as the client takes it, an event every 10 ms."""
    chunks = [(0.01 * number, piece) for number, piece in enumerate(answer.pieces)]
    return engine.read(list(events(chunks)), setup)


def record(engine: Engine, answer: Answer, setup: Setup, delta: dict[str, int] | None = None) -> Acceptance:
    (found,) = engine.record([read(engine, answer, setup)], delta, setup)
    return found


def program(folder: Path, name: str) -> Path:
    """A program that does as the engine's own would."""
    path = folder / f"fake-{name}"
    words = shlex.join([sys.executable, fake_wire.__file__, name])
    path.write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return path


def at_work(place: Workplace, name: str, monkeypatch: pytest.MonkeyPatch, **faults: Any) -> Workplace:
    """`place` with the engine's program as its engine, with the faults asked for."""
    monkeypatch.setattr(client, "RETRY_PAUSE_S", 0.01)
    monkeypatch.setattr(server, "GRACE_S", 2.0)
    monkeypatch.setattr(runner, "SETTLE_S", 0.0)
    monkeypatch.setenv("FAKE_WIRE", json.dumps(faults))
    place.defaults = ["--engine", f"{name}:binary={program(place.path, name)}", "--warmup", 0]
    return place


def truth(row: dict[str, Any], *, speculates: bool = True, gaps: bool = True) -> fake_wire.Script:
    """The script behind a measured row: how many tokens is all its steps depend on."""
    return fake_wire.Script([0], row["output_tokens"], speculates, gaps)


def start(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **faults: Any) -> list[str]:
    """Start the engine's baseline once and ask it for nothing; returns what was said while it loaded.

    Raises:
        SpecbenchError: it could not be started.
    """
    monkeypatch.setenv("FAKE_WIRE", json.dumps(faults))
    monkeypatch.setattr(server, "GRACE_S", 2.0)
    engine = find_engine(name)
    found = probe(engine, str(program(folder, name)))
    assert isinstance(found, Probe)
    said: list[str] = []
    fleet = Fleet(
        engine, {"vanilla": setup_of(engine)}, lambda port: launch(port=port, folder=folder), found, folder,
        together=True, on_line=lambda label, line: said.append(line),
    )  # fmt: skip

    async def once() -> None:
        host, fresh = await fleet.host("vanilla")
        assert isinstance(host, Host)
        assert fresh
        await fleet.close()

    asyncio.run(once())
    return said


def ask(engine: Engine, wire: fake_wire.Wire, model: str) -> client.Exchange:
    """One request, by the adapter, of a program's routes in this process."""

    async def once(url: str) -> client.Exchange:
        asker = Client(url)
        route, body = engine.request(PROMPT, GREEDY, setup_of(engine), model)
        exchange = await asker.stream(route, body)
        await asker.close()
        return exchange

    with FakeServer(wire.routes()) as fake:
        return asyncio.run(once(fake.url))
