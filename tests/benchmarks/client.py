"""The streaming client's own cost and how true its times are, against a server whose delays are known.

    python tests/benchmarks/client.py [STREAMS …]

The server is a process of its own. It means to write an answer's first token FIRST_S after it has read the request,
the others every GAP_S, and puts into each event when it read the request and wrote the token (`perf_counter`, one
clock for both processes): its delays as they were, however well it kept to them. All streams begin together and so
write together, as an engine's steps do. Prints, for 1, 16 and 64 STREAMS at once:

- the client's processor milliseconds a token (limit: 1);
- by how many milliseconds its time to first token, and its gaps between tokens, differ from the server's: median, 95%
  and worst (limit: 2 at 95%);
- the parts of that: how long before the server read it a request is dated, how long after its writing a token.

The limits are for a machine with nothing else to do and two cores at least: each process that waits for a core waits
for whole time slices (4 ms and more). `specbench doctor` says in its line `now` whether others use the processor.
Exit 1 where a limit does not hold at 16 streams.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
from multiprocessing.connection import Connection
from time import perf_counter, process_time

import numpy as np
from numpy.typing import NDArray

from specbench.engines.base import Engine, Setup
from specbench.runner import settled_heap
from specbench.serving.client import Client, Exchange, events
from specbench.serving.load import closed_loop

ROUTE = "/v1/completions"
TOKENS, FIRST_S, GAP_S = 50, 0.05, 0.01
REPEATS = 20  # requests a stream
STREAMS = (1, 16, 64)
JUDGED = 16
MOST_MS = {"processor": 1.0, "off": 2.0}
NAMES = ("first token off", "gap off", "request dated early", "token dated late")
Floats = NDArray[np.float64]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


# -- the server --------------------------------------------------------------------------------------------------


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Requests of one connection, one after another. Each moment counts from the reading: delays do not add up."""
    while head := await _head(reader):
        size = next(
            (int(line[15:]) for line in head.split(b"\r\n") if line.lower()[:15] == b"content-length:"), 0
        )
        await reader.readexactly(size)
        read = perf_counter()
        writer.write(HEAD)
        for number in range(TOKENS):
            await asyncio.sleep(read + FIRST_S + number * GAP_S - perf_counter())
            stamps = {"read": read, "written": perf_counter()}
            writer.write(_chunk(_event({"choices": [{"text": "word "}], **stamps})))
        usage = {"prompt_tokens": 1, "completion_tokens": TOKENS}
        writer.write(_chunk(_event({"choices": [{"text": "", "finish_reason": "length"}], "usage": usage})))
        writer.write(_chunk(b""))


async def _head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""


def _event(data: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def serve(told: Connection) -> None:
    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        told.send(server.sockets[0].getsockname()[1])
        await asyncio.to_thread(told.recv)

    asyncio.run(run())


# -- the client --------------------------------------------------------------------------------------------------


async def measure(port: int, streams: int) -> tuple[list[Exchange], float]:
    """Requests, so many at once, and the client's processor seconds."""
    client = Client(f"http://127.0.0.1:{port}")
    await closed_loop(lambda number: client.stream(ROUTE, {}), streams, streams)  # connections are open now
    with settled_heap():
        before = process_time()
        found = await closed_loop(lambda number: client.stream(ROUTE, {}), REPEATS * streams, streams)
        seconds = process_time() - before
    await client.close()
    return found, seconds


def differences(found: list[Exchange]) -> dict[str, Floats]:
    """Seconds of each request (first token, request) or token (gap, token)."""
    parts: dict[str, list[Floats]] = {name: [] for name in NAMES}
    for one in found:
        told = list(events(one.chunks))
        arrived = np.array([arrival.at for arrival in Engine().read(told, Setup("vanilla")).arrivals])
        written = np.array([event.data["written"] for event in told if "written" in event.data])
        early, late = told[0].data["read"] - one.sent_at, arrived - written
        for name, values in zip(NAMES, ([early + late[0]], np.diff(late), [early], late), strict=True):
            parts[name].append(np.asarray(values))
    return {name: np.concatenate(values) for name, values in parts.items()}


def report(streams: int, found: list[Exchange], seconds: float) -> bool:
    """Print what was found; whether it is within the limits."""
    off = {name: values * 1e3 for name, values in differences(found).items()}
    processor = seconds / len(off["token dated late"]) * 1e3
    print(f"{streams:3} streams  client {processor:.3f} ms of processor a token")
    for name, values in off.items():
        median, high, worst = np.percentile(np.abs(values), [50, 95, 100])
        print(f"  {name:19}  {median:.2f}, {high:.2f}, {worst:.2f}; mean {values.mean():+.3f}")
    high = max(np.percentile(np.abs(off[name]), 95) for name in NAMES[:2])
    return bool(processor < MOST_MS["processor"] and high < MOST_MS["off"])


def main() -> int:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    port = ours.recv()
    chosen = [int(text) for text in sys.argv[1:]] or STREAMS
    good = {streams: report(streams, *asyncio.run(measure(port, streams))) for streams in chosen}
    ours.send(None)
    process.join(5)
    return 0 if good.get(JUDGED, True) else 1


if __name__ == "__main__":
    sys.exit(main())
