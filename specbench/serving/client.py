"""One streaming HTTP client for all engines.

While a stream runs nothing is parsed: what arrives is kept with the moment it came (`serving.wire`), so that the
client's own work does not show in the times, at many streams least of all. Events are read out of it afterwards
(`events`).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import httpcore2 as httpcore
import httpx2 as httpx

from specbench.engines.record import Event
from specbench.errors import first_line
from specbench.serving.wire import DatedStream, DatedTransport

KEY_VARIABLES = ("SPECBENCH_API_KEY", "OPENAI_API_KEY")  # read from the environment only, and never written
BUSY = (429, 502, 503, 504)  # worth another try, as long as no token came
RETRIES = 3
RETRY_PAUSE_S = 0.5  # before the first retry; doubles
SHOWN = 300  # characters of an error's body
FAULTS = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, httpx.HTTPError, OSError)


@dataclass(frozen=True)
class Timeouts:
    """Seconds: to connect, between two chunks (or before the first), for a whole request."""

    connect_s: float = 10.0
    idle_s: float = 300.0
    request_s: float = 3600.0


@dataclass
class Exchange:
    """One streamed request as it went: when its first byte left, what came and when (`perf_counter` seconds).

    `error` says in one line why it failed, after however many chunks. `retries` counts attempts before this one, but
    for one that broke at once: the server had closed a connection that was idle. `sent_at` is this one's.
    """

    sent_at: float
    status: int | None = None
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    error: str | None = None
    broke: bool = False
    retries: int = 0

    @property
    def again(self) -> bool:
        """Whether another attempt may mend it: the server was busy, or the connection broke before anything came."""
        return not self.chunks and (self.broke or (self.error is not None and self.status in BUSY))


class Client:
    """A server at `url`. Use it in one event loop: its connections stay open between requests.

    Args:
        api_key: sent as a bearer token.
    """

    def __init__(self, url: str, api_key: str | None = None, timeouts: Timeouts = Timeouts()) -> None:
        self._timeouts = timeouts
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={
                "Accept-Encoding": "identity",
                **({"Authorization": f"Bearer {api_key}"} if api_key else {}),
            },
            timeout=httpx.Timeout(timeouts.idle_s, connect=timeouts.connect_s, pool=None),
            transport=DatedTransport(),
            trust_env=False,  # no proxy between us and what we time, and no key out of a netrc
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def get(self, path: str) -> tuple[int, str]:
        """Status and body; status 0 where nothing answers."""
        return await self._whole("GET", path, timeout=self._timeouts.connect_s)

    async def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, str]:
        """Status and body of a request that is not streamed; status 0 where nothing answers."""
        return await self._whole("POST", path, json=body)

    async def _whole(self, method: str, path: str, **more: Any) -> tuple[int, str]:
        for _ in range(2):  # the server may just have closed a connection that was idle
            try:
                answer = await self._http.request(method, path, **more)
            except FAULTS:
                continue
            return answer.status_code, answer.text
        return 0, ""

    async def stream(self, path: str, body: Mapping[str, Any]) -> Exchange:
        """Send a request and take its stream to the end. Failures are the exchange's `error`, never raised.

        Tried again only while no token came. Cancelling closes the connection, so that the server stops too.
        """
        payload = json.dumps(body).encode()
        exchange = await self._once(path, payload)
        if exchange.again and exchange.broke:  # the server may just have closed a connection that was idle
            exchange = await self._once(path, payload)
        for retry in range(RETRIES):
            if not exchange.again:
                break
            await asyncio.sleep(RETRY_PAUSE_S * 2**retry)
            exchange = await self._once(path, payload)
            exchange.retries = retry + 1
        return exchange

    async def _once(self, path: str, payload: bytes) -> Exchange:
        exchange = Exchange(perf_counter())
        keep = exchange.chunks.append
        try:
            async with asyncio.timeout(self._timeouts.request_s):
                headers = {"Content-Type": "application/json"}
                async with self._http.stream("POST", path, content=payload, headers=headers) as answer:
                    stream = answer.extensions["network_stream"]
                    assert isinstance(stream, DatedStream)
                    exchange.status, exchange.sent_at = answer.status_code, stream.sent_at
                    if answer.status_code != 200:
                        exchange.error = f"HTTP {answer.status_code}: {_said(await answer.aread())}"
                        return exchange
                    async for data in answer.aiter_raw():
                        keep((stream.arrived_at, data))
        except TimeoutError:
            exchange.error = f"no end after {self._timeouts.request_s:g} s"
        except httpcore.TimeoutException:
            exchange.error = f"nothing came for {self._timeouts.idle_s:g} s"
        except FAULTS as error:
            kind = "the connection broke" if exchange.chunks else "no connection"
            exchange.error, exchange.broke = f"{kind}: {first_line(error)}", True
        return exchange


class StreamError(Exception):
    """A stream that is not what it should be: an error sent as an event, broken JSON, no end."""


def events(chunks: Sequence[tuple[float, bytes]]) -> Iterator[Event]:
    """The server-sent events of a stream, each at the moment its last byte arrived.

    Raises:
        StreamError: the server reports an error, or the stream is broken.
    """
    for at, text in _blocks(chunks):
        if text == b"[DONE]":
            return
        try:
            data = json.loads(text)
        except ValueError:
            raise StreamError(f"an event is not JSON: {_shown(text)!r}") from None
        if not isinstance(data, dict):
            raise StreamError(f"an event is no object: {_shown(text)!r}")
        if data.get("error"):
            raise StreamError(_said(text))
        yield Event(at, data)


def _blocks(chunks: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The `data` of each event; comments and other fields are left out, as is an event without its blank line."""
    rest = b""
    data: list[bytes] = []
    for at, piece in chunks:
        *lines, rest = (rest + piece).split(b"\n")
        for line in map(bytes.rstrip, lines):
            if line.startswith(b"data:"):
                data.append(line[5:].strip())
            elif not line and data:
                yield at, b"\n".join(data)
                data = []


def _said(body: bytes) -> str:
    """The message of an error's body, as one line."""
    text = body.decode(errors="replace")
    try:
        found = json.loads(text)
        found = found.get("error", found.get("message", found.get("detail", found)))
        text = str(found.get("message", found) if isinstance(found, dict) else found)
    except (ValueError, AttributeError):
        pass
    return _shown(text.encode()) or "no message"


def _shown(body: bytes) -> str:
    """The beginning of what a server sent, as one line, without the keys that it may have sent back."""
    text = " ".join(body.decode(errors="replace").split())
    for name in KEY_VARIABLES:
        if key := os.environ.get(name):
            text = text.replace(key, f"({name})")
    return text[:SHOWN]


def api_key() -> str | None:
    """The key for servers that want one, from the environment."""
    return next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
