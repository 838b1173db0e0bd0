"""A serving engine that is none: scripted answers in this process, or a program to launch like an engine.

In a test:

    with FakeServer({"/v1/completions": stream(["a", "b"], usage=2)}) as server:
        Client(server.url) ...
        server.requests  # [(path, body, headers)]

A route's answer may be a list (one a request, the last one repeated) or a function of the request's body.

As a program: `python fake_server.py --port P [--draft-tokens K] [--slow-start S] [--crash] [--taken]
[--drop-every N]` answers completions with a text that depends on the prompt alone, speculating or not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import ssl
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Say = "Answer | list[Answer] | Callable[[dict[str, Any]], Answer]"


@dataclass
class Answer:
    """What a request gets.

    pieces: of the body, each sent on its own after its delay (seconds; the last one is used for the rest).
    cut: break the connection after the pieces, without ending the stream.
    """

    pieces: Sequence[bytes] = ()
    delays: Sequence[float] = (0.0,)
    status: int = 200
    kind: str = "text/event-stream"
    cut: bool = False


def sse(*objects: dict[str, Any], done: bool = True, **more: Any) -> Answer:
    """A stream of objects, one an event."""
    pieces = [f"data: {json.dumps(one)}\n\n".encode() for one in objects]
    return Answer([*pieces, *([b"data: [DONE]\n\n"] if done else [])], **more)


def raw(text: str, **more: Any) -> Answer:
    """A captured stream, an event a piece."""
    return Answer([f"{event}\n\n".encode() for event in text.strip().split("\n\n")], **more)


def stream(texts: Sequence[str], usage: int | None = None, prompt: int = 3, **more: Any) -> Answer:
    """OpenAI's completions: a text an event, then the reason, then usage on an event without choices."""
    events: list[dict[str, Any]] = [{"choices": [{"text": text, "finish_reason": None}]} for text in texts]
    events.append({"choices": [{"text": "", "finish_reason": "length"}]})
    if usage is not None:
        events.append({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": usage}})
    return sse(*events, **more)


def text(body: str, status: int = 200, kind: str = "application/json") -> Answer:
    """A whole body at once."""
    return Answer([body.encode()] if body else [], status=status, kind=kind)  # an empty chunk would end it


@dataclass
class FakeServer:
    """Answers as `routes` say, on a loopback port of its own; other paths are 404, `/health` is 200."""

    routes: dict[str, Any] = field(default_factory=dict)
    port: int = 0
    requests: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)
    running: int = 0  # requests being answered
    most: int = 0  # of them at once
    peers: set[int] = field(default_factory=set)  # ports of the connections it has answered on
    certificate: Path | None = None  # file with key and certificate: it speaks TLS then
    broken: threading.Event = field(default_factory=threading.Event)  # a client went away in mid-stream

    def __enter__(self) -> FakeServer:
        self.routes.setdefault("/health", text("{}"))
        self._lock = threading.Lock()
        self._http = _Threads(("127.0.0.1", self.port), _handler(self))
        self._http.connections = []
        if self.certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.certificate)
            self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    @property
    def url(self) -> str:
        scheme = "http" if self.certificate is None else "https"
        return f"{scheme}://127.0.0.1:{self._http.server_address[1]}"

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for where, body, _ in self.requests if where == path]

    def answer(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Answer:
        with self._lock:
            self.requests.append((path, body, headers))
            route = self.routes.get(path, text('{"error": {"message": "no such route"}}', 404))
            if isinstance(route, list):
                return route.pop(0) if len(route) > 1 else route[0]
        return route(body) if callable(route) else route

    def hang_up(self) -> None:
        """Close the connections that are open."""
        for connection in self._http.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def count(self, change: int) -> None:
        with self._lock:
            self.running += change
            self.most = max(self.most, self.running)


class _Threads(ThreadingHTTPServer):
    daemon_threads = True
    connections: list[socket.socket]
    request_queue_size = 256  # connections that wait to be taken: many come at once

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.append(request)
        super().process_request(request, client_address)


def _handler(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 0
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            size = int(self.headers.get("Content-Length", 0))
            server.peers.add(self.client_address[1])
            server.count(1)
            try:
                self._answer(json.loads(self.rfile.read(size) or b"{}"))
            finally:
                server.count(-1)

        def _answer(self, body: dict[str, Any]) -> None:
            answer = server.answer(self.path, body, dict(self.headers))
            try:
                self._send(answer)
            except (BrokenPipeError, ConnectionResetError):
                server.broken.set()
                self.close_connection = True

        def _send(self, answer: Answer) -> None:
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.kind)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            due = time.perf_counter()
            for number, piece in enumerate(answer.pieces):
                due += answer.delays[min(number, len(answer.delays) - 1)]
                time.sleep(max(0.0, due - time.perf_counter()))
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            if answer.cut:
                self.close_connection = True
                self.connection.close()
                return
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *arguments: object) -> None:
            """Silence."""

    return Handler


# -- a program to launch ----------------------------------------------------------------------------------------


@dataclass
class Imitation:
    """A model whose answer depends on the prompt alone: so many letters, accepted `draft` at a time."""

    draft: int
    drop_every: int = 0
    asked: int = 0
    accepted: int = 0
    drafted: int = 0
    steps: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def complete(self, body: dict[str, Any]) -> Answer:
        prompt = body["prompt"]
        count = int(body["max_tokens"])
        ids = [4 + (sum(prompt) + 7 * number) % 26 for number in range(count)]
        with self.lock:
            self.asked += 1
            drop = self.drop_every and self.asked % self.drop_every == 0
        events: list[dict[str, Any]] = []
        place, steps, accepted = 0, 0, 0
        while place < count:
            size = 1 if place == 0 else min(1 + self.draft, count - place)
            new = ids[place : place + size]
            words = "".join(chr(93 + one) for one in new)
            events.append({"choices": [{"text": words, "token_ids": new, "finish_reason": None}]})
            place, steps, accepted = place + size, steps + (place > 0), accepted + size - 1
        with self.lock:
            self.accepted += accepted
            self.drafted += accepted + steps if self.draft else 0
            self.steps += steps if self.draft else 0
        events.append({"choices": [{"text": "", "finish_reason": "length"}]})
        usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
        events.append({"choices": [], "usage": usage})
        if drop:
            return sse(*events[:2], done=False, cut=True)
        return sse(*events, delays=(0.001,))

    def metrics(self, body: dict[str, Any]) -> Answer:
        names = {"accepted": self.accepted, "drafted": self.drafted, "drafts": self.steps}
        return text(
            "".join(f"fake:{name}_total {value}\n" for name, value in names.items()), kind="text/plain"
        )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="fake-engine")
    made.add_argument("--version", action="version", version="fake-engine 1.2.3")
    made.add_argument("--model")
    made.add_argument("--host", default="127.0.0.1")
    made.add_argument("--port", type=int, default=0)
    made.add_argument("--draft-tokens", type=int, default=0)
    made.add_argument("--draft-model")
    made.add_argument("--slow-start", type=float, default=0.0)
    made.add_argument("--drop-every", type=int, default=0)
    made.add_argument("--crash", action="store_true")
    made.add_argument("--taken", help="a file: while it is missing, make it and find the port taken")
    return made


def main(argv: Sequence[str]) -> None:
    given = parser().parse_args(argv)
    print(f"fake-engine 1.2.3: loading {given.model}", flush=True)
    print("keys:", [name for name in os.environ if name.endswith("API_KEY")], flush=True)
    if given.crash:
        raise RuntimeError("CUDA out of memory: tried to allocate 2.00 GiB")
    if given.taken and not Path(given.taken).exists():
        Path(given.taken).touch()
        raise OSError(98, "Address already in use")
    model = Imitation(given.draft_tokens, given.drop_every)
    began = time.monotonic()

    def health(body: dict[str, Any]) -> Answer:
        ready = time.monotonic() - began >= given.slow_start
        return text("{}") if ready else text('{"error": {"message": "Loading model"}}', 503)

    routes = {"/v1/completions": model.complete, "/metrics": model.metrics, "/health": health}
    with FakeServer(routes, port=given.port):
        print("ready", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1:])
