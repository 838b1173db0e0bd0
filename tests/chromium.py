"""A page in headless Chromium, driven over its DevTools protocol: real clicks and keys, and all it asks for."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *(
        "--no-first-run",
        "--disable-extensions",
        "--disable-background-networking",
        "--remote-debugging-port=0",
    ),
)
WAIT = 30  # seconds for anything; far more than it takes
KEYS = {"Tab": 9, "Enter": 13, " ": 32, "ArrowDown": 40}


class Page:
    """One tab. Everything it asks the network for and all its messages are kept."""

    def __init__(self, address: str) -> None:
        websocket = pytest.importorskip("websocket")
        self.socket = websocket.create_connection(address, timeout=WAIT, suppress_origin=True)
        self.events: list[dict[str, Any]] = []
        self._number = 0
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        self.send("Page.setLifecycleEventsEnabled", enabled=True)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; what comes in between is kept in `events`."""
        self._number += 1
        self.socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while (message := json.loads(self.socket.recv())).get("id") != self._number:
            self.events.append(message)
        assert "error" not in message, (method, message)
        result: dict[str, Any] = message["result"]
        return result

    def open(
        self, path: Path, width: int = 1280, dark: bool = False, media: str = "", script: bool = True
    ) -> None:
        """Load a file afresh, in a window so wide, and forget what happened before."""
        phone = width < 600
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.send("Emulation.setScriptExecutionDisabled", value=not script)
        self.events.clear()
        loader = self.send("Page.navigate", url=path.as_uri())["loaderId"]
        self.wait_for("Page.lifecycleEvent", loaderId=loader, name="load")
        if script:
            self.wait_until(
                "!document.querySelector('#question-list') || document.querySelector('#question-list tr')"
            )

    def wait_for(self, event: str, **parameters: str) -> None:
        """Until an event with these parameters has come."""
        while not any(
            m["method"] == event and parameters.items() <= m["params"].items() for m in self.events
        ):
            self.events.append(json.loads(self.socket.recv()))

    def wait_until(self, condition: str) -> None:
        end = time.monotonic() + WAIT
        while not self.js(f"return Boolean({condition})"):
            assert time.monotonic() < end, f"never: {condition}"
            time.sleep(0.02)

    def js(self, body: str) -> Any:
        """What a function of that body returns, as plain values."""
        answer = self.send(
            "Runtime.evaluate", expression=f"(() => {{{body}}})()", returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """A click of the mouse in the middle of the first element that the selector finds."""
        x, y = self.js(
            f"const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center'}});"
            "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """A key of the keyboard, where the focus is."""
        known = {"key": key, "windowsVirtualKeyCode": KEYS[key], "nativeVirtualKeyCode": KEYS[key]}
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", **known, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **known)

    def choose(self, selector: str, value: str | bool) -> None:
        """Set a control as its user would: to a value, or checked or not."""
        what = "checked" if isinstance(value, bool) else "value"
        self.js(
            f"const e = document.querySelector({json.dumps(selector)}); e.{what} = {json.dumps(value)};"
            "e.dispatchEvent(new Event('input', { bubbles: true }))"
        )

    def texts(self, selector: str) -> list[str]:
        """The texts of the elements that can be seen."""
        found: list[str] = self.js(
            f"return [...document.querySelectorAll({json.dumps(selector)})]"
            ".filter((e) => e.getClientRects().length).map((e) => e.innerText)"
        )
        return found

    def requested(self) -> list[str]:
        """The addresses that the page asked for since it was opened."""
        return [
            m["params"]["request"]["url"] for m in self.events if m["method"] == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[str]:
        """Errors and warnings of the console since the page was opened."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(m["params"])[:400] for m in self.events if m["method"] in kinds]

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG, for looking at."""
        width, height = self.js("const e = document.documentElement; return [e.clientWidth, e.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A page in a fresh Chromium whose profile is in `folder`; skips the test where there is no Chromium."""
    binary = next((found for name in NAMES if (found := shutil.which(name))), None)
    if binary is None:
        pytest.skip("no Chromium here: `make browser` installs Debian's where it may")
    process = subprocess.Popen(
        [binary, *OPTIONS, f"--user-data-dir={folder}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        page = Page(_address(folder / "DevToolsActivePort", process))
        yield page
        page.socket.close()
    finally:
        process.terminate()
        process.wait(WAIT)


def _address(port_file: Path, process: subprocess.Popen[bytes]) -> str:
    """Of the first tab's socket, once the browser has written its port."""
    end = time.monotonic() + WAIT
    while not (port_file.is_file() and port_file.read_text().strip()):
        assert process.poll() is None, "Chromium ended at once"
        assert time.monotonic() < end, "Chromium did not start"
        time.sleep(0.02)
    port = port_file.read_text().split()[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=WAIT) as answer:
        tabs = json.load(answer)
    address: str = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
    return address
