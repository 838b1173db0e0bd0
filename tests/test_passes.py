"""Fixed-shape passes: what a GPU captures and replays, captured and replayed on a CPU, against plain forwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny
import torch
from fake_cuda import RESERVED, FakeCuda
from test_loop import ARCHITECTURES, VOCAB, DraftModel, RandomTrees, generate

from specbench.decoding.context import Context
from specbench.decoding.draft import Drafter
from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Request
from specbench.models.buckets import bucket_of, buckets, round_up
from specbench.models.fixed_pass import WIDEST, FixedPass, Tensors
from specbench.models.passes import Passes
from specbench.models.target import Target

NEW = 90  # grows over the edge of a bucket of slots


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda().install(monkeypatch)


def fixed(target: Target) -> Target:
    """`target` with passes of fixed shape, which are captured."""
    made = Target(target.model)
    made.passes = Passes("target")
    return made


def shapes_of(made: Passes) -> set[tuple[int, ...]]:
    """Rows, columns and slots of the passes made."""
    return {tuple(map(int, shape.split("x"))) for shape in made.facts()["shapes"]}


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
    shapes = shapes_of(other.passes)
    assert {count for count, _, _ in shapes} == {rows}
    assert {width for _, width, _ in shapes} >= {1, 16}, "vanilla's pass of one column, and trees of up to 13"
    assert len({length for _, _, length in shapes}) > 1, "the context grows over an edge"


@pytest.mark.parametrize("rows", [1, 3])
def test_a_pass_is_the_plain_forward(target: Target, rows: int) -> None:
    """Bit by bit at a bucket's own width; padded, to rounding. Taps likewise."""
    other, prompts = fixed(target), [[3, 5, 7, 11, 13]] * rows
    for one in (target, other):
        one.reserve(rows, 100)
        one.prefill(prompts)
    for width in (1, 4, 5, 8, 3, 6):
        tokens = torch.arange(rows * width).view(rows, width) % VOCAB
        both = []
        for one in (target, other, other):
            context = Context(one)
            context.rewind([5] * rows)
            with torch.inference_mode(), one.tapping(("embed", "layer:0", "final")):
                both.append(context.append(one, tokens, [width] * rows))
        plain, _, passed = both
        for name, tensor in {"logits": plain.logits, **plain.taps}.items():
            found = passed.logits if name == "logits" else passed.taps[name]
            assert found.shape == tensor.shape
            torch.testing.assert_close(found, tensor, atol=0 if width in (1, 4, 8) else 1e-5, rtol=0)


@pytest.mark.parametrize("width", [3, 4])
def test_what_comes_out_is_the_callers(width: int) -> None:
    made = Passes("target", Overwriting)
    for _ in range(3):
        first = made.run("", 0, doubled, {"tokens": torch.ones(1, width)}, 0)["out"]
        made.run("", 0, doubled, {"tokens": torch.zeros(1, width)}, 0)
        assert first.tolist() == [[2.0] * width]


def test_passes_with_other_taps_or_layers_are_others(llama: Target) -> None:
    """A graph computes what was hooked and in place when it was captured."""
    other = fixed(llama)
    other.reserve(1, 100)
    other.prefill([[3, 5, 7]])

    def run() -> None:
        context = Context(other)
        context.rewind([3])
        with torch.inference_mode():
            context.append(other, torch.tensor([[1]]), [1])

    run()
    with other.tapping(("final",)):
        run()
        with other.tapping(("embed",)):
            run()
    with other.skipping([1]):
        run()
    run()
    assert other.passes.variants(1) == [(("final",), ()), (("final", "embed"), ()), ((), (1,)), ((), ())]


class Overwriting(FixedPass):
    """Gives out the same memory each time, as a graph does."""

    def run(self) -> Tensors:
        outputs = super().run()
        self.out = getattr(self, "out", outputs["out"])
        self.out.copy_(outputs["out"])
        return {"out": self.out}


def doubled(inputs: Tensors, length: int) -> Tensors:
    return {"out": 2 * inputs["tokens"]}


def ask(
    made: Passes, width: int, times: int = 2, variant: str = "", version: int = 0, length: int = 64
) -> None:
    for _ in range(times):
        inputs = {"tokens": torch.ones(2, width), "slots": torch.ones(2, width, dtype=torch.long)}
        out = made.run(
            variant, version, doubled, {**inputs, "mask": torch.zeros(2, 1, width, length)}, length
        )
        assert out["out"].tolist() == [[2.0] * width] * 2


def test_passes_are_made_the_second_time_and_kept_within_bounds() -> None:
    made = Passes("target", FixedPass, most=2)
    ask(made, 3, times=1)
    assert made.made == 0, "what comes up once is not worth it"
    ask(made, 4, times=1)
    assert shapes_of(made) == {(2, 4, 64)}, "three columns and four are one kind"
    ask(made, 1)
    ask(made, 2, times=3)
    assert made.made == 3
    ask(made, 1)
    assert made.made == 3, "one column was used after four, which made room"
    ask(made, 4)
    assert made.made == 4
    ask(made, 4, version=1)
    assert made.made == 5, "another cache: everything was dropped"
    assert made.nbytes() == 2 * 4 * (4 + 8) + 2 * 4 * 64 * 4
    ask(made, WIDEST + 1)
    assert made.made == 5, "too wide to be worth it"
    made.clear()
    assert made.nbytes() == 0


def test_passes_made_ahead_beyond_what_is_kept_do_not_push_each_other_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A second batch like the first has nothing left to make, and those used most (vanilla's) are there."""
    made, lengths = Passes("target", FixedPass, most=6), [64, 128, 192, 256]
    for width in (2, 4, 1):
        ask(made, width, times=2 if width > 1 else 9)
    for _ in range(2):
        before = made.made
        made.ahead(2, 0, lengths)
    assert made.made == before
    for length in lengths:
        ask(made, 1, length=length)
    assert made.made == before
    assert [record.message for record in caplog.records] == [
        "the target has 12 passes of fixed shape to make for contexts as long as these and keeps 6: others are made "
        "while the clock runs"
    ]


def test_what_captures_took_stays_taken_when_passes_make_room(cuda: FakeCuda) -> None:
    """Graphs share one pool, and it is given back only when the last of them is gone."""
    made = Passes("target", most=1)
    ask(made, 1)
    ask(made, 2)
    assert cuda.happened.count("captured") == 2
    assert made.nbytes() == 2 * 2 * (4 + 8) + 2 * 2 * 64 * 4 + 2 * RESERVED + 2 * 4 * (1 + 2)
    made.clear()
    assert made.nbytes() == 0


def test_a_pass_that_cannot_be_captured_runs_as_it_is_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: Any) -> FixedPass:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    made = Passes("tiny model", refuse)
    for width in (1, 2, 4):
        ask(made, width)
    assert made.facts() == {
        "model": "tiny model",
        "shapes": [],
        "eager": "RuntimeError: operation not permitted when stream is capturing",
    }
    assert [record.message for record in caplog.records] == [
        "the tiny model runs without CUDA graphs: RuntimeError: operation not permitted when stream is capturing"
    ]


def test_passes_are_made_ahead_of_a_batch_that_grows(llama: Target) -> None:
    """Once a method's widths are known, nothing is left to make while the clock runs.

    In double precision: no rounding, which differs with how buffers lie and threads share a product, then decides
    what is accepted, and with that which widths come up.
    """
    exact = Target(copy.deepcopy(llama.model).double())
    target, draft, prompts = fixed(exact), fixed(exact), tiny.prompts(2, VOCAB, seed=5)
    method = DraftVerify(target, DraftModel(target, draft=draft, k=3))
    generate(method, Request(prompts, 40))
    request = Request(prompts, 300)
    method.prepare(request)
    before = target.passes.made, draft.passes.made
    assert min(before) > 5
    outputs, _ = generate(method, request)
    assert (target.passes.made, draft.passes.made) == before
    assert outputs == generate(DraftVerify(exact, Drafter(exact)), request)[0]
    method.release()
    assert target.passes.nbytes() == draft.passes.nbytes() == 0


def test_passes_are_made_ahead_in_a_cache_that_a_batch_has_written(llama: Target) -> None:
    """Its buffers were made in inference mode, and a shorter prompt needs a bucket that was not read before."""
    other = fixed(llama)
    method = DraftVerify(other, Drafter(other))
    generate(method, Request([list(range(60)) * 3], 40))
    before = other.passes.made
    method.prepare(request := Request([[1, 2, 3]], 10))
    assert other.passes.off is None
    assert other.passes.made > before
    assert generate(method, request) == generate(DraftVerify(llama, Drafter(llama)), request)


def test_padding_wakes_no_further_experts() -> None:
    config, attention = ARCHITECTURES["qwen3-moe"]
    plain = tiny.build(config, seed=1, attn=attention)
    target = fixed(plain)
    woken: list[torch.Tensor] = []
    target.model.model.layers[1].mlp.gate.register_forward_hook(lambda _m, _i, out: woken.append(out[2]))
    target.reserve(1, 100)
    target.prefill([[3, 5, 7]])
    for _ in range(2):
        context = Context(target)
        context.rewind([3])
        woken.clear()
        with torch.inference_mode():
            context.append(target, torch.tensor([[1, 2, 3, 4, 5]]), [5])
    assert len(woken[0]) == 8
    assert set(woken[0].flatten().tolist()) == set(woken[0][:5].flatten().tolist())


@pytest.mark.parametrize(("width", "bucket"), [(1, 1), (2, 2), (3, 4), (9, 16), (64, 64), (65, 128)])
def test_buckets_of_columns(width: int, bucket: int) -> None:
    assert bucket_of(width) == bucket


def test_buckets_of_slots_waste_an_eighth_at_most() -> None:
    for slots in range(1, 5000):
        rounded = round_up(slots)
        assert slots <= rounded < slots + max(64, slots / 8 + 1)
    assert buckets(100, 300, 10_000) == [128, 192, 256, 320]
    assert buckets(60, 70, 100) == [64, 100], "the cache's own end"
