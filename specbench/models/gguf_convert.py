"""One GGUF file -> a float32 checkpoint folder, through transformers' GGUF support, with its gaps closed."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, LlamaFileType
from tokenizers import decoders, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig
from transformers.initialization import no_init_weights

from specbench.conversation import stop_ids
from specbench.errors import SpecbenchError

# llama.cpp's names of pre-tokenizers that split off every digit and then split as GPT-2 does. transformers
# (5.17-5.24) does not know them and only splits as GPT-2 does: "  12" would become two tokens for its spaces
# where the original tokenizer has one.
DIGITS_THEN_GPT2 = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
GPT2 = {"gpt-2", "phi-2", "jina-es", "jina-de", "mpt", "olmo", "jais", "trillion", "granite-docling"}

SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def convert(path: Path, folder: Path, check_space: Callable[[Path, int], None]) -> tuple[list[str], str, int]:
    """Write configs, safetensors and tokenizer (with its chat template) of `path` to `folder`.

    Args:
        path: the GGUF file.
        folder: an empty folder.
        check_space: called with `folder` and the number of parameters before anything large is written.

    Returns:
        Notes for the reader of results, the file's quantisation (`q4_1`), its number of parameters.

    Raises SpecbenchError: an architecture, quantisation or tokenizer that transformers does not read.
    """
    try:
        reader = GGUFReader(path)
        parameters = sum(int(tensor.n_elements) for tensor in reader.tensors)
        check_space(folder, parameters)
        tokenizer, notes = _tokenizer(path, reader)
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that no option turns off
            model = _model(path)
    except (ValueError, KeyError, NotImplementedError, IndexError, OSError, RuntimeError) as error:
        raise SpecbenchError(
            f"{path.name} cannot be converted: {_first_line(error)}",
            "transformers must know its architecture and quantisation; else use the model's safetensors",
        ) from error
    model.generation_config = _generation(reader)
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
    return notes, _quantization(reader), parameters


@dataclass(frozen=True)
class Header:
    """What a GGUF file says of itself; its weights are not read.

    context: tokens it was trained for. stop: ids that end an answer. notes: what could not be known.
    """

    tokenizer: Any
    quantization: str
    parameters: int
    context: int | None
    stop: frozenset[int]
    notes: list[str]


def read_header(path: Path) -> Header:
    """Tokenizer, sizes and stop ids of a GGUF file.

    Raises SpecbenchError: a tokenizer that transformers does not read.
    """
    try:
        reader = GGUFReader(path)
        tokenizer, notes = _tokenizer(path, reader)
    except (ValueError, KeyError, NotImplementedError, IndexError, OSError, RuntimeError) as error:
        raise SpecbenchError(
            f"the tokenizer of {path.name} cannot be read: {_first_line(error)}",
            "name a target whose tokenizer transformers knows",
        ) from error
    context = _value(reader, f"{_value(reader, 'general.architecture')}.context_length")
    return Header(
        tokenizer,
        _quantization(reader),
        sum(int(tensor.n_elements) for tensor in reader.tensors),
        None if context is None else int(context),
        stop_ids(_generation(reader), tokenizer),
        notes,
    )


def _model(path: Path) -> Any:
    """The dense float32 model. transformers' public way needs accelerate, its older reader does not."""
    if importlib.util.find_spec("accelerate") is not None:
        return AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),  # else some weights stay packed
        )
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=skeleton)["tensors"]
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing = model.load_state_dict(tensors, strict=False, assign=True).missing_keys
    model.tie_weights()
    if lacking := set(missing) - set(model.all_tied_weights_keys):
        raise ValueError(f"no tensor for {len(lacking)} weights, the first {min(lacking)}")
    return model


def _tokenizer(path: Path, reader: GGUFReader) -> tuple[Any, list[str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.model_max_length = _value(reader, f"{_value(reader, 'general.architecture')}.context_length")
    tokenizer.clean_up_tokenization_spaces = False
    # As the file says: transformers 5.17 takes <|im_start|> for SmolLM2's EOS.
    for name, key in SPECIAL_TOKENS.items():
        index = _value(reader, f"tokenizer.ggml.{key}_token_id")
        setattr(tokenizer, name, None if index is None else tokenizer.convert_ids_to_tokens(int(index)))
    kind, split = _value(reader, "tokenizer.ggml.model"), _value(reader, "tokenizer.ggml.pre")
    notes = []
    if kind == "gpt2":  # transformers 5.17 puts in a decoder that drops a leading space
        tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    if kind == "gpt2" and split in DIGITS_THEN_GPT2:
        tokenizer.backend_tokenizer.pre_tokenizer = _digits_then_gpt2()
    elif kind == "gpt2" and split not in GPT2 and not _splits_by_regex(tokenizer):
        notes.append(f"pre-tokenizer {split!r} is unknown here: text is split as GPT-2 does")
    if tokenizer.chat_template is None:
        notes.append("the GGUF holds no chat template: prompts go in plainly")
    return tokenizer, notes


def _digits_then_gpt2() -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )


def _splits_by_regex(tokenizer: Any) -> bool:
    """Whether transformers knew the file's pre-tokenizer (it then puts a Split before ByteLevel)."""
    return "Split" in repr(tokenizer.backend_tokenizer.pre_tokenizer)


def _generation(reader: GGUFReader) -> GenerationConfig:
    """Start, stop and padding ids of the file. `eot` ends a turn too, where a file has one beside EOS."""
    ends = [_value(reader, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    ends = sorted({int(end) for end in ends if end is not None})
    return GenerationConfig(
        bos_token_id=_value(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=ends[0] if len(ends) == 1 else ends or None,
        pad_token_id=_value(reader, "tokenizer.ggml.padding_token_id"),
    )


def _value(reader: GGUFReader, key: str) -> Any:
    found = reader.get_field(key)
    return None if found is None else found.contents()


def _quantization(reader: GGUFReader) -> str:
    """The file's own word for its quantisation, else the type most of its numbers have."""
    try:
        name = LlamaFileType(_value(reader, "general.file_type")).name
        return name.removeprefix("MOSTLY_").removeprefix("ALL_").lower()
    except ValueError:
        sizes: dict[str, int] = {}
        for tensor in reader.tensors:
            kind = tensor.tensor_type.name.lower()
            sizes[kind] = sizes.get(kind, 0) + int(tensor.n_elements)
        return max(sizes, key=lambda kind: sizes[kind])


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
