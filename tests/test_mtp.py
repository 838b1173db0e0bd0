"""MTP: layers found in the target's own checkpoint, drafts as a plain pass gives them, and output left as it is."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_exactness import SAMPLINGS, VOCAB, check
from test_loop import ARCHITECTURES, SMALL, generate, hf_greedy
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from specbench.decoding.draft import Draft
from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Request
from specbench.errors import SpecbenchError
from specbench.models.load import load
from specbench.models.target import Target

Mtp = importlib.import_module("specbench.methods.mtp").Mtp
NEW = 24
MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
       "n_shared_experts": 1, "n_group": 1, "topk_group": 1}  # fmt: skip
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SMALL),
    "qwen3": Qwen3Config(**SMALL),
    "glm4": Glm4MoeConfig(**SMALL, **MOE),
    "deepseek": DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4, "head_dim": 4}, **MOE, q_lora_rank=12, kv_lora_rank=8,
        qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6,
    ),
}  # fmt: skip
State = dict[str, torch.Tensor]


def write_target(
    path: Path, config: PreTrainedConfig, layers: int = 1, qwen: bool = False, seed: int = 0
) -> Path:
    """A target's folder with MTP layers among its weights: of DeepSeek's layout, or of Qwen's."""
    tiny.build(config, seed).model.save_pretrained(path)
    state = load_file(path / "model.safetensors")
    save_file(state | mtp_weights(config, layers, qwen, seed), path / "model.safetensors")
    return path


def mtp_weights(config: PreTrainedConfig, layers: int, qwen: bool, seed: int) -> State:
    """Random layers, written as a checkpoint has them: one weight an expert."""
    generator = torch.Generator().manual_seed(seed)
    template = tiny.build(config, 1).model.model.layers[-1].state_dict()
    width, first = config.hidden_size, config.num_hidden_layers

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3 + (1 if len(shape) == 1 else 0)

    state = {}
    for number in range(layers):
        at = f"mtp.layers.{number}." if qwen else f"model.layers.{first + number}."
        for name, tensor in template.items():
            state |= split_experts(at + name, random(*tensor.shape))
        names = ("enorm", "hnorm", "shared_head.norm", "eh_proj")
        if qwen:
            at, names = "mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc")
        state |= {f"{at}{name}.weight": random(width) for name in names[:3]}
        state[f"{at}{names[3]}.weight"] = random(width, 2 * width)
    return state


def split_experts(key: str, tensor: torch.Tensor) -> State:
    if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {key: tensor}
    at, _, name = key.rpartition(".")
    parts = (
        {"gate": tensor.chunk(2, 1)[0], "up": tensor.chunk(2, 1)[1]} if "gate" in name else {"down": tensor}
    )
    return {f"{at}.{n}.{p}_proj.weight": t[n].clone() for p, t in parts.items() for n in range(len(tensor))}


def open_target(folder: Path, **options: Any) -> Target:
    loaded = load(str(folder), dtype="float32", device="cpu", **options)
    return Target(loaded.model, None, loaded.identity)


def record(drafter: Any) -> list[list[Draft]]:
    seen: list[list[Draft]] = []
    propose = drafter.propose

    def noting(*args: Any) -> list[Draft]:
        seen.append(propose(*args))
        return seen[-1]

    drafter.propose = noting
    return seen


@dataclass
class SlowMtp:
    """Every guess from the whole text: each layer over all its positions, no cache. Dense layers only."""

    target: Target
    state: State
    layers: int
    qwen: bool = False

    def chain(self, text: list[int], k: int) -> list[int]:
        base = self.target.model.model
        with torch.no_grad(), self.target.stock_attention():
            hidden = base(torch.tensor([text[:-1]])).last_hidden_state
            tokens, drafts = text[1:], []
            for step in range(k):
                if step < self.layers:
                    out = self.layer(step, tokens, hidden)
                    inputs, tokens_in = hidden, tokens
                else:  # the last layer, one position longer
                    inputs, tokens_in = torch.cat([inputs, out[:, -1:]], 1), [*tokens_in, drafts[-1]]
                    out = self.layer(self.layers - 1, tokens_in, inputs)
                drafts.append(int(self.target.lm_head(out[0, -1]).argmax()))
                tokens, hidden = [*tokens[1:], drafts[-1]], out
        return drafts

    def layer(self, index: int, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        base, config = self.target.model.model, self.target.config
        at = f"mtp.layers.{index}." if self.qwen else f"model.layers.{config.num_hidden_layers + index}."
        parts = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
        if not self.qwen:
            parts = tuple(at + name for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
        enorm, hnorm, project, norm = (self.state[f"{part}.weight"] for part in parts)
        block = type(base.layers[-1])(config, layer_idx=config.num_hidden_layers - 1)
        own = {k.removeprefix(at): v for k, v in self.state.items() if k.startswith(at)}
        block.load_state_dict({k: own[k] for k in block.state_dict()})
        embedded = self.rms(base.embed_tokens(torch.tensor([tokens])), enorm)
        x = torch.cat([embedded, self.rms(hidden, hnorm)], -1) @ project.T
        size = len(tokens)
        mask = torch.full((size, size), torch.finfo(torch.float32).min).triu(1)[None, None]
        rope = base.rotary_emb(x, position_ids=torch.arange(1, size + 1)[None])
        out = block(x, attention_mask=mask, position_embeddings=rope)
        return self.rms(out[0] if isinstance(out, tuple) else out, norm)

    def rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, self.target.config.rms_norm_eps)


@pytest.mark.parametrize(
    ("name", "layers", "k"),
    [("llama", 1, 1), ("llama", 1, 4), ("llama", 2, 2), ("llama", 3, 5), ("qwen3", 1, 3), ("qwen3", 2, 3)],
)
def test_drafts_equal_a_plain_recomputation(tmp_path: Path, name: str, layers: int, k: int) -> None:
    qwen = name == "qwen3"
    folder = write_target(tmp_path, CONFIGS[name], layers, qwen)
    target = open_target(folder)
    drafter = Mtp(target, k=0 if k == layers else k)
    seen = record(drafter)
    prompts = [*tiny.prompts(3, 64, seed=5), [9]]
    outputs, rounds = generate(DraftVerify(target, drafter), Request(prompts, NEW))
    assert outputs == [hf_greedy(target, prompt, NEW) for prompt in prompts]
    slow = SlowMtp(target, load_file(folder / "model.safetensors"), layers, qwen)
    for row, prompt in enumerate(prompts):
        text = list(prompt)
        for one, drafts in zip(rounds, seen, strict=False):
            text += one.tokens[row]
            tokens = torch.as_tensor(drafts[row].tokens).tolist()
            assert tokens == slow.chain(text, k)[: len(tokens)]
        assert len(seen[0][row]) == k


@pytest.mark.parametrize("name", ["glm4", "deepseek"])
@pytest.mark.parametrize("layers", [1, 2])
def test_drafts_equal_those_of_transformers(tmp_path: Path, name: str, layers: int) -> None:
    """Experts, partial rotation, latent attention: against transformers' own MTP model, over the whole text."""
    modeling = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(modeling, "MtpModel"):
        pytest.skip("this transformers has no MtpModel")
    folder = write_target(tmp_path, CONFIGS[name], layers)
    target = open_target(folder)
    drafter = Mtp(target)
    seen = record(drafter)
    prompts = tiny.prompts(3, 64, seed=6)
    outputs, rounds = generate(DraftVerify(target, drafter), Request(prompts, NEW))
    assert outputs == [hf_greedy(target, prompt, NEW) for prompt in prompts]
    main = AutoModelForCausalLM.from_pretrained(folder)
    main.config.num_nextn_predict_layers = layers
    main._keys_to_ignore_on_load_unexpected = {rf"model\.layers\.{2 + i}\..*" for i in range(layers)}
    theirs = modeling.MtpModel.from_pretrained(main)
    for row, prompt in enumerate(prompts):
        text = list(prompt)
        for one, drafts in zip(rounds, seen, strict=False):
            text += one.tokens[row]
            if not one.tokens[row] or not len(drafts[row]):
                continue
            with torch.no_grad():
                hidden = main.model(torch.tensor([text[:-1]])).last_hidden_state
                expected, _, _ = theirs(
                    input_ids=torch.tensor([text[1:]]), last_hidden_states=hidden, attention_mask=None,
                    position_ids=torch.arange(1, len(text))[None], mtp_cache=None,
                )  # fmt: skip
            tokens = torch.as_tensor(drafts[row].tokens).tolist()
            assert tokens == expected[0, : len(tokens)].tolist()


@pytest.mark.parametrize("name", [*ARCHITECTURES, "glm4", "deepseek"])
def test_greedy_output_is_the_targets(tmp_path: Path, name: str) -> None:
    config, attention = ARCHITECTURES[name] if name in ARCHITECTURES else (CONFIGS[name], "sdpa")
    config = tiny.of_few_tokens(config)
    target = tiny.build(config, seed=1, attn=attention)
    target.model.save_pretrained(tmp_path)
    if name == "gpt-oss":  # its experts are not of the gated kind that is stored one by one
        weights = fused_weights(target)
    else:
        weights = mtp_weights(config, 1, False, seed=3)
    save_file(weights, tmp_path / "model.safetensors")
    prompts = tiny.prompts(4, config.vocab_size, seed=2)
    answers = [hf_greedy(target, prompt, NEW) for prompt in prompts]
    method = DraftVerify(target, Mtp(target, draft=str(tmp_path), k=3))
    for rows in (1, 4):
        outputs, rounds = generate(method, Request(prompts[:rows], NEW))
        assert outputs == answers[:rows]
    assert sum(n for r in rounds for n in r.accepted) > 0


def fused_weights(target: Target) -> State:
    """An MTP layer that is the target's last one again."""
    at, width = f"model.layers.{target.config.num_hidden_layers}.", target.config.hidden_size
    block = {at + k: v.clone() for k, v in target.model.model.layers[-1].state_dict().items()}
    norms = {f"{at}{name}.weight": torch.ones(width) for name in ("enorm", "hnorm", "shared_head.norm")}
    return block | norms | {f"{at}eh_proj.weight": torch.eye(width).repeat(1, 2)}


def test_a_layer_that_copies_the_target_is_often_right(tmp_path: Path) -> None:
    """One that hands the last state on and names the token after it, on a target that does the same."""
    config = LlamaConfig(**SMALL)
    model = tiny.build(config, 2).model
    with torch.no_grad():  # layers that add nothing: the next token depends on the last one alone
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(tmp_path)
    state, weights = load_file(tmp_path / "model.safetensors"), mtp_weights(config, 1, False, 0)
    at, width = "model.layers.2.", config.hidden_size
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"{at}{name}.weight"].zero_()
    weights[at + "eh_proj.weight"] = torch.cat([torch.eye(width), torch.zeros(width, width)], 1)
    weights |= {f"{at}{name}.weight": torch.ones(width) for name in ("enorm", "hnorm", "shared_head.norm")}
    save_file(state | weights, tmp_path / "model.safetensors")
    target = open_target(tmp_path)
    _, rounds = generate(DraftVerify(target, Mtp(target, k=4)), Request(tiny.prompts(4, 64), NEW))
    assert all(one.accepted == [4] * 4 for one in rounds[1:-1])


def test_stop_tokens_limits_and_short_prompts(tmp_path: Path) -> None:
    target = open_target(write_target(tmp_path, CONFIGS["llama"], 2))
    prompts = [*tiny.prompts(3, 64, seed=7), [3]]
    free = [hf_greedy(target, prompt, NEW) for prompt in prompts]
    stop = frozenset({free[0][9], free[2][0]})
    method = DraftVerify(target, Mtp(target, k=3))
    outputs, _ = generate(method, Request(prompts, NEW, stop))
    assert outputs == [hf_greedy(target, prompt, NEW, sorted(stop)) for prompt in prompts]
    for limit in (1, 2, 3):
        outputs, rounds = generate(method, Request(prompts, limit))
        assert outputs == [answer[:limit] for answer in free]
        assert all(max(r.depth, default=0) <= limit - 2 for r in rounds[1:])


@pytest.mark.parametrize("sampling", SAMPLINGS[1:], ids=str)
def test_sampling_is_exact(tmp_path: Path, sampling: Any) -> None:
    config = tiny.llama(VOCAB, layers=1, hidden=16, std=0.6).config
    target = open_target(write_target(tmp_path, config, 1, seed=3))
    check(target, Mtp(target, k=3), sampling)


def test_only_its_own_weights_are_read_and_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_target(tmp_path, CONFIGS["glm4"])
    target = open_target(folder)
    own = mtp_weights(CONFIGS["glm4"], 1, False, 0)
    drafter = Mtp(target)
    assert drafter.weights_bytes() == sum(tensor.nbytes for tensor in own.values())
    assert drafter.draft_identity()["parameters"] == sum(tensor.numel() for tensor in own.values())
    method = DraftVerify(target, drafter)
    generate(method, Request([[1, 2, 3]], 8))
    assert drafter.kv_bytes() > 0
    method.release()
    assert drafter.kv_bytes() == 0


def test_copies_of_the_targets_weights_are_not_kept_and_others_are_used(tmp_path: Path) -> None:
    folder = write_target(tmp_path, CONFIGS["llama"])
    target = open_target(folder)
    plain = Mtp(target).weights_bytes()
    state = load_file(folder / "model.safetensors")
    head, embed = "model.layers.2.shared_head.head.weight", "model.layers.2.embed_tokens.weight"
    copies = {head: state["lm_head.weight"].clone(), embed: state["model.embed_tokens.weight"].clone()}
    save_file(state | copies, folder / "model.safetensors")
    assert Mtp(target).weights_bytes() == plain
    save_file(state | copies | {head: -copies[head]}, folder / "model.safetensors")
    drafter = Mtp(target)
    assert drafter.weights_bytes() == plain + copies[head].nbytes
    hidden = torch.randn(2, target.config.hidden_size)
    torch.testing.assert_close(drafter.net.logits(0, hidden), -target.lm_head(hidden))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.layers.2.hnorm.weight": None}, "has no weight model.layers.2.hnorm.weight"),
        ({"model.layers.2.mlp.experts.1.up_proj.weight": None}, "no weight model.layers.2.mlp.experts.1.up_"),
        ({"model.layers.2.eh_proj.weight": torch.zeros(32, 32)}, "eh_proj.weight is 32 x 32, expected 32 x 64"),
        ({"model.layers.2.conv.weight": torch.zeros(2)}, "holds model.layers.2.conv.weight"),
        ({"model.layers.3.hnorm.weight": torch.zeros(32)}, "holds model.layers.3.hnorm.weight"),
        ({"model.layers.2.enorm.weight": torch.full((32,), torch.nan)}, "enorm.weight holds NaN"),
        ({"model.layers.2.enorm.weight": torch.ones(32).to(torch.float8_e4m3fn)}, "quantised: .* is float8_e4m3fn"),
    ],
)  # fmt: skip
def test_wrong_weights_are_one_clear_line(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    folder = write_target(tmp_path, CONFIGS["glm4"])
    target = open_target(folder)
    state = load_file(folder / "model.safetensors") | change
    save_file({k: v for k, v in state.items() if v is not None}, folder / "model.safetensors")
    with pytest.raises(SpecbenchError, match=words):
        Mtp(target)


def test_refusals(tmp_path: Path) -> None:
    plain = tiny.build(CONFIGS["llama"])
    with pytest.raises(SpecbenchError, match="this target has no folder of safetensors"):
        Mtp(plain)
    plain.model.save_pretrained(tmp_path / "plain")
    target = open_target(tmp_path / "plain")
    with pytest.raises(
        SpecbenchError, match=r"has no multi-token-prediction layers: .*model.layers.2.eh_proj.weight"
    ):
        Mtp(target)
    other = write_target(tmp_path / "other", LlamaConfig(**{**SMALL, "hidden_size": 16}))
    with pytest.raises(SpecbenchError, match=r"enorm.weight is 16, expected 32"):
        Mtp(target, draft=str(other))
    with pytest.raises(ValueError, match="k must be at least 1"):
        Mtp(target, k=-1)
