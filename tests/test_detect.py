"""What a checkpoint is recognised as: every layout the literature has, by config and keys, never by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import (
    BLOCK,
    DEEPSPEC,
    DFLASH,
    EAGLE,
    EAGLE3,
    KNOWN,
    LLAMA,
    MARKOV,
    MEDUSA,
    MODEL,
    ONE,
    SPECULATORS,
    WIDE,
    ZLAB,
    H,
    Shapes,
    V,
    folder,
)
from safetensors.torch import save_file

from specbench.errors import SpecbenchError
from specbench.models.checkpoint import check_finite, list_checkpoint, open_checkpoint
from specbench.models.detect import KINDS, expect, recognise
from specbench.models.fits import Numbers, fitting_targets, misfits, named_target, numbers_of, registered
from specbench.spec import method_names


@pytest.mark.parametrize(("config", "shapes", "kind", "spelling"), KNOWN.values(), ids=KNOWN)
def test_recognised_without_and_with_the_weights(
    tmp_path: Path, config: dict[str, Any], shapes: Shapes, kind: str, spelling: str
) -> None:
    ref = folder(tmp_path / "named-wrongly", config, shapes)
    listing = list_checkpoint(ref)
    assert listing.shapes == shapes
    listed, opened = recognise(listing), recognise(open_checkpoint(ref))
    assert (listed.kind, listed.spelling) == (kind, spelling)
    assert listed == opened


@pytest.mark.parametrize("file", ["pytorch_model.bin", "medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_files_of_every_kind_are_listed(tmp_path: Path, file: str) -> None:
    (tmp_path / "x").mkdir()
    torch.save({"learning_rate": 1}, tmp_path / "x" / "training_args.bin")
    listing = list_checkpoint(folder(tmp_path / "x", {}, MEDUSA, file))
    assert listing.shapes == MEDUSA
    weight = listing.weights["0.1.weight"]
    assert (weight.dtype, weight.bytes) == ("float32", 4 * V * H)
    assert recognise(listing).settings == {
        "heads": 3,
        "heads_in_config": None,
        "head_layers": 1,
        "target_hidden_size": H,
        "vocab_size": V,
    }


def test_settings_are_the_weights_own(tmp_path: Path) -> None:
    """Medusa's config is wrong about heads, EAGLE-3's about layers; sizes come from the weights."""
    config = {**LLAMA, "num_hidden_layers": 40, "eagle_aux_hidden_state_layer_ids": [1, 5, 9]}
    eagle3 = recognise(list_checkpoint(folder(tmp_path / "e", config, EAGLE3))).settings
    assert (eagle3["layers"], eagle3["draft_vocab_size"], eagle3["vocab_size"]) == (1, V // 2, V)
    assert (eagle3["target_hidden_size"], eagle3["aux_layer_ids"]) == (H, [1, 5, 9])
    medusa = recognise(list_checkpoint(folder(tmp_path / "m", {"medusa_num_heads": 2}, MEDUSA))).settings
    assert (medusa["heads"], medusa["heads_in_config"]) == (3, 2)
    dspark = recognise(list_checkpoint(folder(tmp_path / "d", DEEPSPEC, DFLASH | MARKOV))).settings
    assert (dspark["block_size"], dspark["mask_token_id"], dspark["markov_rank"]) == (4, 3, 4)
    assert (dspark["target_hidden_size"], dspark["target_layers"]) == (H, 4)


def test_every_method_a_kind_names_exists() -> None:
    assert {kind.method for kind in KINDS.values() if kind.method} <= set(method_names())


# -- expect --------------------------------------------------------------------------------------------------


def test_a_draft_of_another_kind_says_what_it_is(tmp_path: Path) -> None:
    ref = folder(tmp_path / "m", {"medusa_num_heads": 2}, MEDUSA)
    with pytest.raises(SpecbenchError) as caught:
        expect(open_checkpoint(ref), ("eagle3",), "eagle3")
    assert caught.value.message == f"{ref} is Medusa heads, not an EAGLE-3 draft"
    assert caught.value.hint == "use --method medusa"
    assert expect(open_checkpoint(ref), ("medusa", "medusa-2"), "medusa").kind == "medusa"


def test_a_draft_nothing_runs_and_nothing_known(tmp_path: Path) -> None:
    config = {**SPECULATORS, "speculators_model_type": "peagle"}
    with pytest.raises(
        SpecbenchError, match=r"a P-EAGLE draft, not an EAGLE-3 draft, and no method here runs it"
    ):
        expect(list_checkpoint(folder(tmp_path / "p", config, WIDE)), ("eagle3",), "eagle3")
    strange = folder(tmp_path / "s", {"model_type": "new"}, {"a.weight": (2,)})
    with pytest.raises(
        SpecbenchError, match=r"nothing that specbench knows.*model type 'new', weights a.weight"
    ):
        expect(list_checkpoint(strange), ("eagle3",), "eagle3")
    mlp = folder(tmp_path / "l", {"speculators_model_type": "mlp"}, {"a.weight": (2,)})
    with pytest.raises(SpecbenchError, match="speculators draft of type 'mlp'"):
        recognise(list_checkpoint(mlp))


@pytest.mark.parametrize(
    ("config", "shapes", "field"),
    [
        ({"model_type": "llama"}, EAGLE, "num_attention_heads"),
        ({"model_type": "llama"}, EAGLE3, "num_attention_heads"),
        ({**BLOCK, "dflash_config": {}}, DFLASH, "mask_token_id"),
        ({k: v for k, v in ZLAB.items() if k != "block_size"}, DFLASH, "block_size"),
    ],
)
def test_a_config_without_the_fields_names_the_first(
    tmp_path: Path, config: dict[str, Any], shapes: Shapes, field: str
) -> None:
    with pytest.raises(SpecbenchError, match=f"config.json has no {field}"):
        recognise(list_checkpoint(folder(tmp_path / "x", config, shapes)))


def test_fields_without_heads(tmp_path: Path) -> None:
    for kind in ("Medusa", "Hydra"):
        ref = folder(tmp_path / kind, {f"{kind.lower()}_num_heads": 2}, {"a.weight": (2,)})
        with pytest.raises(SpecbenchError, match=f"has no {kind} heads"):
            recognise(list_checkpoint(ref))


# -- damaged files -------------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["SPECBENCH_TEST_EVIL"],)


@pytest.mark.parametrize("read", [list_checkpoint, open_checkpoint])
def test_a_pickle_with_code_is_refused_and_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Any
) -> None:
    monkeypatch.setenv("SPECBENCH_TEST_EVIL", str(tmp_path / "evil"))
    ref = folder(tmp_path / "x", {}, {}, "pytorch_model.bin")
    torch.save({"0.0.linear.weight": torch.ones(2), "x": Evil()}, tmp_path / "x" / "pytorch_model.bin")
    with pytest.raises(SpecbenchError, match=r"pytorch_model.bin cannot be read: it holds code \(\S+mkdir\)"):
        read(ref)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("read", [list_checkpoint, open_checkpoint])
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("keep", [0, 5, 200])
def test_a_truncated_file_is_one_line(tmp_path: Path, read: Any, file: str, keep: int) -> None:
    ref = folder(tmp_path / "x", LLAMA, EAGLE, file)
    path = tmp_path / "x" / file
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(SpecbenchError) as caught:
        read(ref)
    assert file in caught.value.message
    assert "\n" not in caught.value.message


def test_bytes_that_are_no_weights(tmp_path: Path) -> None:
    ref = folder(tmp_path / "x", LLAMA, EAGLE, "pytorch_model.bin")
    for content in (b"hello", b"\x80\x02N.", b"PK\x03\x04 not a zip"):
        (tmp_path / "x" / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(SpecbenchError, match=r"pytorch_model\.bin cannot be read"):
            list_checkpoint(ref)


def test_a_missing_shard(tmp_path: Path) -> None:
    ref = folder(tmp_path / "x", LLAMA, EAGLE, "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "x" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SpecbenchError, match=r"lacks weight files, the first model-00002"):
        list_checkpoint(ref)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_is_found_without_holding_all_weights(tmp_path: Path, file: str, bad: float) -> None:
    ref = folder(tmp_path / "x", LLAMA, EAGLE, file)
    listing = list_checkpoint(ref)
    check_finite(listing)
    state = {key: torch.zeros(shape) for key, shape in EAGLE.items()}
    state["fc.bias"][3] = bad
    save_file(state, tmp_path / "x" / file) if file.endswith("safetensors") else torch.save(
        state, tmp_path / "x" / file
    )
    with pytest.raises(SpecbenchError, match=r"weight fc.bias holds NaN"):
        check_finite(listing)
    with pytest.raises(SpecbenchError, match=r"weight fc.bias holds NaN"):
        open_checkpoint(ref)


# -- which target --------------------------------------------------------------------------------------------


def test_a_draft_fits_the_target_of_its_numbers(tmp_path: Path) -> None:
    found = recognise(list_checkpoint(folder(tmp_path / "e", LLAMA, EAGLE3)))
    assert misfits(found, Numbers(H, 12, V)) == []
    assert misfits(found, Numbers(H + 8, 12, V)) == [f"hidden size {H}, the target's is {H + 8}"]
    assert misfits(found, Numbers(H, 12, 2 * V)) == [f"vocabulary {V}, the target's is {2 * V}"]
    deep = {**LLAMA, "eagle_aux_hidden_state_layer_ids": [2, 20, 39]}
    found = recognise(list_checkpoint(folder(tmp_path / "d", deep, EAGLE3)))
    assert misfits(found, Numbers(H, 12, V)) == ["it reads layer 39, the target has 12"]
    found = recognise(list_checkpoint(folder(tmp_path / "f", DEEPSPEC, DFLASH)))
    assert misfits(found, Numbers(H, 12, V)) == ["layers 4, the target's is 12"]


def test_a_padded_vocabulary_fits_and_a_draft_model_needs_nothing_else(tmp_path: Path) -> None:
    config = {**LLAMA, "vocab_size": 151936}
    found = recognise(list_checkpoint(folder(tmp_path / "p", config, MODEL)))
    assert misfits(found, Numbers(4096, 36, 152064)) == []
    assert misfits(found, Numbers(4096, 36, 128256)) != []


def test_registry_targets_by_number_and_by_name(tmp_path: Path) -> None:
    big = {**EAGLE, "fc.weight": (4096, 8192), "fc.bias": (4096,)}
    config = {**LLAMA, "vocab_size": 32000, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    listing = list_checkpoint(folder(tmp_path / "v", config, big))
    fits = fitting_targets(recognise(listing))
    assert {"vicuna-7b", "llama2-7b-chat"} <= set(fits)
    assert not {"llama-8b", "vicuna-13b"} & set(fits)
    assert named_target(listing.config) == "lmsys/vicuna-7b-v1.3"
    assert named_target({"speculators_config": {"verifier": {"name_or_path": "a/b"}}}) == "a/b"
    known = registered("yuhuili/eagle-vicuna-7b-v1.3")
    assert {(alias, draft.method) for alias, draft in known} == {
        ("vicuna-7b", "eagle1"),
        ("vicuna-7b", "eagle2"),
    }


def test_numbers_of_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbench.models.hub.cached", lambda *_: None)
    assert numbers_of("vicuna-7b") == numbers_of("random:vicuna-7b") == Numbers(4096, 32, 32000)
    nested = folder(tmp_path / "n", {"model_type": "gemma3", "text_config": ONE}, {"a": (1,)})
    assert numbers_of(nested) == Numbers(H, 1, V)
    for ref, why in (
        ("granite-3.1-1b-a400m", "not known here"),
        ("vicuna-8b", "unknown target"),
        ("a/b", "not known here"),
    ):
        with pytest.raises(SpecbenchError, match=why):
            numbers_of(ref)
