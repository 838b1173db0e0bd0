"""The streaming client's own cost and how true its times are, against a server with known delays.

    python tests/benchmarks/client.py [STREAMS]

The server is a process of its own. Prints the client's processor seconds a token with STREAMS (16) at once, and how
far time to first token and the gaps between tokens are from what the server was told, in milliseconds: median, 95%
and worst.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from time import process_time

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from fake_server import FakeServer, stream

from specbench.engines.base import Engine, Setup
from specbench.serving.client import Client, Exchange, events
from specbench.serving.load import closed_loop

ROUTE = "/v1/completions"
TOKENS, FIRST_S, GAP_S = 50, 0.05, 0.01
REPEATS = 20  # requests a stream


def serve(told: Connection) -> None:
    answer = stream(["word "] * TOKENS, usage=TOKENS, delays=[FIRST_S, *[GAP_S] * (TOKENS - 1), 0.0])
    with FakeServer({ROUTE: answer}) as server:
        told.send(server.url)
        told.recv()


async def measure(url: str, streams: int) -> tuple[list[Exchange], float]:
    client = Client(url)
    await closed_loop(lambda number: client.stream(ROUTE, {}), streams, streams)  # connections are open now
    before = process_time()
    found = await closed_loop(lambda number: client.stream(ROUTE, {}), REPEATS * streams, streams)
    seconds = process_time() - before
    await client.close()
    return found, seconds


def report(streams: int, found: list[Exchange], seconds: float) -> None:
    replies = [Engine().read(list(events(one.chunks)), Setup("vanilla")) for one in found]
    first = [reply.arrivals[0].at - one.sent_at for reply, one in zip(replies, found, strict=True)]
    gaps = [b.at - a.at for reply in replies for a, b in pairwise(reply.arrivals)]
    tokens = sum(len(reply.arrivals) for reply in replies)
    print(f"{streams:3} streams  client {seconds / tokens * 1e3:.3f} ms of processor a token")
    for name, values, due in (("first token", first, FIRST_S), ("gap", gaps, GAP_S)):
        off = np.abs(np.array(values) - due) * 1e3
        median, high = np.percentile(off, [50, 95])
        mean = (np.mean(values) - due) * 1e3
        print(f"             {name}: off by {median:.2f}, {high:.2f}, {off.max():.2f}; mean {mean:+.3f}")


def main() -> None:
    most = int(sys.argv[1]) if len(sys.argv) > 1 else 16
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    url = ours.recv()
    for streams in (1, most):
        report(streams, *asyncio.run(measure(url, streams)))
    ours.send(None)
    process.join(5)


if __name__ == "__main__":
    main()
