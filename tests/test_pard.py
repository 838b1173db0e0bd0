"""PARD: k guesses from one pass over the text and its masks; nothing but the text stays in the draft's cache."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from test_exactness import SAMPLINGS, VOCAB, check
from test_loop import ARCHITECTURES, generate, hf_greedy
from transformers import LlamaConfig, LlamaForCausalLM

from specbench.decoding.draft import Draft
from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Request
from specbench.errors import SpecbenchError
from specbench.models.target import Target

Pard = importlib.import_module("specbench.methods.pard").Pard
NEW, MASK = 24, 63


def write_pard(path: Path, vocab: int = 64, seed: int = 0, like: Target | None = None, **config: Any) -> str:
    """A PARD draft: a plain model whose config names a `pard_token`. `like`: with this Llama's weights."""
    shape = like.config if like is not None else tiny.llama(vocab, seed, layers=1, hidden=16).config
    model = LlamaForCausalLM(LlamaConfig.from_dict(shape.to_dict()))
    torch.manual_seed(seed)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    if like is not None:
        model.load_state_dict(like.model.state_dict())
    model.save_pretrained(path)
    fields = json.loads((path / "config.json").read_text()) | {"pard_token": vocab - 1} | config
    (path / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    return str(path)


@pytest.fixture(scope="module")
def llama() -> Target:
    return tiny.llama(64)


@pytest.fixture(scope="module")
def draft(llama: Target, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The target's own weights: the first guess, which no mask precedes, is always right."""
    return write_pard(tmp_path_factory.mktemp("drafts") / "pard", like=llama)


def record(drafter: Any) -> list[list[Draft]]:
    seen: list[list[Draft]] = []
    propose = drafter.propose

    def noting(*args: Any) -> list[Draft]:
        seen.append(propose(*args))
        return seen[-1]

    drafter.propose = noting
    return seen


def slow(draft: Target, text: list[int], k: int) -> list[int]:
    """The guesses behind `text`, from all of it at once, without a cache."""
    with torch.no_grad(), draft.stock_attention():
        return draft.model(torch.tensor([text + [MASK] * (k - 1)])).logits[0, -k:].argmax(-1).tolist()


@pytest.mark.parametrize("seed", [None, 3])
def test_drafts_equal_a_plain_recomputation(
    llama: Target, draft: str, tmp_path: Path, seed: int | None
) -> None:
    drafter = Pard(llama, draft=draft if seed is None else write_pard(tmp_path, seed=seed), k=6)
    seen = record(drafter)
    prompts = [*tiny.prompts(3, 64, seed=5), [9]]
    outputs, rounds = generate(DraftVerify(llama, drafter), Request(prompts, NEW))
    assert outputs == [hf_greedy(llama, prompt, NEW) for prompt in prompts]
    for row, prompt in enumerate(prompts):
        text = list(prompt)
        for one, drafts in zip(rounds, seen, strict=False):
            text += one.tokens[row]
            tokens = torch.as_tensor(drafts[row].tokens).tolist()
            assert tokens == slow(drafter.draft, text, 6)[: len(tokens)]
        assert len(seen[0][row]) == 6
    if seed is None:
        assert all(n >= 1 for one in rounds[1:-2] for n in one.accepted), (
            "the first guess is the target's own"
        )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_output_is_the_targets(name: str, tmp_path: Path) -> None:
    config, attention = ARCHITECTURES[name]
    target = tiny.build(config, seed=1, attn=attention)
    method = DraftVerify(target, Pard(target, draft=write_pard(tmp_path)))
    prompts = tiny.prompts(4, 64, seed=2)
    answers = [hf_greedy(target, prompt, NEW) for prompt in prompts]
    assert generate(method, Request(prompts[:1], NEW))[0] == answers[:1]
    outputs, rounds = generate(method, Request(prompts, NEW))
    assert outputs == answers
    assert rounds[1].drafted == [12] * 4, "12 a round, as published"


def test_stop_tokens_limits_and_short_prompts(llama: Target, draft: str) -> None:
    prompts = [*tiny.prompts(3, 64, seed=7), [3]]
    free = [hf_greedy(llama, prompt, NEW) for prompt in prompts]
    stop = frozenset({free[0][9], free[2][0]})
    method = DraftVerify(llama, Pard(llama, draft=draft, k=5))
    outputs, _ = generate(method, Request(prompts, NEW, stop))
    assert outputs == [hf_greedy(llama, prompt, NEW, sorted(stop)) for prompt in prompts]
    for limit in (1, 2, 3):
        outputs, rounds = generate(method, Request(prompts, limit))
        assert outputs == [answer[:limit] for answer in free]
        assert all(max(r.depth, default=0) <= limit - 2 for r in rounds[1:])


def test_one_pass_of_the_draft_a_round_and_only_the_text_stays(llama: Target, draft: str) -> None:
    drafter = Pard(llama, draft=draft, k=5)
    passes: list[int] = []
    drafter.draft.model.register_forward_pre_hook(lambda *_: passes.append(1))
    (prompt,) = tiny.prompts(1, 64)
    (output,), rounds = generate(DraftVerify(llama, drafter), Request([prompt], NEW))
    drafted = sum(1 for r in rounds[1:] if r.drafted[0])
    assert len(passes) == 1 + drafted, "the prompt, then one a round"
    assert drafter._context.lengths[0] <= len(prompt) + len(output)


def test_a_draft_stops_where_its_context_ends(llama: Target, tmp_path: Path) -> None:
    drafter = Pard(llama, draft=write_pard(tmp_path, max_position_embeddings=20), k=5)
    prompts = [[1] * 12, [2] * 30]
    outputs, rounds = generate(DraftVerify(llama, drafter), Request(prompts, NEW))
    assert outputs == [hf_greedy(llama, prompt, NEW) for prompt in prompts]
    assert rounds[1].drafted == [5, 0]
    assert rounds[-1].drafted[0] in (0, None)


@pytest.mark.parametrize("sampling", SAMPLINGS[1:], ids=str)
def test_sampling_is_exact(tmp_path: Path, sampling: Any) -> None:
    target = tiny.llama(VOCAB, seed=3, layers=1, hidden=16, std=0.6)
    check(target, Pard(target, draft=write_pard(tmp_path, VOCAB), k=3), sampling)


def test_what_it_holds(llama: Target, draft: str) -> None:
    drafter = Pard(llama, draft=draft)
    assert drafter.weights_bytes() == llama.weights_bytes()
    assert drafter.draft_identity()["ref"] == draft
    method = DraftVerify(llama, drafter)
    generate(method, Request([[1, 2, 3]], 8))
    assert drafter.kv_bytes() > 0
    method.release()
    assert drafter.kv_bytes() == 0


def test_refusals(llama: Target, tmp_path: Path) -> None:
    with pytest.raises(SpecbenchError, match="pard needs a draft model"):
        Pard(llama)
    with pytest.raises(SpecbenchError, match="is a language model, not a PARD draft model"):
        Pard(llama, draft=write_pard(tmp_path / "a", pard_token=None))
    with pytest.raises(SpecbenchError, match=r"pard_token = 64, expected an id below 64"):
        Pard(llama, draft=write_pard(tmp_path / "b", pard_token=64))
    with pytest.raises(SpecbenchError, match="48 token ids and the target 64"):
        Pard(llama, draft=write_pard(tmp_path / "c", 48))
    with pytest.raises(ValueError, match="k must be at least 1"):
        Pard(llama, draft=write_pard(tmp_path / "d"), k=0)


def test_a_draft_whose_weights_do_not_belong_to_its_config_names_the_weight(
    llama: Target, tmp_path: Path
) -> None:
    """Not transformers' advice on how to load it all the same."""
    ref = write_pard(tmp_path, intermediate_size=8)
    with pytest.raises(
        SpecbenchError, match=r"weight model\.layers\.0\.mlp\.\w+\.weight is .*, expected "
    ) as caught:
        Pard(llama, draft=ref)
    assert "ignore_mismatched_sizes" not in caught.value.message + caught.value.hint
