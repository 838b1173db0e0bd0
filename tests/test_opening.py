"""`inspect` and a run say the same of a draft: what the one lets pass the other opens, and the reverse."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from layouts import (
    DEEPSPEC,
    DFLASH,
    EAGLE,
    EAGLE3,
    HYDRA,
    KNOWN,
    LLAMA,
    MARKOV,
    MEDUSA,
    MODEL,
    ONE,
    ZLAB,
    H,
    Shapes,
    V,
    folder,
)
from safetensors.torch import load_file, save_file
from test_loop import generate, hf_greedy
from tiny_folder import Result, Workplace, specbench
from transformers import LlamaConfig

from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Request
from specbench.errors import SpecbenchError
from specbench.models.checkpoint import list_checkpoint
from specbench.models.detect import recognise
from specbench.models.fits import OWN_TARGET
from specbench.models.opening import OPENERS, check_opens, stand_in
from specbench.models.target import Target
from specbench.spec import find_method

DRAFTS: dict[str, tuple[dict[str, Any], Shapes, str]] = {
    "eagle1": (LLAMA, EAGLE, "layers.0.mlp.up_proj.weight"),
    "eagle3": (LLAMA, EAGLE3, "midlayer.self_attn.k_proj.weight"),
    "medusa": ({}, MEDUSA, "1.1.weight"),
    "hydra": ({"hydra_num_heads": 2}, HYDRA, "hydra_mlp.1.1.linear.weight"),
    "dflash": (ZLAB, DFLASH, "layers.0.self_attn.o_proj.weight"),
}
DSPARK = {**DEEPSPEC, "markov_rank": 4, "markov_head_type": "vanilla", "num_target_layers": 8}


def made(vocab: int) -> Target:
    numbers = {**ONE, "num_hidden_layers": 8, "vocab_size": vocab}
    return tiny.build(LlamaConfig(**numbers, pad_token_id=None, bos_token_id=None, eos_token_id=None))


def made_folder(path: Path, vocab: int) -> Path:
    made(vocab).model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def target() -> Target:
    return made(V)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_folder(tmp_path_factory.mktemp("targets") / "target", V)


def refused(result: Result, *words: str) -> None:
    assert result.code == 2, result.out
    assert len(result.error_lines) == 2, result.err
    for word in words:
        assert word in result.error_lines[0]


@pytest.mark.parametrize(
    "name", [n for n, (_, _, kind, _) in KNOWN.items() if kind in {*OPENERS} - {*OWN_TARGET}]
)
def test_every_layout_that_is_run_opens_for_what_it_was_made_for(tmp_path: Path, name: str) -> None:
    config, shapes, _, _ = KNOWN[name]
    listing = list_checkpoint(folder(tmp_path / "x", config, shapes))
    found = recognise(listing)
    made_for = stand_in(listing, found)
    assert made_for is not None
    check_opens(listing, found, made_for)


def lost(state: Any, key: str) -> None:
    del state[key]


def added(state: Any, key: str) -> None:
    state["strange.weight"] = torch.zeros(3)


def misshapen(state: Any, key: str) -> None:
    state[key] = state[key][:-1].clone()


def flattened(state: Any, key: str) -> None:
    state[key] = state[key].flatten()


@pytest.mark.parametrize("spoil", [None, lost, added, misshapen, flattened])
@pytest.mark.parametrize("method", DRAFTS)
def test_damaged_weights(
    tmp_path: Path, target: Target, target_folder: Path, method: str, spoil: Callable[[Any, str], None] | None
) -> None:
    config, shapes, key = DRAFTS[method]
    ref = folder(tmp_path / "x", config, shapes)
    if spoil is None:
        assert specbench("inspect", ref, "--target", target_folder).code == 0
        find_method(method)(target, draft=ref)
        return
    state = load_file(tmp_path / "x" / "model.safetensors")
    spoil(state, key)
    save_file(state, tmp_path / "x" / "model.safetensors")
    with pytest.raises(SpecbenchError) as caught:
        find_method(method)(target, draft=ref)
    assert ("strange.weight" if spoil is added else key) in caught.value.message
    refused(specbench("inspect", ref), caught.value.message)
    refused(specbench("inspect", ref, "--target", target_folder), caught.value.message)


@pytest.mark.parametrize("method", ["eagle3", "dflash"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", -8), ("hidden_size", None), ("num_attention_heads", 0), ("num_key_value_heads", 3),
        ("vocab_size", "8"), ("architectures", 5), ("hidden_act", "swoosh"), ("hidden_act", 3),
        ("rope_theta", "a"), ("rope_theta", 0), ("rope_scaling", [1]), ("layer_types", "full"), ("head_dim", 1.5),
        ("rms_norm_eps", "small"), ("eagle_config", [1]), ("dflash_config", 7), ("intermediate_size", True),
    ],
)  # fmt: skip
def test_fields_of_a_wrong_type(
    tmp_path: Path, target: Target, target_folder: Path, method: str, field: str, value: Any
) -> None:
    """One line that names the file and the field, from `inspect` and from a run."""
    config, shapes, _ = DRAFTS[method]
    ref = folder(tmp_path / "x", {**config, field: value}, shapes)
    named = "key-value heads" if field == "num_key_value_heads" else field
    with pytest.raises(SpecbenchError, match=rf"config\.json .*{named}") as caught:
        find_method(method)(target, draft=ref)
    assert "\n" not in caught.value.message
    refused(specbench("inspect", ref), "config.json", named)
    refused(specbench("inspect", ref, "--target", target_folder), "config.json", named)


@pytest.mark.parametrize("ids", ["x", {}, {"a": 1}, [1, "2"]], ids=str)
def test_layer_ids_of_a_wrong_type(tmp_path: Path, target_folder: Path, ids: Any) -> None:
    name = "eagle_aux_hidden_state_layer_ids"
    ref = folder(tmp_path / "x", {**LLAMA, name: ids}, EAGLE3)
    refused(
        specbench("inspect", ref, "--target", target_folder), f"has {ids!r} as {name}, expected a list of"
    )


def test_a_target_whose_config_is_wrong(tmp_path: Path) -> None:
    ref = folder(tmp_path / "d", LLAMA, EAGLE)
    for number, config in enumerate(({**LLAMA, "vocab_size": "8"}, {**LLAMA, "num_attention_heads": 3})):
        at = folder(tmp_path / str(number), config, MODEL)
        refused(specbench("inspect", ref, "--target", at), "config.json" if number == 0 else str(at))


def test_layers_named_that_the_weights_do_not_read(
    tmp_path: Path, target: Target, target_folder: Path
) -> None:
    """Two ids where `fc` reads three hidden states: not another hidden size."""
    name = "eagle_aux_hidden_state_layer_ids"
    ref = folder(tmp_path / "x", {**LLAMA, name: [2, 4]}, EAGLE3)
    for result in (specbench("inspect", ref), specbench("inspect", ref, "--target", target_folder)):
        refused(result, f"weight fc.weight is {H} x {3 * H}, expected {H} x {2 * H}")
    with pytest.raises(SpecbenchError, match=f"fc.weight is {H} x {3 * H}") as caught:
        find_method("eagle3")(target, draft=ref)
    assert name in caught.value.hint


@pytest.mark.parametrize(
    ("method", "changed", "hint"),
    [
        ("eagle1", {"num_key_value_heads": 1}, "num_key_value_heads"),
        ("dflash", {"head_dim": 2}, "head_dim"),
        ("eagle3", {"intermediate_size": 4}, "intermediate_size"),
    ],
)
def test_the_hint_names_the_fields_a_shape_follows_from(
    tmp_path: Path, target: Target, method: str, changed: dict[str, int], hint: str
) -> None:
    config, shapes, _ = DRAFTS[method]
    with pytest.raises(SpecbenchError, match="expected") as caught:
        find_method(method)(target, draft=folder(tmp_path / "x", config | changed, shapes))
    assert hint in caught.value.hint


def test_a_draft_vocabulary_that_the_config_does_not_tell(
    tmp_path: Path, target: Target, target_folder: Path
) -> None:
    ref = folder(tmp_path / "x", LLAMA, EAGLE3)
    assert find_method("eagle3")(target, draft=ref).net.vocab == V // 2
    assert specbench("inspect", ref, "--target", target_folder).code == 0
    wrong = folder(tmp_path / "y", {**LLAMA, "draft_vocab_size": 3}, EAGLE3)
    refused(
        specbench("inspect", wrong, "--target", target_folder), "lm_head.weight is 16 x 8, expected 3 x 8"
    )


def test_files_without_weights_and_a_file_for_a_folder(tmp_path: Path, target: Target) -> None:
    ref = folder(tmp_path / "x", LLAMA, {})
    file = f"{folder(tmp_path / 'y', LLAMA, EAGLE)}/model.safetensors"
    for draft, words in ((ref, "there are no weights in model.safetensors"), (file, "is a file")):
        refused(specbench("inspect", draft), words)
        with pytest.raises(SpecbenchError, match=words):
            find_method("eagle")(target, draft=draft)


def test_what_else_a_kind_has_is_told(tmp_path: Path, target: Target) -> None:
    shapes = {**DFLASH, "layers.0.self_attn.q_proj.bias": (H,)}
    with pytest.raises(SpecbenchError, match=r"expected are \d+ weights like .*q_proj\.weight"):
        find_method("dflash")(target, draft=folder(tmp_path / "x", ZLAB, shapes))


def test_a_target_whose_own_heads_are_damaged_is_still_described(tmp_path: Path) -> None:
    shapes = MODEL | {f"medusa_head.{k}": v for k, v in MEDUSA.items() if k != "1.1.weight"}
    found = specbench("inspect", folder(tmp_path / "x", LLAMA, shapes), "--json")
    assert found.code == 0, found.err
    assert "has no weight 1.1.weight" in json.loads(found.out)["refused"]
    whole = specbench("inspect", folder(tmp_path / "y", *KNOWN["medusa-2"][:2]), "--json")
    assert "refused" not in json.loads(whole.out)


@pytest.mark.parametrize("rows", [199, 201])
@pytest.mark.parametrize("method", [*DRAFTS, "dspark"])
def test_vocabularies_padded_otherwise(tmp_path: Path, method: str, rows: int) -> None:
    """199 or 201 ids in the draft, 200 in the target: one vocabulary to `inspect` and to a run, and lossless."""
    config, shapes, _ = DRAFTS.get(method, (DSPARK, DFLASH | MARKOV, ""))
    wide = {key: tuple(rows if size == V else size for size in shape) for key, shape in shapes.items()}
    of_its_own = {"embed_tokens.weight": (rows, H), "lm_head.weight": (rows, H)} if method == "dspark" else {}
    extra = {"input_embed_fn.weight": (rows, H)} if method == "hydra" else of_its_own
    ref = folder(tmp_path / "draft", {**config, **({"vocab_size": rows} if config else {})}, wide | extra)
    if method == "medusa" or method == "hydra":
        noise(tmp_path / "draft" / "model.safetensors")
    target = made(200)
    result = specbench("inspect", ref, "--target", made_folder(tmp_path / "target", 200))
    assert result.code == 0, result.err
    drafter = find_method("dflash" if method == "dspark" else method)(target, draft=ref)
    prompts = [[3, 199, 5, 198], [199]]
    outputs, rounds = generate(DraftVerify(target, drafter), Request(prompts, 12))
    assert outputs == [hf_greedy(target, prompt, 12) for prompt in prompts]
    assert rounds[1].drafted[0] > 0
    refused(specbench("inspect", ref, "--target", made_folder(tmp_path / "other", 300)), "300")


def noise(file: Path) -> None:
    """Random weights instead of zeros, of which Hydra's want the last id there is."""
    generator = torch.Generator().manual_seed(0)
    state = {key: torch.randn(value.shape, generator=generator) for key, value in load_file(file).items()}
    for key in state:
        if key.startswith("hydra_lm_head") and key.endswith("bias"):
            state[key][-1] = 1000.0
    save_file(state, file)


def test_a_run_says_which_eagle_it_took_and_of_what(
    tmp_path: Path, target_folder: Path, make_place: Callable[[str], Workplace]
) -> None:
    place, ref = make_place("took"), folder(tmp_path / "e", LLAMA, EAGLE)
    result = place.run("--target", target_folder, "--method", "eagle", "--draft", ref, "--limit", 1)
    assert result.code == 0, result.err
    assert f"note: eagle drafts with {ref} (EAGLE-1/2; eagle took eagle2)" in result.err
    report = next(place.path.rglob("report.md")).read_text(encoding="utf-8")
    assert re.search(r"\| drafter of eagle \| .* \(EAGLE-1/2; eagle took eagle2\) \|", report)
