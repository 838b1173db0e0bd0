"""Connections that note when bytes came and went: httpx, over streams of our own.

An engine writes to all its streams at once, step by step. Dated where it is taken out of the connection pool, the
last of them would carry the client's work on all the others, and a request that of all which leave with it. So each
piece is dated in the event loop's read callback, before anything looks at it, and a request when its first bytes are
handed over, on a connection that is open by then.
"""

from __future__ import annotations

import asyncio
import select
import ssl
from collections import deque
from collections.abc import AsyncIterator, Iterable
from time import perf_counter
from typing import Any

import httpcore2 as httpcore
import httpx2 as httpx  # the maintained httpx; huggingface_hub brings it too

EYEBALLS_S = 0.25  # until a name's next address is tried too: `localhost` may be ::1, where nothing listens


class DatedStream(asyncio.Protocol, httpcore.AsyncNetworkStream):
    """One TCP or TLS connection.

    sent_at: when the first bytes of the last request went out. arrived_at: when the bytes that `read` returned last
    came in (`perf_counter` seconds).
    """

    def __init__(self) -> None:
        self.sent_at = self.arrived_at = 0.0
        self._pieces: deque[tuple[float, bytes]] = deque()
        self._ended = False
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        self._answering = True  # the next bytes that go out begin a request

    # -- what the event loop calls -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._pieces.append((perf_counter(), data))
        self._wake()

    def eof_received(self) -> None:
        self._ended = True
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._ended, self._error = True, error
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # -- what the connection pool calls ------------------------------------------------------------------------

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """The next piece as it came, however many bytes; empty at the end."""
        self._answering = True
        if not self._pieces and not self._ended:
            await self._news(timeout)
        if self._pieces:
            self.arrived_at, data = self._pieces.popleft()
            return data
        if self._error is not None:
            raise httpcore.ReadError(str(self._error)) from self._error
        return b""

    async def _news(self, timeout: float | None) -> None:
        self._reader = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout):
                await self._reader
        except TimeoutError:
            raise httpcore.ReadTimeout from None

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if self._transport.is_closing():
            raise httpcore.WriteError("the connection is closed")
        if self._answering:
            self._answering, self.sent_at = False, perf_counter()
        self._transport.write(buffer)

    async def aclose(self) -> None:
        self._transport.abort()  # nothing unsent matters, and a server must notice at once

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout):
                transport = await loop.start_tls(
                    self._transport, self, ssl_context, server_hostname=server_hostname
                )
        except TimeoutError:
            raise httpcore.ConnectTimeout from None
        except OSError as error:  # ssl.SSLError is one
            raise httpcore.ConnectError(str(error)) from error
        assert transport is not None
        self._transport = transport
        return self

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable":  # asked of an idle connection: whatever came, it is no longer one to use
            ended = self._ended or self._transport.is_closing()
            return ended or bool(self._pieces) or self._has_news()
        return self._transport.get_extra_info(info)

    def _has_news(self) -> bool:
        """Whether something came, or the end, that the event loop has not seen yet."""
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket"), select.POLLIN)
        return bool(poll.poll(0))


class DatedBackend(httpcore.AsyncNetworkBackend):
    async def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:  # fmt: skip
        """A connection; asyncio sets TCP_NODELAY, so that a request's head and body leave at once."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout):
                _, stream = await loop.create_connection(
                    DatedStream, host, port, happy_eyeballs_delay=EYEBALLS_S
                )
        except TimeoutError:
            raise httpcore.ConnectTimeout from None
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        return stream


class DatedTransport(httpx.AsyncBaseTransport):
    """httpx's transport over dated streams: no limit of connections, no proxies, each kept open until it ends.

    A response's `network_stream` extension is its DatedStream. Faults are httpcore's exceptions (`FAULTS`).
    """

    def __init__(self) -> None:
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=ssl.create_default_context(), max_connections=None, network_backend=DatedBackend()
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        answer = await self._pool.handle_async_request(
            httpcore.Request(
                request.method,
                httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
                headers=request.headers.raw,
                content=request.stream,
                extensions=request.extensions,
            )
        )
        body = _Body(answer.stream)
        return httpx.Response(
            answer.status, headers=answer.headers, stream=body, extensions=answer.extensions
        )

    async def aclose(self) -> None:
        await self._pool.aclose()


class _Body(httpx.AsyncByteStream):
    def __init__(self, pieces: Any) -> None:
        self._pieces = pieces

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._pieces.__aiter__()

    async def aclose(self) -> None:
        await self._pieces.aclose()
