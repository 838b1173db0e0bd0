"""Fixed-shape passes: the code that a GPU captures, run on a CPU without capturing, against plain forwards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import eagle_heads
import pytest
import tiny
import torch
from test_eagle import Eagle1, Eagle3
from test_loop import ARCHITECTURES, SMALL, VOCAB, DraftModel, RandomTrees, SelfSpeculation, generate
from transformers import LlamaConfig, PreTrainedConfig

from specbench.config import RunConfig
from specbench.decoding.context import Context
from specbench.decoding.draft import Drafter, Outcome
from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Request
from specbench.errors import SpecbenchError
from specbench.models import passes
from specbench.models.passes import CapturedPass, FixedPass, Passes, Results, Tensors, bucket_of
from specbench.models.target import Target, buckets, round_up

NEW = 90  # grows over the edge of a bucket of slots


def fixed(target: Target) -> Target:
    """`target` with passes of fixed shape: everything a graph needs but the capture."""
    made = Target(target.model)
    made.passes = Passes("target", FixedPass)
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


@pytest.mark.parametrize("rows", [1, 4])
def test_drafts_by_fixed_passes_are_the_same(rows: int) -> None:
    """Draft models, self-speculation, EAGLE's trees: every draft, and so every count, is what it was."""
    target = tiny.llama(VOCAB, layers=8)
    prompts = tiny.prompts(rows, VOCAB, seed=3)

    def draft_model(target: Target, draft: Target) -> Drafter:
        draft.passes = target.passes.like("draft model")
        return DraftModel(target, draft=draft, k=4)

    def run(target: Target, make: Callable[[Target], Any]) -> tuple[Any, set[tuple[int, ...]]]:
        drafter = make(target)
        made = generate(DraftVerify(target, drafter), Request(prompts, 50))
        return made, shapes_of(getattr(drafter, "draft", drafter).passes)

    for make, widths in (
        (lambda target: draft_model(target, Target(target.model)), {1, 2}),
        (lambda target: draft_model(target, tiny.llama(VOCAB, seed=3)), {1}),
        (lambda target: Eagle1(target, draft=eagle_heads.eagle1(target)), {1, 2, 4}),
        (
            lambda target: Eagle3(target, draft=eagle_heads.eagle3(target), total_token=20, depth=3, top_k=4),
            {1},
        ),
    ):
        (found, shapes), (plain, _) = run(fixed(target), make), run(target, make)
        assert found == plain
        assert {width for _, width, _ in shapes} >= widths
    assert (
        run(fixed(target), lambda target: _passes_of_target(SelfSpeculation(target, k=3)))[0]
        == (run(target, lambda target: _passes_of_target(SelfSpeculation(target, k=3)))[0])
    )


def _passes_of_target(drafter: Any) -> Any:
    drafter.passes = drafter.target.passes
    return drafter


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
    ask(made, passes.WIDEST + 1)
    assert made.made == 5, "too wide to be worth it"
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
    """Once a method's widths are known, nothing is left to make while the clock runs."""
    other, prompts = fixed(llama), tiny.prompts(2, VOCAB, seed=5)
    draft = fixed(llama)
    method = DraftVerify(other, DraftModel(other, draft=draft, k=3))
    generate(method, Request(prompts, 40))
    request = Request(prompts, 300)
    method.prepare(request)
    before = passes.made()
    assert before > 10
    outputs, _ = generate(method, request)
    assert passes.made() == before
    assert outputs == generate(DraftVerify(llama, Drafter(llama)), request)[0]
    method.release()
    assert other.passes.nbytes() == draft.passes.nbytes() == 0


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


# -- capturing, with a device that is made up -----------------------------------------------------------------


class FakeGraph:
    """Replays by computing again: what was asked for between `graph`'s begin and end."""

    recorded: Callable[[], object]

    def replay(self) -> None:
        self.recorded()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """torch.cuda's part in a capture, on a CPU; what happened in which order."""
    happened: list[str] = []
    reserved = iter(range(0, 10**6, 1000))
    stream = SimpleNamespace(wait_stream=lambda other: happened.append("wait"))

    @contextmanager
    def graph(made: FakeGraph, pool: object, capture_error_mode: str) -> Iterator[None]:
        assert (pool, capture_error_mode) == ("pool", "thread_local")
        happened.append("capture")
        yield
        happened.append("captured")

    for name, value in {
        "device": lambda device: nullcontext(),
        "Stream": lambda device: stream,
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda device: stream,
        "CUDAGraph": FakeGraph,
        "graph": graph,
        "graph_pool_handle": lambda: "pool",
        "memory_reserved": lambda device: next(reserved),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return happened


def test_a_capture_warms_up_first_and_replays_into_shared_buffers(cuda: list[str]) -> None:
    def compute(inputs: Tensors, length: int) -> Tensors:
        cuda.append("compute")
        return {"out": inputs["tokens"] * length}

    results = Results()
    made = []
    for length in (2, 3):
        captured = CapturedPass(compute, {"tokens": torch.ones(1, 4)}, length, "pool", results)
        captured._graph.recorded = partial(lambda c, n: results.keep(compute(c.inputs, n)), captured, length)
        made.append(captured)
    assert cuda[:7] == ["wait", "compute", "compute", "wait", "capture", "compute", "captured"]
    assert made[0].nbytes() == 16 + 1000
    for captured, length in zip(made, (2, 3), strict=True):
        captured.prepare({"tokens": torch.tensor([[1.0, 2.0]])})
        assert captured.run()["out"].tolist() == [[length, 2 * length, length, length]]
    assert made[0].run()["out"].data_ptr() == made[1].run()["out"].data_ptr()


def test_passes_capture_by_default(cuda: list[str]) -> None:
    made = Passes("target")
    ask(made, 1, times=1)
    assert cuda == []
    inputs = {"tokens": torch.ones(2, 1), "slots": torch.ones(2, 1, dtype=torch.long)}
    with pytest.raises(
        AttributeError, match="recorded"
    ):  # it was captured, and this graph has nothing to replay
        made.run("", 0, doubled, {**inputs, "mask": torch.zeros(2, 1, 1, 64)}, 64)
    assert "captured" in cuda


# -- compiling ------------------------------------------------------------------------------------------------


class Taps(Drafter):
    taps = ("layer:0", "final")

    def observe(self, outcome: Outcome) -> None:
        self.heard = set(outcome.taps)


def test_compiled_passes_give_the_same_tokens_and_taps(
    llama: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # traced, not generated
    prompts = tiny.prompts(1, VOCAB, seed=2)
    other = Target(llama.model).accelerate(compile=True)
    assert other.kernels["compile"] == "torch.compile"
    plain, _ = generate(DraftVerify(llama, Drafter(llama)), Request(prompts, 20))
    for drafter in (Drafter(other), tapping := Taps(other)):
        assert generate(DraftVerify(other, drafter), Request(prompts, 20))[0] == plain
    assert tapping.heard == {"layer:0", "final"}, "hooks that came after the first compilation"
    assert other._fused is not None


def test_what_cannot_be_compiled_runs_as_it_is(
    llama: Target, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(model: object, **_: object) -> Callable[..., Any]:
        def call(**_: object) -> Any:
            raise RuntimeError("no compiler here")

        return call

    monkeypatch.setattr(torch, "compile", failing)
    prompts = tiny.prompts(1, VOCAB, seed=2)
    other = Target(llama.model).accelerate(compile=True)
    outputs, _ = generate(DraftVerify(other, Drafter(other)), Request(prompts, 10))
    assert outputs == generate(DraftVerify(llama, Drafter(llama)), Request(prompts, 10))[0]
    assert [record.message for record in caplog.records] == [
        "the LlamaForCausalLM runs without torch.compile: RuntimeError: no compiler here"
    ]


# -- what is known before a capture is tried ------------------------------------------------------------------


def on_a_gpu(config: PreTrainedConfig) -> Target:
    """A tiny target that believes to be on a GPU."""
    made = tiny.build(config)
    made.device = torch.device("cuda", 0)
    return made


def test_a_processor_has_no_graphs_and_says_nothing(llama: Target, caplog: pytest.LogCaptureFixture) -> None:
    made = Target(llama.model).accelerate()
    assert made.passes.facts() == {"model": "LlamaForCausalLM", "shapes": [], "eager": "a cpu has none"}
    assert "graphs" not in made.kernels
    assert caplog.records == []


def test_reasons_not_to_capture(caplog: pytest.LogCaptureFixture) -> None:
    plain = on_a_gpu(LlamaConfig(**SMALL)).accelerate()
    assert plain.passes.off is None
    assert plain.kernels["graphs"] == "captured"
    assert on_a_gpu(LlamaConfig(**SMALL)).accelerate("off").kernels["graphs"] == "--graphs off"
    assert caplog.records == []
    plain.model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    assert plain.accelerate().passes.off == "it is spread over several devices"
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    changing = on_a_gpu(LlamaConfig(**SMALL, rope_parameters=dynamic)).accelerate()
    assert changing.passes.off == "its rotary frequencies depend on the length of the text"
    assert [record.message.partition(": ")[0] for record in caplog.records] == (
        ["the LlamaForCausalLM runs without CUDA graphs"] * 2
    )


def test_experts_are_grouped_where_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = ARCHITECTURES["qwen3-moe"]
    mixture = on_a_gpu(copy.deepcopy(config))
    mixture.model.set_experts_implementation("eager")
    assert mixture.accelerate("off").kernels["experts"] == "grouped_mm"
    mixture.model.set_experts_implementation("eager")
    monkeypatch.setattr(mixture.model, "set_experts_implementation", refusing)
    assert mixture.accelerate().passes.off == "its experts are called one by one, as the data says"


def refusing(_name: str) -> None:
    raise ValueError("not this model")


def test_only_auto_and_off_are_settings() -> None:
    with pytest.raises(SpecbenchError, match="--graphs maybe is neither auto nor off"):
        RunConfig("t", ("vanilla",), ("t",), graphs="maybe")
