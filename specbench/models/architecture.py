"""The numbers of a model that the cost of its passes depends on, read off the model itself (`analysis.roofline`).

Weights are counted, not derived from a config, so that every architecture comes out right, quantised ones as stored.
A model on torch's meta device serves as well: what is not at hand can be counted too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specbench.analysis.roofline import Architecture
from specbench.errors import SpecbenchError
from specbench.models import hub, packed, registry
from specbench.models.joined import Joined
from specbench.models.packed import Packed
from specbench.models.routers import number_of_experts, routers

if TYPE_CHECKING:
    from specbench.models.target import Target


def architecture(target: Target) -> Architecture:
    """The numbers of a target's model."""
    model, config = target.model, target.config
    moe_layers = len(routers(model))
    experts, active = number_of_experts(config) if moe_layers else (0, 0)
    dense = Counted()
    routed = Counted() if experts else dense
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    for path, module, weight in _weights(model):
        if isinstance(module, torch.nn.Embedding) and not (head is not None and weight is head.weight):
            continue  # a pass reads a few of its rows
        (routed if "experts" in path.split(".") else dense).add(module, weight)
    each = max(1, experts * moe_layers)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return Architecture(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
        vocab=target.vocab_size,
        tied=head is not None and head.weight is embeddings.weight,
        windows=tuple(_windows(config)),
        cached=_cached(config, kv_heads, head_dim),
        attended=_attended(config, heads, head_dim),
        dense_parameters=dense.parameters,
        dense_bytes=dense.bytes,
        moe_layers=moe_layers if experts else 0,
        experts=experts,
        active_experts=active,
        expert_parameters=routed.parameters / each if experts else 0,
        expert_bytes=routed.bytes / each if experts else 0,
        number_bytes=target.dtype.itemsize,
    )


@dataclass(frozen=True)
class Described:
    """What is known of a target without its weights.

    Args:
        architecture: its bytes are those of float32; `in_bytes` gives others.
        dtype: the checkpoint's own.
        stored: how its weights are quantised; None: they are not.
    """

    architecture: Architecture
    dtype: str
    stored: Packed | None


def described(ref: str) -> Described:
    """What `ref` names, without loading or fetching any weights.

    Args:
        ref: an alias, `random:ALIAS`, a folder, or the id of a model in the Hub's cache on this machine.

    Raises:
        SpecbenchError: not known here, or nothing that can be a target.
    """
    from specbench.models.opening import blank_target

    config = _config(ref)
    target = blank_target(ref, config)
    if target is None:
        raise SpecbenchError(
            f"transformers has no causal language model for {ref} (model type {config.get('model_type')!r})",
            "name a target that `specbench run` takes: see `specbench ls targets`",
        )
    target.model.tie_weights()
    dtype = config.get("dtype") or config.get("torch_dtype")
    entry = registry.entry_for(ref)
    stored = packed.read(config)
    if entry is not None and entry.stored and not ref.startswith(registry.RANDOM_PREFIX):
        stored = packed.read({"quantization_config": entry.stored})
    return Described(architecture(target), str(dtype or (entry.dtype if entry else "bfloat16")), stored)


def _config(ref: str) -> Mapping[str, Any]:
    entry = registry.entry_for(ref)
    if entry is not None and entry.config is not None:
        return entry.config
    folder: Path | None = Path(ref).expanduser()
    if folder is None or not folder.is_dir():
        if entry is None and "/" not in ref:
            registry.find(ref)  # raises, and names the nearest alias
        snapshot = hub.cached(entry.hub if entry else ref)
        folder = None if snapshot is None else snapshot.folder
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8")) if folder else None
    except (OSError, ValueError) as error:
        raise SpecbenchError(
            f"{ref} has no config.json that can be read: {error}", "name a model's folder"
        ) from error
    if not isinstance(config, dict):
        raise SpecbenchError(
            f"the architecture of {ref} is not known here",
            "name an alias that `specbench ls targets` marks as random, a folder, or a model in the Hub's cache",
        )
    return config


def parameters(model: torch.nn.Module) -> int:
    """Parameters of a model, tied ones once, quantised ones as many as they stand for."""
    counted = Counted()
    for _, module, weight in _weights(model):
        counted.add(module, weight)
    return counted.parameters


class Counted:
    """Parameters and their bytes, each weight once."""

    def __init__(self) -> None:
        self.parameters, self.bytes = 0, 0
        self._seen: set[int] = set()

    def add(self, module: Any, weight: torch.Tensor) -> None:
        from specbench.measure.memory import tensor_bytes

        if id(weight) in self._seen:
            return
        self._seen.add(id(weight))
        self.bytes += weight.nbytes if weight.is_meta else tensor_bytes([weight])
        matrix = hasattr(module, "in_features") and hasattr(module, "out_features")
        if not matrix or weight is getattr(module, "bias", None):
            self.parameters += weight.numel()
        elif id(module) not in self._seen:
            # However many tensors a quantised layer holds its matrix in, with scales and zero points.
            self._seen.add(id(module))
            self.parameters += module.in_features * module.out_features


def _weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, torch.Tensor]]:
    """(path of its module, the module, the weight) of every parameter, and of the buffers of packed layers."""
    again = {
        id(module.joined) for module in model.modules() if isinstance(module, Joined) and module.place == 0
    }
    for path, module in model.named_modules():
        if id(module) in again:  # all the weights of a group, which are there under their own names
            continue
        held = list(module.buffers(recurse=False))
        in_buffers = any(not each.is_floating_point() and each.dim() > 1 for each in held)
        for weight in (*module.parameters(recurse=False), *(held if in_buffers else ())):
            yield path, module, weight


def _windows(config: Any) -> Iterator[tuple[int | None, int]]:
    layers = config.num_hidden_layers
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None)
    sliding = layers if kinds is None else sum(kind == "sliding_attention" for kind in kinds)
    sliding = sliding if window else 0
    if sliding:
        yield window, sliding
    if layers - sliding:
        yield None, layers - sliding


def _cached(config: Any, kv_heads: int, head_dim: int) -> int:
    """Numbers a token leaves in one layer. Of latent attention (DeepSeek) its latent, however it is stored."""
    latent = getattr(config, "kv_lora_rank", None)
    return latent + config.qk_rope_head_dim if latent else 2 * kv_heads * head_dim


def _attended(config: Any, heads: int, head_dim: int) -> int:
    if getattr(config, "kv_lora_rank", None):
        return heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    return 2 * heads * head_dim
