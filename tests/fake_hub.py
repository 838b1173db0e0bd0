"""A stand-in for the Hub, serving one folder as `owner/model` on 127.0.0.1: model info, tree, files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "a" * 40


@contextmanager
def serve(folder: Path, *, gated: bool = False, missing: bool = False) -> Iterator[str]:
    """The URL of a Hub that holds `folder`; gated: its files are refused; missing: there is no such model."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            if missing:
                self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif "/tree/" in path:
                self.answer(200, json.dumps([describe(file) for file in sorted(folder.iterdir())]).encode())
            elif path.startswith("/api/models/"):
                self.answer(200, json.dumps({"id": "owner/model", "sha": COMMIT, "siblings": []}).encode())
            elif gated:
                self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
            else:
                file = folder / path.rsplit("/", 1)[1]
                etag = describe(file).get("lfs", describe(file))["oid"]
                self.answer(200, file.read_bytes(), {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'})

        do_HEAD = do_GET

        def answer(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(code)
            for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def describe(file: Path) -> dict:
    data = file.read_bytes()
    entry = {"type": "file", "path": file.name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
    if file.suffix == ".safetensors":
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 1}
    return entry
