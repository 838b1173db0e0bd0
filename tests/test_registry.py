"""The registry: every alias whole, its numbers right, and light to import."""

from __future__ import annotations

import subprocess
import sys

import pytest

from specbench.errors import SpecbenchError
from specbench.models import registry

ASKED_FOR = {
    "llama-8b": 8.03e9,
    "llama-70b": 70.6e9,
    "qwen3-8b": 8.19e9,
    "qwen3-30b-a3b": 30.5e9,
    "qwen3-32b": 32.8e9,
    "vicuna-7b": 6.74e9,
    "vicuna-13b": 13.0e9,
    "llama2-7b-chat": 6.74e9,
    "mixtral-8x7b": 46.7e9,
    "gpt-oss-20b": 20.9e9,
    "smollm2-135m": 134.5e6,
}
WITH_NUMBERS = [entry for entry in registry.targets() if entry.config is not None]


def test_every_target_asked_for_has_numbers():
    assert set(ASKED_FOR) <= {entry.alias for entry in WITH_NUMBERS}


@pytest.mark.parametrize("entry", WITH_NUMBERS, ids=lambda entry: entry.alias)
def test_parameters_of_the_architecture_match_the_published_number(entry):
    import torch
    from transformers import AutoModelForCausalLM

    from specbench.models.random_init import config_of

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(entry))
    counted = sum(weight.numel() for weight in model.parameters())
    assert counted == pytest.approx(ASKED_FOR.get(entry.alias, entry.parameters), rel=0.01)
    assert entry.parameters == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("entry", WITH_NUMBERS, ids=lambda entry: entry.alias)
def test_transformers_knows_every_number(entry):
    """A misspelt key would be stored on the config silently: it must be a field of the config class."""
    from specbench.models.random_init import config_of

    config = config_of(entry)
    known = set(type(config)().to_dict()) | set(config.attribute_map) | {"model_type", "head_dim"}
    assert set(entry.config) <= known
    assert config.rope_parameters["rope_theta"] == entry.config["rope_parameters"]["rope_theta"]


@pytest.mark.parametrize("entry", registry.targets(), ids=lambda entry: entry.alias)
def test_entries_are_whole(entry):
    assert entry.hub.count("/") == 1
    assert entry.template
    assert entry.dtype in ("bfloat16", "float16", "float32")
    for method, drafts in entry.drafts.items():
        assert drafts, method
        assert len({draft.id for draft in drafts}) == len(drafts)
        for draft in drafts:
            assert draft.source
            assert draft.id.count("/") == 1
            assert (draft.expected_tau is None) == (draft.tau_source is None)
            assert not draft.verified  # change together with a report of the load


def test_hub_ids_are_listed_once():
    hubs = [entry.hub.lower() for entry in registry.targets()]
    assert len(set(hubs)) == len(hubs)


def test_every_drafter_is_of_a_method_or_says_why_it_is_not_run():
    from specbench.build import DRAFTS_OF
    from specbench.spec import find_method, method_names, options_of

    takers = [name for name in method_names() if "draft" in options_of(find_method(name))]
    looked_up = {known for name in takers for known in DRAFTS_OF.get(name, (name,))}
    for entry in registry.targets():
        usable = {method for method in entry.drafts if entry.usable(method)}
        assert usable <= looked_up, entry.alias
        assert usable or entry.alias in ("smollm2-135m", "deepseek-v3")  # no drafter, float8 layers


def test_what_is_not_run_is_never_taken_or_shown_as_usable():
    from specbench.cli.ls import _targets

    entry = registry.find("qwen3-8b")
    assert [draft.not_run for draft in entry.drafts["p-eagle"]] == ["P-EAGLE"]
    assert registry.drafts_for("qwen3-8b", "p-eagle") == ()
    assert all(draft.not_run is None for draft in registry.drafts_for("qwen3-8b", "dflash"))
    shown = {row["alias"]: row["drafters"].split(", ") for row in _targets()}
    assert shown["qwen3-8b"] == ["dflash", "draft-model", "eagle3", "pard"]
    assert "mtp" in shown["glm-4.7-flash"]


def test_a_drafter_inside_the_targets_own_checkpoint_is_left_to_the_method():
    for alias, method in (("glm-4.7-flash", "mtp"), ("medusa2-zephyr-7b", "medusa")):
        known = registry.drafts_for(alias, method)
        assert known[0].id == registry.find(alias).hub
        assert registry.default_draft(alias, known) is None
    known = registry.drafts_for("vicuna-7b", "medusa")
    assert registry.default_draft("vicuna-7b", known) == known[0].id
    assert registry.default_draft("vicuna-7b", ()) is None


def test_an_unknown_alias_names_the_nearest():
    with pytest.raises(SpecbenchError) as caught:
        registry.find("lama-8b")
    assert "lama-8b" in caught.value.message
    assert "llama-8b" in caught.value.hint
    assert "specbench ls targets" in caught.value.hint


@pytest.mark.parametrize(
    "ref",
    ["smollm2-135m", "smollm2-135m@q4_1", "random:smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"],
)
def test_every_spelling_finds_its_entry(ref):
    assert registry.entry_for(ref) is registry.find("smollm2-135m")


def test_entry_for_a_stranger_is_none():
    assert registry.entry_for("someone/else") is None


def test_eagle_means_the_newest_known():
    assert registry.drafts_for("llama-8b", "eagle")[0].method == "eagle3"
    assert registry.drafts_for("vicuna-7b", "eagle")[0].method == "eagle2"
    assert registry.drafts_for("qwen3-8b", "eagle1") == ()


def test_importing_the_registry_is_light():
    code = (
        "import sys; from specbench.models import registry; registry.targets();"
        "print(sorted({'torch', 'transformers', 'huggingface_hub', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_vicuna_template_is_fastchats():
    import jinja2

    template = jinja2.Environment(keep_trailing_newline=True).from_string(
        registry.find("vicuna-7b").chat_template or ""
    )
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye"},
    ]
    system = (
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
        "helpful, detailed, and polite answers to the user's questions."
    )
    text = template.render(messages=turns, bos_token="<s>", eos_token="</s>", add_generation_prompt=True)
    assert text == f"<s>{system} USER: Hi ASSISTANT: Hello.</s>USER: Bye ASSISTANT:"


def test_the_zephyr_template_is_zephyrs():
    import jinja2

    template = jinja2.Environment(keep_trailing_newline=True).from_string(
        registry.find("medusa2-zephyr-7b").chat_template or ""
    )
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    text = template.render(
        messages=[*turns, {"role": "user", "content": "Bye"}], eos_token="</s>", add_generation_prompt=True
    )
    assert text == "<|user|>\nHi</s>\n<|assistant|>\nHello.</s>\n<|user|>\nBye</s>\n<|assistant|>\n"
