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


def accepted_nodes(draft: Draft, tokens: list[int], accepted: int) -> list[int]:
    """The drafted nodes along the path that was kept."""
    ids, parents = torch.as_tensor(draft.tokens).tolist(), torch.as_tensor(draft.parents).tolist()
    path = [-1]
    for token in tokens[:accepted]:
        path.append(next(n for n, p in enumerate(parents) if p == path[-1] and ids[n] == token))
    return path[1:]


def same_rounds(case: Golden, drafter: Drafter) -> int:
    """Compare every golden round with ours, without stop tokens and with room for the last; how many there were.

    A draft may differ where the drafter gives two tokens the same score (`last_scores`, if it has them).
    """
    compared = 0
    for prompt, outputs, theirs in zip(
        case.golden["prompts"], case.golden["outputs"], case.golden["rounds"], strict=True
    ):
        heard, scores = [], []
        propose = drafter.propose

        def spy(*args: Any, heard: list = heard, scores: list = scores, propose: Any = propose) -> Any:
            heard.append(propose(*args)[0])
            scores.append(getattr(drafter, "last_scores", None))
            return [heard[-1]]

        drafter.propose = spy  # type: ignore[method-assign]
        emitted, (_, *ours) = run(drafter, Request([prompt], len(outputs) + drafter.tree.depth + 1))
        drafter.propose = propose  # type: ignore[method-assign]
        assert emitted[0][: len(outputs)] == outputs
        for draft, score, one, golden_round in zip(heard, scores, ours, theirs, strict=False):
            tokens = draft.tokens.tolist()
            assert draft.parents.tolist() == case.golden["parents"]
            if tokens != golden_round["draft_tokens"]:
                _must_be_a_tie(tokens, golden_round["draft_tokens"], score)
                break  # what follows may be cut into other rounds
            accepted = golden_round["accepted"]
            assert one.accepted == [accepted]
            assert accepted_nodes(draft, one.tokens[0], accepted) == golden_round["accepted_nodes"]
            assert one.tokens[0][-1] == golden_round["next_token"]
            compared += 1
    return compared


def _must_be_a_tie(ours: list[int], theirs: list[int], scores: torch.Tensor | None) -> None:
    node = next(n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    assert scores is not None, f"node {node} is {ours[node]}, golden {theirs[node]}"
    gap = float((scores[0, node, ours[node]] - scores[0, node, theirs[node]]).abs())
    assert gap < 1e-5, f"node {node} is {ours[node]}, golden {theirs[node]}, {gap} apart"
