"""Random EAGLE drafts in every spelling, and a plain, slow recomputation of what they should say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import rms_norm
from transformers.activations import ACT2FN

from specbench.models.checkpoint import Checkpoint
from specbench.models.target import Target

HEADS, KV_HEADS, INNER = 4, 2, 48


def made(ref: str, config: dict[str, Any], state: dict[str, torch.Tensor]) -> Checkpoint:
    return Checkpoint(ref, Path("/nowhere"), config, state)


def _config(target: Target, hidden: int, **changed: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "vocab_size": target.vocab_size,
        **changed,
    }


def _weights(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    """Norms around 1, so that a missing one shows; the rest small."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: 1 + 0.3 * x if "norm" in name else 0.25 * x for name, x in drawn.items()}


def _layer(name: str, hidden: int, reads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.self_attn.q_proj.weight": (HEADS * head_dim, reads),
        f"{name}.self_attn.k_proj.weight": (KV_HEADS * head_dim, reads),
        f"{name}.self_attn.v_proj.weight": (KV_HEADS * head_dim, reads),
        f"{name}.self_attn.o_proj.weight": (hidden, HEADS * head_dim),
        f"{name}.mlp.gate_proj.weight": (INNER, hidden),
        f"{name}.mlp.up_proj.weight": (INNER, hidden),
        f"{name}.mlp.down_proj.weight": (hidden, INNER),
        f"{name}.post_attention_layernorm.weight": (hidden,),
    }


def eagle1(target: Target, seed: int = 0, **config: Any) -> Checkpoint:
    """An EAGLE-1/2 draft as SafeAILab writes it; `bias` and `qkv_bias` as in its config."""
    hidden = target.config.hidden_size
    shapes = {"fc.weight": (hidden, 2 * hidden), **_layer("layers.0", hidden, hidden, hidden // HEADS)}
    if config.get("bias", True):
        shapes["fc.bias"] = (hidden,)
    if config.get("qkv_bias"):
        for name in "qkv":
            shapes[f"layers.0.self_attn.{name}_proj.bias"] = (
                shapes[f"layers.0.self_attn.{name}_proj.weight"][0],
            )
    return made("tiny-eagle1", _config(target, hidden, **config), _weights(shapes, seed))


def eagle3(
    target: Target,
    seed: int = 0,
    *,
    layer: str = "midlayer",
    hidden: int | None = None,
    drafts: int | None = None,
    fc_norm: bool = False,
    input_norm: bool = False,
    qk_norm: bool = False,
    layers: int = 1,
    **config: Any,
) -> Checkpoint:
    """An EAGLE-3 draft. `drafts`: its vocabulary, mapped to every second id or so of the target's."""
    size = target.config.hidden_size
    hidden, vocab = hidden or size, target.vocab_size
    head_dim = hidden // HEADS
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 3 * size), "norm.weight": (hidden,)}
    shapes |= _layer(layer, hidden, 2 * hidden, head_dim)
    shapes |= {f"{layer}.{name}.weight": (hidden,) for name in ("hidden_norm", "input_layernorm")}
    for index in range(1, layers):
        shapes |= _layer(f"layers.{index}", hidden, hidden, head_dim)
        shapes[f"layers.{index}.input_layernorm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (drafts or vocab, hidden)
    if fc_norm:
        shapes |= {f"fc_norm.{index}.weight": (size,) for index in range(3)}
    if input_norm:
        shapes["input_norm.weight"] = (3 * size,)
    if qk_norm:
        shapes |= {f"{layer}.self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
    if hidden != size:
        shapes["embed_tokens.weight"] = (vocab, hidden)
        config["target_hidden_size"] = size
    state = _weights(shapes, seed)
    if drafts is not None and drafts != vocab:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randperm(vocab, generator=generator)[:drafts].sort().values
        state["d2t"] = ids - torch.arange(drafts)
        state["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
        config["draft_vocab_size"] = drafts
    return made("tiny-eagle3", _config(target, hidden, **config), state)


def speculators(checkpoint: Checkpoint, **flags: Any) -> Checkpoint:
    """The same draft as `speculators` writes it: the layer's numbers nested, flags outside."""
    inner = dict(checkpoint.config)
    outer = {
        key: inner.pop(key)
        for key in ("draft_vocab_size", "target_hidden_size")
        if inner.get(key) is not None
    }
    config = {
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3"},
        "norm_before_residual": False,
        "norm_before_fc": False,
        "target_hidden_size": None,
        "draft_vocab_size": inner["vocab_size"],
        **outer,
        "transformer_layer_config": inner,
        **flags,
    }
    return made("tiny-speculators", config, checkpoint.state)


def _norm(state: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    weight = state.get(f"{name}.weight")
    return x if weight is None else rms_norm(x, weight.shape, weight, 1e-5)


def _attention(
    state: dict[str, torch.Tensor],
    name: str,
    x: torch.Tensor,
    theta: float,
    see: torch.Tensor,
    at: torch.Tensor,
) -> torch.Tensor:
    """Attention over `x` `[T, …]` at positions `at`, each seeing where `see` `[T, T]` is true."""
    weight = {n: state[f"{name}.self_attn.{n}_proj.weight"] for n in "qkvo"}
    q, k, v = (x @ weight[n].T + state.get(f"{name}.self_attn.{n}_proj.bias", torch.zeros(())) for n in "qkv")
    dim = q.shape[-1] // HEADS
    q, k, v = q.view(-1, HEADS, dim), k.view(-1, KV_HEADS, dim), v.view(-1, KV_HEADS, dim)
    q, k = _norm(state, f"{name}.self_attn.q_norm", q), _norm(state, f"{name}.self_attn.k_norm", k)
    angle = at[:, None].float() / theta ** (torch.arange(0, dim, 2) / dim)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]

    def rotated(y: torch.Tensor) -> torch.Tensor:
        pairs = torch.complex(y[..., : dim // 2], y[..., dim // 2 :]) * turn
        return torch.cat([pairs.real, pairs.imag], -1)

    k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1) for y in (rotated(k), v))
    scores = torch.einsum("thd,shd->hts", rotated(q), k) / dim**0.5
    weights = scores.masked_fill(~see, float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v).flatten(1) @ weight["o"].T


def outputs(
    checkpoint: Checkpoint,
    target: Target,
    tokens: list[int],
    features: torch.Tensor,
    *,
    layer: str = "midlayer",
    see: torch.Tensor | None = None,
    at: torch.Tensor | None = None,
    theta: float = 10000.0,
    **flags: bool,
) -> torch.Tensor:
    """Outputs `[T, h]` of the network for tokens and the hidden states `[T, h]` they go in with, all at once."""
    state = checkpoint.state
    count = len(tokens)
    see = torch.ones(count, count).tril().bool() if see is None else see
    at = torch.arange(count) if at is None else at
    own = state.get("embed_tokens.weight")
    embedded = target.embeddings(torch.tensor(tokens)) if own is None else own[tokens]
    if f"{layer}.hidden_norm.weight" in state:
        normed = _norm(state, f"{layer}.hidden_norm", features)
        x = torch.cat([_norm(state, f"{layer}.input_layernorm", embedded), normed], -1)
        residual = normed if flags.get("norm_before_residual") else features
    else:
        x = torch.cat([embedded, features], -1) @ state["fc.weight"].T
        x = residual = x + state.get("fc.bias", torch.zeros(()))
    names = [layer, *(f"layers.{i}" for i in range(1, 9) if f"layers.{i}.input_layernorm.weight" in state)]
    for name in names:
        if name != layer:
            residual, x = x, _norm(state, f"{name}.input_layernorm", x)
        x = residual + _attention(state, name, x, theta, see, at)
        y = _norm(state, f"{name}.post_attention_layernorm", x)
        gate, up, down = (state[f"{name}.mlp.{part}_proj.weight"].T for part in ("gate", "up", "down"))
        said = checkpoint.config.get("transformer_layer_config", checkpoint.config)
        act = ACT2FN[said.get("hidden_act", "silu")]
        x = x + (act(y @ gate) * (y @ up)) @ down
    return x


def eagle3_features(
    checkpoint: Checkpoint, hidden: tuple[torch.Tensor, ...], inputs: list[int]
) -> torch.Tensor:
    """EAGLE-3's features `[T, h]` of a target's `hidden_states`, read at the inputs of layers `inputs`."""
    state = checkpoint.state
    parts = [_norm(state, f"fc_norm.{place}", hidden[index][0]) for place, index in enumerate(inputs)]
    return _norm(state, "input_norm", torch.cat(parts, -1)) @ state["fc.weight"].T
