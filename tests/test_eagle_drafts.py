"""EAGLE drafts in every spelling: what they compute, and what is said of those that do not fit."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import eagle_heads as heads
import pytest
import tiny
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Request
from specbench.errors import SpecbenchError
from specbench.measure.clock import NullClock
from specbench.models import random_draft
from specbench.models.checkpoint import Checkpoint
from specbench.models.eagle import Eagle3 as Eagle3Net
from specbench.models.eagle import open_eagle
from specbench.models.eagle_config import aux_taps
from specbench.models.fields import Fields
from specbench.models.rope import read_frequencies
from specbench.models.target import Target

Eagle, Eagle1, Eagle2, Eagle3 = (
    getattr(importlib.import_module(f"specbench.methods.{name}"), name.capitalize())
    for name in ("eagle", "eagle1", "eagle2", "eagle3")
)
Vanilla = importlib.import_module("specbench.methods.vanilla").Vanilla
VOCAB = 16
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from more, and wait for them on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def llama() -> Target:
    return tiny.build(LlamaConfig(**SMALL), seed=1)


SPELLINGS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "safeailab": ({}, None),
    "layers.0": ({"layer": "layers.0"}, None),
    "two layers": ({"layer": "layers.0", "layers": 2}, None),
    "query and key norms": ({"layer": "layers.0", "qk_norm": True}, None),
    "own hidden size": ({"hidden": 48}, None),
    "eagle 3.1": ({"fc_norm": True, "norm_output": True}, None),
    "gpt-oss": ({"input_norm": True}, None),
    "model-optimizer": ({"layer": "layers.0", "eagle_config": {"use_aux_hidden_state": True}}, None),
    "speculators": ({"layer": "layers.0"}, {"norm_before_residual": True}),
    "speculators 3.1": (
        {"layer": "layers.0", "fc_norm": True, "hidden": 16},
        {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
    ),
    "speculators, gpt-oss": ({"layer": "layers.0", "input_norm": True}, {"norm_before_fc": True}),
    "own theta": ({"rope_theta": 500.0}, None),
    "own activation": ({"hidden_act": "gelu"}, None),
    "speculators, own activation": ({"layer": "layers.0", "hidden_act": "gelu_pytorch_tanh"}, {}),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@torch.no_grad()
def test_each_spelling_computes_what_a_plain_forward_does(llama: Target, spelling: str) -> None:
    """Two steps: a prompt's hidden states, then a token drafted from the last output, fed back."""
    made, flags = SPELLINGS[spelling]
    checkpoint = heads.eagle3(llama, drafts=10, **made)
    if flags is not None:
        checkpoint = heads.speculators(checkpoint, **flags)
    net = open_eagle(checkpoint, llama)
    state, prompt, drafted = checkpoint.state, [3, 1, 4, 1, 5, 9, 2], 7
    with llama.stock_attention():
        hidden = llama.model(torch.tensor([prompt[:-1]]), output_hidden_states=True).hidden_states
    taps = {"layer:1": hidden[2], "layer:3": hidden[4], "layer:4": hidden[5]}
    assert net.taps == tuple(taps)

    features = heads.eagle3_features(checkpoint, hidden, [2, 4, 5])
    torch.testing.assert_close(net.features(taps)[0], features, atol=1e-5, rtol=1e-4)
    options = {"layer": made.get("layer", "midlayer"), "theta": made.get("rope_theta", 10000.0)}
    residual = bool(flags and flags.get("norm_before_residual"))
    first = heads.outputs(checkpoint, llama, prompt[1:], features, norm_before_residual=residual, **options)
    net.reserve(1, 20)
    out = net(torch.tensor([prompt[1:]]), net.features(taps), None)
    normed = torch.nn.functional.rms_norm(first, state["norm.weight"].shape, state["norm.weight"], 1e-5)
    torch.testing.assert_close(net.logits(out)[0], normed @ state["lm_head.weight"].T, atol=1e-5, rtol=1e-4)

    fed = normed if made.get("norm_output") or (flags and flags.get("norm_output")) else first
    torch.testing.assert_close(net.feedback(out)[0], fed, atol=1e-5, rtol=1e-4)
    both = torch.cat([features, fed[-1:]])
    second = heads.outputs(
        checkpoint, llama, [*prompt[1:], drafted], both, norm_before_residual=residual, **options
    )
    context = importlib.import_module("specbench.decoding.context").Context(net)
    context.rewind([len(prompt) - 1])
    again = net(torch.tensor([[drafted]]), net.feedback(out)[:, -1:], context.extend(1, [1]))
    torch.testing.assert_close(again[0, 0], second[-1], atol=1e-5, rtol=1e-4)
    assert net.to_target(torch.arange(10)).tolist() == state["t2d"].nonzero()[:, 0].tolist()


@pytest.mark.parametrize("config", [{}, {"bias": False}, {"qkv_bias": True}, {"hidden_act": "relu"}], ids=str)
@torch.no_grad()
def test_eagle1_computes_what_a_plain_forward_does(llama: Target, config: dict[str, Any]) -> None:
    checkpoint = heads.eagle1(llama, **config)
    net = open_eagle(checkpoint, llama)
    final = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(0))
    net.reserve(1, 20)
    out = net(torch.tensor([[3, 1, 4, 1, 5, 9]]), net.features({"final": final}), None)
    expected = heads.outputs(checkpoint, llama, [3, 1, 4, 1, 5, 9], final[0], layer="layers.0")
    torch.testing.assert_close(out[0], expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(net.logits(out)[0], llama.lm_head(expected), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_without_aux_layers_the_last_hidden_state_goes_in_as_it_is(llama: Target) -> None:
    """Model-Optimizer's `use_aux_hidden_state: false`: no fc, no hidden norm."""
    made = heads.eagle3(llama, layer="layers.0", eagle_config={"use_aux_hidden_state": False})
    state = {k: v for k, v in made.state.items() if k not in ("fc.weight", "layers.0.hidden_norm.weight")}
    net = open_eagle(replace(made, state=state), llama)
    assert net.taps == ("final",)
    final = torch.randn(1, 4, 32)
    torch.testing.assert_close(net.features({"final": final}), final)
    net.reserve(1, 20)
    assert net(torch.tensor([[3, 1, 4, 1]]), final, None).shape == (1, 4, 32)


@pytest.mark.parametrize(
    ("config", "inputs"),
    [
        ({}, [2, 4, 5]),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, [2, 4, 5]),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}}, [2, 3, 7]),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}, [2, 4, 5]),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, [2, 4, 5]),
        ({"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}, [2, 4, 5]),
        ({"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": [0, 1, 8]}, [0, 1, 8]),
        ({"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, [2, 4, 5]),
        ({"target_layer_ids": [1, 3, 4]}, [2, 4, 5]),
    ],
    ids=str,
)
def test_aux_layers_in_each_convention(config: dict[str, Any], inputs: list[int]) -> None:
    taps = aux_taps(Fields("x", config), 8)
    assert taps == tuple(f"layer:{i - 1}" if i else "embed" for i in inputs)


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["llama3", "linear", "yarn"])
def test_scaled_rotary_positions_are_those_of_transformers(llama: Target, field: str, kind: str) -> None:
    extra = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    scaling = {"rope_type": kind, "factor": 8.0, "original_max_position_embeddings": 64, **extra}
    config = {"rope_theta": 5000.0, "max_position_embeddings": 512, field: dict(scaling)}
    ours, scale = read_frequencies(Fields("x", heads.eagle1(llama, **config).config), 8)
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(**{**SMALL, "rope_parameters": {**scaling, "rope_theta": 5000.0}})
    )
    torch.testing.assert_close(ours, theirs.inv_freq)
    assert scale == theirs.attention_scaling


def test_the_targets_embeddings_replace_the_drafts(llama: Target) -> None:
    """Some published drafts hold random ones."""
    made = heads.eagle3(llama)
    made.state["embed_tokens.weight"] = torch.randn(VOCAB, 32)
    net = open_eagle(made, llama)
    assert isinstance(net, Eagle3Net)
    torch.testing.assert_close(net.embed(torch.tensor([[3]])), llama.embeddings(torch.tensor([[3]])))


# -- drafts that do not fit ----------------------------------------------------------------------------------


def _without(key: str) -> Any:
    return lambda c: c.state.pop(key)


def _with(key: str, *shape: int) -> Any:
    return lambda c: c.state.__setitem__(key, torch.zeros(shape))


def _says(**config: Any) -> Any:
    return lambda c: c.config.update(config)


def _silent(key: str) -> Any:
    return lambda c: c.config.pop(key)


BAD: dict[str, tuple[str, Any, list[str]]] = {
    "missing weight": ("1", _without("layers.0.mlp.up_proj.weight"), ["layers.0.mlp.up_proj.weight", "no weight"]),
    "missing bias": ("1", _without("fc.bias"), ["fc.bias"]),
    "missing as spelled": ("3", _without("midlayer.mlp.up_proj.weight"), ["midlayer.mlp.up_proj.weight"]),
    "missing norm": ("3", _without("norm.weight"), ["norm.weight"]),
    "missing head": ("3", _without("lm_head.weight"), ["lm_head.weight"]),
    "missing map": ("3", _without("d2t"), ["d2t"]),
    "extra weight": ("1", _with("layers.0.extra.weight", 3), ["layers.0.extra.weight"]),
    "extra variant": ("3", _with("mask_hidden", 1, 96), ["mask_hidden"]),
    "misshapen": ("1", _with("fc.weight", 32, 63), ["fc.weight", "32 x 63", "32 x 64"]),
    "misshapen fc": ("3", _with("fc.weight", 32, 64), ["fc.weight", "32 x 64", "32 x 96"]),
    "misshapen embeddings": ("1", _with("embed_tokens.weight", VOCAB, 31), ["embed_tokens.weight", "16 x 32"]),
    "misshapen t2d": ("3", _with("t2d", VOCAB - 1), ["t2d", "15", "16"]),
    "map out of range": ("3", lambda c: c.state["d2t"].__setitem__(9, 99), ["d2t"]),
    "map not one to one": ("3", lambda c: c.state["d2t"].__setitem__(slice(0, 2), torch.tensor([1, 0])), ["d2t"]),
    "another hidden size": ("1", _says(hidden_size=64), ["hidden_size", "64", "32"]),
    "another target's hidden size": ("3", _says(target_hidden_size=64), ["target_hidden_size", "64", "32"]),
    "another vocabulary": ("1", _says(vocab_size=48), ["vocab_size", "48", "16"]),
    "another vocabulary, EAGLE-3": ("3", _says(vocab_size=48), ["vocab_size", "48", "16"]),
    "more layers": ("3", _says(eagle_aux_hidden_state_layer_ids=[2, 16, 29]), ["[2, 16, 29]", "8"]),
    "layer ids are no list": ("3", _says(eagle_aux_hidden_state_layer_ids="2"), ["eagle_aux_hidden_state_layer_ids"]),
    "no heads": ("1", _silent("num_attention_heads"), ["num_attention_heads"]),
    "no hidden size": ("3", _silent("hidden_size"), ["hidden_size"]),
    "no mlp size": ("3", _silent("intermediate_size"), ["intermediate_size"]),
    "heads are no number": ("1", _says(num_attention_heads="four"), ["num_attention_heads", "four"]),
    "eps is no number": ("1", _says(rms_norm_eps="small"), ["rms_norm_eps", "small"]),
    "heads and key-value heads": ("1", _says(num_key_value_heads=3), ["4", "3", "key-value"]),
    "rope by length": ("1", _says(rope_scaling={"type": "dynamic", "factor": 2.0}), ["dynamic"]),
    "rope without its fields": ("1", _says(rope_scaling={"rope_type": "llama3"}), ["llama3"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_drafts_are_one_clear_line(llama: Target, case: str) -> None:
    which, spoil, words = BAD[case]
    checkpoint = heads.eagle1(llama) if which == "1" else heads.eagle3(llama, drafts=12)
    spoil(checkpoint)
    with pytest.raises(SpecbenchError) as raised:
        (Eagle2 if which == "1" else Eagle3)(llama, draft=checkpoint)
    assert "\n" not in raised.value.message
    assert all(word in raised.value.message for word in words), raised.value.message
    assert raised.value.hint


def test_eagle3_wants_seven_layers() -> None:
    small = tiny.llama(VOCAB, layers=6)
    with pytest.raises(SpecbenchError, match="6 layers"):
        Eagle3(small, draft=heads.eagle3(small))


def test_the_other_kind_is_sent_to_its_method(llama: Target) -> None:
    for method, checkpoint, wanted in (
        (Eagle1, heads.eagle3(llama), "eagle3"),
        (Eagle2, heads.eagle3(llama), "eagle3"),
        (Eagle3, heads.eagle1(llama), "eagle2"),
    ):
        with pytest.raises(SpecbenchError) as raised:
            method(llama, draft=checkpoint)
        assert wanted in raised.value.hint


@pytest.mark.parametrize("method", [Eagle, Eagle1, Eagle2, Eagle3])
def test_no_draft_and_no_folder(llama: Target, method: Any) -> None:
    with pytest.raises(SpecbenchError, match="needs an EAGLE-"):
        method(llama)
    with pytest.raises(SpecbenchError, match="does not exist"):
        method(llama, draft="./nowhere")


def test_options_out_of_range(llama: Target) -> None:
    for name, value, said in (
        ("total_token", 1, "2 to 1024"), ("total_token", 100_000, "2 to 1024"), ("depth", -1, "0 to 64"),
        ("depth", 65, "0 to 64"), ("top_k", 0, "1 to 256"), ("top_k", 257, "1 to 256"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"{name} must be {said}, not {value}"):
            Eagle2(llama, draft=heads.eagle1(llama), **{name: value})
    with pytest.raises(SpecbenchError, match="no tree"):
        Eagle1(llama, draft=heads.eagle1(llama), tree="oak")


def test_checkpoints_of_the_hub_layout_open(llama: Target, tmp_path: Path) -> None:
    """config.json and pytorch_model.bin in a folder, as SafeAILab publishes them."""
    made: Checkpoint = heads.eagle3(llama, drafts=12)
    (tmp_path / "config.json").write_text(json.dumps(made.config))
    torch.save(made.state, tmp_path / "pytorch_model.bin")
    assert Eagle3(llama, draft=str(tmp_path)).kind == "EAGLE-3"


@pytest.mark.parametrize("drafted", [32_000, 6])
def test_a_random_draft_of_the_usual_shape(
    llama: Target, drafted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_draft, "DRAFTED", drafted)
    method = Eagle3(llama, draft="random", total_token=8, depth=3)
    assert method.net.vocab == min(drafted, VOCAB)
    identity = method.draft_identity()
    assert (identity["source"], identity["hub_id"], identity["files"]) == ("random", None, {})
    layer = 64 * 32 + 2 * (64 * 16) + 32 * 32 + 3 * 32 * 64  # q, k and v, o, MLP; q, k and v read two vectors
    assert identity["parameters"] == layer + 3 * 32 * 32 + min(drafted, VOCAB) * 32 + 4 * 32 + (
        drafted if drafted < VOCAB else 0
    )
    request = Request(tiny.prompts(2, VOCAB), 12)

    def tokens(drafter: Any) -> list[list[int]]:
        rounds = list(DraftVerify(llama, drafter).generate(request, NullClock()))
        return [[token for one in rounds for token in one.tokens[row]] for row in range(2)]

    assert tokens(method) == tokens(Vanilla(llama))
    again = Eagle3(llama, draft="random", total_token=8, depth=3)
    for one, other in zip(method.net.parameters(), again.net.parameters(), strict=True):
        assert torch.equal(one, other)
