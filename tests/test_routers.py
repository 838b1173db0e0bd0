"""Experts woken by a verify pass, against a slow recount from the routers' own logits, on tiny mixtures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from fake_cuda import FakeCuda
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from specbench.decoding.draft import Draft, Drafter
from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Request
from specbench.measure.clock import NullClock
from specbench.models import routers
from specbench.models.passes import Passes
from specbench.models.target import Target

VOCAB, EXPERTS, ACTIVE = 32, 8, 2
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "num_experts_per_tok": ACTIVE,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
GROUPED = {"n_group": 2, "topk_group": 2, "n_routed_experts": EXPERTS, "moe_intermediate_size": 16}
MIXTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "mixtral": lambda: MixtralConfig(**COMMON, num_local_experts=EXPERTS),
    "qwen3_moe": lambda: Qwen3MoeConfig(**COMMON, num_experts=EXPERTS, moe_intermediate_size=16),
    "deepseek_v3": lambda: DeepseekV3Config(
        **COMMON | {"num_key_value_heads": 4}, **LATENT, **GROUPED, first_k_dense_replace=1
    ),
    "gpt_oss": lambda: GptOssConfig(**COMMON, num_local_experts=EXPERTS, head_dim=8, sliding_window=16),
    "olmoe": lambda: OlmoeConfig(**COMMON, num_experts=EXPERTS),
    "granitemoe": lambda: GraniteMoeConfig(**COMMON, num_local_experts=EXPERTS),
    "glm4_moe": lambda: Glm4MoeConfig(**COMMON, **GROUPED, head_dim=8, first_k_dense_replace=1),
}


def mixture(name: str) -> Target:
    return tiny.build(MIXTURES[name](), attn="eager" if name == "gpt_oss" else "sdpa")


class Noise(Drafter):
    """Drafts of varying length, so that rounds differ; rows of a batch differ too."""

    max_nodes = 5

    def begin(self, prompts: list[list[int]]) -> None:
        self._round = 0

    def propose(self, budgets: list[int], generators: Any) -> list[Draft]:
        self._round += 1
        return [
            Draft(
                [(7 * self._round + 3 * i + row) % VOCAB for i in range(min(b, 1 + (self._round + row) % 5))]
            )
            for row, b in enumerate(budgets)
        ]


def recount(name: str, layer_logits: list[torch.Tensor]) -> float:
    """Mean over layers of the different experts among each token's best ones, one token at a time."""
    counts = []
    for logits in layer_logits:
        # Grouped routing keeps every group here (topk_group = n_group), and its bias is zero: the best are the best.
        woken = {expert for token in logits for expert in token.float().topk(ACTIVE).indices.tolist()}
        counts.append(len(woken))
    return sum(counts) / len(counts)


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("rows", [1, 3])
def test_experts_of_each_round_against_a_recount_from_the_logits(name: str, rows: int) -> None:
    target = mixture(name)
    assert target.experts == EXPERTS
    assert len(target.router_taps) == (2 if name in ("deepseek_v3", "glm4_moe") else 3)
    passes: list[list[torch.Tensor]] = []

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        (logits,) = (part for part in output if part.is_floating_point() and part.shape[-1] == EXPERTS)
        if len(passes[-1]) == len(target.router_taps):
            passes.append([])
        passes[-1].append(logits)

    handles = [router.register_forward_hook(keep) for router in routers.routers(target.model)]
    passes.append([])
    request = Request(tiny.prompts(rows, VOCAB), 12)
    rounds = list(DraftVerify(target, Noise(target)).generate(request, NullClock()))
    for handle in handles:
        handle.remove()
    assert rounds[0].experts is None  # the prefill is no verify pass
    recorded = [float(one.experts) for one in rounds[1:] if one.experts is not None]
    assert len(recorded) == len(rounds) - 1 == len(passes) - 1
    assert recorded == pytest.approx([recount(name, each) for each in passes[1:]])
    assert min(recorded) >= ACTIVE
    assert len(set(recorded)) > 1


@pytest.mark.parametrize("name", MIXTURES)
def test_captured_passes_tell_the_same_experts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks do not run in a replay: what they had taken is written anew, and padding is cut off."""
    FakeCuda().install(monkeypatch)
    plain, captured = mixture(name), mixture(name)
    captured.passes = Passes("target")
    request = Request(tiny.prompts(3, VOCAB), 24)
    one, other = (list(DraftVerify(t, Noise(t)).generate(request, NullClock())) for t in (plain, captured))
    assert captured.passes.off is None
    assert captured.passes.made > 1
    assert [each.tokens for each in one] == [each.tokens for each in other]
    assert [float(e.experts) for e in one[1:]] == [float(e.experts) for e in other[1:]]  # type: ignore[arg-type]


def test_a_dense_target_has_none_and_drafters_do_not_see_the_routers() -> None:
    dense = tiny.llama()
    assert dense.router_taps == ()
    request = Request(tiny.prompts(1, VOCAB), 4)
    assert all(
        one.experts is None for one in DraftVerify(dense, Drafter(dense)).generate(request, NullClock())
    )

    class Curious(Drafter):
        taps = ("final",)

        def observe(self, outcome: Any) -> None:
            assert list(outcome.taps) == ["final"]

    target = mixture("mixtral")
    list(DraftVerify(target, Curious(target)).generate(request, NullClock()))


def test_tokens_are_the_same_with_and_without_the_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    target = mixture("qwen3_moe")
    request = Request(tiny.prompts(2, VOCAB), 10)

    def tokens() -> list[Any]:
        return [one.tokens for one in DraftVerify(target, Noise(target)).generate(request, NullClock())]

    counted = tokens()
    monkeypatch.setattr(Target, "router_taps", ())
    assert tokens() == counted


def test_a_run_keeps_them_in_its_trials(tmp_path: Path) -> None:
    from tiny_folder import Workplace, quiet_machine, save_folder, write_task

    folder = save_folder(tmp_path / "dense")  # for its tokenizer
    config = MixtralConfig(**COMMON | {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
                           num_local_experts=EXPERTS)  # fmt: skip
    tiny.build(config).model.save_pretrained(folder)
    task = write_task(tmp_path / "work.jsonl", [["abc abc abc"], ["x y x y"]])
    place = Workplace(tmp_path, folder, task, ["--threads", 1, "--warmup", 0])
    with quiet_machine():
        found = place.run("--method", "prompt-lookup", "--batch-size", "1,2")
    assert found.code == 0, found.err
    for row in place.rows():
        experts = row["rounds"]["experts"]
        assert len(experts) == len(row["rounds"]["emitted"])
        assert all(ACTIVE <= value <= EXPERTS for value in experts)
        if row["method"] == "vanilla" and row["batch_size"] == 1:
            assert set(experts) == {float(ACTIVE)}
