"""Connections: dated where bytes come and go, kept open, as many as are wanted, by any name, with TLS."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpcore2 as httpcore
import pytest
from fake_server import Answer, FakeServer, stream

from specbench.serving import client as client_module
from specbench.serving import wire
from specbench.serving.client import Client, Exchange
from specbench.serving.load import closed_loop

ROUTE = "/v1/completions"


def with_client(url: str, act: Callable[[Client], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        client = Client(url)
        try:
            return await act(client)
        finally:
            await client.close()

    return asyncio.run(run())


def answers(url: str, count: int, concurrency: int) -> list[Exchange]:
    async def act(client: Client) -> list[Exchange]:
        return await closed_loop(lambda number: client.stream(ROUTE, {}), count, concurrency)

    return with_client(url, act)


class Sink(asyncio.Transport):
    """A transport that takes everything and goes nowhere."""

    def write(self, data: Any) -> None:
        pass

    def is_closing(self) -> bool:
        return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """`clock[0]` is the time."""
    now = [0.0]
    monkeypatch.setattr(wire, "perf_counter", lambda: now[0])
    return now


def connected() -> wire.DatedStream:
    made = wire.DatedStream()
    made.connection_made(Sink())
    return made


def test_bytes_are_dated_when_they_come_and_not_when_they_are_read(clock: list[float]) -> None:
    connection = connected()
    for moment, piece in ((1.0, b"a"), (2.0, b"b")):
        clock[0] = moment
        connection.data_received(piece)
    clock[0] = 9.0  # the reader was busy elsewhere

    async def read() -> list[tuple[bytes, float]]:
        return [(await connection.read(100), connection.arrived_at) for _ in range(2)]

    assert asyncio.run(read()) == [(b"a", 1.0), (b"b", 2.0)]


def test_a_request_is_dated_by_its_first_bytes(clock: list[float]) -> None:
    connection = connected()

    async def send(moment: float) -> float:
        clock[0] = moment
        await connection.write(b"head")
        clock[0] += 5.0
        await connection.write(b"body")
        sent = connection.sent_at
        connection.data_received(b"answer")
        await connection.read(100)
        return sent

    assert [asyncio.run(send(moment)) for moment in (1.0, 20.0)] == [1.0, 20.0]


@pytest.mark.parametrize(
    ("act", "fault"),
    [
        (lambda c: c.connection_lost(ConnectionResetError("reset by peer")), httpcore.ReadError),
        (lambda c: None, httpcore.ReadTimeout),
    ],
)
def test_what_goes_wrong_while_reading(act: Callable[[wire.DatedStream], None], fault: type) -> None:
    connection = connected()
    act(connection)
    with pytest.raises(fault):
        asyncio.run(connection.read(100, timeout=0.01))


def test_what_came_before_the_end_is_read_first() -> None:
    connection = connected()
    connection.data_received(b"last")
    connection.eof_received()
    assert connection.get_extra_info("is_readable")

    async def read() -> list[bytes]:
        return [await connection.read(100) for _ in range(2)]

    assert asyncio.run(read()) == [b"last", b""]


def test_connections_are_kept_and_there_is_no_limit_of_them() -> None:
    with FakeServer({ROUTE: stream(["a"], usage=1, delays=(0.05,))}) as server:
        assert {one.error for one in answers(server.url, 3, 1)} == {None}
        assert len(server.peers) == 1
    with FakeServer({ROUTE: stream(["a"], usage=1, delays=(0.3,))}) as server:
        found = answers(server.url, 70, 70)
        assert {one.error for one in found} == {None}
        assert (server.most, len(server.peers)) == (70, 70)


def test_a_connection_that_the_server_closed_meanwhile_is_replaced_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "RETRY_PAUSE_S", 1000.0)
    with FakeServer({ROUTE: [Answer(cut=True), stream(["a"], usage=1)]}) as server:
        (found,) = answers(server.url, 1, 1)
    assert (found.error, found.retries) == (None, 0)


def test_an_idle_connection_that_was_closed_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the event loop has not had time to see its end."""
    with FakeServer({ROUTE: stream(["a"], usage=1)}) as server:

        async def act(client: Client) -> list[Exchange]:
            first = await client.stream(ROUTE, {})
            server.hang_up()
            time.sleep(0.05)  # the loop sees nothing meanwhile
            return [first, await client.stream(ROUTE, {})]

        found = with_client(server.url, act)
        assert [(one.error, one.retries) for one in found] == [(None, 0), (None, 0)]
        assert len(server.peers) == 2


def test_no_proxy_is_asked_and_a_name_s_other_addresses_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """`localhost` may be ::1 first, where nothing listens."""
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with FakeServer({ROUTE: stream(["a"], usage=1)}) as server:
        url = server.url.replace("127.0.0.1", "localhost")
        assert {one.error for one in answers(url, 2, 1)} == {None}


def test_a_path_before_the_routes() -> None:
    with FakeServer({f"/behind{ROUTE}": stream(["a"], usage=1)}) as server:
        assert answers(f"{server.url}/behind", 1, 1)[0].error is None


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "RETRY_PAUSE_S", 0.0)
    key, certificate, both = (tmp_path / name for name in ("key", "certificate", "both"))
    kind = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=specbench"
    words = [*kind.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run(["openssl", *words], check=True, capture_output=True)
    both.write_bytes(key.read_bytes() + certificate.read_bytes())
    with FakeServer({ROUTE: stream(["a", "b"], usage=2)}, certificate=both) as server:
        (refused,) = answers(server.url, 1, 1)
        assert "certificate verify failed" in (refused.error or "")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        found = answers(server.url, 2, 1)
        assert {one.error for one in found} == {None}
        assert len(server.peers) == 1
        assert all(one.chunks[0][0] > one.sent_at > 0 for one in found)
