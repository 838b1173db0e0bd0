"""What the tests of adapters have in common: setups, launches, streams read, programs of `fake_wire` run."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fake_wire
import pytest
from fake_server import Answer, FakeServer
from tiny_folder import Workplace

from specbench.engines import find_engine
from specbench.engines.base import Engine, flags_in
from specbench.engines.prometheus import delta
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


@dataclass(frozen=True)
class Measured:
    """A run: where, the rows of the method, what was said."""

    place: Workplace
    rows: list[dict[str, Any]]
    said: str


def measure(
    make_place: Callable[[str], Workplace],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    method: str,
    **faults: Any,
) -> Measured:
    """A run of two questions with the engine's program. Each is answered, as the baseline answers it."""
    place = at_work(make_place(name), name, monkeypatch, **faults)
    result = place.run("--method", method, "--repeats", 1, "--limit", 2)
    assert result.code == 0, result.err
    rows = [row for row in place.rows() if row["method"] == method]
    assert rows
    assert all(row["error"] is None and row["agreement"]["same"] for row in rows)
    return Measured(place, rows, result.err)


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
        assert isinstance(await fleet.host("vanilla"), Host)
        await fleet.close()

    asyncio.run(once())
    return said


def wire_of(name: str, folder: Path, setup: Setup, **faults: Any) -> fake_wire.Wire:
    """An engine's program in this process, from the adapter's own command line."""
    engine, kind = find_engine(name), fake_wire.WIRES[name]
    parser = kind.parser(faults)
    command = engine.command([], setup, launch(folder=folder), flags_in(parser.format_help()))
    for path, content in command.files.items():
        path.write_text(content, encoding="utf-8")
    return kind(parser.parse_args(fake_wire.words_of(command.argv)), faults)


@dataclass(frozen=True)
class Asked:
    """One request: as it went, and what the server counted meanwhile, as the runner would take it."""

    exchange: client.Exchange
    counted: dict[str, int] | None


def ask(engine: Engine, wire: fake_wire.Wire, setup: Setup, model: str = "/m") -> Asked:
    """One request, by the adapter, of a program's routes in this process."""

    async def once(url: str) -> Asked:
        asker = Client(url)
        before = await _counters(asker, engine)
        exchange = await asker.stream(*engine.request(PROMPT, GREEDY, setup, model))
        after = await _counters(asker, engine)
        await asker.close()
        return Asked(exchange, None if before is None or after is None else delta(before, after))

    with FakeServer(wire.routes()) as fake:
        return asyncio.run(once(fake.url))


async def _counters(asker: Client, engine: Engine) -> dict[str, int] | None:
    if engine.metrics is None:
        return None
    status, text = await asker.get(engine.metrics)
    return engine.counters(text) if status == 200 else None
