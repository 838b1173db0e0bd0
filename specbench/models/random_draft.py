"""`draft=random`: an EAGLE-3 draft of the usual shape with random weights, to time drafting without a download.

The shape is that of the official drafts: one layer like the target's own, three of the target's hidden states read,
and a head over 32,000 tokens (SafeAILab/EAGLE). What it proposes is noise: only times mean anything.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specbench.models.checkpoint import Checkpoint
from specbench.models.identity import ModelIdentity
from specbench.models.target import Target

RANDOM = "random"
DRAFTED = 32_000  # tokens of the draft's own vocabulary


class RandomDraft(Checkpoint):
    """A draft that was not read from anywhere."""

    def identity(self, *notes: str) -> ModelIdentity:
        note = "random weights, seed 0: only times mean anything"
        return replace(super().identity(*notes, note), source="random", hub_id=None, files={})


def random_eagle3(target: Target) -> RandomDraft:
    """An EAGLE-3 draft for `target`, its weights drawn on the target's device in its dtype, seed 0."""
    config = target.config
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    drafts = min(DRAFTED, target.vocab_size)
    layer = {
        "self_attn.q_proj": (heads * head_dim, 2 * hidden),
        "self_attn.k_proj": (kv_heads * head_dim, 2 * hidden),
        "self_attn.v_proj": (kv_heads * head_dim, 2 * hidden),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes = {"fc": (hidden, 3 * hidden), "lm_head": (drafts, hidden)}
    shapes |= {f"midlayer.{name}": shape for name, shape in layer.items()}
    norms = (
        "norm",
        *(f"midlayer.{name}" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
    )
    generator = torch.Generator(target.device).manual_seed(0)
    like: dict[str, Any] = {"device": target.device, "dtype": target.dtype}
    state = {
        f"{name}.weight": torch.empty(shape, **like).normal_(0, 1 / math.sqrt(shape[1]), generator=generator)
        for name, shape in shapes.items()
    }
    state |= {f"{name}.weight": torch.ones(hidden, **like) for name in norms}
    if drafts < target.vocab_size:
        state["d2t"] = torch.zeros(drafts, dtype=torch.long)
    settings = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": drafts,
    }
    return RandomDraft(RANDOM, Path(RANDOM), settings, state)
