"""Fixed-shape passes: the code that a GPU captures, run on a CPU without capturing, against plain forwards."""

from __future__ import annotations

import random

import pytest
import tiny
import torch
from test_loop import ARCHITECTURES, VOCAB, DraftModel, Listener, RandomTrees, SelfSpeculation, generate

from specbench.decoding.draft import Drafter
from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Request
from specbench.models import passes
from specbench.models.passes import FixedPass, Passes, bucket_of
from specbench.models.target import Target

NEW = 90  # grows over the edge of a bucket of slots


def fixed(target: Target) -> Target:
    """`target` with passes of fixed shape: everything a graph needs but the capture."""
    made = Target(target.model)
    made.passes = Passes("target", FixedPass)
    return made


@pytest.fixture(scope="module", params=ARCHITECTURES)
def target(request: pytest.FixtureRequest) -> Target:
    config, attention = ARCHITECTURES[request.param]
    return tiny.build(config, seed=1, attn=attention)


@pytest.fixture(scope="module")
def llama() -> Target:
    return tiny.llama(VOCAB)


@pytest.mark.parametrize("rows", [1, 4])
def test_fixed_passes_give_the_same_tokens(target: Target, rows: int) -> None:
    prompts = tiny.prompts(rows, VOCAB, seed=2)
    plain, _ = generate(DraftVerify(target, Drafter(target)), Request(prompts, NEW))
    answers = {tuple(p): a for p, a in zip(prompts, plain, strict=True)}
    other = fixed(target)
    for drafter in (Drafter(other), RandomTrees(other, answers)):
        outputs, _ = generate(DraftVerify(other, drafter), Request(prompts, NEW))
        assert outputs == plain
    assert other.passes.off is None
    shapes = {tuple(map(int, shape.split("x"))) for shape in other.passes.facts()["shapes"]}
    assert {count for count, _, _ in shapes} == {rows}
    assert {width for _, width, _ in shapes} >= {1, 16}, "vanilla's pass of one column, and trees of up to 13"
    assert len({length for _, _, length in shapes}) > 1, "the context grows over an edge"
