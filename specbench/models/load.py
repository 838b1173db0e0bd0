"""One way to load every target and draft model, with an identity and one clear line for each failure."""

from __future__ import annotations

import importlib.util
import pickle
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from specbench.errors import SpecbenchError
from specbench.measure.memory import module_bytes
from specbench.models import packed, random_init, registry
from specbench.models.architecture import parameters
from specbench.models.identity import ModelIdentity
from specbench.models.placement import check_options, pick_attention, pick_device
from specbench.models.quantize import NONE, check, compute_dtype, quantise
from specbench.models.source import Source, resolve

Notify = Callable[[str], None]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
OTHER_TASKS = ("ForMaskedLM", "Classification", "ForQuestionAnswering", "ForPreTraining", "EncoderModel")
# Everything transformers, safetensors and torch raise for a checkpoint they cannot read.
UNREADABLE = (
    OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError, EOFError,
    SafetensorError, pickle.UnpicklingError, StrictDataclassError,
)  # fmt: skip


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Args:
        model: transformers' causal LM, in eval mode, gradients off.
        tokenizer: None for random weights and for folders without one.
        identity: what was loaded.
    """

    model: Any
    tokenizer: Any | None
    identity: ModelIdentity


def load(
    ref: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    device_map: str = "none",
    attn: str = "auto",
    quantize: str = NONE,
    revision: str | None = None,
    trust_remote_code: bool = False,
    notify: Notify = lambda line: None,
    role: str = "target",
) -> LoadedModel:
    """Load a target or a draft model.

    Args:
        ref: alias of the registry, Hub id, folder, GGUF file, or `random:ALIAS`.
        dtype: `auto` = float32 on a CPU, the checkpoint's own elsewhere, and for int4 and fp8 bfloat16; or float32,
            bfloat16, float16.
        device: `auto` = cuda if there is one, else cpu; or cpu, cuda, cuda:N, mps.
        device_map: `none`, or accelerate's (`auto`, `balanced`…) for a model over several devices.
        attn: `auto` = sdpa, or eager where the architecture has only that; or sdpa, eager.
        quantize: `none`, or int8, int4 or fp8 (`models.quantize`).
        revision: branch, tag or commit on the Hub.
        trust_remote_code: run Python code that the checkpoint brings.
        notify: takes progress lines.
        role: what the model is wanted for, in an error's words.

    Raises:
        SpecbenchError: whatever goes wrong, with what to do about it.
    """
    check_options(attn, device_map)
    place = pick_device(device)
    check(quantize, place)
    number = compute_dtype(quantize, dtype, place)
    with _quiet(), _out_of_memory(ref, place):
        if ref.startswith(registry.RANDOM_PREFIX):
            loaded = _random(ref, place, number, attn, notify, role)
        else:
            source = resolve(ref, revision=revision, notify=notify, role=role)
            loaded = _checkpoint(ref, source, place, number, device_map, attn, trust_remote_code, quantize)
        return loaded if quantize == NONE else _quantised(loaded, quantize, notify)


def load_tokenizer(
    ref: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    notify: Notify = lambda line: None,
) -> tuple[str, Any]:
    """The name and the tokenizer of a target, whose weights are not read.

    Raises:
        SpecbenchError: what `load` raises, or the target has no tokenizer.
    """
    tokenizer = None
    if not ref.startswith(registry.RANDOM_PREFIX):
        with _quiet():
            source = resolve(ref, revision=revision, notify=notify)
            tokenizer = read_tokenizer(source, trust_remote_code)
    if tokenizer is None:
        raise SpecbenchError(f"{ref} has no tokenizer", "name a target that has one")
    return source.name, tokenizer


def _checkpoint(
    ref: str, source: Source, device: torch.device, dtype: torch.dtype | None, device_map: str, attn: str,
    trust_remote_code: bool, quantize: str,
) -> LoadedModel:  # fmt: skip
    config = _config(source, trust_remote_code)
    stored = packed.read(config.to_dict())
    if stored is not None:
        packed.check(stored, source.name, quantize)
        packed.prepare(stored, config)
    model = _model(source, config, device, dtype, device_map, attn, trust_remote_code)
    if stored is not None and (line := packed.note(stored, model)):
        source.notes.append(line)
    tokenizer = read_tokenizer(source, trust_remote_code)
    return LoadedModel(model, tokenizer, _identity(ref, source, model, stored))


def _quantised(loaded: LoadedModel, scheme: str, notify: Notify) -> LoadedModel:
    """The same model with its linear layers quantised, in place."""
    notify(f"quantising {loaded.identity.name} to {scheme}…")
    what = quantise(loaded.model, scheme)
    return replace(loaded, identity=loaded.identity.quantised(scheme, module_bytes(loaded.model), what))


def _random(
    ref: str, device: torch.device, dtype: torch.dtype | None, attn: str, notify: Notify, role: str
) -> LoadedModel:
    entry = registry.find(ref.removeprefix(registry.RANDOM_PREFIX), role)
    notify(f"building {ref} with random weights on {device}…")
    model = random_init.build(entry, device=device, dtype=dtype, attn=attn)
    notes = ["random weights, seed 0: only times mean anything, texts and acceptance do not"]
    identity = ModelIdentity(
        name=ref, ref=ref, source="random", hub_id=None, revision=None, dtype=_dtype_name(model),
        quantization=None, parameters=parameters(model), bytes=module_bytes(model), notes=notes,
    )  # fmt: skip
    return LoadedModel(model, None, identity)


def _config(source: Source, trust_remote_code: bool) -> Any:
    """The checkpoint's config, if it is a decoder-only language model transformers can build."""
    try:
        written, _ = PreTrainedConfig.get_config_dict(source.folder)
        packed.check_field(written, source.name)
        config = AutoConfig.from_pretrained(source.folder, trust_remote_code=trust_remote_code)
    except UNREADABLE as error:
        raise _unreadable(source, error) from error
    wanted = tuple(config.architectures or ())
    known = type(config) in AutoModelForCausalLM._model_mapping
    remote = trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if config.is_encoder_decoder or any(task in name for name in wanted for task in OTHER_TASKS):
        raise SpecbenchError(
            f"{source.name} is not a decoder-only language model ({', '.join(wanted) or config.model_type})",
            "specbench measures causal language models only",
        )
    if not (known or remote):
        raise SpecbenchError(
            f"transformers has no causal language model for {source.name} (model type {config.model_type!r})",
            "if the checkpoint brings its own code and you trust it, add --trust-remote-code",
        )
    return config


def _model(
    source: Source, config: Any, device: torch.device, dtype: torch.dtype | None, device_map: str, attn: str,
    trust_remote_code: bool,
) -> Any:  # fmt: skip
    known = type(config) in AutoModelForCausalLM._model_mapping
    model_class = AutoModelForCausalLM._model_mapping[type(config)] if known else None
    spread = device_map != "none"
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            source.folder,
            config=config,
            dtype=dtype or "auto",
            attn_implementation=pick_attention(attn, model_class),
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, with the shapes
            weights_only=True,
            **({"device_map": device_map} if spread else _straight_to(device)),
        )
    except torch.OutOfMemoryError:
        raise
    except UNREADABLE as error:
        if _is_out_of_memory(error):
            raise
        raise _unreadable(source, error) from error
    if info["mismatched_keys"]:
        key, there, wanted = min(info["mismatched_keys"])
        raise SpecbenchError(
            f"{source.name}: weight {key} is {_by(there)}, expected {_by(wanted)}",
            "is config.json the one that belongs to these weights?",
        )
    if info["missing_keys"]:
        raise SpecbenchError(
            f"{source.name} lacks {len(info['missing_keys'])} weights of its architecture, the first "
            f"{min(info['missing_keys'])}",
            "a drafter (EAGLE, Medusa…) is no target and no draft model: name it as draft= of its method",
        )
    there = model.device.type == device.type and device.index in (None, model.device.index)
    if not spread and not there:  # a quantised one may refuse to be moved, even to where it is
        model = model.to(device)
    return model.eval().requires_grad_(False)


def _by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "one number"


def _straight_to(device: torch.device) -> dict[str, Any]:
    """Load onto the device without a copy in host memory, which transformers does only with accelerate."""
    if device.type == "cpu" or importlib.util.find_spec("accelerate") is None:
        return {}
    return {"device_map": {"": device}}


def read_tokenizer(source: Source, trust_remote_code: bool) -> Any | None:
    """The folder's tokenizer, with the registry's chat template where the checkpoint has none."""
    if not any((source.folder / name).is_file() for name in TOKENIZER_FILES):
        source.notes.append("no tokenizer: it takes ids, not text")
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.folder, trust_remote_code=trust_remote_code)
    except UNREADABLE as error:
        raise _unreadable(source, error, "the tokenizer of ") from error
    if tokenizer.chat_template is None and source.entry is not None and source.entry.chat_template:
        tokenizer.chat_template = source.entry.chat_template
        source.notes.append("chat template from the registry: the checkpoint has none")
    return tokenizer


def _identity(ref: str, source: Source, model: Any, stored: packed.Packed | None) -> ModelIdentity:
    return ModelIdentity(
        name=source.name,
        ref=ref,
        source=source.kind,
        hub_id=source.hub_id,
        revision=source.revision,
        dtype=_dtype_name(model),
        quantization=source.quantization or (stored.name if stored else None),
        parameters=parameters(model),
        bytes=module_bytes(model),
        files=source.files,
        verified=source.verified,
        notes=source.notes,
    )


def _dtype_name(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")


def _unreadable(source: Source, error: BaseException, what: str = "") -> SpecbenchError:
    """What transformers says about a checkpoint, as one line and what to do."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    where = f"{what}{source.name}"
    if "trust_remote_code" in str(error) or "custom code" in str(error):
        return SpecbenchError(
            f"{where} brings its own Python code", "read it, and if you trust it add --trust-remote-code"
        )
    if "does not recognize this architecture" in str(error) or "Unrecognized model" in str(error):
        return SpecbenchError(
            f"transformers does not know the architecture of {where}",
            "a newer transformers may; config.json must name a model_type",
        )
    if isinstance(error, ImportError):
        return SpecbenchError(f"{where} needs a package that is not installed: {text}", "install it with pip")
    return SpecbenchError(
        f"{where} cannot be loaded: {text}", f"check {source.folder}; download or copy the model again"
    )


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


@contextmanager
def _out_of_memory(ref: str, device: torch.device) -> Any:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not _is_out_of_memory(error):
            raise
        raise SpecbenchError(
            f"not enough memory on {device} to load {ref}",
            "use --dtype bfloat16, a smaller target, or --device-map auto over several devices",
        ) from error


@contextmanager
def _quiet() -> Any:
    """No progress bars and no warnings of transformers while loading: what matters is in identity.notes."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
