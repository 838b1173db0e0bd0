"""Capturing and compiling, with a device that is made up; and what is known not to be capturable."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import tiny
import torch
from fake_cuda import REFUSAL, RESERVED, FakeCuda
from test_loop import ARCHITECTURES, SMALL, VOCAB, generate
from transformers import LlamaConfig, PreTrainedConfig

from specbench.config import RunConfig
from specbench.decoding.draft import Drafter, Outcome
from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Request
from specbench.errors import SpecbenchError
from specbench.models.fixed_pass import CapturedPass, Results, Tensors
from specbench.models.passes import Passes, made
from specbench.models.target import Target


@pytest.fixture(scope="module")
def llama() -> Target:
    return tiny.llama(VOCAB)


# -- capturing, with a device that is made up -----------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda().install(monkeypatch)


def test_a_capture_warms_up_first_and_replays_into_shared_buffers(cuda: FakeCuda) -> None:
    def compute(inputs: Tensors, length: int) -> Tensors:
        cuda.happened.append("compute")
        return {"out": inputs["tokens"] * length}

    results = Results()
    made = [CapturedPass(compute, {"tokens": torch.ones(1, 4)}, length, "pool", results) for length in (2, 3)]
    once = ["wait", "compute", "compute", "wait", "empty", "capture", "compute", "captured"]
    assert cuda.happened == 2 * once
    assert (made[0].nbytes(), made[0].reserved) == (16, RESERVED)
    assert results.nbytes() == 16
    for captured, length in zip(made, (2, 3), strict=True):
        captured.prepare({"tokens": torch.tensor([[1.0, 2.0]])})
        assert captured.run()["out"].tolist() == [[length, 2 * length, length, length]]
    assert made[0].run()["out"].data_ptr() == made[1].run()["out"].data_ptr()


def test_passes_capture_by_default(cuda: FakeCuda) -> None:
    made = Passes("target")
    inputs = {"tokens": torch.ones(2, 1), "slots": torch.ones(2, 1, dtype=torch.long)}
    for times in range(3):
        outputs = made.run("", 0, lambda inputs, length: {"out": inputs["tokens"] * length}, inputs, 64)
        assert outputs["out"].tolist() == [[64.0]] * 2
        assert cuda.happened.count("captured") == (times > 0), "once, the second time"
    assert made.nbytes() == 2 * (4 + 8) + RESERVED + 2 * 4


def test_what_reads_the_device_is_not_captured_and_runs_on(
    cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    """torch says that a capture broke: what broke it is what a reader needs. Its stream is not ours to go on in."""

    def compute(inputs: Tensors, length: int) -> Tensors:
        return {"out": inputs["tokens"] * int(inputs["tokens"].sum())}

    made = Passes("tiny model")
    for _ in range(3):
        assert made.run("", 0, compute, {"tokens": torch.ones(1, 2)}, 0)["out"].tolist() == [[2.0, 2.0]]
    assert made.off == f"RuntimeError: {REFUSAL}: item"
    assert caplog.records[0].message == f"the tiny model runs without CUDA graphs: {made.off}"
    assert cuda.current is cuda.default


WAITING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "item": lambda x: x * x.sum().item(),
    "tolist": lambda x: x * len(x.tolist()),
    "cpu": lambda x: x * x.cpu(),
    "numpy": lambda x: x * float(x.numpy().sum()),
    "index": lambda x: x[x > 1],
    "index_put_": lambda x: x.clone().index_put_((x > 1,), x.sum()),
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x.masked_select(x > 1),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, torch.ones_like(x[0], dtype=torch.long), 1),
    "where": lambda x: torch.where(x > 1)[0],
    "_unique2": lambda x: x.unique(),
    "unique_dim": lambda x: x.unique(dim=1),
    "unique_consecutive": lambda x: x.unique_consecutive(),
    "bincount": lambda x: x[0].long().bincount(),
    "tensor to a device": lambda x: x + torch.tensor([1.0], device=x.device),
    "lift_fresh": lambda x: x + torch.tensor([1.0]),
    "multinomial with a generator of its own": lambda x: x.multinomial(1, generator=torch.Generator()),
    "exponential_ with a generator of its own": lambda x: x.clone().exponential_(generator=torch.Generator()),
}


@pytest.mark.parametrize("what", WAITING)
def test_a_capture_refuses_what_a_gpu_would(cuda: FakeCuda, what: str) -> None:
    made = Passes("target")
    for _ in range(2):
        made.run("", 0, lambda inputs, _: {"out": WAITING[what](inputs["x"])}, {"x": torch.ones(1, 4)}, 0)
    assert made.off is not None
    assert made.off.startswith(f"RuntimeError: {REFUSAL}: {what}")


def test_a_capture_takes_what_a_gpu_would(cuda: FakeCuda) -> None:
    def compute(inputs: Tensors, _length: int) -> Tensors:
        x = inputs["x"].clone()
        x[0, torch.arange(2)] = x[0, :2] + torch.zeros(2)
        torch.rand(1)
        x = x.repeat_interleave(torch.ones_like(x[0], dtype=torch.long), 1, output_size=4)
        return {"out": x.masked_fill(x > 2, 1) + x.multinomial(1)}

    made = Passes("target")
    for _ in range(3):
        made.run("", 0, compute, {"x": torch.ones(1, 4)}, 0)
    assert (made.off, made.made) == (None, 1)


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
    assert other._compiled is not None


def test_a_trial_that_waited_for_a_compiler_is_one_that_paid(
    llama: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()  # what other tests compiled
    other = Target(llama.model).accelerate(compile=True)
    method, request = DraftVerify(other, Drafter(other)), Request(tiny.prompts(1, VOCAB, seed=4), 5)
    before = made()
    generate(method, request)
    assert made() > before
    before = made()
    generate(method, request)
    assert made() == before


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
    assert plain.kernels["cudnn_attention"] is False
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
