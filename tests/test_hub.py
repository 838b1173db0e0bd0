"""From a Hub id to a folder, against a stand-in for the Hub on this machine."""

from __future__ import annotations

import pytest
import torch
from fake_hub import COMMIT, serve
from transformers import AutoModelForCausalLM, LlamaConfig

from specbench.errors import SpecbenchError
from specbench.models import hub, identity, registry
from specbench.models.load import load

NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def folder(tmp_path):
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """Point huggingface_hub at an empty cache and, when called, at a Hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

    def point(url: str) -> None:
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)

    return point


def test_download_once_then_offline(folder, ask, monkeypatch):
    lines: list[str] = []
    with serve(folder) as url:
        ask(url)
        first = load("owner/model", device="cpu", notify=lines.append).identity
        load("owner/model", device="cpu", notify=lines.append)
    assert [line.split()[0] for line in lines] == ["downloading"]
    assert (first.source, first.hub_id, first.revision) == ("hub", "owner/model", COMMIT)
    assert first.files["model.safetensors"] == identity.sha256(folder / "model.safetensors")
    assert first.files["config.json"] == identity.sha256(folder / "config.json")

    ask(NOBODY)
    assert load("owner/model", device="cpu", notify=lines.append).identity.to_json() == first.to_json()
    assert "the Hub does not answer" in lines[-1]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert load("owner/model", device="cpu").identity.to_json() == first.to_json()


def test_the_cached_hash_of_a_large_file_is_not_computed_again(folder, ask, monkeypatch):
    with serve(folder) as url:
        ask(url)
        snapshot = hub.fetch("owner/model")
    monkeypatch.setattr(identity, "sha256", lambda path: "computed")
    files = identity.folder_files(snapshot.folder)
    assert files["config.json"] == "computed"
    assert len(files["model.safetensors"]) == 64


def test_pytorch_files_only_where_there_are_no_safetensors(folder, ask):
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    torch.save(state, folder / "pytorch_model.bin")
    with serve(folder) as url:
        ask(url)
        assert not (hub.fetch("owner/model").folder / "pytorch_model.bin").exists()


def test_a_repository_of_pytorch_files(folder, ask):
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with serve(folder) as url:
        ask(url)
        assert "pytorch_model.bin" in load("owner/model", device="cpu").identity.files


@pytest.mark.parametrize(
    ("state", "words", "hint"),
    [({"gated": True}, "is gated", "accept the licence"), ({"missing": True}, "has no model", "spelling")],
)
def test_refusals(folder, ask, state, words, hint):
    with serve(folder, **state) as url:
        ask(url)
        with pytest.raises(SpecbenchError, match=words) as caught:
            load("owner/model", device="cpu")
    assert not isinstance(caught.value, hub.Unreachable)
    assert hint in caught.value.hint


def test_no_network_and_nothing_cached(ask):
    ask(NOBODY)
    with pytest.raises(hub.Unreachable, match="cannot be reached"):
        load("owner/model", device="cpu")


def test_an_alias_from_a_readme_is_marked_unverified(folder, ask, monkeypatch):
    entry = registry.Entry("mine", "owner/model", parameters=1, dtype="float32", template="-")
    monkeypatch.setattr(registry, "get", lambda ref: entry)
    with serve(folder) as url:
        ask(url)
        who = load("mine", device="cpu").identity
    assert who.name == "mine"
    assert not who.verified
    assert "not verified" in who.notes[0]
