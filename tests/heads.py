"""Random Medusa and Hydra checkpoints in the official layouts, and golden folders to compare with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specbench.decoding.draft import Draft, Drafter
from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Request, Round
from specbench.measure.clock import NullClock
from specbench.models.checkpoint import Checkpoint
from specbench.models.load import load
from specbench.models.target import Target

PARITY = Path(__file__).resolve().parents[2] / "shared" / "parity"
State = dict[str, torch.Tensor]
torch.set_num_threads(1)  # tiny models gain nothing from more, and wait for each other on a busy machine


def checkpoint(state: State, **config: Any) -> Checkpoint:
    """As if read from a folder."""
    return Checkpoint("random", Path("/nowhere"), config, state)


def medusa_state(target: Target, heads: int = 5, blocks: int = 1, seed: int = 0) -> State:
    """Medusa-1's weights, random."""
    hidden, vocab = target.config.hidden_size, target.vocab_size
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        for block in range(blocks):
            shapes[f"{head}.{block}.linear.weight"] = (hidden, hidden)
            shapes[f"{head}.{block}.linear.bias"] = (hidden,)
        shapes[f"{head}.{blocks}.weight"] = (vocab, hidden)
    return _random(shapes, seed)


def hydra_state(target: Target, heads: int = 4, blocks: int = 2, seed: int = 0) -> State:
    """Hydra++'s weights, random; the prefix layer has the target's heads."""
    config, hidden, vocab = target.config, target.config.hidden_size, target.vocab_size
    dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    layer = "prefix_embeding_layer.layers.0"
    shapes: dict[str, tuple[int, ...]] = {
        "input_embed_fn.weight": (vocab, hidden),
        "prefix_embeding_layer.embed_tokens.weight": (vocab, hidden),
        f"{layer}.self_attn.q_proj.weight": (queries, hidden),
        f"{layer}.self_attn.k_proj.weight": (keys, hidden),
        f"{layer}.self_attn.v_proj.weight": (keys, hidden),
        f"{layer}.self_attn.o_proj.weight": (hidden, queries),
        f"{layer}.self_attn.rotary_emb.inv_freq": (dim // 2,),
        f"{layer}.mlp.gate_proj.weight": (2 * hidden, hidden),
        f"{layer}.mlp.up_proj.weight": (2 * hidden, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, 2 * hidden),
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        "prefix_embeding_layer.norm.weight": (hidden,),
    }
    for head in range(heads):
        mlp, path = f"hydra_mlp.{head}", (head + 2) * hidden
        for part in ("linear", "res_connection"):
            shapes |= {f"{mlp}.1.{part}.weight": (hidden, path), f"{mlp}.1.{part}.bias": (hidden,)}
        for block in range(1, blocks):
            name = f"{mlp}.{2 * block + 1}.linear"
            shapes |= {f"{name}.weight": (hidden, hidden), f"{name}.bias": (hidden,)}
        shapes |= {
            f"hydra_lm_head.{head}.1.weight": (vocab, hidden),
            f"hydra_lm_head.{head}.1.bias": (vocab,),
        }
    return _random(shapes, seed)


def _random(shapes: dict[str, tuple[int, ...]], seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {key: 0.3 * torch.randn(shape, generator=generator) for key, shape in shapes.items()}


@dataclass
class Golden:
    """A golden folder, its target open."""

    folder: Path
    golden: dict[str, Any]
    target: Target

    def tensors(self, name: str = "tensors.npz") -> dict[str, np.ndarray]:
        return dict(np.load(self.folder / name))


def golden(name: str) -> Golden:
    folder = PARITY / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here")
    loaded = load(str(folder / "target"), dtype="float32", device="cpu")
    return Golden(
        folder, json.loads((folder / "golden.json").read_text()), Target(loaded.model, None, loaded.identity)
    )


def run(drafter: Drafter, request: Request) -> tuple[list[list[int]], list[Round]]:
    rounds = list(DraftVerify(drafter.target, drafter).generate(request, NullClock()))
    return [[t for r in rounds for t in r.tokens[row]] for row in range(len(request.prompts))], rounds


def overheard(drafter: Drafter) -> list[list[Draft]]:
    """A list that fills with the drafts of every round from now on."""
    heard: list[list[Draft]] = []
    propose = drafter.propose

    def spy(*args: Any) -> list[Draft]:
        heard.append(propose(*args))
        return heard[-1]

    drafter.propose = spy  # type: ignore[method-assign]
    return heard
