"""Whether a run would take a draft, found out without its weights: it is opened as a run opens it, on no device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig
from transformers.initialization import no_init_weights

from specbench.errors import SpecbenchError, first_line
from specbench.models.checkpoint import Checkpoint, Listing, open_checkpoint
from specbench.models.detect import Recognised
from specbench.models.detect_settings import Shapes
from specbench.models.dflash import open_dflash
from specbench.models.eagle import open_eagle
from specbench.models.fields import CURE
from specbench.models.hydra import PREFIX, open_hydra
from specbench.models.medusa import open_medusa
from specbench.models.mtp import mtp_prefixes, open_mtp
from specbench.models.target import Target

OPENERS: dict[str, Callable[[Checkpoint, Target], Any]] = {
    "eagle": open_eagle,
    "eagle3": open_eagle,
    "medusa": open_medusa,
    "medusa-2": open_medusa,
    "hydra": open_hydra,
    "dflash": open_dflash,
    "dspark": open_dflash,
    "mtp": lambda checkpoint, target: open_mtp(target, checkpoint),
}
META = torch.device("meta")
_MOST_LAYERS = 1000  # of a stand-in: no target has more
# What torch and transformers raise for numbers of which no model can be made.
IMPOSSIBLE = (
    ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RuntimeError, AssertionError,
    StrictDataclassError,
)  # fmt: skip


def check_opens(listing: Listing, found: Recognised, target: Target) -> None:
    """Open a draft for `target`, which may be a blank one. Kinds that no method opens are let pass.

    Raises:
        SpecbenchError: what a run would say: weights missing, misshapen or too many, fields of the config that are
            wrong, another target.
    """
    if found.method is not None and found.kind in OPENERS:
        prefixes = mtp_prefixes(target) if found.kind == "mtp" else ("",)
        OPENERS[found.kind](outline(listing, prefixes), target)


def outline(listing: Listing, prefixes: tuple[str, ...] = ("",)) -> Checkpoint:
    """The checkpoint with weights that have a shape and a dtype alone. Integers (vocabulary maps) are read."""
    weights = {key: weight for key, weight in listing.weights.items() if key.startswith(prefixes)}
    whole = tuple(key for key, weight in weights.items() if "float" not in weight.dtype)
    read = open_checkpoint(str(listing.folder), prefixes=whole).state if whole else {}
    empty = {
        key: torch.empty(weight.shape, dtype=getattr(torch, weight.dtype, None), device=META)
        for key, weight in weights.items()
        if key not in read
    }
    return Checkpoint(listing.ref, listing.folder, listing.config, empty | read, listing.revision)


def blank_target(ref: str, config: Mapping[str, Any]) -> Target | None:
    """A target of this config.json without weights; None if transformers does not know the architecture.

    Raises:
        SpecbenchError: numbers of which no model can be made, or one that cannot be a target.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in CONFIG_MAPPING:
        return None
    kind = CONFIG_MAPPING[name]
    if kind not in AutoModelForCausalLM._model_mapping:
        return None
    return _blank(ref, lambda: kind.from_dict(dict(config)))


def stand_in(listing: Listing, found: Recognised) -> Target | None:
    """A target without weights that the draft was made for as far as it says; None if it says too little."""
    settings = found.settings
    hidden, vocab = settings.get("target_hidden_size"), settings.get("vocab_size")
    if not hidden or not vocab:
        return None
    read = settings.get("aux_layer_ids") or settings.get("target_layer_ids") or []
    layers = settings.get("target_layers") or max([8, *(number + 1 for number in read)])
    heads, kv_heads, head_dim = _heads_of_hydra(listing.shapes)
    config = {
        "hidden_size": hidden, "vocab_size": vocab, "num_hidden_layers": min(layers, _MOST_LAYERS),
        "intermediate_size": 1, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
    }  # fmt: skip
    return _blank(listing.ref, lambda: LlamaConfig(**config))


def _heads_of_hydra(shapes: Shapes) -> tuple[int, int, int]:
    """Heads that go with a Hydra's prefix layer, which is like the target's; others do not mind which."""
    at = f"{PREFIX}layers.0.self_attn."
    queries, keys = ((shapes.get(f"{at}{name}_proj.weight") or (1,))[0] or 1 for name in "qv")
    width = math.gcd(queries, keys)
    return queries // width, keys // width, width


def _blank(ref: str, config: Callable[[], Any]) -> Target:
    try:
        with no_init_weights(), META:
            model = AutoModelForCausalLM.from_config(config(), dtype=torch.float32)
    except IMPOSSIBLE as error:
        raise SpecbenchError(
            f"{ref}: no model can be made of its config.json: {first_line(error)}", CURE
        ) from error
    return Target(model)
