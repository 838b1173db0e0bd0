"""`random:ALIAS`: an architecture of the registry with seeded random weights: timing without downloads."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.initialization import no_init_weights

from specbench.errors import SpecbenchError
from specbench.models.placement import DTYPES, pick_attention
from specbench.models.registry import Entry

LOGIT_STD = 2.0  # spread of the logits: finite, and few near-ties even in bfloat16


def config_of(entry: Entry) -> Any:
    """The transformers config of an alias. Raises SpecbenchError if the registry has no numbers for it."""
    if entry.config is None:
        raise SpecbenchError(
            f"random:{entry.alias} cannot be built: the registry has no architecture numbers for it",
            f"add a [{entry.alias}.config] table to registry.toml, or take one that `specbench ls targets` "
            "marks as random",
        )
    return AutoConfig.for_model(**entry.config)


def build(
    entry: Entry, *, device: torch.device, dtype: torch.dtype | None, attn: str = "auto", seed: int = 0
) -> Any:
    """The architecture of `entry` in eval mode, made on `device` in `dtype`, with weights drawn there.

    Args:
        dtype: None = the checkpoint's own.
        seed: same seed, same kind of device, same dtype -> same weights.
    """
    config = config_of(entry)
    dtype = dtype or DTYPES[entry.dtype]
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    with no_init_weights(), torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=pick_attention(attn, model_class)
        )
    model.tie_weights()
    _fill(model, torch.Generator(device=device).manual_seed(seed))
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    return model.eval().requires_grad_(False)


@torch.no_grad()
def _fill(model: Any, generator: torch.Generator) -> None:
    """Draw every weight so that activations keep their scale and logits spread by LOGIT_STD."""
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    depth = model.config.num_hidden_layers
    for name, weight in model.named_parameters():  # tied weights come once
        if weight.dim() < 2:
            _fill_vector(name, weight, generator)
            continue
        std = 1 / math.sqrt(weight.shape[-1] if weight.dim() == 2 else max(weight.shape[-2:]))
        if "embed_tokens" in name:
            std = LOGIT_STD * std if tied else 1.0
        elif "lm_head" in name:
            std *= LOGIT_STD
        elif "o_proj" in name or "down_proj" in name:
            std /= math.sqrt(2 * depth)  # two additions a layer to the residual stream
        weight.normal_(0.0, std, generator=generator)


def _fill_vector(name: str, weight: torch.Tensor, generator: torch.Generator) -> None:
    if "norm" in name:
        weight.fill_(1.0)
    elif name.endswith("sinks"):
        weight.normal_(0.0, 1.0, generator=generator)
    else:
        weight.zero_()
