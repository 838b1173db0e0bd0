"""`--quantize` and `draft.quantize=`: the right numbers, still lossless, counted as stored, or refused."""

from __future__ import annotations

import importlib
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import eagle_heads
import heads
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_loop import generate, hf_greedy
from test_mtp import CONFIGS, mtp_weights, write_target
from test_pard import write_pard
from tiny_dflash import write_draft
from tiny_folder import Workplace, save_folder, specbench
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import MixtralConfig

from specbench.analysis.comparable import check as comparable
from specbench.decoding.draft import Drafter
from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Request
from specbench.errors import SpecbenchError
from specbench.measure.memory import module_bytes
from specbench.models import kernels, quantize
from specbench.models.architecture import architecture, parameters
from specbench.models.drafts import open_draft_model
from specbench.models.load import load
from specbench.models.quantize import QuantizedLinear, quantise, scheme_of
from specbench.models.target import Target

pytest.importorskip("torchao")
CPU = torch.device("cpu")
VOCAB = 64
NEW = 40


def quantised(scheme: str, dtype: torch.dtype = torch.float32, **shape: Any) -> Target:
    model = tiny.llama(VOCAB, seed=1, **shape).model.to(dtype)
    quantise(model, scheme)
    return Target(model.requires_grad_(False))


def method(name: str, cls: str, target: Target, **options: Any) -> Drafter:
    return getattr(importlib.import_module(f"specbench.methods.{name}"), cls)(target, **options)


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """float8 on this processor: slow, but the same arithmetic as a GPU's."""
    from torchao.quantization import quant_api

    monkeypatch.setattr(quant_api, "_check_hardware_support", lambda granularity: None)


# -- the numbers ---------------------------------------------------------------------------------------------


def round_trip(weight: torch.Tensor, scheme: str) -> torch.Tensor:
    """The weight as it comes back, by the textbook."""
    if scheme == "int8":
        scale = weight.abs().amax(1, keepdim=True) / 127.5
        return (weight * (1 / scale)).round().clamp(-128, 127) * scale
    groups = weight.unflatten(1, (-1, quantize.GROUP))
    least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (most - least) / 15
    return (((groups - least) / scale).round() * scale + least).flatten(1)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_weights_come_back_as_the_textbook_says(scheme: str) -> None:
    target, plain = quantised(scheme, hidden=64), tiny.llama(VOCAB, seed=1, hidden=64).model
    layers = {name for name, layer in target.model.named_modules() if isinstance(layer, QuantizedLinear)}
    for name, layer in plain.named_modules():
        if name in layers:
            layer.weight.data = round_trip(layer.weight.data, scheme)
    ids = torch.randint(0, VOCAB, (2, 40), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(target.model(ids).logits, plain(ids).logits, atol=2e-4, rtol=1e-4)
    assert len(layers) == 14, "seven a layer, and not the head"


@pytest.mark.usefixtures("anywhere")
def test_float8_scales_each_row_and_each_token_by_itself() -> None:
    torch.manual_seed(0)
    weight = torch.randn(48, 32).bfloat16()
    weight[3] *= 1e6
    model = torch.nn.ModuleDict({"one": torch.nn.Linear(32, 48, bias=False)}).to(torch.bfloat16)
    model["one"].weight.data = weight.clone()
    quantise(model, "fp8")
    x = torch.randn(2, 5, 32).bfloat16()
    x[0, 1] *= 1e6  # either would leave nothing of the others under a scale they share

    out = model["one"](x)
    wrong = (out.float() - x.float() @ weight.float().T).abs()
    assert (wrong < 0.05 * (x.float().abs() @ weight.float().abs().T)).all(), "three bits of mantissa"
    alone = torch.stack(
        [torch.cat([model["one"](x[b : b + 1, t : t + 1])[0] for t in range(5)]) for b in range(2)]
    )
    assert torch.equal(out, alone), "what else is in a pass must not change a token"


@pytest.mark.parametrize(("dtype", "tokens"), [(torch.float32, 9), (torch.bfloat16, 3), (torch.bfloat16, 40)])
def test_our_int8_product_is_torchaos(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tokens: int
) -> None:
    monkeypatch.setattr(quantize, "BLOCK", 100)  # a few rows at a time
    for layer in quantised("int8", dtype).model.modules():
        if isinstance(layer, QuantizedLinear):
            x = torch.randn(2, tokens, layer.in_features, dtype=dtype)
            theirs = torch.nn.functional.linear(x, layer.weight, layer.bias)
            torch.testing.assert_close(layer(x), theirs)


def test_biases_are_kept() -> None:
    target, plain = quantised("int8", attention_bias=True), tiny.llama(VOCAB, seed=1, attention_bias=True)
    for model in (target.model, plain.model):
        for layer in model.modules():
            if getattr(layer, "bias", None) is not None:
                layer.bias.data = torch.ones_like(layer.bias)
    ids = torch.arange(20)[None]
    torch.testing.assert_close(target.model(ids).logits, plain.model(ids).logits, atol=0.5, rtol=0)


# -- lossless ------------------------------------------------------------------------------------------------

SCHEMES = [("int8", torch.float32), ("int4", torch.float32), ("int4", torch.bfloat16)]


@pytest.fixture(scope="module", params=SCHEMES, ids=lambda case: f"{case[0]}-{str(case[1])[6:]}")
def target(request: pytest.FixtureRequest) -> Target:
    return quantised(*request.param)


def test_several_tokens_are_worth_what_one_is(target: Target) -> None:
    """The gap between a pass over all tokens and passes over one each: rounding alone."""
    ids = torch.randint(0, VOCAB, (1, 24), generator=torch.Generator().manual_seed(3))
    for layer in target.model.modules():
        if isinstance(layer, QuantizedLinear):
            x = torch.randn(1, 12, layer.in_features, dtype=target.dtype)
            single = torch.cat([layer(x[:, at : at + 1]) for at in range(12)], 1)
            torch.testing.assert_close(layer(x), single, atol=1e-5, rtol=1e-5)
    whole, cache = target.model(ids).logits, None
    for at in range(24):
        out = target.model(ids[:, at : at + 1], use_cache=True, **{target._cache_argument: cache})
        cache = out.past_key_values
        gap = (out.logits[:, 0] - whole[:, at]).abs().max()
        assert gap < (1e-4 if target.dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("rows", [1, 3])
def test_every_method_says_what_vanilla_says(target: Target, rows: int) -> None:
    prompts = tiny.prompts(rows, VOCAB, seed=2)
    request = Request(prompts, NEW)
    plain, _ = generate(DraftVerify(target, Drafter(target)), request)
    if rows == 1:
        assert plain == [hf_greedy(target, prompts[0], NEW)]
    drafts = tiny.llama(VOCAB, seed=1)
    for drafter in (
        method("prompt_lookup", "PromptLookup", target, k=4, ngram=1),
        method("draft_model", "DraftModel", target, draft=drafts, k=3),
        method("draft_model", "DraftModel", target, draft=Target(target.model), k=3),
        method("eagle2", "Eagle2", target, draft=eagle_heads.eagle1(target)),
        method("self_speculation", "SelfSpeculation", target, exit=1, k=3),
    ):
        outputs, rounds = generate(DraftVerify(target, drafter), request)
        assert outputs == plain, drafter
        assert any(sum(r.drafted) for r in rounds), drafter


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_a_quantised_draft_of_a_target_that_is_not(tmp_path: Path, scheme: str) -> None:
    folder = save_folder(tmp_path / "tiny")
    loaded = load(str(folder))
    target = Target(loaded.model, loaded.tokenizer, loaded.identity)
    prompts = tiny.prompts(2, VOCAB, seed=2)
    plain, _ = generate(DraftVerify(target, Drafter(target)), Request(prompts, NEW))
    tau = {}
    for made in (scheme, "none"):
        drafter = method("draft_model", "DraftModel", target, draft=str(folder), k=3, quantize=made)
        outputs, rounds = generate(DraftVerify(target, drafter), Request(prompts, NEW))
        assert outputs == plain
        tau[made] = NEW * 2 / sum(len(r.drafted) for r in rounds)
        assert scheme_of(drafter.draft.model) == made
        assert drafter.draft_identity()["name"] == ("tiny" if made == "none" else f"tiny@{made}")
        assert drafter.draft.dtype == (torch.bfloat16 if made == "int4" else torch.float32)
    assert 1 < tau[scheme] <= tau["none"], "the target as its own draft is always right, quantised it is not"


def lossless_and_smaller(target: Target, whole: Drafter, small: Drafter, scheme: str) -> None:
    """A quantised draft network leaves the output as it was, holds fewer bytes, and says what it is."""
    request = Request(tiny.prompts(2, VOCAB, seed=2), NEW)
    plain, _ = generate(DraftVerify(target, Drafter(target)), request)
    outputs, rounds = generate(DraftVerify(target, small), request)
    assert outputs == plain
    assert any(sum(r.drafted) for r in rounds)
    assert small.weights_bytes() < whole.weights_bytes()
    who = small.draft_identity()
    assert who is not None
    assert (who["quantization"], who["bytes"]) == (scheme, small.weights_bytes())
    assert who["name"].endswith(f"@{scheme}")


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["Eagle1", "Eagle2", "Eagle3"])
def test_quantised_heads(kind: str, scheme: str) -> None:
    target = tiny.llama(VOCAB, seed=1, layers=7, hidden=64)
    made = eagle_heads.eagle3(target) if kind == "Eagle3" else eagle_heads.eagle1(target)
    whole, small = (method(kind.lower(), kind, target, draft=made, quantize=q) for q in ("none", scheme))
    lossless_and_smaller(target, whole, small, scheme)
    assert scheme_of(small.net) == scheme
    own = [layer for name, layer in small.net.named_modules() if name.endswith("lm_head")]
    assert not any(isinstance(layer, QuantizedLinear) for layer in [*own, target.lm_head])


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_quantised_hydra_heads(scheme: str) -> None:
    target = tiny.llama(VOCAB, seed=1, hidden=64)
    made = heads.checkpoint(heads.hydra_state(target))
    whole, small = (method("hydra", "Hydra", target, draft=made, quantize=q) for q in ("none", scheme))
    lossless_and_smaller(target, whole, small, scheme)
    left = {name for name, layer in small.net.named_modules() if type(layer) is torch.nn.Linear}
    assert left == {f"heads.{head}.out" for head in range(4)}


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_quantised_medusa_heads(scheme: str) -> None:
    target = tiny.llama(VOCAB, seed=1, hidden=64)
    state = heads.medusa_state(target, 3, 2)
    made = heads.checkpoint(state)
    whole, small = (method("medusa", "Medusa", target, draft=made, quantize=q) for q in ("none", scheme))
    lossless_and_smaller(target, whole, small, scheme)

    by_hand = {
        key: round_trip(tensor, scheme) if tensor.dim() == 2 else tensor for key, tensor in state.items()
    }
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    expected = method("medusa", "Medusa", target, draft=heads.checkpoint(by_hand)).heads.logits(hidden)
    torch.testing.assert_close(small.heads.logits(hidden), expected, atol=2e-4, rtol=1e-4)
    assert not any(type(layer) is torch.nn.Linear for layer in small.heads.modules()), "to the vocabulary too"

    matrices = [tensor for tensor in state.values() if tensor.dim() == 2]
    weights, outputs = sum(m.numel() for m in matrices), sum(len(m) for m in matrices)
    saved = whole.weights_bytes() - small.weights_bytes()
    assert saved == fewer_bytes(scheme, weights, outputs)
    assert "; biases are not quantised" in small.draft_identity()["notes"][-1]


@pytest.mark.usefixtures("anywhere")
def test_medusa_heads_in_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "unavailable", lambda scheme, device: None)
    target = Target(tiny.llama(VOCAB, seed=1, hidden=64).model.to(torch.bfloat16))
    state = heads.medusa_state(target, 3)
    whole, small = (
        method("medusa", "Medusa", target, draft=heads.checkpoint(state), quantize=q) for q in ("none", "fp8")
    )
    assert scheme_of(small.heads) == "fp8"
    assert small.weights_bytes() < whole.weights_bytes()
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    plain, made = (drafter.heads.logits(hidden).float() for drafter in (whole, small))
    assert 0 < (plain - made).norm() / plain.norm() < 0.1, "three bits of mantissa"


@pytest.mark.parametrize("markov", ["", "vanilla", "gated", "rnn"])
def test_quantised_block_drafts(tmp_path: Path, markov: str) -> None:
    target = tiny.llama(VOCAB, seed=1, hidden=64)
    made = str(write_draft(tmp_path, target, markov=markov))
    whole, small = (method("dflash", "DFlash", target, draft=made, quantize=q) for q in ("none", "int8"))
    lossless_and_smaller(target, whole, small, "int8")
    assert not any(type(layer) is torch.nn.Linear for layer in small.net.modules())


def test_a_quantised_pard_draft(tmp_path: Path) -> None:
    target = tiny.llama(VOCAB, seed=1)
    made = write_pard(tmp_path, VOCAB)
    whole, small = (method("pard", "Pard", target, draft=made, quantize=q) for q in ("none", "int8"))
    lossless_and_smaller(target, whole, small, "int8")


def test_mtp_layers_with_experts_are_not_quantised(tmp_path: Path) -> None:
    folder = write_target(tmp_path, CONFIGS["deepseek"], 1)
    target = Target(load(str(folder)).model)
    with pytest.raises(SpecbenchError) as caught:
        method("mtp", "Mtp", target, draft=str(folder), quantize="int8")
    assert caught.value.message.startswith("int8: the experts of a MtpNet are no linear layers")
    assert caught.value.hint.startswith("leave the option out, or")


@pytest.mark.parametrize("of_the_target", ["none", "int8"])
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_quantised_mtp_layers(tmp_path: Path, scheme: str, of_the_target: str) -> None:
    model = tiny.llama(VOCAB, seed=1, hidden=64).model
    model.save_pretrained(tmp_path)
    weights = mtp_weights(model.config, 1, False, 0)
    save_file(load_file(tmp_path / "model.safetensors") | weights, tmp_path / "model.safetensors")
    target = Target(load(str(tmp_path), quantize=of_the_target).model)
    whole, small = (method("mtp", "Mtp", target, draft=str(tmp_path), quantize=q) for q in ("none", scheme))
    assert scheme_of(whole.net) == "none"
    lossless_and_smaller(target, whole, small, scheme)
    assert not any(type(layer) is torch.nn.Linear for layer in small.net.modules())


def test_a_draft_shares_the_targets_weights_only_if_they_are_the_same(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "tiny")
    loaded = load(str(folder), quantize="int8")
    target = Target(loaded.model, loaded.tokenizer, loaded.identity)
    same = open_draft_model(str(folder), target, "draft-model", quantize="int8")
    assert same.model is target.model
    other = open_draft_model(str(folder), target, "draft-model")
    assert (scheme_of(other.model), other.identity.name) == ("none", "tiny")


# -- counted as stored ---------------------------------------------------------------------------------------


def fewer_bytes(scheme: str, weights: int, outputs: int) -> int:
    """Than float32 has: int8 keeps a scale an output, and a zero point that is always 0; int4 two numbers a group."""
    if scheme == "int8":
        return 3 * weights - 5 * outputs
    return 4 * weights - weights // 2 - 8 * weights // quantize.GROUP


def test_bytes_are_counted_as_stored() -> None:
    plain = tiny.llama(VOCAB, seed=1)
    layers = [m for m in plain.model.model.layers.modules() if isinstance(m, torch.nn.Linear)]
    weights, outputs = sum(m.weight.numel() for m in layers), sum(m.out_features for m in layers)
    for scheme in ("int8", "int4"):
        target, fewer = quantised(scheme), fewer_bytes(scheme, weights, outputs)
        assert module_bytes(plain.model) - module_bytes(target.model) == fewer
        assert parameters(target.model) == parameters(plain.model) == plain.model.num_parameters()
        before, after = architecture(plain), architecture(target)
        assert before.dense_bytes - after.dense_bytes == fewer, "what the floor of a pass reads"
        assert before.dense_parameters == after.dense_parameters


def test_packed_layers_stand_for_the_matrix_they_hold() -> None:
    class Gptq(torch.nn.Module):
        """What gptqmodel makes of a 64 x 32 layer: everything is a buffer."""

        def __init__(self) -> None:
            super().__init__()
            self.in_features, self.out_features = 64, 32
            self.register_buffer("qweight", torch.zeros(8, 32, dtype=torch.int32))
            self.register_buffer("qzeros", torch.zeros(2, 4, dtype=torch.int32))
            self.register_buffer("scales", torch.zeros(2, 32, dtype=torch.float16))
            self.register_buffer("g_idx", torch.zeros(64, dtype=torch.int32))
            self.bias = torch.nn.Parameter(torch.zeros(32))

    model = torch.nn.Sequential(Gptq(), torch.nn.Linear(4, 4))
    assert parameters(model) == 64 * 32 + 32 + 20


def test_kernels_for_plain_layers_leave_quantised_ones_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kernels, "SMALLEST", 0)
    monkeypatch.setattr(kernels, "_measure", lambda layers: dict.fromkeys(map(str, kernels.TOKENS), "packed"))
    for scheme in ("int8", "int4"):
        target = quantised(scheme).pack(tmp_path)
        assert set(target.kernel_choices) == {"64x32"}, "the head"
        assert scheme_of(target.model) == scheme


# -- who it is -----------------------------------------------------------------------------------------------


def test_a_quantised_target_is_another_target(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "tiny")
    plain, int8, int4 = (load(str(folder), quantize=scheme).identity for scheme in ("none", "int8", "int4"))
    assert (int8.name, int8.quantization, int8.dtype) == ("tiny@int8", "int8", "float32")
    assert (int4.name, int4.quantization, int4.dtype) == ("tiny@int4", "int4", "bfloat16")
    assert plain.parameters == int8.parameters == int4.parameters
    assert plain.bytes > int8.bytes > int4.bytes
    assert any(note.startswith("int8: the weights of 14 of 14 linear layers") for note in int8.notes)
    with pytest.raises(SpecbenchError, match="quantization none and int8"):
        comparable({"target": plain.to_json()}, {"target": int8.to_json()}, ())


def test_what_was_dequantised_from_something_else_keeps_its_name(tmp_path: Path) -> None:
    who = load(str(save_folder(tmp_path / "tiny"))).identity
    again = replace(who, name="smollm2-135m@q4_1", quantization="q4_1").quantised("int8", 7, "so")
    assert (again.name, again.quantization, again.bytes) == ("smollm2-135m@q4_1+int8", "q4_1+int8", 7)


def test_random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from specbench.models import random_init

    monkeypatch.setattr(random_init, "build", lambda *a, **k: tiny.llama(VOCAB).model)
    loaded = load("random:smollm2-135m", quantize="int8")
    assert (loaded.identity.name, loaded.identity.quantization) == ("random:smollm2-135m@int8", "int8")
    assert scheme_of(loaded.model) == "int8"


# -- refused -------------------------------------------------------------------------------------------------


def refusal(*args: Any, call: Any = quantize.check) -> SpecbenchError:
    with pytest.raises(SpecbenchError) as caught:
        call(*args)
    assert "\n" not in caught.value.message + caught.value.hint
    return caught.value


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = refusal("int8", CPU)
    assert "torchao is not installed" in found.message
    assert "pip install" in found.hint


def test_a_library_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao.quantization", None)
    assert "cannot be imported" in refusal("int8", CPU).message


def test_float8_needs_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = refusal("fp8", CPU)
    assert "needs a CUDA device, and this is a cpu" in found.message
    assert "int8 or int4" in found.hint
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert "compute capability 8.9 or more, and this one has 8.6" in refusal("fp8", cuda).message
    quantize.check("int4", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    quantize.check("fp8", cuda)
    assert refusal("int4", torch.device("mps")).message


def test_dtypes_that_kernels_take() -> None:
    cuda = torch.device("cuda")
    assert quantize.compute_dtype("int8", "auto", CPU) is torch.float32
    assert quantize.compute_dtype("int8", "auto", cuda) is None
    assert quantize.compute_dtype("int8", "fp16", cuda) is torch.float16
    for scheme in ("int4", "fp8"):
        assert quantize.compute_dtype(scheme, "auto", cuda) is torch.bfloat16
        assert "computes in bfloat16" in refusal(scheme, "float32", cuda, call=quantize.compute_dtype).message
    assert quantize.compute_dtype("int4", "auto", CPU) is torch.bfloat16
    assert quantize.compute_dtype("int4", "float32", CPU) is torch.float32
    assert "not in fp16" in refusal("int4", "fp16", CPU, call=quantize.compute_dtype).message


def test_models_without_what_could_be_quantised() -> None:
    experts = MixtralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    assert (
        "experts of a MixtralForCausalLM" in refusal(tiny.build(experts).model, "int8", call=quantise).message
    )
    odd = tiny.llama(VOCAB, hidden=24).model
    assert "multiple of 16 outputs and of 32 inputs" in refusal(odd, "int4", call=quantise).message


def test_what_a_gpu_does_in_tensors_without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    made = quantize._config
    monkeypatch.setattr(quantize, "_config", lambda scheme, device: made(scheme, torch.device("cuda")))
    with FakeTensorMode(), torch.no_grad():
        model = torch.nn.Sequential(torch.nn.Linear(2048, 64, dtype=torch.bfloat16))
        quantise(model, "int4")
        assert model(torch.empty(2, 9, 2048, dtype=torch.bfloat16)).shape == (2, 9, 64)
        assert type(model[0].weight).__name__ == "Int4TilePackedTo4dTensor"
        assert module_bytes(model) == 64 * 2048 // 2 + 64 * 2048 // quantize.GROUP * 4 + 64 * 2
        model = torch.nn.Sequential(torch.nn.Linear(64, 64, dtype=torch.float16, device="meta"))
        for name in ("weight", "bias"):
            empty = torch.empty_like(getattr(model[0], name), device="cuda")
            setattr(model[0], name, torch.nn.Parameter(empty))
        assert quantise(model, "int8").endswith("int8 saves memory here and no time")
        assert model(torch.empty(2, 9, 64, dtype=torch.float16, device="cuda")).dtype == torch.float16
    assert made("fp8", torch.device("cuda")).granularity[0].__class__.__name__ == "PerRow"


def test_layers_that_do_not_fit_stay_as_they_are() -> None:
    model = tiny.llama(VOCAB, hidden=48).model  # 96 wide inside
    assert quantise(model, "int4").startswith("the weights of 2 of 14 linear layers")
    model(torch.arange(9)[None])


# -- the command line ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(make_place: Any) -> Workplace:
    return make_place("quantize")


def test_a_run_of_each(place: Workplace) -> None:
    draft = f"draft-model:draft={place.target},k=3"
    small = f"draft-model:draft={place.target},draft.quantize=int8,k=3"
    lookup = ["--method", "prompt-lookup", "--method", draft, "--method", small, "--json"]
    rows = {}
    for name in ("none", "int8"):
        result = place.run(*lookup, "--quantize", name, name=name)
        assert result.code == 0, result.err
        rows[name] = {r["method"]: r for r in json.loads(result.out)["rows"] if r["task"] == "overall"}
        assert all(row["identical"] == row["compared"] > 0 for m, row in rows[name].items() if m != "vanilla")
    none, int8 = rows["none"], rows["int8"]
    assert none["vanilla"]["weights_bytes"] > int8["vanilla"]["weights_bytes"]
    # The target as its own draft costs nothing and is always right; quantised apart, it is neither.
    for made, same, other in (
        (none, draft, small),
        (int8, small, draft),
    ):
        assert made[same]["weights_bytes"] == made["vanilla"]["weights_bytes"] < made[other]["weights_bytes"]
        assert made[same]["tau"]["point"] >= made[other]["tau"]["point"]
    manifest = place.manifest("int8")
    assert manifest["target"]["quantization"] == "int8"
    assert manifest["drafters"][small]["quantization"] == "int8"
    assert manifest["versions"]["torchao"]

    compared = specbench("compare", "none", "int8", "--results", place.results)
    assert compared.code == 2
    assert "quantization none and int8" in compared.err
    text = specbench(
        "report", "none", "int8", "--results", place.results, "--output", "-", "--format", "md"
    ).out
    assert f"{place.target.name}@int8" in text
    assert "another target than in none: the same weights, int8, float32" in text
    again = place.run(*lookup, "--quantize", "none", name="int8")
    assert again.code == 2
    assert "quantize" in again.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--quantize", "int3"], "unknown quantisation 'int3'"),
        (["--quantize", "fp8"], "no fp8 on cpu"),
        (["--quantize", "int4", "--dtype", "float16"], "int4 computes in bfloat16 or float32"),
        (["--method", "draft-model:draft.quantize=int5"], "option draft.quantize=int5 of draft-model is not"),
        (["--quantize", "int8", "--engine", "llama.cpp"], "--quantize int8 is for specbench's own loop"),
    ],
)
def test_bad_input(place: Workplace, options: list[str], words: str) -> None:
    result = place.run(*options, name="bad")
    assert result.code == 2
    assert len(result.error_lines) == 2
    assert words in result.error_lines[0]
