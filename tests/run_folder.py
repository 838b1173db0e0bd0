"""Runs on disk and in memory for tests of comparisons: manifests with an identity, trials with known costs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
from trial_factory import FakeRun, block

from specbench.store import RunStore, Trial

MANIFEST: dict[str, Any] = {
    "name": "run",
    "target": {
        "name": "tiny",
        "dtype": "float32",
        "quantization": None,
        "revision": "abc",
        "parameters": 10,
        "files": {"model.safetensors": "11"},
    },
    "config": {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "ignore_eos": False, "max_new_tokens": 48},
    "methods": [{"label": "vanilla"}, {"label": "fast"}],
    "tasks": [
        {"name": "chat", "sha256": "aa", "questions": 20},
        {"name": "code", "sha256": "bb", "questions": 20},
    ],
    "machine": {"cpu": {"model": "CPU"}},
    "machine_fingerprint": "m1",
    "chat_template": "t",
    "versions": {"torch": "2.13.0"},
    "git": {"commit": "a" * 40, "dirty": False},
    "start": "2026-01-01T00:00:00+00:00",
    "status": "complete",
}


def manifest(**changed: Any) -> dict[str, Any]:
    """MANIFEST with other values; `target__dtype="x"` changes a part of a part."""
    made = copy.deepcopy(MANIFEST)
    for key, value in changed.items():
        first, _, second = key.partition("__")
        if second:
            made[first][second] = value
        else:
            made[first] = value
    return made


def trials(
    questions: int = 20,
    slower: float = 1.0,
    tasks: tuple[str, ...] = ("chat", "code"),
    seed: int = 0,
    noise: float = 0.0,
    accepted: int = 2,
    **fields: Any,
) -> list[Trial]:
    """`fast` beside vanilla on questions that differ in cost; `slower` multiplies the seconds of `fast`.

    Costs are the question's own, whatever else is asked for; `noise` is the spread of a trial's own seconds.
    """
    found: list[Trial] = []
    own = np.random.default_rng(1000 + seed)
    for task in tasks:
        costs = np.random.default_rng(sum(map(ord, task)))
        for number in range(questions):
            length, cost = int(costs.integers(10, 60)), float(costs.lognormal(0, 0.3))
            vanilla, fast = (float(own.lognormal(0, noise)) if noise else 1.0 for _ in range(2))
            rounds = max(1, length // (accepted + 1))
            methods: dict[str, dict[str, Any]] = {
                "vanilla": {"seconds": length * cost * vanilla, "accepted": [0] * rounds * (accepted + 1)},
                "fast": {
                    "seconds": 1.3 * rounds * cost * fast * slower,
                    "accepted": [accepted] * rounds,
                    "lossless": True,
                },
            }
            number_of_block = len(found) // 2
            made = block(f"q{number}", number_of_block, methods, task=task, **({"prompt_tokens": 7} | fields))
            for trial in made:
                trial.batch_s = trial.total_s = trial.prefill_s = trial.decode_s
            found += made
    return found


def run(given: list[Trial] | None = None, **changed: Any) -> FakeRun:
    return FakeRun(trials() if given is None else given, manifest(**changed))


def write_run(folder: Path, given: list[Trial], **changed: Any) -> Path:
    """A run folder, named after the folder."""
    store = RunStore(folder)
    store.write_manifest(manifest(**({"name": folder.name} | changed)))
    store.append(given)
    return folder
