"""Fixtures that several files share."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_folder import Workplace, quiet_machine, save_folder, write_task


def pytest_configure() -> None:
    """One thread, here and in processes that tests start: tiny models gain nothing from two, and where another
    process wants the core they lose much."""
    import torch

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


QUESTIONS = (["hello you", "and more"], ["second one x y z"], ["third one x y x y x y"])


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer, in a folder."""
    return save_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def make_place(
    tiny_target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Workplace]]:
    """Places to run in, on one thread: a tiny model gains nothing from more, and waits on a busy machine."""
    import torch

    def make(name: str) -> Workplace:
        path = tmp_path_factory.mktemp(name)
        task = write_task(path / "work.jsonl", QUESTIONS)
        return Workplace(path, tiny_target, task, ["--threads", 1, "--warmup", 0])

    threads, gradients = torch.get_num_threads(), torch.is_grad_enabled()
    with quiet_machine():
        yield make
    torch.set_num_threads(threads)
    torch.set_grad_enabled(gradients)


@pytest.fixture
def on_engine(make_place: Callable[[str], Workplace], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`engine_kit.measure`: a run on an engine's program, by the engine's name, a method and what is to go wrong."""
    from engine_kit import measure

    return functools.partial(measure, make_place, monkeypatch)


@pytest.fixture
def fresh(make_place: Callable[[str], Workplace]) -> Workplace:
    """A place of its own, for tests that count what is on disk."""
    return make_place("fresh")
