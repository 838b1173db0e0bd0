"""Hydra++: equal to the official code round by round (up to ties), lossless, strict about its weights."""

from __future__ import annotations

import importlib
from typing import Any

import heads
import pytest
import tiny
import torch
from parity_scores import overheard
from test_exactness import check
from test_loop import ARCHITECTURES, hf_greedy
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from specbench.decoding.method import Request
from specbench.decoding.sampling import Sampling
from specbench.decoding.static_tree import StaticTree
from specbench.errors import SpecbenchError
from specbench.models.hydra import open_hydra
from specbench.models.target import Target

VOCAB, NEW = 64, 24
Hydra = importlib.import_module("specbench.methods.hydra").Hydra


@pytest.fixture(scope="module")
def official() -> heads.Golden:
    return heads.golden("hydra-prefixmlp-mcsim63")


@pytest.fixture(scope="module")
def llama() -> Target:
    return tiny.llama(VOCAB)


def random_hydra(target: Target, **options: Any) -> Hydra:
    return Hydra(target, draft=heads.checkpoint(heads.hydra_state(target)), **options)


# -- the official code's own rounds ------------------------------------------------------------------------------


def test_outputs_in_a_batch_are_the_official_ones(official: heads.Golden) -> None:
    golden = official.golden
    stop = frozenset([golden["settings"]["eos_token_id"]])
    drafter = Hydra(official.target, draft=str(official.folder / "draft"))
    outputs, _ = heads.run(drafter, Request(golden["prompts"], golden["settings"]["max_new_tokens"], stop))
    assert outputs == golden["outputs_trimmed"]


def test_prefix_and_head_logits_are_the_official_ones(official: heads.Golden) -> None:
    tensors = official.tensors()
    drafter = Hydra(official.target, draft=str(official.folder / "draft"))
    seen: list[dict[str, torch.Tensor]] = []
    propose = drafter.propose

    def spy(*args: Any) -> Any:
        with overheard(drafter.net, "logits") as heads_logits:
            drafts = propose(*args)
        seen.append({f"head{i}": logits[0] for i, logits in enumerate(heads_logits)})
        seen[-1]["prefix"] = drafter._state
        return drafts

    drafter.propose = spy  # type: ignore[method-assign]
    prompt = official.golden["prompts"][official.golden["settings"]["tensors_prompt_index"]]
    heads.run(drafter, Request([prompt], 20))
    for step in (0, 1):
        for name, ours in seen[step].items():
            expected = torch.from_numpy(tensors[f"round{step}_{name}"])
            expected = expected[-1:] if name == "prefix" else expected
            torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


# -- against a plain computation ---------------------------------------------------------------------------------


def plain_prefix(state: heads.State, target: Target, hidden: torch.Tensor) -> torch.Tensor:
    """The prefix layer by transformers' own Llama layer, over all of `hidden` `[1, T, H]` at once."""
    config = LlamaConfig(**{**target.config.to_dict(), "intermediate_size": 2 * hidden.shape[-1]})
    config._attn_implementation = "eager"
    layer, norm = LlamaDecoderLayer(config, 0), LlamaRMSNorm(hidden.shape[-1], config.rms_norm_eps)
    name = "prefix_embeding_layer."
    layer.load_state_dict({k: state[f"{name}layers.0.{k}"] for k in layer.state_dict()})
    norm.load_state_dict({"weight": state[f"{name}norm.weight"]})
    length = hidden.shape[1]
    mask = torch.full((length, length), -1e30).triu(1)[None, None]
    positions = torch.arange(length)[None]
    rope = LlamaRotaryEmbedding(config)(hidden, positions)
    with torch.no_grad():
        out = layer(hidden, attention_mask=mask, position_ids=positions, position_embeddings=rope)
        return norm(out[0] if isinstance(out, tuple) else out)


def head_by_definition(state: heads.State, head: int, path: torch.Tensor) -> torch.Tensor:
    def through(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    mlp = f"hydra_mlp.{head}"
    gate = through(f"{mlp}.1.linear", path)
    x = through(f"{mlp}.1.res_connection", path) + gate * gate.sigmoid()
    gate = through(f"{mlp}.3.linear", x)
    return through(f"hydra_lm_head.{head}.1", x + gate * gate.sigmoid())


@pytest.mark.parametrize(("theta", "act"), [(10000.0, "silu"), (500.0, "silu"), (10000.0, "gelu")])
def test_drafts_in_a_ragged_batch_by_the_definition(theta: float, act: str) -> None:
    """Grouped-query attention, any rope_theta and activation, rows of unequal length: every node, recomputed."""
    rope = {"rope_type": "default", "rope_theta": theta}
    target = tiny.llama(8, seed=3, hidden_act=act, rope_parameters=rope)
    state = heads.hydra_state(target)
    state["input_embed_fn.weight"] = target.embeddings.weight.detach().clone()
    drafter = Hydra(target, draft=heads.checkpoint(state))
    prompts = tiny.prompts(3, 8, seed=4)
    heard = heads.overheard(drafter)
    _, (first, *rounds) = heads.run(drafter, Request(prompts, 16))
    assert len({tuple(r.accepted) for r in rounds}) > 1
    assert any(len(set(r.accepted)) > 1 for r in rounds), "rows accept unequally"
    known = [prompt + new for prompt, new in zip(prompts, first.tokens, strict=True)]
    for drafts, one in zip(heard, rounds, strict=True):
        for row, draft in enumerate(drafts):
            if len(draft):
                compare_draft(state, target, known[row], draft)
            known[row] = known[row] + one.tokens[row]


def compare_draft(state: heads.State, target: Target, text: list[int], draft: Any) -> None:
    """`text` ends with the root, which the prefix layer has not seen."""
    with torch.no_grad(), target.stock_attention():
        hidden = target.model.model(torch.tensor([text[:-1]])).last_hidden_state
    start = plain_prefix(state, target, hidden)[0, -1]
    embed = state["input_embed_fn.weight"]
    tokens, parents = draft.tokens.tolist(), draft.parents.tolist()
    paths = {-1: torch.cat([start, embed[text[-1]]])}
    seen: dict[int, int] = {}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        head = len(paths[parent]) // 32 - 2
        ranked = head_by_definition(state, head, paths[parent]).sort(descending=True)
        rank = seen[parent] = seen.get(parent, -1) + 1
        assert token == int(ranked.indices[rank]) or abs(ranked.values[rank] - ranked.values[rank - 1]) < 1e-4
        paths[node] = torch.cat([paths[parent], embed[token]])


# -- lossless ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_equals_transformers(name: str, rows: int) -> None:
    config, attention = ARCHITECTURES[name]
    target = tiny.build(tiny.of_few_tokens(config), seed=1, attn=attention)
    prompts = tiny.prompts(rows, target.vocab_size, seed=2)
    outputs, rounds = heads.run(random_hydra(target), Request(prompts, NEW))
    assert outputs == [hf_greedy(target, prompt, NEW) for prompt in prompts]
    assert sum(n for r in rounds for n in r.accepted) > 0


@pytest.mark.parametrize("new", [1, 2, 3, 5])
def test_budgets_are_kept(llama: Target, new: int) -> None:
    prompts = tiny.prompts(4, VOCAB, seed=3)
    outputs, _ = heads.run(random_hydra(llama), Request(prompts, new))
    assert outputs == [hf_greedy(llama, prompt, new) for prompt in prompts]


def test_rows_that_stop_early_and_token_zero() -> None:
    target = tiny.llama(8, seed=3)
    prompts = tiny.prompts(4, 8, seed=4)
    plain = [hf_greedy(target, prompt, 40) for prompt in prompts]
    drafter = random_hydra(target)
    outputs, rounds = heads.run(drafter, Request(prompts, 40))
    assert outputs == plain
    kept = [t for r in rounds[1:] for row, n in enumerate(r.accepted) for t in r.tokens[row][:n]]
    assert kept.count(0) >= 5
    stop = frozenset([max(set(plain[0]), key=plain[0].index)])
    outputs, _ = heads.run(drafter, Request(prompts, 40, stop))
    assert outputs == [hf_greedy(target, prompt, 40, sorted(stop)) for prompt in prompts]
    assert len({len(output) for output in outputs}) > 1


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0), pytest.param(Sampling(0.7), marks=pytest.mark.slow)], ids=str
)
def test_sampling_is_exact(sampling: Sampling) -> None:
    target = tiny.llama(6, seed=3, layers=1, hidden=16, std=0.6)
    drafter = random_hydra(target)
    drafter.tree = StaticTree.growing({(): 3, (0,): 2, (1,): 2, (0, 0): 2})
    check(target, drafter, sampling)


# -- checkpoints and memory ----------------------------------------------------------------------------------


def test_memory_is_counted_and_given_back(llama: Target) -> None:
    state = heads.hydra_state(llama)
    state["input_embed_fn.weight"] = llama.embeddings.weight.detach().clone()
    drafter = Hydra(llama, draft=heads.checkpoint(state))
    unused = (
        "input_embed_fn",
        "prefix_embeding_layer.embed_tokens",
        "prefix_embeding_layer.layers.0.self_attn.rotary",
    )
    assert drafter.weights_bytes() == sum(v.nbytes for k, v in state.items() if not k.startswith(unused))
    heads.run(drafter, Request(tiny.prompts(2, VOCAB), 4))
    assert drafter.kv_bytes() > 0
    drafter.release()
    assert drafter.kv_bytes() == 0


def test_embeddings_of_its_own(llama: Target) -> None:
    """The official code lets the checkpoint's embeddings replace the target's in the heads' input."""
    state = heads.hydra_state(llama)
    net = open_hydra(heads.checkpoint(state), llama)
    tokens = torch.tensor([3, 5])
    assert torch.equal(net.embed(tokens, llama), state["input_embed_fn.weight"][tokens])
    del state["input_embed_fn.weight"]
    net = open_hydra(heads.checkpoint(state), llama)
    assert torch.equal(net.embed(tokens, llama), llama.embeddings(tokens))


def test_a_tree_no_deeper_than_the_heads(llama: Target) -> None:
    drafter = Hydra(llama, draft=heads.checkpoint(heads.hydra_state(llama, heads=2, blocks=3)))
    assert drafter.tree.depth == 2
    (prompt,) = tiny.prompts(1, VOCAB, seed=6)
    assert heads.run(drafter, Request([prompt], NEW))[0] == [hf_greedy(llama, prompt, NEW)]


def damaged(state: heads.State, key: str, value: torch.Tensor | None) -> heads.State:
    state = {k: v for k, v in state.items() if k != key}
    return state if value is None else {**state, key: value}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("hydra_mlp.1.3.linear.bias", None, "no weight hydra_mlp.1.3.linear.bias"),
        ("hydra_lm_head.3.1.bias", None, "no weight hydra_lm_head.3.1.bias"),
        ("prefix_embeding_layer.norm.weight", None, "no weight prefix_embeding_layer.norm.weight"),
        ("hydra_lm_head.0.1.weight", torch.zeros(50, 32), "its target has 50 token ids (hydra_lm_head.0.1.w"),
        ("hydra_mlp.0.1.linear.weight", torch.zeros(32, 96), "is 32 x 96, expected 32 x 64"),
        ("prefix_embeding_layer.layers.0.mlp.gate_proj.weight", torch.zeros(64, 48), "expected any x 32"),
        ("input_embed_fn.weight", torch.zeros(50, 32), "its target has 50 token ids (input_embed_fn.weight)"),
        ("prefix_embeding_layer.layers.1.mlp.up_proj.weight", torch.zeros(1), "layers.1.mlp.up_proj.weight"),
    ],
)
def test_wrong_weights(llama: Target, key: str, value: torch.Tensor | None, words: str) -> None:
    with pytest.raises(SpecbenchError) as caught:
        open_hydra(heads.checkpoint(damaged(heads.hydra_state(llama), key, value)), llama)
    assert words in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "config", [{"hydra_head_arch": "mlp"}, {"grounded_heads": False}, {"hidden_state_offset": 1}], ids=str
)
def test_another_kind_of_hydra(llama: Target, config: dict[str, Any]) -> None:
    with pytest.raises(SpecbenchError, match="of another kind"):
        open_hydra(heads.checkpoint(heads.hydra_state(llama), **config), llama)


def test_another_drafters_weights(llama: Target) -> None:
    with pytest.raises(SpecbenchError, match="no weight prefix_embeding_layer"):
        open_hydra(heads.checkpoint(heads.medusa_state(llama)), llama)


def test_no_heads_at_all(llama: Target) -> None:
    with pytest.raises(SpecbenchError, match="hydra needs Hydra heads"):
        Hydra(llama)
