"""What the config and the keys of an EAGLE draft say: which EAGLE, its sizes, norms, aux layers and rotary positions.

Spellings read (facts from SafeAILab/EAGLE, sgl-project/SpecForge, NVIDIA/Model-Optimizer, vllm-project/speculators
and vLLM's loaders): plain (`midlayer.*` or `layers.0.*`), `eagle_config` inside, `speculators_model_type` with a
nested `transformer_layer_config`, and vLLM's `model_type: eagle` with a nested `model`. Where config and keys
disagree about what exists, the keys are right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from specbench.errors import SpecbenchError
from specbench.models.checkpoint import Checkpoint
from specbench.models.fits import PADDING

FOR_TARGET = "was it made for this target?"


@dataclass(frozen=True)
class Keys:
    """The weights of a checkpoint under one spelling: no `model.` prefix, and `layers.0.` for `midlayer.`."""

    checkpoint: Checkpoint

    def spelled(self, name: str) -> str:
        """`name` as this checkpoint writes it."""
        state = self.checkpoint.state
        names = [name, name.replace("layers.0.", "midlayer.", 1)]
        written = [prefix + n for prefix in ("", "model.") for n in names]
        midlayer = any(key.removeprefix("model.").startswith("midlayer.") for key in state)
        return next((key for key in written if key in state), names[midlayer])

    def __contains__(self, name: str) -> bool:
        return self.spelled(name) in self.checkpoint.state

    def take(self, name: str, *shape: int | None) -> torch.Tensor:
        """The weight of this shape (see `Checkpoint.take`)."""
        return self.checkpoint.take(self.spelled(name), *shape)

    def not_loaded(self) -> list[str]:
        """Keys that may be there although they are the target's own, computed, or read apart."""
        computed = [key for key in self.checkpoint.state if key.endswith("rotary_emb.inv_freq")]
        return [*map(self.spelled, _NOT_LOADED), *computed]

    def layers(self) -> int:
        """How many decoder layers there are (configs have been wrong about it)."""
        names = (key.removeprefix("model.") for key in self.checkpoint.state)
        numbers = [0 if name.startswith("midlayer.") else _number_in(name) for name in names]
        return max((n for n in numbers if n is not None), default=0) + 1


_NOT_LOADED = ("embed_tokens.weight", "d2t", "t2d", "verifier_norm.weight", "verifier_lm_head.weight")


def _number_in(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[1]) if len(parts) > 1 and parts[0] == "layers" and parts[1].isdigit() else None


class Config:
    """A draft's config.json: sizes from the part that describes the layer, flags from wherever they stand."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        outer = checkpoint.config
        self.ref = checkpoint.ref
        self.speculators = "speculators_model_type" in outer
        nested = outer.get("transformer_layer_config") if self.speculators else None
        if outer.get("model_type") == "eagle":
            nested = outer.get("model")
        self.layer: dict[str, Any] = nested if isinstance(nested, dict) else outer
        eagle = outer.get("eagle_config")
        self.eagle: dict[str, Any] = eagle if isinstance(eagle, dict) else {}
        self.outer: dict[str, Any] = outer

    def get(self, name: str, default: Any = None) -> Any:
        """The field `name` of the whole config, of `eagle_config` or of the layer's part."""
        parts = (self.outer, self.eagle, self.layer)
        return next((part[name] for part in parts if part.get(name) is not None), default)

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.get(name, default))

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number above 0, of the layer's part first.

        Raises:
            SpecbenchError: missing without a default, or not such a number.
        """
        value = self.layer.get(name)
        value = self.get(name, default) if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            what = "has no" if value is None else f"has {value!r} as"
            raise SpecbenchError(
                f"{self.ref}: config.json {what} {name}, expected a whole number above 0",
                "is config.json the one that belongs to these weights?",
            )
        return value

    def number(self, name: str, default: float) -> float:
        """A number that describes the layer. Raises SpecbenchError if it is something else."""
        value = self.layer.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SpecbenchError(
                f"{self.ref}: config.json has {value!r} as {name}, expected a number",
                "is config.json the one that belongs to these weights?",
            )
        return float(value)


def check_vocabulary(config: Config, vocab: int) -> int:
    """The draft's idea of the target's vocabulary size; it may differ from `vocab` by padding.

    Raises:
        SpecbenchError: for another vocabulary.
    """
    size = config.integer("vocab_size")
    if abs(size - vocab) > PADDING * vocab:
        raise SpecbenchError(
            f"{config.ref}: its target has {size} token ids (vocab_size), this target has {vocab}", FOR_TARGET
        )
    return size


def check_hidden_size(ref: str, name: str, size: int, target: int) -> None:
    """Refuse a draft that reads hidden states of another size."""
    if size != target:
        raise SpecbenchError(
            f"{ref}: it reads hidden states of size {size} ({name}), this target's have size {target}",
            FOR_TARGET,
        )


def aux_taps(config: Config, layers: int) -> tuple[str, ...]:
    """The target's hidden states an EAGLE-3 draft reads, low to high, as taps.

    An id i means the *input* of decoder layer i in SafeAILab's code, in vLLM and in speculators, and its *output* in
    SpecForge and Model-Optimizer, whose pattern is 1, n//2 - 1, n - 4, and in DeepSpec (`target_layer_ids`). So: that
    pattern means outputs, wherever it stands (it survives conversion to speculators); so does any list in
    `eagle_config` that does not start with 2. Without ids: the inputs of layers 2, n//2 and n - 3.
    """
    name = next((n for n in _AUX_IDS if config.get(n)), None)
    if name is None:
        inputs = [2, layers // 2, layers - 3]
        if len(set(inputs)) < 3 or min(inputs) < 0:
            raise SpecbenchError(
                f"{config.ref}: EAGLE-3 reads layers 2, n//2 and n - 3 of its target; with {layers} layers these "
                "are not three different ones",
                f"use a target of 7 layers or more, or name them in {_AUX_IDS[0]}",
            )
    else:
        inputs = _inputs(config, name, layers)
    return tuple(f"layer:{i - 1}" if i else "embed" for i in inputs)


_AUX_IDS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids")


def _inputs(config: Config, name: str, layers: int) -> list[int]:
    """The list `name` of the config as numbers of the layers whose inputs are read (`layers`: the last output)."""
    ids = config.get(name)
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise SpecbenchError(
            f"{config.ref}: {name} is {ids!r}, expected a list of layer numbers",
            "is config.json the one that belongs to these weights?",
        )
    nested = name in config.eagle and not config.speculators
    outputs = (
        ids == [1, layers // 2 - 1, layers - 4] or (nested and ids[0] != 2) or name == "target_layer_ids"
    )
    inputs = [i + 1 for i in ids] if outputs else ids
    if min(inputs) < 0 or max(inputs) > layers:
        raise SpecbenchError(
            f"{config.ref}: it reads layers {ids} of its target ({name}), this target has {layers}",
            FOR_TARGET,
        )
    return inputs


def window_of(config: Config) -> int | None:
    """How far back the draft's attention looks; None: all the way.

    Raises:
        SpecbenchError: if its layers differ in that.
    """
    kinds = config.layer.get("layer_types") or []
    if "sliding_attention" not in kinds or not config.layer.get("sliding_window"):
        return None
    if len(set(kinds)) > 1:
        raise SpecbenchError(
            f"{config.ref}: its layers mix full and sliding attention, which is not supported in a draft",
            "use a draft whose layers are all of one type",
        )
    return config.integer("sliding_window")


def rope_frequencies(config: Config, head_dim: int) -> tuple[torch.Tensor, float]:
    """Rotary frequencies float32 `[head_dim / 2]` and the factor on cosines and sines.

    From the draft's own config, not the target's: without `rope_theta` it is 10000 (official EAGLE-3 checkpoints).

    Raises:
        SpecbenchError: for a scaling that depends on the length of the text, or an unknown one.
    """
    layer = config.layer
    parameters: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        found = layer.get(name)
        if isinstance(found, dict):
            parameters |= found.get("full_attention", found)
    theta = parameters.get("rope_theta") or config.number("rope_theta", 10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    partial = parameters.get("partial_rotary_factor") or layer.get("partial_rotary_factor") or 1
    if kind in ("default", "mrope") and partial == 1:
        return 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim), 1.0
    if kind not in ("linear", "llama3", "yarn") or partial != 1:
        what = f"rotary positions of type {kind}" if partial == 1 else "partial rotary positions"
        raise SpecbenchError(
            f"{config.ref}: {what} are not supported in a draft", "supported: default, linear, llama3, yarn"
        )
    return _scaled(config, kind, {**parameters, "rope_type": kind, "rope_theta": theta}, head_dim)


def _scaled(
    config: Config, kind: str, parameters: dict[str, Any], head_dim: int
) -> tuple[torch.Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters.pop("type", None)
    heads = config.integer("num_attention_heads")
    try:
        llama = LlamaConfig(
            hidden_size=head_dim * heads,
            num_attention_heads=heads,
            head_dim=head_dim,
            max_position_embeddings=config.integer("max_position_embeddings", 2048),
            rope_parameters=parameters,
        )
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](llama, torch.device("cpu"))
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise SpecbenchError(
            f"{config.ref}: rotary positions of type {kind} lack a field: {error}",
            "is config.json the one that belongs to these weights?",
        ) from error
    return frequencies.float(), float(factor)
