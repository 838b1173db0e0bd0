"""Packed matrix kernels: the same numbers, chosen once, and off while transformers is the reference."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from test_loop import generate, hf_greedy

from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Request
from specbench.measure.cpu import CpuProbe
from specbench.models import kernels
from specbench.models.target import Target

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
PACKED = dict.fromkeys(map(str, kernels.TOKENS), "packed")


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Target:
    """A tiny target all of whose linear layers are packed, whatever is faster here."""
    monkeypatch.setattr(kernels, "SMALLEST", 0)
    monkeypatch.setattr(kernels, "_measure", lambda layers: dict(PACKED))
    return tiny.llama(seed=1).pack(tmp_path)


def test_packed_layers_compute_the_same(target: Target) -> None:
    layers = [layer for layer in target.model.modules() if isinstance(layer, kernels.PackedLinear)]
    assert len(layers) == 15, "seven a layer and the head"
    for tokens in (1, 3, 20, 100):
        for layer in layers:
            x = torch.randn(2, tokens, layer.in_features)
            stock = torch.nn.functional.linear(x, layer.weight, layer.bias)
            torch.testing.assert_close(layer(x), stock, atol=1e-5, rtol=1e-4)


def test_output_is_still_transformers_own(target: Target) -> None:
    prompts = tiny.prompts(3, 64, seed=2)
    lookup = importlib.import_module("specbench.methods.prompt_lookup").PromptLookup(target, k=4, ngram=1)
    outputs, _ = generate(DraftVerify(target, lookup), Request(prompts, 30))
    assert outputs == [hf_greedy(target, prompt, 30) for prompt in prompts]


def test_references_run_on_torchs_own_kernels(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    packed = kernels._packed
    monkeypatch.setattr(kernels, "_packed", lambda *a: (used.append(1), packed(*a))[1])
    with target.stock_attention():
        target.model(torch.tensor([[1, 2, 3]]))
    assert not used
    target.reserve(1, 3)
    target.prefill([[1, 2, 3]])
    assert used


def test_a_choice_is_made_once_on_a_quiet_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernels, "SMALLEST", 0)
    heard: list[str] = []
    monkeypatch.setattr(CpuProbe, "stop", lambda self: SimpleNamespace(contended=True))
    assert tiny.llama(seed=1).pack(tmp_path, heard.append).kernel_choices
    assert list(tmp_path.iterdir()) == []
    assert "busy" in heard[1]
    monkeypatch.setattr(CpuProbe, "stop", lambda self: SimpleNamespace(contended=False))
    first = tiny.llama(seed=1).pack(tmp_path).kernel_choices
    assert set(first) == {"32x32", "16x32", "64x32", "32x64"}
    monkeypatch.setattr(kernels, "_measure", lambda layers: pytest.fail("measured again"))
    assert tiny.llama(seed=1).pack(tmp_path).kernel_choices == first
    (file,) = tmp_path.iterdir()
    assert str(file) in heard[0]
    assert json.loads(file.read_text()) == first
    file.write_text("{}")
    with pytest.raises(pytest.fail.Exception):
        tiny.llama(seed=1).pack(tmp_path)


def test_stock_is_kept_where_it_is_not_slower(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernels, "SMALLEST", 0)
    monkeypatch.setattr(kernels, "_interleaved", lambda *runs: [1.0, 0.98])
    target = tiny.llama(seed=1).pack(tmp_path)
    assert all(set(choice.values()) == {"stock"} for choice in target.kernel_choices.values())
    assert not any(isinstance(layer, kernels.PackedLinear) for layer in target.model.modules())


def test_each_number_of_tokens_has_its_own_choice() -> None:
    assert [kernels.TOKENS[kernels._bucket(n)] for n in (1, 2, 3, 8, 9, 17, 64, 5000)] == [
        1,
        2,
        4,
        8,
        16,
        64,
        64,
        64,
    ]


def test_small_models_are_left_alone(tmp_path: Path) -> None:
    assert tiny.llama(seed=1).pack(tmp_path).kernel_choices == {}
    assert not any(tmp_path.iterdir())


def test_an_unwritable_cache_is_no_obstacle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernels, "SMALLEST", 0)
    (tmp_path / "file").write_text("")
    assert tiny.llama(seed=1).pack(tmp_path / "file" / "below").kernel_choices


def test_the_packed_copy_counts_as_memory(target: Target) -> None:
    plain = tiny.llama(seed=1).weights_bytes()
    layers = [layer for layer in target.model.modules() if isinstance(layer, kernels.PackedLinear)]
    assert target.weights_bytes() == plain + sum(layer.weight.nbytes for layer in layers)


def test_a_compiler_is_shown_torchs_own_product(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows no other; and what packs weights for it, if it wants that, is its own business."""
    monkeypatch.setattr(kernels, "_packed", lambda *_: pytest.fail("packed under a compiler"))
    layer = target.model.model.layers[0].mlp.down_proj
    assert isinstance(layer, kernels.PackedLinear)
    x = torch.randn(1, 3, layer.in_features)
    compiled = torch.compile(lambda x: layer(x), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), torch.nn.functional.linear(x, layer.weight))
