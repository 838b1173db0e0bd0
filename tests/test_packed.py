"""Checkpoints that are quantised already: what is said of them, what they need, and what is left of it in memory."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_loop import generate
from test_mtp import CONFIGS, mtp_weights, open_target, record, write_target
from tiny_folder import Workplace, save_folder, specbench
from transformers import AutoConfig, LlamaConfig
from trial_factory import trial

from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Request
from specbench.errors import GateError, SpecbenchError
from specbench.models import kernels, packed
from specbench.models.load import load
from specbench.models.target import Target
from specbench.verdict import refuse_bugs

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
GROUPS = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 64}}}


@pytest.mark.parametrize(
    ("config", "name", "words"),
    [
        (GPTQ, "gptq-4bit-g32", "gptq, 4 bits, groups of 32"),
        ({**GPTQ, "group_size": -1}, "gptq-4bit", "gptq, 4 bits"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq-4bit-g128", "awq, 4 bits, groups of 128"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, "awq-4bit-g64", "awq, 4 bits, groups of 64"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", "fp8, 8 bits"),
        ({"quant_method": "mxfp4"}, "mxfp4", "mxfp4, 4 bits"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes-4bit", "bitsandbytes, 4 bits"),
        ({"load_in_8bit": True, "load_in_4bit": False}, "bitsandbytes-8bit", "bitsandbytes, 8 bits"),
        (
            {"quant_method": "compressed-tensors", "config_groups": GROUPS},
            "compressed-tensors-4bit-g64",
            "compressed-tensors, 4 bits, groups of 64",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "compressed-tensors", "compressed-tensors"),
        ({"quant_method": "new", "bits": "four"}, "new", "new"),
        ({"odd": 1}, "unknown", "unknown"),
    ],
)  # fmt: skip
def test_what_a_config_says(config: dict[str, Any], name: str, words: str) -> None:
    found = packed.read({"quantization_config": config})
    assert found is not None
    assert (found.name, found.words) == (name, words)


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}, {"quantization_config": "gptq"}])
def test_a_config_that_says_nothing(config: dict[str, Any]) -> None:
    assert packed.read(config) is None


def store(folder: Path, config: dict[str, Any], state: dict[str, torch.Tensor]) -> Path:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": config}))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def linear(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: weight for key, weight in state.items() if key.endswith("_proj.weight")}


@pytest.fixture(scope="module")
def gptq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as GPTQ stores it; all its numbers are 0."""
    folder = save_folder(tmp_path_factory.mktemp("models") / "gptq")
    state = load_file(folder / "model.safetensors")
    for key, weight in linear(state).items():
        del state[key]
        rows, columns = weight.shape
        name, groups = key.removesuffix("weight"), columns // 32
        state[f"{name}qweight"] = torch.zeros(columns // 8, rows, dtype=torch.int32)
        state[f"{name}qzeros"] = torch.zeros(groups, rows // 8, dtype=torch.int32)
        state[f"{name}scales"] = torch.zeros(groups, rows, dtype=torch.float16)
        state[f"{name}g_idx"] = torch.zeros(columns, dtype=torch.int32)
    return store(folder, GPTQ, state)


@pytest.fixture
def float8(tmp_path: Path) -> Path:
    """A checkpoint in float8, in blocks of 128 x 128 with a scale each: of these layers one."""
    folder = save_folder(tmp_path / "float8")
    state = load_file(folder / "model.safetensors")
    for key, weight in linear(state).items():
        scale = weight.abs().max() / torch.finfo(torch.float8_e4m3fn).max
        state[key] = (weight / scale).to(torch.float8_e4m3fn)
        state[f"{key}_scale_inv"] = scale.reshape(1, 1)
    return store(folder, {"quant_method": "fp8", "weight_block_size": [128, 128]}, state)


@pytest.mark.parametrize("made", ["gptq", "float8"])
def test_inspect_counts_what_packed_weights_stand_for(
    made: str, tiny_target: Path, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(made)
    plain, found = (json.loads(specbench("inspect", ref, "--json").out) for ref in (tiny_target, folder))
    assert (plain["quantization"], found["quantization"].split(",")[0]) == (
        None,
        {"float8": "fp8"}.get(made, made),
    )
    assert found["parameters"] == plain["parameters"]
    assert found["bytes"] == sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
    assert f"quantised    {found['quantization']}" in specbench("inspect", folder).out


def test_a_missing_package_is_named_with_the_command(
    gptq: Path, make_place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    place: Workplace = make_place("gptq")
    found = importlib.util.find_spec
    absent = ("gptqmodel", "optimum", "compressed_tensors")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name in absent else found(name, *a)
    )
    result = place.run("--target", gptq)
    assert result.code == 2
    assert result.error_lines == [
        "error: gptq is quantised (gptq-4bit-g32), and to load it needs gptqmodel and optimum",
        "  hint: pip install gptqmodel optimum",
    ]
    with pytest.raises(SpecbenchError) as caught:
        packed.check(packed.Packed("compressed-tensors"), "x", "none")
    assert caught.value.hint == "pip install compressed-tensors"
    packed.check(packed.Packed("mxfp4"), "x", "none")


def test_what_is_quantised_is_not_quantised_again(gptq: Path) -> None:
    with pytest.raises(SpecbenchError, match=r"quantised already \(gptq-4bit-g32\)"):
        load(str(gptq), quantize="int8")


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="transformers wants accelerate")
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU they stay float8")
def test_float8_is_expanded_where_it_cannot_be_computed(float8: Path) -> None:
    loaded = load(str(float8))
    who = loaded.identity
    assert (who.quantization, who.dtype) == ("fp8", "float32")
    assert "its fp8 weights were expanded to float32 to be loaded here" in who.notes
    state = load_file(float8 / "model.safetensors")
    for key in linear(state):
        weight = state[key].float() * state[f"{key}_scale_inv"]
        torch.testing.assert_close(loaded.model.get_parameter(key), weight)
    assert who.bytes >= 4 * who.parameters


def test_a_target_that_mixes_tokens_is_no_ground_to_call_a_method_wrong() -> None:
    wrong = trial(
        method="m", lossless=True, agreement={"same": False, "first_difference": 3, "logit_gap": 0.2}
    )
    run = SimpleNamespace(
        trials=[wrong], manifest={"target": {"dtype": "float32", "quantization": "gptq-4bit"}}
    )
    with pytest.raises(GateError, match="differs from vanilla in float32"):
        refuse_bugs(run)  # type: ignore[arg-type]
    run.manifest["target"]["quantization"] = packed.MIXES
    refuse_bugs(run)  # type: ignore[arg-type]
    model = SimpleNamespace(config=SimpleNamespace(quantization_config={}))
    assert "depend on the other tokens" in (packed.note(packed.Packed("bitsandbytes", 8), model) or "")


def test_compressed_tensors_expands_before_and_not_within_the_first_pass() -> None:
    config = SimpleNamespace(quantization_config={"quant_method": "compressed-tensors"})
    packed.prepare(packed.Packed("compressed-tensors"), config)
    assert config.quantization_config["dequantize"]
    other = SimpleNamespace(quantization_config={"quant_method": "gptq"})
    packed.prepare(packed.Packed("gptq"), other)
    assert other.quantization_config == {"quant_method": "gptq"}


# -- multi-token-prediction layers ----------------------------------------------------------------------------


class Codes(torch.nn.Module):
    """A linear layer as kernels of GPTQ keep it: codes and scales, all of them buffers, and no matrix."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, None
        scale = layer.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("qweight", (layer.weight / scale).round().to(torch.int32))
        self.register_buffer("scales", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.matrix().T

    def matrix(self) -> torch.Tensor:
        return self.qweight * self.scales


class Narrow(torch.nn.Linear):
    """One as bitsandbytes and float8 keep it: the weight is one, but of codes, and not always of its shape."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False)
        self.scale = layer.weight.abs().max() / 127
        codes = (layer.weight / self.scale).round().to(torch.int8).reshape(-1, 1)
        self.weight = torch.nn.Parameter(codes, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.matrix().T

    def matrix(self) -> torch.Tensor:
        return self.weight.reshape(self.out_features, self.in_features) * self.scale


def with_mtp(folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    state = load_file(folder / "model.safetensors")
    save_file(state | weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def mtp_of(folder: Path) -> dict[str, torch.Tensor]:
    config = AutoConfig.from_pretrained(folder)
    return mtp_weights(LlamaConfig(**tiny_shape(config)), 1, False, 0)


def tiny_shape(config: Any) -> dict[str, Any]:
    return {key: value for key, value in config.to_dict().items() if key != "quantization_config"}


def drafts(target: Target, **options: Any) -> tuple[list[list[int]], list[list[int]]]:
    """The tokens of two rows, and what was drafted in each round."""
    drafter = importlib.import_module("specbench.methods.mtp").Mtp(target, **options)
    seen = record(drafter)
    outputs, _ = generate(DraftVerify(target, drafter), Request(tiny.prompts(2, 64, seed=5), 20))
    return outputs, [torch.as_tensor(draft.tokens).tolist() for round_ in seen for draft in round_]


@pytest.mark.parametrize("kind", [Codes, Narrow])
def test_prediction_layers_that_are_stored_plainly_of_a_target_that_is_packed(
    kind: type, tmp_path: Path
) -> None:
    """As of a target whose weights are what the codes stand for, which nothing packs."""
    folder = save_folder(tmp_path / "tiny")
    with_mtp(folder, mtp_of(folder))
    made, twin = (load(str(folder)) for _ in range(2))
    for layers, other in zip(made.model.model.layers, twin.model.model.layers, strict=True):
        for name, linear in list(other.named_modules()):
            if isinstance(linear, torch.nn.Linear):
                packed_one = kind(linear)
                parent, _, last = name.rpartition(".")
                setattr(layers.get_submodule(parent), last, packed_one)
                linear.weight.data = packed_one.matrix()
    found, expected = (drafts(Target(each.model, None, each.identity)) for each in (made, twin))
    assert found == expected
    assert sum(map(len, found[1])) > 5


def test_a_target_changed_for_speed_has_its_prediction_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN's copies of its last layer's weights are not those of the layers after it."""
    folder = save_folder(tmp_path / "tiny")
    with_mtp(folder, mtp_of(folder))
    monkeypatch.setattr(kernels, "SMALLEST", 0)
    monkeypatch.setattr(kernels, "_measure", lambda layers: dict.fromkeys(map(str, kernels.TOKENS), "packed"))
    plain, fast = (Target(one.model, None, one.identity) for one in (load(str(folder)), load(str(folder))))
    assert fast.pack(tmp_path).kernel_choices
    assert drafts(fast) == drafts(plain)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="transformers wants accelerate")
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU they stay float8")
def test_prediction_layers_of_a_float8_checkpoint(float8: Path, tmp_path: Path) -> None:
    weights = mtp_of(float8)
    with_mtp(float8, weights)
    loaded = load(str(float8))
    twin = save_folder(tmp_path / "twin")
    loaded.model.save_pretrained(tmp_path / "expanded")
    state = load_file(tmp_path / "expanded" / "model.safetensors")
    save_file(state | weights, twin / "model.safetensors", metadata={"format": "pt"})
    other = load(str(twin))
    found, expected = (drafts(Target(one.model, None, one.identity)) for one in (loaded, other))
    assert found == expected

    key = "model.layers.2.mlp.down_proj.weight"
    with_mtp(float8, {key: weights[key].to(torch.float8_e4m3fn), f"{key}_scale_inv": torch.ones(1, 1)})
    with pytest.raises(SpecbenchError) as caught:
        drafts(Target(loaded.model, None, loaded.identity))
    assert f"quantised (fp8, 8 bits): {key} is float8_e4m3fn" in caught.value.message
    assert "mtp:draft=FOLDER" in caught.value.hint
    assert drafts(Target(loaded.model, None, loaded.identity), draft=str(twin)) == expected, (
        "as the hint says"
    )


@pytest.mark.parametrize("named", [False, True])
def test_prediction_layers_that_are_stored_packed_are_refused(
    named: bool, gptq: Path, tmp_path: Path
) -> None:
    """By GPTQ, all linear layers of them, so that not even their projection is there under its plain name."""
    folder, weights = save_folder(tmp_path / "tiny"), mtp_of(gptq)
    for key in [key for key in weights if key.endswith("_proj.weight")]:
        rows, columns = weights.pop(key).shape
        name = key.removesuffix("weight")
        weights[f"{name}qweight"] = torch.zeros(columns // 8, rows, dtype=torch.int32)
        weights[f"{name}scales"] = torch.zeros(columns // 32, rows, dtype=torch.float16)
    state = load_file(folder / "model.safetensors") | weights
    target = load(str(folder))
    store(folder, GPTQ, state)
    with pytest.raises(SpecbenchError) as caught:
        drafts(Target(target.model, None, target.identity), **({"draft": str(folder)} if named else {}))
    assert (
        "stores its multi-token-prediction layers quantised (gptq, 4 bits, groups of 32): "
        in caught.value.message
    )
    assert "qweight is int32" in caught.value.message


def test_experts_and_heads_that_are_kept_packed_are_refused(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "experts", CONFIGS["deepseek"])
    target = open_target(folder)
    experts = target.model.model.layers[-1].mlp.experts
    experts.gate_up_proj = torch.nn.Parameter(
        experts.gate_up_proj.to(torch.float8_e4m3fn), requires_grad=False
    )
    with pytest.raises(
        SpecbenchError, match=r"mtp cannot draft for experts: its mlp\.experts\.gate_up_proj is kept"
    ):
        drafts(target)

    folder = save_folder(tmp_path / "head")
    loaded = load(str(with_mtp(folder, mtp_of(folder))))
    loaded.model.lm_head = Codes(loaded.model.lm_head)
    with pytest.raises(SpecbenchError, match="mtp cannot draft for head: its lm_head is kept quantised here"):
        drafts(Target(loaded.model, None, loaded.identity))
