"""Drafters' steps as fixed passes, captured and replayed on a CPU: every draft is what it was without."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import eagle_heads
import pytest
import tiny
import torch
from fake_cuda import FakeCuda
from test_dflash import DFlash
from test_eagle import Eagle1, Eagle3
from test_hydra import random_hydra
from test_loop import SMALL, DraftModel, SelfSpeculation, generate
from test_medusa import random_medusa
from test_mtp import Mtp, open_target, record, write_target
from test_passes import fixed, shapes_of
from tiny_dflash import write_draft
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

from specbench.decoding.draft import Draft, Drafter
from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Request
from specbench.decoding.sampling import Sampling
from specbench.models.fixed_pass import FixedPass
from specbench.models.passes import Passes
from specbench.models.target import Target

VOCAB, NEW = 64, 50
GREEDY, SHARP = Sampling(), Sampling(0.8, top_k=20, top_p=0.9)


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda().install(monkeypatch)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.llama(VOCAB, layers=8)


Shapes = set[tuple[int, ...]]


def shapes_after(
    target: Target, make: Callable[[Target], Any], rows: int, sampling: Sampling = GREEDY
) -> tuple[Any, Shapes]:
    """Tokens, rounds and drafts of two batches (the second's passes are made ahead), and the drafter's passes."""
    drafter = make(target)
    method = DraftVerify(target, drafter)
    drafts = record(drafter)
    requests = [
        Request(
            tiny.prompts(rows, VOCAB, seed=seed),
            NEW,
            sampling=sampling,
            generators=generators(rows, sampling),
        )
        for seed in (3, 4)
    ]
    found = [generate(method, request) for request in requests]
    if target.passes.off is None:
        assert drafter_passes(drafter).off is None
    return (found, [list(map(listed, each)) for each in drafts]), shapes_of(drafter_passes(drafter))


def generators(rows: int, sampling: Sampling) -> list[torch.Generator] | None:
    return None if sampling.greedy else [torch.Generator().manual_seed(row) for row in range(rows)]


def listed(draft: Draft) -> tuple[Any, Any]:
    """A draft's tokens and parents as lists."""
    parents = draft.parents
    return torch.as_tensor(draft.tokens).tolist(), None if parents is None else torch.as_tensor(
        parents
    ).tolist()


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
    "eagle1": (lambda target: Eagle1(target, draft=eagle_heads.eagle1(target)), {1, 2}),
    "eagle3": (
        lambda target: Eagle3(target, draft=eagle_heads.eagle3(target), total_token=20, depth=3, top_k=4),
        {1},
    ),
    "medusa": (random_medusa, {1}),
    "hydra": (random_hydra, {1}),
}


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(
    ("name", "sampling"),
    [*((name, GREEDY) for name in MADE), ("eagle1", SHARP), ("a draft model", SHARP)],
    ids=str,
)
def test_drafts_by_fixed_passes_are_the_same(
    target: Target, name: str, sampling: Sampling, rows: int
) -> None:
    make, widths = MADE[name]
    found, shapes = shapes_after(fixed(target), make, rows, sampling)
    plain, _ = shapes_after(target, make, rows, sampling)
    assert found == plain
    assert {width for _, width, _ in shapes} >= widths


def test_graphs_held_are_the_targets_and_the_drafters_and_grow_with_the_context(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = fixed(target)
    drafter = draft_model(target, tiny.llama(VOCAB, seed=3))
    method, vanilla = DraftVerify(target, drafter), DraftVerify(target, Drafter(target))
    generate(method, Request([[1, 2, 3]], 20))
    assert method.graph_bytes() is None, "this is no GPU"

    def held() -> tuple[int, int]:
        with monkeypatch.context() as patch:
            patch.setattr(target, "device", torch.device("cuda"))
            return method.graph_bytes(), vanilla.graph_bytes()

    short, shared = held()
    assert short == target.passes.nbytes() + drafter.draft.passes.nbytes()
    assert shared == target.passes.nbytes() < short
    generate(method, Request([[1, 2, 3]], 100))
    assert held() > (short, shared), "passes over more slots were made"


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("sampling", [GREEDY, SHARP], ids=str)
@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, {}),
        ({"tree": "ddtree", "nodes": 12}, {}),
        ({}, {"markov": "rnn"}),
        ({"k": "auto"}, {"markov": "gated"}),
    ],
    ids=["chain", "ddtree", "markov", "markov-auto"],
)
def test_blocks_by_fixed_passes_are_the_same(
    target: Target,
    tmp_path: Path,
    options: dict[str, Any],
    settings: dict[str, Any],
    sampling: Sampling,
    rows: int,
) -> None:
    draft = str(write_draft(tmp_path / "dflash", target, **settings))

    def make(target: Target) -> Any:
        return DFlash(target, draft=draft, **options)

    found, shapes = shapes_after(fixed(target), make, rows, sampling)
    plain, _ = shapes_after(target, make, rows, sampling)
    assert found == plain
    assert {length for _, _, length in shapes} >= {0, 64}, "what is kept of the context reads nothing"


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(
    ("layers", "k", "sampling"),
    [(1, 3, GREEDY), (2, 4, GREEDY), (2, 4, SHARP), (3, 2, GREEDY), (2, "auto", GREEDY)],
    ids=str,
)
def test_prediction_layers_by_fixed_passes_are_the_same(
    tmp_path: Path, layers: int, k: Any, sampling: Sampling, rows: int
) -> None:
    target = open_target(write_target(tmp_path, LlamaConfig(**SMALL), layers))
    folder = target.identity

    def make(target: Target) -> Any:
        target.identity = folder
        return Mtp(target, k=k)

    found, shapes = shapes_after(fixed(target), make, rows, sampling)
    plain, _ = shapes_after(target, make, rows, sampling)
    assert found == plain
    assert shapes


@pytest.mark.parametrize("name", ["eagle1", "dspark"])
def test_passes_made_ahead_draw_as_they_did(target: Target, tmp_path: Path, name: str) -> None:
    """A batch that samples otherwise, and needs more room, makes all passes anew: those of the last sampling too."""
    draft = str(write_draft(tmp_path / "dflash", target, markov="vanilla"))

    def run(target: Target) -> Any:
        drafter = DFlash(target, draft=draft) if name == "dspark" else MADE[name][0](target)
        method, drafts = DraftVerify(target, drafter), record(drafter)
        for new, sampling in ((NEW, SHARP), (3 * NEW, Sampling(2.0)), (NEW, SHARP)):
            prompts = tiny.prompts(1, VOCAB, seed=3)
            generate(method, Request(prompts, new, sampling=sampling, generators=generators(1, sampling)))
        return [list(map(listed, each)) for each in drafts]

    assert run(fixed(target)) == run(target)


class Outside(TorchDispatchMode):
    """Counts what would be kernels of their own, in any rounds' drafting, outside fixed passes."""

    def __init__(self, drafter: Any, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.rounds: list[int] = []
        self._inside = False
        for name in ("propose", "observe"):
            patch.setattr(drafter, name, self._counted(getattr(drafter, name), name == "propose"))
        patch.setattr(FixedPass, "run", self._uncounted(FixedPass.run))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._inside and not func.is_view and "empty" not in func.name():
            self.rounds[-1] += 1
        return func(*args, **(kwargs or {}))

    def _counted(self, step: Any, begins: bool) -> Any:
        def run(*args: Any) -> Any:
            if begins or not self.rounds:
                self.rounds.append(0)
            with self:
                return step(*args)

        return run

    def _uncounted(self, plain: Any) -> Any:
        def run(made: FixedPass) -> Any:
            self._inside = True
            try:
                return plain(made)
            finally:
                self._inside = False

        return run


@pytest.mark.parametrize("name", ["eagle1", "eagle3", "medusa", "hydra", "dflash", "ddtree", "dspark", "mtp"])
def test_little_of_a_round_runs_outside_passes(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name == "mtp":
        target = open_target(write_target(tmp_path, LlamaConfig(**SMALL), 2))
    own = target.identity
    target = fixed(target)
    target.identity, target.passes = own, Passes("target", FixedPass)
    if name == "mtp":
        drafter = Mtp(target, k=5)
    elif name in MADE:
        drafter = MADE[name][0](target)
    else:
        draft = write_draft(tmp_path, target, markov="rnn" if name == "dspark" else "")
        drafter = DFlash(target, draft=str(draft), **({"tree": "ddtree"} if name == "ddtree" else {}))
    spy = Outside(drafter, monkeypatch)
    generate(DraftVerify(target, drafter), Request(tiny.prompts(3, VOCAB, seed=3), NEW))
    assert statistics.median(spy.rounds) <= 32, "a chain's or tree's steps are hundreds"
