"""What matters of each kind of checkpoint, read from its config and the shapes of its weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from specbench.errors import SpecbenchError

if TYPE_CHECKING:
    from specbench.models.detect import Described

Shapes = Mapping[str, tuple[int, ...]]
NESTED = ("transformer_layer_config", "text_config", "eagle_config", "dflash_config", "model")
_PREFIX = re.compile(r"^(?:model\.|language_model\.)+")


def bare(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """The shapes by key without the wrappers around the model that some exports keep (`model.`)."""
    return {_PREFIX.sub("", key): shape for key, shape in shapes.items()}


def field_of(config: Mapping[str, Any], *names: str) -> Any:
    """The first of the fields that the config, or a config inside it, has; None if none."""
    for name in names:
        for place in (config, *(config.get(key) for key in NESTED)):
            if isinstance(place, Mapping) and place.get(name) is not None:
                return place[name]
    return None


def fc_width(shapes: Shapes) -> float | None:
    """How many hidden sizes `fc` reads, as widths of what it writes; None without an `fc`."""
    shape = shapes.get("fc.weight")
    return shape[1] / shape[0] if shape is not None and len(shape) == 2 and shape[0] else None


def needed(checkpoint: Described, what: str, *names: str) -> Any:
    """A field that `what` cannot do without. Raises SpecbenchError naming it."""
    value = field_of(checkpoint.config, *names)
    if value is None:
        raise SpecbenchError(
            f"{checkpoint.ref}: config.json has no {names[0]}, which {what} needs",
            "copy config.json from where the weights came from",
        )
    return value


def _layers(shapes: Shapes, name: str = "layers") -> int:
    numbers = {int(found[1]) for k in shapes if (found := re.match(rf"{re.escape(name)}\.(\d+)\.", k))}
    return len(numbers)


def _count(shapes: Shapes, pattern: str) -> int | None:
    numbers = [int(found[1]) for k in shapes if (found := re.match(pattern, k))]
    return max(numbers) + 1 if numbers else None


def _size(shapes: Shapes, key: str, axis: int) -> int | None:
    shape = shapes.get(key)
    return shape[axis] if shape is not None and len(shape) > axis else None


def _eagle(checkpoint: Described) -> dict[str, Any]:
    shapes, config = bare(checkpoint.shapes), checkpoint.config
    return {
        "hidden_size": _size(shapes, "fc.weight", 0),
        "target_hidden_size": _size(shapes, "fc.weight", 0),
        "layers": _layers(shapes),
        "heads": needed(checkpoint, "an EAGLE draft", "num_attention_heads"),
        "kv_heads": field_of(config, "num_key_value_heads"),
        "vocab_size": _size(shapes, "embed_tokens.weight", 0) or field_of(config, "vocab_size"),
        "fc_bias": "fc.bias" in shapes,
        "qkv_bias": "layers.0.self_attn.q_proj.bias" in shapes,
        "own_embeddings": "embed_tokens.weight" in shapes,
    }


def _eagle3(checkpoint: Described) -> dict[str, Any]:
    shapes, config = bare(checkpoint.shapes), checkpoint.config
    hidden = _size(shapes, "norm.weight", 0) or field_of(config, "hidden_size")
    ids = field_of(
        config, "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids"
    )
    width = _size(shapes, "fc.weight", 1)
    features = len(ids) if ids else 3
    whole = width is not None and width % features == 0
    return {
        "hidden_size": hidden,
        "target_hidden_size": width // features
        if width and whole
        else field_of(config, "target_hidden_size"),
        "layers": max(_layers(shapes), 1),
        "heads": needed(checkpoint, "an EAGLE-3 draft", "num_attention_heads"),
        "kv_heads": field_of(config, "num_key_value_heads"),
        "vocab_size": _size(shapes, "t2d", 0) or field_of(config, "vocab_size"),
        "draft_vocab_size": _size(shapes, "lm_head.weight", 0) or field_of(config, "draft_vocab_size"),
        "vocabulary_map": "d2t" in shapes,
        "aux_layer_ids": ids,
        "reads_features": "fc.weight" in shapes,
        "norm_before_residual": field_of(config, "norm_before_residual"),
        "norm_before_fc": bool(field_of(config, "norm_before_fc")) or "input_norm.weight" in shapes,
        "fc_norm": bool(field_of(config, "fc_norm")) or any(k.startswith("fc_norm.") for k in shapes),
        "norm_output": bool(field_of(config, "norm_output")),
        "own_embeddings": "embed_tokens.weight" in shapes,
        "max_positions": field_of(config, "max_position_embeddings"),
    }


def _medusa(checkpoint: Described) -> dict[str, Any]:
    found = {re.sub(r"^(?:.*\.)?medusa_head\.", "", k): v for k, v in bare(checkpoint.shapes).items()}
    found = {k: v for k, v in found.items() if re.match(r"\d+\.\d+\.", k)}
    heads = _count(found, r"(\d+)\.\d+\.")
    if heads is None:
        raise SpecbenchError(
            f"{checkpoint.ref} has no Medusa heads: no weight is called 0.0.linear.weight",
            "a Medusa draft holds medusa_lm_head.pt or .safetensors",
        )
    last = max(int(k.split(".")[1]) for k in found)
    return {
        "heads": heads,
        "heads_in_config": checkpoint.config.get("medusa_num_heads"),
        "head_layers": last,
        "target_hidden_size": _size(found, f"0.{last}.weight", 1),
        "vocab_size": _size(found, f"0.{last}.weight", 0),
    }


def _hydra(checkpoint: Described) -> dict[str, Any]:
    shapes = checkpoint.shapes
    heads = _count(shapes, r"hydra_(?:mlp|lm_head)\.(\d+)\.")
    if heads is None:
        raise SpecbenchError(
            f"{checkpoint.ref} has no Hydra heads: no weight is called hydra_mlp.0…",
            "a Hydra draft holds hydra_lm_head.pt",
        )
    output = next((v for k, v in shapes.items() if re.match(r"hydra_lm_head\.0\..*weight$", k)), None)
    return {
        "heads": heads,
        "head_layers": field_of(checkpoint.config, "hydra_num_layers"),
        "architecture": field_of(checkpoint.config, "hydra_head_arch"),
        "grounded": field_of(checkpoint.config, "grounded_heads"),
        "prefix_layers": _layers(shapes, "prefix_embeding_layer.layers"),
        "target_hidden_size": output[1] if output else None,
        "vocab_size": output[0] if output else None,
    }


def _dflash(checkpoint: Described) -> dict[str, Any]:
    shapes, config = bare(checkpoint.shapes), checkpoint.config
    ids = field_of(config, "target_layer_ids", "aux_hidden_state_layer_ids")
    layers, width = _layers(shapes), _size(shapes, "fc.weight", 1)
    features = len(ids) if ids else layers
    found: dict[str, Any] = {
        "hidden_size": _size(shapes, "fc.weight", 0),
        "target_hidden_size": width // features if width and features and width % features == 0 else None,
        "layers": layers,
        "heads": needed(checkpoint, "a DFlash draft", "num_attention_heads"),
        "kv_heads": field_of(config, "num_key_value_heads"),
        "vocab_size": _size(shapes, "t2d", 0) or field_of(config, "vocab_size"),
        "block_size": needed(checkpoint, "a DFlash draft", "block_size"),
        "mask_token_id": needed(checkpoint, "a DFlash draft", "mask_token_id"),
        "target_layer_ids": ids,
        "target_layers": field_of(config, "num_target_layers"),
        "causal": bool(field_of(config, "causal_head", "causal")),
    }
    if "markov_head.markov_w1.weight" in shapes:
        found["markov_rank"] = _size(shapes, "markov_head.markov_w1.weight", 1)
        found["markov_head"] = field_of(config, "markov_head_type")
        found["confidence_head"] = any(k.startswith("confidence_head.") for k in shapes)
    return found


def _causal_lm(checkpoint: Described) -> dict[str, Any]:
    config = checkpoint.config
    return {
        "architecture": ", ".join(config.get("architectures") or ()) or config.get("model_type"),
        "hidden_size": field_of(config, "hidden_size", "n_embd", "d_model"),
        "layers": field_of(config, "num_hidden_layers", "n_layer"),
        "heads": field_of(config, "num_attention_heads", "n_head"),
        "kv_heads": field_of(config, "num_key_value_heads"),
        "experts": field_of(config, "num_local_experts", "num_experts", "n_routed_experts"),
        "vocab_size": field_of(config, "vocab_size"),
        "max_positions": field_of(config, "max_position_embeddings", "n_positions"),
    }


def _mtp(checkpoint: Described) -> dict[str, Any]:
    shapes = bare(checkpoint.shapes)
    layers = _layers(shapes, "mtp.layers") or sum(k.endswith("eh_proj.weight") for k in shapes)
    said = field_of(checkpoint.config, "num_nextn_predict_layers", "mtp_num_hidden_layers")
    return {**_causal_lm(checkpoint), "mtp_layers": layers, "mtp_layers_in_config": said}


def _pard(checkpoint: Described) -> dict[str, Any]:
    return {**_causal_lm(checkpoint), "pard_token": needed(checkpoint, "a PARD draft", "pard_token")}


SETTINGS: dict[str, Callable[[Described], dict[str, Any]]] = {
    "eagle": _eagle,
    "eagle3": _eagle3,
    "p-eagle": _eagle3,
    "medusa": _medusa,
    "medusa-2": lambda checkpoint: {**_causal_lm(checkpoint), **_medusa(checkpoint)},
    "hydra": _hydra,
    "dflash": _dflash,
    "dspark": _dflash,
    "domino": _dflash,
    "jetspec": _dflash,
    "mtp": _mtp,
    "pard": _pard,
    "causal-lm": _causal_lm,
}
