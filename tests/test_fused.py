"""Fused norms, rotations and products give what transformers' own code gives; what would not is left alone."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from test_routers import COMMON, MIXTURES
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    CohereConfig,
    GemmaConfig,
    GlmConfig,
    LlamaConfig,
    OlmoConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from specbench.decoding.context import Context
from specbench.measure.memory import module_bytes
from specbench.models import joined, kernels
from specbench.models.architecture import architecture, parameters
from specbench.models.fused import fuse
from specbench.models.joined import Joined, Switch
from specbench.models.mtp import MtpNet
from specbench.models.rope import rotate
from specbench.models.target import Target

DENSE = {name: value for name, value in COMMON.items() if name != "num_experts_per_tok"}
# What is fused of three layers (norms, rotations, products), and where a model differs, why.
MODELS: dict[str, tuple[PreTrainedConfig, dict[str, int]]] = {
    "llama": (LlamaConfig(**DENSE), {"norms": 7, "rotations": 3, "products": 6}),
    "llama-biases": (
        LlamaConfig(**DENSE, attention_bias=True, mlp_bias=True),
        {"norms": 7, "rotations": 3, "products": 6},
    ),
    "qwen2": (Qwen2Config(**DENSE), {"norms": 7, "rotations": 3, "products": 6}),
    "qwen3": (Qwen3Config(**DENSE, head_dim=8), {"norms": 13, "rotations": 3, "products": 6}),
    "phi3": (Phi3Config(**DENSE), {"norms": 7, "rotations": 3}),  # its products are joined already
    "gemma": (
        GemmaConfig(**DENSE, head_dim=8),
        {"rotations": 3, "products": 6},
    ),  # a norm's weight has 1 added
    "glm": (GlmConfig(**DENSE, head_dim=8), {"norms": 7, "products": 3}),  # pairs are rotated, not halves
    "cohere": (CohereConfig(**DENSE), {"products": 6}),  # layer norms; pairs as well
    "olmo": (OlmoConfig(**DENSE), {"rotations": 3, "products": 6}),  # layer norms without weights
}


def spoiled(model: nn.Module) -> nn.Module:
    """Norms' weights and biases that are not all alike."""
    generator = torch.Generator().manual_seed(5)
    for weight in model.parameters():
        if weight.dim() == 1:
            weight.data = weight.data + 0.3 * torch.randn(weight.shape, generator=generator).to(weight)
    return model


def target(config: PreTrainedConfig, seed: int = 0) -> Target:
    made = tiny.build(config, seed)
    spoiled(made.model)
    return made


def logits(target: Target) -> torch.Tensor:
    ids = torch.randint(0, COMMON["vocab_size"], (2, 13), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return target.model(ids, use_cache=False).logits


@pytest.mark.parametrize("name", MODELS)
def test_a_fused_model_computes_what_it_did(name: str) -> None:
    config, expected = MODELS[name]
    made = target(config)
    before = logits(made)
    assert made.fuse().fused == expected
    torch.testing.assert_close(logits(made), before, rtol=1e-4, atol=1e-5)
    with made.stock_attention():
        assert torch.equal(logits(made), before), "the reference computes as transformers does"


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_too(name: str) -> None:
    made = tiny.build(MIXTURES[name](), attn="eager")
    before = logits(made)
    made.fuse()
    torch.testing.assert_close(logits(made), before, rtol=1e-4, atol=1e-5)


def test_in_half_precision_it_is_no_less_exact() -> None:
    errors = torch.zeros(2)
    for seed in range(10):
        model = target(LlamaConfig(**DENSE), seed).model.bfloat16()
        exact = logits(Target(copy.deepcopy(model).float()))
        made = Target(model)
        stock = logits(made)
        assert made.fuse().fused == {"norms": 7, "rotations": 3, "products": 6}
        errors += torch.stack([(out.float() - exact).square().sum() for out in (stock, logits(made))])
    assert errors[1] < errors[0]


def test_weights_take_no_more_memory_and_keep_their_names() -> None:
    made = target(LlamaConfig(**DENSE, attention_bias=True))
    before, names = module_bytes(made.model), {n: p.clone() for n, p in made.model.named_parameters()}
    made.fuse()
    assert module_bytes(made.model) == before
    after = dict(made.model.named_parameters())
    assert all(torch.equal(after[name], weight) for name, weight in names.items())


@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral", "deepseek_v3"])
def test_what_a_pass_reads_counts_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SMALLEST", 0)
    made = tiny.build(MODELS[name][0] if name in MODELS else MIXTURES[name]())
    before = architecture(made), parameters(made.model)
    assert made.fuse().fused["products"] > 0
    assert (architecture(made), parameters(made.model)) == before
    made.pack(tmp_path)
    assert (architecture(made), parameters(made.model)) == before


class Started(TorchDispatchMode):
    """Counts the operations that start a kernel on a GPU: those whose output is no view of an input."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        parts = tree_leaves(out)
        read = {each.untyped_storage()._cdata for each in tree_leaves(args) if isinstance(each, torch.Tensor)}
        in_place = func.overloadpacket.__name__.endswith("_")
        self.kernels += in_place or not any(part.untyped_storage()._cdata in read for part in parts)
        return out


def kernels_a_layer(fuse: bool) -> int:
    """What a pass over one token starts for one more Llama layer, in half precision."""
    counts = []
    for layers in (2, 3):
        made = Target(tiny.llama(layers=layers).model.bfloat16())
        if fuse:
            made.fuse()
        made.reserve(1, 40)
        made.prefill([[*range(20)]])
        context = Context(made)
        context.rewind([20])
        with torch.inference_mode(), Started() as started:
            context.append(made, torch.tensor([[5]]), [1])
        counts.append(started.kernels)
    return counts[1] - counts[0]


def test_a_layer_starts_fewer_kernels() -> None:
    kernels_a_layer(False)  # what is kept for good is made once
    assert (kernels_a_layer(False), kernels_a_layer(True)) == (40, 17)


def test_weights_still_to_come_find_separate_layers() -> None:
    nets = [MtpNet(each, 1).state_dict() for each in (tiny.llama(), tiny.llama().fuse())]
    assert list(nets[0]) == list(nets[1])
    assert [weight.shape for weight in nets[0].values()] == [weight.shape for weight in nets[1].values()]


def test_layers_may_be_asked_in_any_order_and_alone() -> None:
    made = target(LlamaConfig(**DENSE, attention_bias=True))
    attention = made.model.model.layers[0].self_attn
    x, other = torch.randn(1, 5, 32), torch.randn(1, 5, 32)
    wanted = attention.v_proj(x), attention.q_proj(x), attention.k_proj(other), attention.k_proj(x)
    made.fuse()
    found = attention.v_proj(x), attention.q_proj(x), attention.k_proj(other), attention.k_proj(x)
    for one, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, expected)
    torch.testing.assert_close(attention.k_proj(x), wanted[3], msg="asked twice")


def test_what_was_made_for_others_is_not_kept() -> None:
    attention = target(LlamaConfig(**DENSE)).fuse().model.model.layers[0].self_attn
    x = torch.randn(1, 5, 32)
    for layer in (attention.k_proj, attention.v_proj, attention.q_proj):
        assert isinstance(layer, Joined)
        layer(x)
    assert attention.q_proj.group._read is None
    assert attention.q_proj.group._made == {}


class Stored(nn.Module):
    """A linear layer whose weights are stored some other way, as packed checkpoints have them."""

    def __init__(self, layer: nn.Linear, weight: torch.Tensor, parameter: bool) -> None:
        super().__init__()
        self._multiply = layer.forward
        if parameter:
            self.weight = nn.Parameter(weight, requires_grad=False)
        else:
            self.register_buffer("qweight", weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x)


@pytest.mark.parametrize("parameter", [True, False])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn])
def test_however_weights_are_stored_the_rest_is_fused(dtype: torch.dtype, parameter: bool) -> None:
    made = target(LlamaConfig(**DENSE))
    before = logits(made)
    for layer in made.model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, each in list(part.named_children()):
                if isinstance(each, nn.Linear):
                    setattr(part, name, Stored(each, torch.zeros(4, 4).to(dtype), parameter))
    assert made.fuse().fused == {"norms": 7, "rotations": 3}
    torch.testing.assert_close(logits(made), before, rtol=1e-4, atol=1e-5)


def test_layers_in_other_hands_are_left_alone() -> None:
    made = target(LlamaConfig(**DENSE))
    layer = made.model.model.layers[0]
    layer.self_attn.k_proj._hf_hook = object()
    layer.mlp.gate_proj.forward = layer.mlp.gate_proj.forward  # as accelerate replaces it
    layer.input_layernorm._hf_hook = object()
    assert made.fuse().fused == {"norms": 6, "rotations": 3, "products": 4}


def test_layers_of_different_kinds_are_not_joined() -> None:
    made = target(LlamaConfig(**DENSE))
    layer = made.model.model.layers[0]
    layer.self_attn.v_proj.bias = nn.Parameter(torch.zeros(16))
    layer.mlp.up_proj.weight.data = layer.mlp.up_proj.weight.data.to(torch.bfloat16)
    assert made.fuse().fused["products"] == 4


def test_a_norm_that_only_looks_like_one_is_left_alone() -> None:
    class OddRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2 * self.eps)

    model = tiny.llama().model
    model.model.norm = OddRMSNorm()
    assert fuse(model, Switch())["norms"] == 4, "of five"


def test_nothing_is_joined_where_there_is_no_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Full:
        available = 1000

    monkeypatch.setattr(joined.psutil, "virtual_memory", Full)
    assert "products" not in target(LlamaConfig(**DENSE)).fuse().fused
    assert caplog.messages == ["memory is short: the products of the LlamaForCausalLM are not joined"]


def test_a_second_time_changes_nothing() -> None:
    made = target(LlamaConfig(**DENSE)).fuse()
    before = logits(made)
    assert fuse(made.model, Switch()) == {}
    assert torch.equal(logits(made), before)


def test_joined_layers_take_packed_kernels_as_others_do(tmp_path: Path) -> None:
    config = LlamaConfig(**{**DENSE, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2})
    made = target(config)
    before = logits(made)
    made.fuse().pack(tmp_path)
    assert "2048x1024" in made.kernel_choices
    assert "8192x1024" in made.kernel_choices
    assert "4096x1024" not in made.kernel_choices
    torch.testing.assert_close(logits(made), before, rtol=1e-3, atol=1e-4)


def test_fused_models_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    made = target(LlamaConfig(**DENSE)).fuse()
    before = logits(made)
    compiled = torch.compile(made.model, fullgraph=True)
    ids = torch.randint(0, COMMON["vocab_size"], (2, 13), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, before)


def test_rotating_is_what_the_formula_says() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 5, 8, generator=generator, dtype=torch.float64)
    angle = torch.randn(2, 1, 5, 4, generator=generator, dtype=torch.float64)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    both = torch.cat([angle, angle], -1)
    ours = rotate(x, (both.cos(), both.sin()))
    torch.testing.assert_close(ours, torch.cat([turned.real, turned.imag], -1))
