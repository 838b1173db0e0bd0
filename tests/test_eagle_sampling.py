"""EAGLE is exact when the target samples, with siblings that are drawn and with the likeliest ones."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import eagle_heads as heads
import pytest
import test_exactness
import tiny
import torch

from specbench.decoding.sampling import Sampling, drawn_distinct, exponentials

Eagle1, Eagle2, Eagle3 = (
    getattr(importlib.import_module(f"specbench.methods.{name}"), name.capitalize())
    for name in ("eagle1", "eagle2", "eagle3")
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from more, and wait for them on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


TREES = {"total_token": 9, "depth": 2, "top_k": 3}
CHAINS = {"total_token": 4, "depth": 2, "top_k": 1}
SHARP = Sampling(0.7, top_p=0.9)


def sampler(name: str, options: dict[str, Any]) -> Any:
    """A drafter for a target of the size `test_exactness` can enumerate."""
    target = tiny.llama(test_exactness.VOCAB, seed=3, hidden=16, std=0.6)
    if name == "eagle3":
        ids = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        return Eagle3(target, draft=heads.eagle3(target, drafts=5, **ids), **options)
    return {"eagle1": Eagle1, "eagle2": Eagle2}[name](target, draft=heads.eagle1(target), **options)


@pytest.mark.parametrize("sampling", test_exactness.SAMPLINGS, ids=str)
def test_sampling_is_exact_with_drawn_siblings(sampling: Sampling) -> None:
    made = sampler("eagle1", {})
    test_exactness.check(made.target, made, sampling)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("eagle2", TREES),
        ("eagle3", TREES),
        pytest.param("eagle1", {"sampled": False}, marks=pytest.mark.slow),
        pytest.param("eagle3", CHAINS, marks=pytest.mark.slow),
        pytest.param("eagle2", {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sampling_is_exact_with_likeliest_siblings(name: str, options: dict[str, Any]) -> None:
    made = sampler(name, options)
    test_exactness.check(made.target, made, SHARP)


def test_draws_without_replacement() -> None:
    """The joint distribution of two draws, and the q each says it was drawn from."""
    p = torch.tensor([0.5, 0.3, 0.2, 0.0])
    rows = 20_000
    noise = exponentials(rows, 4, [torch.Generator().manual_seed(0)], [rows])
    tokens, q = drawn_distinct(p.expand(1, rows, 4), 4, noise)
    assert all(len(set(row)) == 4 for row in tokens[0].tolist())
    for first in range(3):
        for second in range(3):
            share = ((tokens[0, :, 0] == first) & (tokens[0, :, 1] == second)).float().mean()
            expected = 0 if first == second else p[first] * p[second] / (1 - p[first])
            assert abs(share - expected) < 0.015
    assert (tokens[0, :, 3] == 3).all(), "what has no probability comes last"
    torch.testing.assert_close(q.sum(-1), torch.ones(1, rows, 4))
    drawn = q.gather(-1, tokens[..., None])[..., 0]
    assert (drawn > 0).all()
    expected = p[tokens[0, :, 1]] / (1 - p[tokens[0, :, 0]])
    torch.testing.assert_close(drawn[0, :, 1], expected)
