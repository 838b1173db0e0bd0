"""Drafters' steps as fixed passes, captured and replayed on a CPU: every draft is what it was without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import eagle_heads
import pytest
import tiny
from fake_cuda import FakeCuda
from test_dflash import DFlash
from test_eagle import Eagle1, Eagle3
from test_hydra import random_hydra
from test_loop import SMALL, DraftModel, SelfSpeculation, generate
from test_medusa import random_medusa
from test_mtp import Mtp, open_target, write_target
from test_passes import fixed, shapes_of
from tiny_dflash import write_draft
from transformers import LlamaConfig

from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Request
from specbench.models.target import Target

VOCAB, NEW = 64, 50


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda().install(monkeypatch)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.llama(VOCAB, layers=8)


Shapes = set[tuple[int, ...]]


def shapes_after(target: Target, make: Callable[[Target], Any], rows: int) -> tuple[Any, Shapes]:
    """Tokens and rounds of two batches (the second begins with passes made ahead), and the drafter's passes."""
    drafter = make(target)
    method = DraftVerify(target, drafter)
    requests = [Request(tiny.prompts(rows, VOCAB, seed=seed), NEW) for seed in (3, 4)]
    found = [generate(method, request) for request in requests]
    if target.passes.off is None:
        assert drafter_passes(drafter).off is None
    return found, shapes_of(drafter_passes(drafter))


def drafter_passes(drafter: Any) -> Any:
    if isinstance(drafter, DraftModel):
        return drafter.draft.passes
    return drafter.target.passes if isinstance(drafter, SelfSpeculation) else drafter.passes


def draft_model(target: Target, draft: Target) -> Any:
    draft.passes = target.passes.like("draft model")
    return DraftModel(target, draft=draft, k=4)


MADE: dict[str, tuple[Callable[[Target], Any], set[int]]] = {
    "the target as draft": (lambda target: draft_model(target, Target(target.model)), {1, 2}),
    "a draft model": (lambda target: draft_model(target, tiny.llama(VOCAB, seed=3)), {1}),
    "self-speculation": (lambda target: SelfSpeculation(target, k=3), {1}),
    "eagle1": (lambda target: Eagle1(target, draft=eagle_heads.eagle1(target)), {1, 2, 4}),
    "eagle3": (
        lambda target: Eagle3(target, draft=eagle_heads.eagle3(target), total_token=20, depth=3, top_k=4),
        {1},
    ),
    "medusa": (random_medusa, {1}),
    "hydra": (random_hydra, {1}),
}


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", MADE)
def test_drafts_by_fixed_passes_are_the_same(target: Target, name: str, rows: int) -> None:
    make, widths = MADE[name]
    found, shapes = shapes_after(fixed(target), make, rows)
    plain, _ = shapes_after(target, make, rows)
    assert found == plain
    assert {width for _, width, _ in shapes} >= widths


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(
    ("options", "settings"),
    [({}, {}), ({"tree": "ddtree", "nodes": 12}, {}), ({}, {"markov": "rnn"})],
    ids=["chain", "ddtree", "markov"],
)
def test_blocks_by_fixed_passes_are_the_same(
    target: Target, tmp_path: Path, options: dict[str, Any], settings: dict[str, Any], rows: int
) -> None:
    draft = str(write_draft(tmp_path / "dflash", target, **settings))
    found, shapes = shapes_after(fixed(target), lambda target: DFlash(target, draft=draft, **options), rows)
    plain, _ = shapes_after(target, lambda target: DFlash(target, draft=draft, **options), rows)
    assert found == plain
    assert {length for _, _, length in shapes} >= {0, 64}, "what is kept of the context reads nothing"


@pytest.mark.parametrize("rows", [1, 4])
def test_prediction_layers_by_fixed_passes_are_the_same(tmp_path: Path, rows: int) -> None:
    target = open_target(write_target(tmp_path, LlamaConfig(**SMALL), layers=2))
    folder = target.identity

    def make(target: Target) -> Any:
        target.identity = folder
        return Mtp(target, k=4)

    found, shapes = shapes_after(fixed(target), make, rows)
    plain, _ = shapes_after(target, make, rows)
    assert found == plain
    assert {width for _, width, _ in shapes} >= {1, 2}
