"""Every layout of checkpoint the literature has, as config and shapes, and folders made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

H, V = 8, 32
Shapes = dict[str, tuple[int, ...]]
DTYPES = {"d2t": torch.int64, "t2d": torch.bool}


def folder(path: Path, config: dict[str, Any], shapes: Shapes, file: str = "model.safetensors") -> str:
    """A checkpoint of zeros."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    state = {key: torch.zeros(shape, dtype=DTYPES.get(key)) for key, shape in shapes.items()}
    save_file(state, path / file) if file.endswith(".safetensors") else torch.save(state, path / file)
    return str(path)


def layer(reads: int = H, *norms: str) -> Shapes:
    """The weights of a decoder layer of two heads whose attention reads `reads` numbers."""
    shapes: Shapes = {f"self_attn.{name}_proj.weight": (H, reads) for name in "qkv"}
    shapes |= {
        f"{name}.weight": (H, H)
        for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    }
    shapes |= {f"{norm}.weight": (H,) for norm in ("post_attention_layernorm", *norms)}
    return {f"layers.0.{name}": shape for name, shape in shapes.items()}


QK_NORMS: Shapes = {f"layers.0.self_attn.{name}_norm.weight": (H // 2,) for name in "qk"}
LAYER = layer()
WIDE = layer(2 * H, "hidden_norm", "input_layernorm")
MIDLAYER = {key.replace("layers.0", "midlayer"): shape for key, shape in WIDE.items()}
HEAD: Shapes = {"norm.weight": (H,), "lm_head.weight": (V, H)}
EAGLE = LAYER | {"fc.weight": (H, 2 * H), "fc.bias": (H,)}
FULL_EAGLE3 = MIDLAYER | HEAD | {"fc.weight": (H, 3 * H)}
EAGLE3 = FULL_EAGLE3 | {"lm_head.weight": (V // 2, H), "d2t": (V // 2,), "t2d": (V,)}
MEDUSA: Shapes = {
    f"{head}.{part}": shape
    for head in range(3)
    for part, shape in {"0.linear.weight": (H, H), "0.linear.bias": (H,), "1.weight": (V, H)}.items()
}
HYDRA: Shapes = {f"prefix_embeding_layer.{k}": v for k, v in layer(H, "input_layernorm").items()}
HYDRA |= {"prefix_embeding_layer.norm.weight": (H,)}
for head in range(2):
    for part in ("linear", "res_connection"):
        HYDRA |= {
            f"hydra_mlp.{head}.1.{part}.weight": (H, (head + 2) * H),
            f"hydra_mlp.{head}.1.{part}.bias": (H,),
        }
    HYDRA |= {f"hydra_lm_head.{head}.1.weight": (V, H), f"hydra_lm_head.{head}.1.bias": (V,)}
DFLASH = layer(H, "input_layernorm") | QK_NORMS
DFLASH |= {"fc.weight": (H, 2 * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
MARKOV: Shapes = {"markov_head.markov_w1.weight": (V, 4), "markov_head.markov_w2.weight": (V, 4)}
MODEL = {f"model.{key}": shape for key, shape in LAYER.items()}
MODEL |= {"model.embed_tokens.weight": (V, H), "model.norm.weight": (H,), "lm_head.weight": (V, H)}

ONE = {
    "num_attention_heads": 2,
    "intermediate_size": H,
    "num_hidden_layers": 1,
    "hidden_size": H,
    "vocab_size": V,
}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **ONE}
BLOCK = {"model_type": "qwen3", "block_size": 4, **ONE}
ZLAB = {**BLOCK, "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 2]}}
DEEPSPEC = {**BLOCK, "mask_token_id": 3, "target_layer_ids": [1, 2], "num_target_layers": 4}
SPECULATORS = {"transformer_layer_config": LLAMA, "block_size": 4, "mask_token_id": 3}

KNOWN = {
    "eagle": (LLAMA, EAGLE, "eagle", "SafeAILab"),
    "eagle, prefixed": (LLAMA, {f"model.{k}": v for k, v in EAGLE.items()}, "eagle", "SafeAILab"),
    "eagle, vllm": ({"model_type": "eagle", "model": LLAMA, "eagle_fc_bias": True}, EAGLE, "eagle", "vLLM"),
    "eagle3": (LLAMA, EAGLE3, "eagle3", "SafeAILab"),
    "eagle3, config of 40 layers": ({**LLAMA, "num_hidden_layers": 40}, EAGLE3, "eagle3", "SafeAILab"),
    "eagle3, equal vocabularies": (
        LLAMA,
        FULL_EAGLE3,
        "eagle3",
        "SafeAILab",
    ),
    "eagle3, own hidden size": (
        LLAMA,
        EAGLE3 | {"fc.weight": (H, 3 * 2 * H), "embed_tokens.weight": (V, H)},
        "eagle3",
        "SafeAILab",
    ),
    "eagle3, specforge": (
        {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"]},
        EAGLE3 | {f"fc_norm.{place}.weight": (H,) for place in range(3)},
        "eagle3",
        "SpecForge",
    ),
    "eagle3, angelslim": (
        {**LLAMA, "architectures": ["Eagle3LlamaForCausalLM"]},
        EAGLE3,
        "eagle3",
        "AngelSlim",
    ),
    "eagle3, modelopt": (
        {**LLAMA, "eagle_config": {"use_aux_hidden_state": True}},
        WIDE | HEAD | {"fc.weight": (H, 3 * H)},
        "eagle3",
        "ModelOpt",
    ),
    "eagle3, modelopt without features": (
        {**LLAMA, "eagle_config": {"use_aux_hidden_state": False}},
        layer(2 * H, "input_layernorm") | HEAD,
        "eagle3",
        "ModelOpt",
    ),
    "eagle3, deepspec": (
        {**DEEPSPEC, "architectures": ["Qwen3Eagle3Model"]},
        WIDE | HEAD | QK_NORMS | {"fc.weight": (H, 2 * H)},
        "eagle3",
        "DeepSpec",
    ),
    "eagle3, speculators": (
        {**SPECULATORS, "speculators_model_type": "eagle3"},
        WIDE | HEAD | {"fc.weight": (H, 3 * H)},
        "eagle3",
        "speculators",
    ),
    "p-eagle": ({**SPECULATORS, "speculators_model_type": "peagle"}, WIDE, "p-eagle", "speculators"),
    "dflash, speculators": (
        {**SPECULATORS, "speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [1, 2]},
        DFLASH,
        "dflash",
        "speculators",
    ),
    "medusa": ({"medusa_num_heads": 2, "medusa_num_layers": 1}, MEDUSA, "medusa", "Medusa"),
    "medusa without fields": ({}, MEDUSA, "medusa", "Medusa"),
    "medusa-2": (
        {**LLAMA, "medusa_num_heads": 3},
        MODEL | {f"medusa_head.{k}": v for k, v in MEDUSA.items()},
        "medusa-2",
        "Medusa",
    ),
    "medusa-2 without fields": (
        LLAMA,
        MODEL | {f"medusa_head.{k}": v for k, v in MEDUSA.items()},
        "medusa-2",
        "Medusa",
    ),
    "hydra": ({"hydra_num_heads": 2, "hydra_num_layers": 1}, HYDRA, "hydra", "Hydra"),
    "dflash": (ZLAB, DFLASH, "dflash", "z-lab"),
    "dflash, deepspec": (
        DEEPSPEC,
        DFLASH | {"embed_tokens.weight": (V, H), "lm_head.weight": (V, H)},
        "dflash",
        "DeepSpec",
    ),
    "dspark": (
        {**DEEPSPEC, "markov_rank": 4, "markov_head_type": "vanilla"},
        DFLASH | MARKOV,
        "dspark",
        "DeepSpec",
    ),
    "domino": (
        {**ZLAB, "dflash_config": {**ZLAB["dflash_config"], "projector_type": "domino"}},
        DFLASH,
        "domino",
        "z-lab",
    ),
    "jetspec": (
        {**ZLAB, "dflash_config": {**ZLAB["dflash_config"], "causal_head": True}},
        DFLASH,
        "jetspec",
        "z-lab",
    ),
    "mtp, deepseek": (
        {**LLAMA, "num_nextn_predict_layers": 1},
        MODEL | {"model.layers.1.eh_proj.weight": (H, 2 * H), "model.layers.1.enorm.weight": (H,)},
        "mtp",
        "DeepSeek",
    ),
    "mtp, qwen": (LLAMA, MODEL | {"mtp.fc.weight": (H, 2 * H), "mtp.layers.0.x.weight": (H,)}, "mtp", "Qwen"),
    "pard": ({**LLAMA, "pard_token": 5}, MODEL, "pard", "PARD"),
    "a language model": (LLAMA, MODEL, "causal-lm", "transformers"),
    "strange": ({"model_type": "new"}, {"a.weight": (2, 2), "b.weight": (2,)}, "unknown", "unknown"),
}
