"""`specbench inspect`, and what the registry says of a drafter: taken by the methods, kept, and held against τ."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_detect import DFLASH, EAGLE, EAGLE3, LLAMA, MEDUSA, ZLAB, H, V, folder
from tiny_folder import Result, Workplace, save_folder, specbench

from specbench.analysis.caution import Overall, method_warnings
from specbench.analysis.definitions import DEFINITIONS
from specbench.build import DRAFTS_OF, PUBLISHED, Named, _registered_drafts
from specbench.errors import SpecbenchError
from specbench.manifest import FIXED, resumed
from specbench.models import registry
from specbench.spec import Spec


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbench.models.hub.cached", lambda *_: None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def facts(*args: object) -> dict[str, Any]:
    result = specbench("inspect", *args, "--json")
    assert result.code == 0, result.err
    return json.loads(result.out)


def refused(result: Result, *words: str) -> None:
    """Exit 2, one line saying what and one what to do."""
    assert result.code == 2, result.out
    assert len(result.error_lines) == 2, result.err
    assert result.error_lines[1].startswith("  hint: ")
    for word in words:
        assert word in result.error_lines[0]


# -- what it says --------------------------------------------------------------------------------------------


def test_a_draft(tmp_path: Path) -> None:
    ref = folder(tmp_path / "draft", {**LLAMA, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}, EAGLE3)
    found = facts(ref)
    assert (found["kind"], found["layout"], found["method"]) == ("eagle3", "SafeAILab", "eagle3")
    floats = sum(torch.Size(shape).numel() for key, shape in EAGLE3.items() if key not in ("d2t", "t2d"))
    assert (found["parameters"], found["dtypes"]) == (floats, ["float32"])
    assert found["bytes"] == 4 * floats + 8 * (V // 2) + V, "the vocabulary's maps included"
    size = (tmp_path / "draft" / "model.safetensors").stat().st_size
    assert found["files"]["model.safetensors"] == size
    assert found["made_for"] == "lmsys/vicuna-7b-v1.3"
    assert found["settings"]["draft_vocab_size"] == V // 2
    text = specbench("inspect", ref).out
    for word in (
        ref,
        "an EAGLE-3 draft",
        "--method eagle3",
        f"hidden_size {H}",
        "vicuna-7b",
        f"{size:,} bytes",
    ):
        assert word in text


def test_no_weights_are_read_of_a_language_model(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reading(*_: object, **__: object) -> None:
        raise AssertionError("inspect reads headers only")

    monkeypatch.setattr("specbench.models.checkpoint.load_file", reading)
    monkeypatch.setattr("specbench.models.checkpoint.check_finite", reading)
    found = facts(tiny_target)
    assert (found["kind"], found["settings"]["architecture"]) == ("causal-lm", "LlamaForCausalLM")
    weights = load_file(tiny_target / "model.safetensors")
    assert found["parameters"] == sum(weight.numel() for weight in weights.values())


def test_an_alias_that_is_not_on_this_machine() -> None:
    found = facts("llama-8b")
    assert (found["hub"], found["parameters"]) == ("meta-llama/Llama-3.1-8B-Instruct", 8_030_000_000)
    assert found["settings"]["hidden_size"] == 4096
    first = found["drafters"][0]
    assert (first["method"], first["expected_tau"], first["verified"]) == ("eagle3", 6.13, False)
    text = specbench("inspect", "random:llama-8b").out
    assert "registry's" in text
    assert "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B, τ 6.13 (EAGLE-3 paper" in text
    assert specbench("inspect", "granite-3.1-1b-a400m").code == 0  # no numbers of its architecture


def test_a_draft_of_the_registry_is_known_by_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its Hub id, which here a folder stands for."""
    from specbench.models import checkpoint

    monkeypatch.setattr(checkpoint, "_folder", lambda *_: (tmp_path / "d", "c" * 40))
    folder(tmp_path / "d", {"medusa_num_heads": 2}, MEDUSA)
    found = facts("FasterDecoding/medusa-vicuna-7b-v1.3")
    assert found["revision"] == "c" * 40
    (known,) = found["registry"]
    assert (known["target"], known["method"], known["expected_tau"]) == ("vicuna-7b", "medusa", 2.31)
    assert "medusa of vicuna-7b" in specbench("inspect", "FasterDecoding/medusa-vicuna-7b-v1.3").out


# -- does it fit ---------------------------------------------------------------------------------------------


def test_fits(tmp_path: Path, tiny_target: Path) -> None:
    """The tiny target: hidden size 32, 128 tokens."""
    heads = {"0.0.linear.weight": (32, 32), "0.0.linear.bias": (32,), "0.1.weight": (128, 32)}
    ref = folder(tmp_path / "fits", {"medusa_num_heads": 1}, heads)
    assert facts(ref, "--target", tiny_target)["target"] == {
        "ref": str(tiny_target), "hidden_size": 32, "layers": 2, "vocab_size": 128, "fits": True, "why_not": [],
    }  # fmt: skip
    assert "fits" in specbench("inspect", ref, "--target", tiny_target).out.splitlines()[-1]


def test_does_not_fit(tmp_path: Path, tiny_target: Path) -> None:
    ref = folder(tmp_path / "other", {"medusa_num_heads": 1}, MEDUSA)
    result = specbench("inspect", ref, "--target", tiny_target, "--json")
    refused(result, f"hidden size {H}, the target's is 32", f"vocabulary {V}, the target's is 128")
    assert json.loads(result.out)["target"]["fits"] is False
    refused(specbench("inspect", ref, "--target", "vicuna-7b"), "hidden size 8, the target's is 4096")
    refused(specbench("inspect", ref, "--target", "vicuna-8b"), "unknown target 'vicuna-8b'")
    refused(specbench("inspect", ref, "--target", tmp_path), "no config.json")


# -- bad input -----------------------------------------------------------------------------------------------


def _truncated(path: Path) -> str:
    ref = folder(path, LLAMA, EAGLE)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return ref


def _nan(path: Path) -> str:
    ref = folder(path, LLAMA, EAGLE)
    state = load_file(path / "model.safetensors")
    state["fc.weight"][0, 0] = float("nan")
    save_file(state, path / "model.safetensors")
    return ref


def _pickled_code(path: Path) -> str:
    ref = folder(path, {"medusa_num_heads": 2}, {}, "medusa_lm_head.pt")
    torch.save(torch.nn.Linear(2, 2), path / "medusa_lm_head.pt")
    return ref


def _no_config(path: Path) -> str:
    ref = folder(path, LLAMA, EAGLE)
    (path / "config.json").unlink()
    return ref


def _not_json(path: Path) -> str:
    ref = folder(path, LLAMA, EAGLE)
    (path / "config.json").write_text("{", encoding="utf-8")
    return ref


def _no_weights(path: Path) -> str:
    ref = folder(path, LLAMA, EAGLE)
    (path / "model.safetensors").unlink()
    return ref


def _empty(path: Path) -> str:
    path.mkdir()
    return str(path)


def _file(path: Path) -> str:
    return f"{folder(path, LLAMA, EAGLE)}/model.safetensors"


BAD: dict[str, tuple[Callable[[Path], str], str]] = {
    "truncated": (_truncated, "damaged"),
    "NaN": (_nan, "weight fc.weight holds NaN"),
    "code": (_pickled_code, "holds code (torch.nn.modules.linear.Linear)"),
    "no config": (_no_config, "no config.json"),
    "config is not JSON": (_not_json, "not JSON"),
    "no weights": (_no_weights, "no weights"),
    "empty": (_empty, "no config.json"),
    "a file": (_file, "is a file"),
    "no such folder": (str, "does not exist"),
    "fields missing": (lambda path: folder(path, {"model_type": "llama"}, EAGLE), "no num_attention_heads"),
    "unknown": (lambda path: folder(path, {"model_type": "new"}, {"a": (2,)}), "model type 'new', weights a"),
    "of no use": (
        lambda path: folder(path, {"speculators_model_type": "mlp"}, {"a": (2,)}),
        "speculators draft of type 'mlp'",
    ),
    "no alias": (lambda _: "llama-8c", "unknown target 'llama-8c'"),
}


@pytest.mark.parametrize(("make", "says"), BAD.values(), ids=BAD)
def test_bad_input(tmp_path: Path, make: Callable[[Path], str], says: str) -> None:
    result = specbench("inspect", make(tmp_path / "x"))
    refused(result, says)
    assert result.out == ""


# -- the registry's drafters ---------------------------------------------------------------------------------

CHOSEN = {
    ("llama-8b", "eagle"): "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
    ("vicuna-7b", "eagle"): "yuhuili/EAGLE-Vicuna-7B-v1.3",
    ("llama-8b", "eagle1"): "yuhuili/EAGLE-LLaMA3.1-Instruct-8B",
    ("llama-8b", "eagle2"): "yuhuili/EAGLE-LLaMA3.1-Instruct-8B",
    ("llama-8b", "eagle3"): "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
    ("vicuna-7b", "medusa"): "FasterDecoding/medusa-vicuna-7b-v1.3",
    ("vicuna-7b", "hydra"): "ankner/hydra-vicuna-7b-v1.3",
    ("qwen3-8b", "dflash"): "z-lab/Qwen3-8B-DFlash-b16",
    ("qwen3-14b", "dflash"): "deepseek-ai/dflash_qwen3_14b_block7",
    ("qwen3-30b-a3b", "dflash"): None,  # one is known, of a layout that is not read
    ("glm-4.7-flash", "mtp"): "zai-org/GLM-4.7-Flash",
    ("medusa2-vicuna-7b", "medusa"): "FasterDecoding/medusa-1.0-vicuna-7b-v1.5",
    ("qwen3-8b", "pard"): "amd/PARD-Qwen3-0.6B",
    ("qwen3-8b", "draft-model"): "Qwen/Qwen3-0.6B",
    ("qwen3-8b", "hf-assisted"): "Qwen/Qwen3-0.6B",
    ("llama-8b", "mtp"): None,  # the target's own layers
    ("vicuna-7b", "eagle3"): None,
    ("./some/folder", "eagle3"): None,
}


@pytest.mark.parametrize(("target", "method"), CHOSEN)
def test_the_drafter_a_method_takes(target: str, method: str) -> None:
    known = _registered_drafts(target, method)
    assert (known[0].id if known else None) == CHOSEN[target, method]


def test_every_method_with_a_drafter_is_in_the_registry_under_a_name_it_is_looked_up_by() -> None:
    from specbench.spec import find_method, method_names, options_of

    names = {name for entry in registry.targets() for name in entry.drafts}
    takers = {name for name in method_names() if "draft" in options_of(find_method(name))} - {"mtp"}
    assert all(names & set(DRAFTS_OF.get(name, (name,))) for name in takers)


class Drafting:
    """A method with a drafter of that identity."""

    def __init__(self, identity: dict[str, Any] | None) -> None:
        self.draft_identity = lambda: identity


def named(method: str, target: str, identity: dict[str, Any] | None) -> Named:
    return Named(method, Spec(method), Drafting(identity), _registered_drafts(target, method))  # type: ignore[arg-type]


def test_what_is_published_of_a_drafter_goes_into_the_manifest() -> None:
    weights = {"name": "x", "ref": "yuhuili/EAGLE-Vicuna-7B-v1.3", "hub_id": None, "verified": True}
    taus = {m: named(m, "vicuna-7b", weights).drafter() for m in ("eagle", "eagle1", "eagle2")}
    assert {m: found and found["expected_tau"] for m, found in taus.items()} == {
        "eagle": 4.34, "eagle1": 3.58, "eagle2": 4.34,
    }  # fmt: skip
    first = taus["eagle"]
    assert first is not None
    assert first["verified"] is False
    assert "Spec-Bench" in first["tau_source"]
    by_alias = {"ref": "some-alias", "hub_id": "YUHUILI/eagle-vicuna-7b-v1.3"}
    found = named("eagle2", "vicuna-7b", by_alias).drafter()
    assert found is not None
    assert found["expected_tau"] == 4.34
    own = {"name": "mine", "ref": "./mine", "hub_id": None, "verified": True}
    assert named("eagle2", "vicuna-7b", own).drafter() == own
    assert named("eagle2", "vicuna-7b", None).drafter() is None


def test_a_resumed_run_does_not_mind_an_edited_registry() -> None:
    before: dict[str, Any] = {**dict.fromkeys((*FIXED, "git")), "name": "r", "start": "a", "versions": {}}
    before["drafters"] = {"eagle2": {"ref": "x", "verified": False}}
    edited = {"ref": "x", "verified": True, "expected_tau": 3.0, "tau_source": "s"}
    assert set(edited) - {"ref"} == set(PUBLISHED)
    resumed({**before, "drafters": {"eagle2": edited}}, before, lambda line: None)
    with pytest.raises(SpecbenchError, match="another drafter"):
        resumed({**before, "drafters": {"eagle2": {**edited, "ref": "y"}}}, before, lambda line: None)


@pytest.fixture
def drafted(
    make_place: Callable[[str], Workplace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Workplace:
    """A place whose target the registry knows, with a draft model of other weights that is published at 4."""
    place = make_place("drafted")
    draft = save_folder(tmp_path / "draft", seed=1)
    known = registry.Draft("draft-model", str(draft), "a test", expected_tau=4.0, tau_source="a paper")
    monkeypatch.setattr(
        registry, "drafts_for", lambda ref, method: (known,) if method == "draft-model" else ()
    )
    return place


def test_a_run_takes_the_registrys_draft_and_warns_of_a_low_tau(drafted: Workplace) -> None:
    result = drafted.run("--method", "draft-model:k=5", "--limit", 1, "--json", name="low")
    assert result.code == 0, result.err
    entry = drafted.manifest("low")["drafters"]["draft-model:k=5"]
    assert {name: entry[name] for name in PUBLISHED} == {
        "expected_tau": 4.0, "tau_source": "a paper", "verified": False,
    }  # fmt: skip
    (found,) = [w for w in json.loads(result.out)["warnings"] if w["code"] == "tau-below-published"]
    assert "published 4.0 (a paper): check template and checkpoint" in found["message"]
    again = drafted.run("--method", "draft-model:k=5", "--limit", 1, name="low")
    assert again.code == 0, again.err  # resumes


# -- the warning ---------------------------------------------------------------------------------------------


def warned(
    tau: float | None, positions: int = 5, *, published: float | None = 2.6, target: str = "t"
) -> list[str]:
    row = dict.fromkeys(DEFINITIONS) | {
        "run": "r", "method": "eagle3", "batch_size": 1, "concurrency": None, "failed": 0, "trials": 1,
        "excluded": 0, "outliers": 0,
        "decode_speedup": {"low": None, "point": None}, "speedup": {"low": None, "point": None, "high": None},
        "tau": {"low": tau, "point": tau, "high": tau}, "acceptance_by_position": [0.5] * positions,
        "compared": 0, "identical": 0, "lossless": True, "near_ties": 0,
    }  # fmt: skip
    drafter = {"name": "d", "expected_tau": published, "tau_source": "Some table"}
    manifest = {"drafters": {"eagle3": drafter}, "target": {"name": target}, "config": {"temperature": 1.0}}
    found = method_warnings(Overall(row, [], 1, None, 0, 0), manifest)
    return [w["message"] for w in found if w["code"] == "tau-below-published"]


def test_tau_clearly_below_the_published_one() -> None:
    assert warned(1.3) == ["eagle3: τ 1.3, published 2.6 (Some table): check template and checkpoint"]
    assert warned(2.6 * 0.75 + 0.01) == []
    assert warned(2.6 * 0.75 - 0.01) != []


def test_no_warning_where_nothing_can_be_compared() -> None:
    assert warned(1.3, published=None) == []
    assert warned(None) == []
    assert warned(1.0, target="random:llama-8b") == []
    assert warned(1.8, positions=1, published=6.0) == []  # a draft of one token: 2 is all there is
    assert warned(1.2, positions=1, published=6.0) != []


def test_a_draft_of_another_kind_is_told_by_the_method(tmp_path: Path, make_place: Any) -> None:
    place = make_place("wrong-kind")
    for method, ref in {
        "dflash": folder(tmp_path / "m", {"medusa_num_heads": 2}, MEDUSA),
        "medusa": folder(tmp_path / "d", ZLAB, DFLASH),
    }.items():
        refused(place.run("--method", method, "--draft", ref, name="wrong"))
