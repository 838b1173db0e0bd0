"""Tiny DFlash and DSpark drafts in the official layout, and a slow, plain re-computation of what they propose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import rms_norm
from transformers import Qwen3Config
from transformers.activations import ACT2FN
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, rotate_half

from specbench.models.target import Target

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def write_draft(
    path: Path,
    target: Target,
    *,
    block: int = 5,
    layers: int = 2,
    seed: int = 0,
    markov: str = "",
    **config: Any,
) -> Path:
    """A draft with random weights for `target`; `markov` makes it one of DeepSpec with a head of that kind."""
    hidden = target.config.hidden_size
    vocab, there = target.vocab_size, target.config.num_hidden_layers
    fields = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": vocab,
        "block_size": block,
        "num_target_layers": there,
        "dflash_config": {"mask_token_id": vocab - 1, "target_layer_ids": [0, there - 1]},
    }
    if markov:
        del fields["dflash_config"]
        fields |= {
            "architectures": ["Qwen3DSparkModel"],
            "target_layer_ids": [-1, 0],
            "mask_token_id": vocab - 1,
            "num_anchors": 8,
            "markov_rank": 6,
            "markov_head_type": markov,
        }
    fields |= config
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(fields))
    save_file(_weights(hidden, vocab, layers, markov, seed), path / "model.safetensors")
    return path


def _weights(hidden: int, vocab: int, layers: int, markov: str, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 2 * hidden)}
    norms = {"norm": hidden, "hidden_norm": hidden}
    for layer in range(layers):
        at = f"layers.{layer}."
        shapes |= {
            at + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, hidden),
            at + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, hidden),
            at + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, hidden),
            at + "self_attn.o_proj.weight": (hidden, HEADS * HEAD_DIM),
            at + "mlp.gate_proj.weight": (2 * hidden, hidden),
            at + "mlp.up_proj.weight": (2 * hidden, hidden),
            at + "mlp.down_proj.weight": (hidden, 2 * hidden),
        }
        norms |= {at + "input_layernorm": hidden, at + "post_attention_layernorm": hidden}
        norms |= {at + "self_attn.q_norm": HEAD_DIM, at + "self_attn.k_norm": HEAD_DIM}
    if markov:
        shapes |= {"markov_head.markov_w1.weight": (vocab, 6), "markov_head.markov_w2.weight": (vocab, 6)}
    if markov == "gated":
        shapes |= {"markov_head.gate_proj.weight": (6, hidden + 6), "markov_head.gate_proj.bias": (6,)}
    if markov == "rnn":
        shapes |= {"markov_head.joint_proj.weight": (18, hidden + 12), "markov_head.joint_proj.bias": (18,)}
    state = {key: torch.randn(shape, generator=generator) * 0.4 for key, shape in shapes.items()}
    return state | {f"{k}.weight": 1 + 0.3 * torch.randn(n, generator=generator) for k, n in norms.items()}


class SlowDFlash:
    """Every guess from the whole text, one row, no cache: the official formulas, said once more."""

    def __init__(self, folder: Path, target: Target) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.state = load_file(folder / "model.safetensors")
        self.target = target

    def logits(self, text: list[int]) -> torch.Tensor:
        """Logits `[drafts, V]` for the places behind `text`, without a Markov head."""
        hidden = self.hidden(text)
        return self.target.lm_head(hidden if self.deepspec else hidden[1:])

    def tokens(self, text: list[int]) -> list[int]:
        """The argmax chain behind `text`, with the Markov head if there is one."""
        with torch.no_grad():
            hidden, base = self.hidden(text), self.logits(text)
            if not self.deepspec:
                return base.argmax(-1).tolist()
            w1, w2 = (self.state[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
            out, before, state = [], text[-1], torch.zeros(6)
            for step, scores in enumerate(base):
                latent = w1[before]
                if self.config["markov_head_type"] == "gated":
                    latent = latent * torch.sigmoid(self.affine("gate_proj", hidden[step], latent))
                if self.config["markov_head_type"] == "rnn":
                    gate, new, told = self.affine("joint_proj", state, latent, hidden[step]).chunk(3)
                    state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(new)
                    latent = torch.tanh(told)
                before = int((scores + w2 @ latent).argmax())
                out.append(before)
            return out

    @property
    def deepspec(self) -> bool:
        return "markov_rank" in self.config

    def affine(self, name: str, *parts: torch.Tensor) -> torch.Tensor:
        weight, bias = (self.state[f"markov_head.{name}.{kind}"] for kind in ("weight", "bias"))
        return weight @ torch.cat(parts) + bias

    def hidden(self, text: list[int]) -> torch.Tensor:
        """Normed states `[B, H]` of the block behind `text`, whose last token is the block's first."""
        nested = self.config.get("dflash_config", self.config)
        with torch.no_grad(), self.target.stock_attention():
            seen = self.target.model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        context = torch.cat([seen[i + 1][0] for i in nested["target_layer_ids"]], -1)
        context = self.norm("hidden_norm", context @ self.state["fc.weight"].T)
        block = [text[-1]] + [nested["mask_token_id"]] * (self.config["block_size"] - 1)
        x = self.target.embeddings.weight[block]
        for layer in range(self.config["num_hidden_layers"]):
            x = self.layer(layer, x, context)
        return self.norm("norm", x)

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self.state[f"{name}.weight"]
        return rms_norm(x, weight.shape, weight, 1e-6)

    def layer(self, index: int, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        at = f"layers.{index}."
        before, size = len(context), len(x)
        normed = self.norm(at + "input_layernorm", x)
        every = torch.cat([context, normed])
        heads = {
            name: (y @ self.state[f"{at}self_attn.{name}_proj.weight"].T)
            .view(len(y), -1, HEAD_DIM)
            .transpose(0, 1)
            for name, y in (("q", normed), ("k", every), ("v", every))
        }
        q, k = (self.norm(f"{at}self_attn.{name}_norm", heads[name]) for name in ("q", "k"))
        cos, sin = self.rotary(before + size)
        q = q * cos[before:] + rotate_half(q) * sin[before:]
        k = k * cos + rotate_half(k) * sin
        scores = q @ k.repeat_interleave(HEADS // KV_HEADS, 0).transpose(1, 2) / HEAD_DIM**0.5
        if self.config.get("layer_types", [""] * 9)[index] == "sliding_attention":
            back = torch.arange(before, before + size)[:, None] - torch.arange(before + size)
            scores[:, (back < 0) | (back >= self.config["sliding_window"])] = -torch.inf
        mixed = scores.softmax(-1) @ heads["v"].repeat_interleave(HEADS // KV_HEADS, 0)
        x = x + mixed.transpose(0, 1).flatten(1) @ self.state[at + "self_attn.o_proj.weight"].T
        y = self.norm(at + "post_attention_layernorm", x)
        gate, up, down = (self.state[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        act = ACT2FN[self.config.get("hidden_act", "silu")]
        return x + (act(y @ gate.T) * (y @ up.T)) @ down.T

    def rotary(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        rope = {"rope_type": "default", "rope_theta": self.config["rope_theta"]}
        config = Qwen3Config(hidden_size=32, num_attention_heads=4, head_dim=HEAD_DIM, rope_parameters=rope)
        cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
        return cos[0], sin[0]
