"""Loading: local folders, random weights, identities, and one clear line for each thing that goes wrong."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM, LlamaConfig, T5Config

from specbench.errors import SpecbenchError
from specbench.models import hub, identity, random_init, registry
from specbench.models.load import load
from specbench.models.placement import check_options, pick_attention, pick_device, pick_dtype

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

# Never a fixed alias: once the registry has its numbers, `random:` would build it.
WITHOUT_NUMBERS = next(entry.alias for entry in registry.targets() if entry.config is None)


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    """A tiny seeded Llama in bfloat16, saved, and its logits in float32."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY)).requires_grad_(False).eval()
    for weight in model.parameters():
        weight.copy_(weight.bfloat16())
    logits = model(torch.arange(8)[None]).logits
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder, logits


@pytest.fixture
def folder(original, tmp_path):
    return Path(shutil.copytree(original[0], tmp_path / "tiny"))


def refusal(ref, **options) -> SpecbenchError:
    with pytest.raises(SpecbenchError) as caught:
        load(str(ref), device="cpu", **options)
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value


def test_a_local_folder(folder, original):
    loaded = load(str(folder), device="cpu")
    assert torch.equal(loaded.model(torch.arange(8)[None]).logits, original[1])
    assert not loaded.model.training
    assert not any(weight.requires_grad for weight in loaded.model.parameters())
    assert loaded.tokenizer is None

    who = loaded.identity
    assert (who.name, who.source, who.dtype, who.quantization) == ("tiny", "local", "float32", None)
    assert who.parameters == sum(weight.numel() for weight in loaded.model.parameters())
    assert who.bytes >= 4 * who.parameters
    assert who.files["model.safetensors"] == identity.sha256(folder / "model.safetensors")
    assert {"config.json", "generation_config.json"} <= set(who.files)
    assert any("no tokenizer" in note for note in who.notes)
    assert json.loads(json.dumps(who.to_json())) == who.to_json()


def test_dtype_asked_for(folder):
    loaded = load(str(folder), device="cpu", dtype="bfloat16")
    assert loaded.model.dtype == torch.bfloat16
    assert loaded.identity.dtype == "bfloat16"
    assert loaded.identity.bytes < 4 * loaded.identity.parameters


def test_dtype_auto_is_float32_on_a_cpu_and_the_checkpoints_own_elsewhere():
    assert pick_dtype("auto", torch.device("cpu")) is torch.float32
    assert pick_dtype("auto", torch.device("cuda")) is None


def test_pickled_weights_load_without_pickle(folder, original):
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    loaded = load(str(folder), device="cpu")
    assert torch.equal(loaded.model(torch.arange(8)[None]).logits, original[1])

    class Payload:
        def __reduce__(self):
            return (Path(folder / "owned").touch, ())

    torch.save({"lm_head.weight": Payload()}, folder / "pytorch_model.bin")
    assert "cannot be loaded" in refusal(folder).message
    assert not (folder / "owned").exists()


def test_a_truncated_file_is_named(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors is damaged" in refusal(folder).message


def test_a_file_of_noise_is_named(folder):
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    assert "not a safetensors file" in refusal(folder).message


def test_a_folder_without_config(folder):
    (folder / "config.json").unlink()
    assert "no config.json" in refusal(folder).message
    (folder / "model.Q4_1.gguf").touch()
    assert "model.Q4_1.gguf" in refusal(folder).hint


def test_a_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    assert "no weights" in refusal(folder).message


def test_a_missing_shard(folder):
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002-of-00002.safetensors" in refusal(folder).message


def test_missing_weights_are_not_made_up(folder):
    """transformers would fill them with random numbers: an EAGLE head taken for a model must not load."""
    edit_config(folder, num_hidden_layers=3)
    assert "lacks 9 weights" in refusal(folder).message


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_an_unknown_architecture(folder):
    edit_config(folder, model_type="hal9000", architectures=["HalForCausalLM"])
    assert "does not know the architecture" in refusal(folder).message


def test_remote_code_is_not_run(folder):
    edit_config(folder, model_type="hal9000", auto_map={"AutoConfig": "hal.HalConfig"})
    (folder / "hal.py").write_text(f"open({str(folder / 'owned')!r}, 'w')")
    assert "--trust-remote-code" in refusal(folder).hint
    assert not (folder / "owned").exists()


def test_an_encoder_is_refused(tmp_path):
    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    assert "not a decoder-only language model" in refusal(tmp_path / "bert").message


def test_an_encoder_decoder_is_refused(folder):
    T5Config(architectures=["T5ForConditionalGeneration"]).save_pretrained(folder)
    assert "not a decoder-only language model" in refusal(folder).message


@pytest.mark.parametrize(
    ("ref", "words"),
    [
        ("smollm2", "unknown target"),
        ("./no/such/folder", "no such folder"),
        ("/no/such/model.gguf", "no such file"),
        ("random:smollm", "unknown target"),
        (f"random:{WITHOUT_NUMBERS}", "no architecture numbers"),
        (__file__, "is a file"),
    ],
)
def test_refs_that_name_nothing(ref, words):
    assert words in refusal(ref).message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float3"}, "unknown dtype"),
        ({"quantize": "int3"}, "unknown quantisation 'int3'"),
        ({"attn": "flash_attention_2"}, "flash attention takes no tree masks"),
        ({"attn": "magic"}, "unknown attention"),
        ({"device_map": "foo"}, "unknown --device-map 'foo'"),
    ],
)
def test_options_are_refused_before_anything_is_loaded(options, words):
    assert words in refusal("owner/never-asked-for", **options).message


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "meta"])
def test_unknown_devices(name):
    with pytest.raises(SpecbenchError, match=r"device"):
        pick_device(name)


def test_a_device_map_that_is_none_names_those_that_are():
    assert "auto, balanced, balanced_low_0, sequential, none" in refusal("tiny", device_map="foo").hint


@pytest.mark.parametrize("name", ["GPU-5a3b", "MIG-5a3b"])
def test_a_device_by_uuid_is_told_how_to_be_chosen(name):
    with pytest.raises(SpecbenchError) as caught:
        pick_device(name)
    assert caught.value.hint == f"set CUDA_VISIBLE_DEVICES={name} and use --device cuda"


@pytest.mark.parametrize("said", ["x", 3, ["gptq"]])
def test_a_quantization_config_of_another_kind_is_named(folder, said):
    edit_config(folder, quantization_config=said)
    error = refusal(folder)
    assert f"quantization_config in config.json is {said!r}, not an object" in error.message
    assert "config.json" in error.hint


def test_device_map_needs_accelerate(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SpecbenchError, match="accelerate"):
        check_options("auto", "auto")


def test_attention_is_eager_only_where_it_must_be():
    classes = AutoModelForCausalLM._model_mapping
    oss = classes[type(random_init.config_of(registry.find("gpt-oss-20b")))]
    assert pick_attention("auto", oss) == "eager"
    assert pick_attention("auto", classes[LlamaConfig]) == "sdpa"
    assert pick_attention("eager", classes[LlamaConfig]) == "eager"
    with pytest.raises(SpecbenchError, match="no sdpa"):
        pick_attention("sdpa", oss)


def test_out_of_memory_is_one_line(folder, monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", full)
    assert "not enough memory" in refusal(folder).message


@pytest.mark.parametrize("alias", ["llama-8b", "qwen3-8b", "qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b"])
def test_random_weights(alias):
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    small |= {key: 4 for key in ("num_experts", "num_local_experts") if key in registry.find(alias).config}
    small |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
    entry = registry.find(alias)
    config = {**entry.config, **{key: value for key, value in small.items() if key in entry.config}}
    entry = dataclasses.replace(entry, config=config)
    cpu = torch.device("cpu")

    model = random_init.build(entry, device=cpu, dtype=torch.bfloat16)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert model.generation_config.eos_token_id == entry.config["eos_token_id"]
    logits = model(torch.arange(64)[None]).logits.float()
    assert logits.isfinite().all()
    assert logits.std() == pytest.approx(random_init.LOGIT_STD, rel=0.1)
    assert logits.argmax(-1).unique().numel() > 16

    again, other = (random_init.build(entry, device=cpu, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    assert torch.equal(model.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)


def test_random_identity_says_so(monkeypatch):
    entry = dataclasses.replace(registry.find("smollm2-135m"), config={"model_type": "llama", **TINY})
    monkeypatch.setattr(registry, "find", lambda *_: entry)
    loaded = load("random:smollm2-135m", device="cpu")
    assert loaded.tokenizer is None
    assert loaded.identity.name == "random:smollm2-135m"
    assert loaded.identity.source == "random"
    assert "random weights" in loaded.identity.notes[0]


def test_the_hub_is_not_asked_when_offline(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    error = refusal("owner/model")
    assert isinstance(error, hub.Unreachable)
    assert "HF_HUB_OFFLINE" in error.message
