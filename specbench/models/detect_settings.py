"""What matters of each kind of checkpoint, read from its config and the shapes of its weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from specbench.errors import SpecbenchError
from specbench.models.fields import Fields

if TYPE_CHECKING:
    from specbench.models.detect import Described

Shapes = Mapping[str, tuple[int, ...]]
_PREFIX = re.compile(r"^(?:model\.|language_model\.)+")


def bare(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """The shapes by key without the wrappers around the model that some exports keep (`model.`)."""
    return {_PREFIX.sub("", key): shape for key, shape in shapes.items()}


def fc_width(shapes: Shapes) -> float | None:
    """How many hidden sizes `fc` reads, as widths of what it writes; None without an `fc`."""
    shape = shapes.get("fc.weight")
    return shape[1] / shape[0] if shape is not None and len(shape) == 2 and shape[0] else None


def _layers(shapes: Shapes, name: str = "layers") -> int:
    numbers = {int(found[1]) for k in shapes if (found := re.match(rf"{re.escape(name)}\.(\d+)\.", k))}
    return len(numbers)


def _count(shapes: Shapes, pattern: str) -> int | None:
    numbers = [int(found[1]) for k in shapes if (found := re.match(pattern, k))]
    return max(numbers) + 1 if numbers else None


def _size(shapes: Shapes, key: str, axis: int) -> int | None:
    shape = shapes.get(key)
    return shape[axis] if shape is not None and len(shape) > axis else None


def _eagle(checkpoint: Described, fields: Fields) -> dict[str, Any]:
    shapes = bare(checkpoint.shapes)
    return {
        "hidden_size": _size(shapes, "fc.weight", 0),
        "target_hidden_size": _size(shapes, "fc.weight", 0),
        "layers": _layers(shapes),
        "heads": fields.integer("num_attention_heads"),
        "kv_heads": fields.optional("num_key_value_heads"),
        "vocab_size": _size(shapes, "embed_tokens.weight", 0) or fields.optional("vocab_size"),
        "fc_bias": "fc.bias" in shapes,
        "qkv_bias": "layers.0.self_attn.q_proj.bias" in shapes,
        "own_embeddings": "embed_tokens.weight" in shapes,
    }


def _eagle3(checkpoint: Described, fields: Fields) -> dict[str, Any]:
    shapes = bare(checkpoint.shapes)
    hidden = _size(shapes, "norm.weight", 0) or fields.optional("hidden_size")
    ids = fields.integers(
        "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids"
    )
    return {
        "hidden_size": hidden,
        "target_hidden_size": _read_by_eagle3(shapes, fields, hidden, len(ids) or 3),
        "layers": max(_layers(shapes), 1),
        "heads": fields.integer("num_attention_heads"),
        "kv_heads": fields.optional("num_key_value_heads"),
        "vocab_size": _size(shapes, "t2d", 0) or fields.optional("vocab_size"),
        "draft_vocab_size": _size(shapes, "lm_head.weight", 0) or fields.optional("draft_vocab_size"),
        "vocabulary_map": "d2t" in shapes,
        "aux_layer_ids": ids or None,
        "reads_features": "fc.weight" in shapes,
        "norm_before_residual": fields.get("norm_before_residual"),
        "norm_before_fc": fields.flag("norm_before_fc") or "input_norm.weight" in shapes,
        "fc_norm": fields.flag("fc_norm") or any(k.startswith("fc_norm.") for k in shapes),
        "norm_output": fields.flag("norm_output"),
        "own_embeddings": "embed_tokens.weight" in shapes,
        "max_positions": fields.optional("max_position_embeddings"),
    }


def _read_by_eagle3(shapes: Shapes, fields: Fields, hidden: int | None, features: int) -> int | None:
    """The target's hidden size: the draft's own, but where it brings embeddings of that."""
    stated, width = fields.optional("target_hidden_size"), _size(shapes, "fc.weight", 1)
    if stated is not None:
        return stated
    if width is None or "embed_tokens.weight" not in shapes:
        return hidden
    return width // features if width % features == 0 else None


def _medusa(checkpoint: Described, fields: Fields) -> dict[str, Any]:
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
        "heads_in_config": fields.get("medusa_num_heads"),
        "head_layers": last,
        "target_hidden_size": _size(found, f"0.{last}.weight", 1),
        "vocab_size": _size(found, f"0.{last}.weight", 0),
    }


def _hydra(checkpoint: Described, fields: Fields) -> dict[str, Any]:
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
        "head_layers": fields.get("hydra_num_layers"),
        "architecture": fields.get("hydra_head_arch"),
        "grounded": fields.get("grounded_heads"),
        "prefix_layers": _layers(shapes, "prefix_embeding_layer.layers"),
        "target_hidden_size": output[1] if output else None,
        "vocab_size": output[0] if output else None,
    }


def _dflash(checkpoint: Described, fields: Fields) -> dict[str, Any]:
    shapes = bare(checkpoint.shapes)
    ids = fields.integers("target_layer_ids", "aux_hidden_state_layer_ids")
    layers, width = _layers(shapes), _size(shapes, "fc.weight", 1)
    features = len(ids) if ids else layers
    found: dict[str, Any] = {
        "hidden_size": _size(shapes, "fc.weight", 0),
        "target_hidden_size": width // features if width and features and width % features == 0 else None,
        "layers": layers,
        "heads": fields.integer("num_attention_heads"),
        "kv_heads": fields.optional("num_key_value_heads"),
        "vocab_size": _size(shapes, "t2d", 0) or fields.optional("vocab_size"),
        "block_size": fields.integer("block_size"),
        "mask_token_id": fields.integer("mask_token_id", least=0),
        "target_layer_ids": ids or None,
        "target_layers": fields.optional("num_target_layers"),
        "causal": fields.flag("causal_head", "causal"),
    }
    if "markov_head.markov_w1.weight" in shapes:
        found["markov_rank"] = _size(shapes, "markov_head.markov_w1.weight", 1)
        found["markov_head"] = fields.get("markov_head_type")
        found["confidence_head"] = any(k.startswith("confidence_head.") for k in shapes)
    return found


def _causal_lm(checkpoint: Described, fields: Fields) -> dict[str, Any]:
    return {
        "architecture": ", ".join(fields.words("architectures")) or fields.get("model_type"),
        **numbers(fields),
        "heads": fields.get("num_attention_heads", "n_head"),
        "kv_heads": fields.get("num_key_value_heads"),
        "experts": fields.get("num_local_experts", "num_experts", "n_routed_experts"),
        "max_positions": fields.get("max_position_embeddings", "n_positions"),
    }


def numbers(fields: Fields) -> dict[str, int | None]:
    """What of a model's architecture the drafts made for it depend on."""
    return {
        "hidden_size": fields.optional("hidden_size", "n_embd", "d_model"),
        "layers": fields.optional("num_hidden_layers", "n_layer"),
        "vocab_size": fields.optional("vocab_size"),
    }


def _mtp(checkpoint: Described, fields: Fields) -> dict[str, Any]:
    shapes = bare(checkpoint.shapes)
    layers = _layers(shapes, "mtp.layers") or sum(k.endswith("eh_proj.weight") for k in shapes)
    said = fields.get("num_nextn_predict_layers", "mtp_num_hidden_layers")
    return {**_causal_lm(checkpoint, fields), "mtp_layers": layers, "mtp_layers_in_config": said}


def _medusa_2(checkpoint: Described, fields: Fields) -> dict[str, Any]:
    return {**_causal_lm(checkpoint, fields), **_medusa(checkpoint, fields)}


def _pard(checkpoint: Described, fields: Fields) -> dict[str, Any]:
    return {**_causal_lm(checkpoint, fields), "pard_token": fields.integer("pard_token", least=0)}


SETTINGS: dict[str, Callable[[Described, Fields], dict[str, Any]]] = {
    "eagle": _eagle,
    "eagle3": _eagle3,
    "p-eagle": _eagle3,
    "medusa": _medusa,
    "medusa-2": _medusa_2,
    "hydra": _hydra,
    "dflash": _dflash,
    "dspark": _dflash,
    "domino": _dflash,
    "jetspec": _dflash,
    "mtp": _mtp,
    "pard": _pard,
    "causal-lm": _causal_lm,
}
