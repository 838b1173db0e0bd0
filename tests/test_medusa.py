"""Medusa: equal to the official code round by round, lossless by default, and strict about its weights."""

from __future__ import annotations

import importlib
import json
from itertools import product
from pathlib import Path

import heads
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_exactness import check
from test_loop import ARCHITECTURES, hf_greedy

from specbench.decoding.draft import Draft
from specbench.decoding.method import Request
from specbench.decoding.sampling import Sampling
from specbench.decoding.static_tree import StaticTree
from specbench.decoding.tree import collate
from specbench.errors import SpecbenchError
from specbench.measure.memory import module_bytes
from specbench.models import checkpoint
from specbench.models.load import load
from specbench.models.medusa import MedusaHeads, open_medusa
from specbench.models.target import Target

VOCAB, NEW = 64, 24
module = importlib.import_module("specbench.methods.medusa")
Medusa, typical = module.Medusa, module.typical


@pytest.fixture(scope="module")
def official() -> heads.Golden:
    return heads.golden("medusa1-mcsim63")


@pytest.fixture(scope="module")
def llama() -> Target:
    return tiny.llama(VOCAB)


def random_medusa(target: Target, **options) -> Medusa:
    return Medusa(target, draft=heads.checkpoint(heads.medusa_state(target)), **options)


def one_head_at_a_time(state: heads.State, hidden: torch.Tensor, head: int, blocks: int) -> torch.Tensor:
    """Logits by the definition, for comparison."""
    x = hidden
    for block in range(blocks):
        gate = x @ state[f"{head}.{block}.linear.weight"].T + state[f"{head}.{block}.linear.bias"]
        x = x + gate * gate.sigmoid()
    return x @ state[f"{head}.{blocks}.weight"].T


# -- the official code's own rounds ------------------------------------------------------------------------------


def test_outputs_in_a_batch_are_the_official_ones(official: heads.Golden) -> None:
    golden = official.golden
    stop = frozenset([golden["settings"]["eos_token_id"]])
    drafter = Medusa(official.target, draft=str(official.folder / "draft"))
    outputs, _ = heads.run(drafter, Request(golden["prompts"], golden["settings"]["max_new_tokens"], stop))
    assert outputs == golden["outputs_trimmed"]


def test_head_logits_are_the_official_ones(official: heads.Golden) -> None:
    tensors = official.tensors()
    drafter = Medusa(official.target, draft=str(official.folder / "draft"))
    logits: list[torch.Tensor] = []
    propose = drafter.propose
    drafter.propose = lambda *a: (logits.append(drafter.heads.logits(drafter._hidden)), propose(*a))[1]
    prompt = official.golden["prompts"][official.golden["settings"]["tensors_prompt_index"]]
    heads.run(drafter, Request([prompt], 20))
    for step in (0, 1):
        expected = torch.from_numpy(tensors[f"round{step}_medusa_logits"])
        torch.testing.assert_close(logits[step][0], expected, atol=1e-4, rtol=1e-4)


# -- lossless ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_equals_transformers(name: str, rows: int) -> None:
    config, attention = ARCHITECTURES[name]
    target = tiny.build(tiny.of_few_tokens(config), seed=1, attn=attention)
    prompts = tiny.prompts(rows, target.vocab_size, seed=2)
    outputs, rounds = heads.run(random_medusa(target), Request(prompts, NEW))
    assert outputs == [hf_greedy(target, prompt, NEW) for prompt in prompts]
    assert sum(n for r in rounds for n in r.accepted) > 0


@pytest.mark.parametrize("new", [1, 2, 3, 5])
def test_budgets_are_kept(llama: Target, new: int) -> None:
    prompts = tiny.prompts(4, VOCAB, seed=3)
    drafter = random_medusa(llama)
    heard = heads.overheard(drafter)
    outputs, _ = heads.run(drafter, Request(prompts, new))
    assert outputs == [hf_greedy(llama, prompt, new) for prompt in prompts]
    for drafts in heard:
        assert all(len(draft) <= drafter.max_nodes for draft in drafts)


def test_rows_that_stop_early(llama: Target) -> None:
    prompts = tiny.prompts(4, VOCAB, seed=4)
    plain = [hf_greedy(llama, prompt, NEW) for prompt in prompts]
    stop = frozenset([plain[0][5], plain[2][9]])
    outputs, _ = heads.run(random_medusa(llama), Request(prompts, NEW, stop))
    assert outputs == [hf_greedy(llama, prompt, NEW, sorted(stop)) for prompt in prompts]
    assert len({len(output) for output in outputs}) > 1


def test_token_zero_is_a_token_like_others() -> None:
    """The official loop copies a wrong cache row when token 0, its padding, is emitted."""
    target = tiny.llama(6, seed=2)
    prompts = tiny.prompts(3, 6, seed=5)
    drafter = random_medusa(target)
    outputs, rounds = heads.run(drafter, Request(prompts, 40))
    assert outputs == [hf_greedy(target, prompt, 40) for prompt in prompts]
    kept = [t for r in rounds[1:] for row, n in enumerate(r.accepted) for t in r.tokens[row][:n]]
    assert kept.count(0) >= 5


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0), pytest.param(Sampling(0.7, top_p=0.9), marks=pytest.mark.slow)],
    ids=str,
)
def test_sampling_is_exact(sampling: Sampling) -> None:
    target = tiny.llama(6, seed=3, layers=1, hidden=16, std=0.6)
    drafter = random_medusa(target)
    drafter.tree = StaticTree.growing({(): 3, (0,): 2, (1,): 2, (0, 0): 2})
    check(target, drafter, sampling)


# -- typical acceptance --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("epsilon", "alpha"), [(0.3, 0.5), (0.05, 0.9)])
def test_typical_by_the_definition(epsilon: float, alpha: float) -> None:
    """Against every path tried in turn, with a chain, a bare root and padding in the batch."""
    torch.manual_seed(0)
    shape = StaticTree([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)])
    for _ in range(30):
        tokens = torch.randint(0, 5, (6,))
        drafts = [Draft(tokens, shape.parents), Draft(tokens[:2], [-1, 0]), Draft()]
        tree = collate(torch.tensor([1, 2, 3]), drafts, [True, True, True], 5)
        logits = 2 * torch.randn(3, 7, 5)
        verdict = typical(tree, logits, Sampling(0.8), epsilon, alpha)
        for row, draft in enumerate(drafts):
            best = slow_typical(draft, logits[row], 0.8, epsilon, alpha)
            count = int(verdict.accepted[row])
            assert (verdict.path[row, 1 : count + 1] - 1).tolist() == best
            assert int(verdict.bonus[row]) == int(logits[row, best[-1] + 1 if best else 0].argmax())


def slow_typical(
    draft: Draft, logits: torch.Tensor, temperature: float, epsilon: float, alpha: float
) -> list[int]:
    parents = [] if draft.parents is None else torch.as_tensor(draft.parents).tolist()
    best: tuple[int, float, list[int]] = (0, 0.0, [])
    for node in range(len(draft)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        score, fine = 0.0, True
        for n in path:
            p = (logits[parents[n] + 1] / temperature).softmax(-1)
            entropy = -float((p * p.log()).sum())
            own = float(p[int(draft.tokens[n])])
            fine &= own > min(epsilon, alpha * 2.718281828459045**-entropy)
            score += torch.tensor(own).log().item()
        if fine and (len(path) > best[0] or (len(path) == best[0] and score > best[1])):
            best = (len(path), score, path)
    return best[2]


def test_typical_draws_nothing_and_keeps_more(official: heads.Golden) -> None:
    prompts = official.golden["prompts"][:4]
    drafter = Medusa(official.target, draft=str(official.folder / "draft"), posterior="typical")
    assert not drafter.lossless

    def outputs(rows: list[list[int]], seed: int) -> list[list[int]]:
        generators = [torch.Generator().manual_seed(seed + row) for row in range(len(rows))]
        return heads.run(drafter, Request(rows, 20, frozenset(), Sampling(0.7), generators))[0]

    together = outputs(prompts, 0)
    assert outputs(prompts, 7) == together, "no seed matters, not even for the first token"
    assert [outputs([prompt], 0)[0] for prompt in prompts] == together


def test_typical_at_temperature_zero_is_greedy(official: heads.Golden) -> None:
    golden = official.golden
    drafter = Medusa(official.target, draft=str(official.folder / "draft"), posterior="typical")
    outputs, _ = heads.run(drafter, Request(golden["prompts"][:2], 30))
    assert outputs == [answer[:30] for answer in golden["vanilla"][:2]]


# -- checkpoints ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "blocks"), [(5, 1), (3, 2), (2, 3)])
def test_heads_are_the_official_ones(llama: Target, count: int, blocks: int) -> None:
    state = heads.medusa_state(llama, count, blocks)
    opened = open_medusa(heads.checkpoint(state, medusa_num_heads=2, medusa_num_layers=1), llama)
    assert len(opened) == count
    hidden = torch.randn(3, 32)
    for some in (None, 1):
        logits = opened.logits(hidden, some)
        assert logits.shape == (3, some or count, VOCAB)
        for head in range(some or count):
            torch.testing.assert_close(logits[:, head], one_head_at_a_time(state, hidden, head, blocks))
    assert module_bytes(opened) == sum(tensor.nbytes for tensor in state.values())


def test_blocks_that_safetensors_keep_once(llama: Target) -> None:
    """Official heads repeat one block; a file without the repetitions means the same."""
    state = heads.medusa_state(llama, 2, 3)
    for head, block, part in product(range(2), (1, 2), ("weight", "bias")):
        state[f"{head}.{block}.linear.{part}"] = state[f"{head}.0.linear.{part}"]
    short = {k: v for k, v in state.items() if ".1.linear" not in k and ".2.linear" not in k}
    hidden = torch.randn(3, 32)
    whole = open_medusa(heads.checkpoint(state), llama).logits(hidden)
    torch.testing.assert_close(open_medusa(heads.checkpoint(short), llama).logits(hidden), whole)


def test_a_tree_no_deeper_than_the_heads(llama: Target) -> None:
    drafter = Medusa(llama, draft=heads.checkpoint(heads.medusa_state(llama, 2)))
    assert drafter.tree.depth == 2
    prompts = tiny.prompts(2, VOCAB, seed=6)
    outputs, _ = heads.run(drafter, Request(prompts, NEW))
    assert outputs == [hf_greedy(llama, prompt, NEW) for prompt in prompts]


def test_a_file_of_heads(llama: Target, tmp_path: Path) -> None:
    state = heads.medusa_state(llama)
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 2}))
    save_file(state, tmp_path / "medusa_lm_head.safetensors")
    drafter = Medusa(llama, draft=str(tmp_path))
    identity = drafter.draft_identity()
    assert identity is not None
    assert identity["files"].keys() == {"config.json", "medusa_lm_head.safetensors"}
    assert drafter.weights_bytes() == identity["bytes"]
    assert drafter.kv_bytes() == 0


def test_the_pickled_file_is_hashed(official: heads.Golden) -> None:
    identity = Medusa(official.target, draft=str(official.folder / "draft")).draft_identity()
    assert "medusa_lm_head.pt" in identity["files"]


def test_medusa_2_is_its_own_target(tiny_target: Path, tmp_path: Path) -> None:
    for file in tiny_target.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    loaded = load(str(tiny_target), dtype="float32", device="cpu")
    own = heads.medusa_state(Target(loaded.model), 3)
    whole = load_file(tmp_path / "model.safetensors") | {f"medusa_head.{k}": v for k, v in own.items()}
    save_file(whole, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = load(str(tmp_path), dtype="float32", device="cpu")
    target = Target(loaded.model, loaded.tokenizer, loaded.identity)
    drafter = Medusa(target)
    hidden = torch.randn(2, 32)
    expected = open_medusa(heads.checkpoint(own), target).logits(hidden)
    assert torch.equal(drafter.heads.logits(hidden), expected)
    prompts = tiny.prompts(2, target.vocab_size, seed=8)
    outputs, _ = heads.run(drafter, Request(prompts, NEW))
    assert outputs == [hf_greedy(target, prompt, NEW) for prompt in prompts]


def test_of_a_whole_model_only_the_heads_are_read(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named as the draft of another target, as well as of its own."""
    loaded = load(str(tiny_target), dtype="float32", device="cpu")
    target = Target(loaded.model, loaded.tokenizer, loaded.identity)
    own = heads.medusa_state(target, 3)
    whole = load_file(tiny_target / "model.safetensors") | {f"medusa_head.{k}": v for k, v in own.items()}
    (tmp_path / "config.json").write_bytes((tiny_target / "config.json").read_bytes())
    save_file(whole, tmp_path / "model.safetensors", {"format": "pt"})
    looked_at: list[str] = []
    monkeypatch.setattr(checkpoint, "_check_finite", lambda ref, key, tensor: looked_at.append(key))
    drafter = Medusa(target, draft=str(tmp_path))
    assert sorted(looked_at) == sorted(f"medusa_head.{key}" for key in own)
    assert drafter.draft_identity()["parameters"] == sum(tensor.numel() for tensor in own.values())


def damaged(state: heads.State, key: str, value: torch.Tensor | None) -> heads.State:
    state = {k: v for k, v in state.items() if k != key}
    return state if value is None else {**state, key: value}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("1.0.linear.bias", None, "no weight 1.0.linear.bias"),
        ("2.1.weight", None, "no weight 2.1.weight"),
        ("0.0.linear.weight", torch.zeros(48, 48), "0.0.linear.weight is 48 x 48, expected 32 x 32"),
        ("3.1.weight", torch.zeros(50, 32), "3.1.weight is 50 x 32, expected 64 x 32"),
        ("fc.weight", torch.zeros(2, 2), "holds fc.weight, which this kind of drafter"),
    ],
)
def test_wrong_weights(llama: Target, key: str, value: torch.Tensor | None, words: str) -> None:
    state = damaged(heads.medusa_state(llama), key, value)
    with pytest.raises(SpecbenchError) as caught:
        open_medusa(heads.checkpoint(state), llama)
    assert words in caught.value.message
    assert "\n" not in caught.value.message


def test_another_drafters_weights(llama: Target) -> None:
    with pytest.raises(SpecbenchError, match=r"no weight 0\.0\.linear\.weight"):
        open_medusa(heads.checkpoint(heads.hydra_state(llama)), llama)


def test_no_heads_at_all(llama: Target) -> None:
    with pytest.raises(SpecbenchError, match="medusa needs Medusa heads"):
        Medusa(llama)


def test_an_unknown_tree(llama: Target) -> None:
    with pytest.raises(SpecbenchError, match="no tree is called"):
        random_medusa(llama, tree="oak")


def test_heads_take_the_targets_dtype(llama: Target) -> None:
    half = Target(tiny.llama(VOCAB).model.to(torch.bfloat16))
    opened = open_medusa(heads.checkpoint(heads.medusa_state(llama)), half)
    assert isinstance(opened, MedusaHeads)
    assert {weight.dtype for weight in opened.parameters()} == {torch.bfloat16}
