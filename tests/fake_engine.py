"""The adapter of the imitation in `fake_server.py`, and how a test has it among the engines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from specbench.engines.base import Engine, Native, Setup
from specbench.engines.terms import Launch

PROGRAM = Path(__file__).with_name("fake_server.py")


class Fake(Engine):
    name = "fake"
    install = "pip install fake-engine"
    module = "fake"
    methods: ClassVar = {
        "prompt-lookup": Native("ngram", {"draft-tokens": 3}, {"k": "draft-tokens"}),
        "draft-model": Native("draft", {"draft-tokens": 2}, {"k": "draft-tokens"}, draft="draft-model"),
        "suffix": Native("suffix", {"draft-tokens": 1}, learns=True),
        "gone": Native("gone", {"flag-that-was-removed": 1}),
    }
    metrics = "/metrics"
    counter_names: ClassVar = {
        "accepted": "fake:accepted_total",
        "drafted": "fake:drafted_total",
        "verify_steps": "fake:drafts_total",
    }

    def found(self, binary: str | None = None) -> list[str] | None:
        return None if binary == "missing" else [sys.executable, str(PROGRAM)]

    def arguments(self, setup: Setup, launch: Launch) -> list[str]:
        where = ["--model", launch.target, "--host", launch.host, "--port", str(launch.port)]
        return [*where, *self.flags(setup)]


def install(monkeypatch: pytest.MonkeyPatch, **attributes: Any) -> Fake:
    """Have the imitation as the engine `fake`, with some of its facts changed."""
    import specbench.engines

    cls = type("Changed", (Fake,), attributes)
    monkeypatch.setattr(specbench.engines, "engines", lambda: {"fake": cls()})
    return cls()
