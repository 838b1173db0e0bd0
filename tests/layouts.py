"""Every layout of checkpoint the literature has, as config and shapes, and folders made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

H, V = 8, 32
Shapes = dict[str, tuple[int, ...]]


def folder(path: Path, config: dict[str, Any], shapes: Shapes, file: str = "model.safetensors") -> str:
    """A checkpoint of zeros."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    state = {key: torch.zeros(shape) for key, shape in shapes.items()}
    save_file(state, path / file) if file.endswith(".safetensors") else torch.save(state, path / file)
    return str(path)


LAYER: Shapes = {
    "layers.0.self_attn.q_proj.weight": (H, H),
    "layers.0.self_attn.o_proj.weight": (H, H),
    "layers.0.mlp.gate_proj.weight": (H, H),
    "layers.0.post_attention_layernorm.weight": (H,),
}
WIDE = LAYER | {"layers.0.self_attn.q_proj.weight": (H, 2 * H), "layers.0.hidden_norm.weight": (H,)}
MIDLAYER = {key.replace("layers.0", "midlayer"): shape for key, shape in WIDE.items()}
EAGLE = LAYER | {"fc.weight": (H, 2 * H), "fc.bias": (H,)}
EAGLE3 = MIDLAYER | {"fc.weight": (H, 3 * H), "norm.weight": (H,), "lm_head.weight": (V // 2, H)}
EAGLE3 |= {"d2t": (V // 2,), "t2d": (V,)}
MEDUSA: Shapes = {
    f"{head}.{part}": shape
    for head in range(3)
    for part, shape in {"0.linear.weight": (H, H), "0.linear.bias": (H,), "1.weight": (V, H)}.items()
}
HYDRA: Shapes = {
    "prefix_embeding_layer.layers.0.self_attn.q_proj.weight": (H, H),
    "hydra_mlp.0.1.linear.weight": (H, 2 * H),
    "hydra_mlp.1.1.linear.weight": (H, 3 * H),
    "hydra_lm_head.0.1.weight": (V, H),
    "hydra_lm_head.1.1.weight": (V, H),
}
DFLASH = LAYER | {
    "fc.weight": (H, 2 * H),
    "hidden_norm.weight": (H,),
    "norm.weight": (H,),
    "layers.0.self_attn.q_norm.weight": (4,),
}
MARKOV: Shapes = {"markov_head.markov_w1.weight": (V, 4), "markov_head.markov_w2.weight": (V, 4)}
MODEL = {f"model.{key}": shape for key, shape in LAYER.items()}
MODEL |= {"model.embed_tokens.weight": (V, H), "model.norm.weight": (H,), "lm_head.weight": (V, H)}

ONE = {"num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": H, "vocab_size": V}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **ONE}
BLOCK = {"model_type": "qwen3", "block_size": 4, **ONE}
ZLAB = {**BLOCK, "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 2]}}
DEEPSPEC = {**BLOCK, "mask_token_id": 3, "target_layer_ids": [1, 2], "num_target_layers": 4}
SPECULATORS = {"transformer_layer_config": LLAMA, "block_size": 4, "mask_token_id": 3}

KNOWN = {
    "eagle": (LLAMA, EAGLE, "eagle", "SafeAILab"),
    "eagle, prefixed": (LLAMA, {f"model.{k}": v for k, v in EAGLE.items()}, "eagle", "SafeAILab"),
    "eagle, vllm": ({"model_type": "eagle", "model": LLAMA}, EAGLE, "eagle", "vLLM"),
    "eagle3": (LLAMA, EAGLE3, "eagle3", "SafeAILab"),
    "eagle3, config of 40 layers": ({**LLAMA, "num_hidden_layers": 40}, EAGLE3, "eagle3", "SafeAILab"),
    "eagle3, equal vocabularies": (
        LLAMA,
        {k: v for k, v in EAGLE3.items() if k not in ("d2t", "t2d")},
        "eagle3",
        "SafeAILab",
    ),
    "eagle3, own hidden size": (LLAMA, EAGLE3 | {"fc.weight": (H, 3 * 2 * H)}, "eagle3", "SafeAILab"),
    "eagle3, specforge": (
        {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"]},
        EAGLE3 | {"fc_norm.0.weight": (H,)},
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
        WIDE | {"fc.weight": (H, 3 * H), "norm.weight": (H,), "lm_head.weight": (V, H)},
        "eagle3",
        "ModelOpt",
    ),
    "eagle3, modelopt without features": (
        {**LLAMA, "eagle_config": {"use_aux_hidden_state": False}},
        {k: v for k, v in WIDE.items() if "hidden_norm" not in k} | {"norm.weight": (H,)},
        "eagle3",
        "ModelOpt",
    ),
    "eagle3, deepspec": (
        {**DEEPSPEC, "architectures": ["Qwen3Eagle3Model"]},
        WIDE | {"fc.weight": (H, 2 * H), "norm.weight": (H,), "layers.0.self_attn.q_norm.weight": (4,)},
        "eagle3",
        "DeepSpec",
    ),
    "eagle3, speculators": (
        {**SPECULATORS, "speculators_model_type": "eagle3"},
        WIDE | {"fc.weight": (H, 3 * H)},
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
    "dspark": ({**DEEPSPEC, "markov_rank": 4}, DFLASH | MARKOV, "dspark", "DeepSpec"),
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
