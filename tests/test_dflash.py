"""DFlash drafts what the official code drafts, and its chains and trees change nothing in the output."""

from __future__ import annotations

import heapq
import importlib
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_exactness import SAMPLINGS, VOCAB, check
from test_loop import ARCHITECTURES, generate, hf_greedy
from tiny_dflash import SlowDFlash, write_draft

from specbench.decoding.draft import Draft, Drafter
from specbench.decoding.loop import DraftVerify
from specbench.decoding.marginal_tree import best_first, count_nodes
from specbench.decoding.method import Request
from specbench.errors import SpecbenchError
from specbench.models.checkpoint import open_checkpoint
from specbench.models.dflash_settings import default_layer_ids
from specbench.models.load import load
from specbench.models.target import Target

PARITY = Path(__file__).parents[2] / "shared" / "parity"
FIXTURES = ("dflash-b16-l3-defaultids", "dflash-b8-l2")
DFlash = importlib.import_module("specbench.methods.dflash").DFlash
NEW = 24


@pytest.fixture(scope="module")
def llama() -> Target:
    return tiny.llama(64)


@pytest.fixture(scope="module")
def draft(llama: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_draft(tmp_path_factory.mktemp("drafts") / "dflash", llama)


class Recorded:
    """A drafter whose proposals and logits are written down."""

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter
        self.drafts: list[list[Draft]] = []
        self.logits: list[torch.Tensor] = []
        self._propose, self._logits = drafter.propose, drafter.net.logits
        drafter.propose, drafter.net.logits = self.propose, self.note

    def propose(self, *args: Any) -> list[Draft]:
        self.drafts.append(self._propose(*args))
        return self.drafts[-1]

    def note(self, *args: Any) -> torch.Tensor:
        self.logits.append(self._logits(*args))
        return self.logits[-1]

    def tokens(self, row: int = 0) -> list[list[int]]:
        return [torch.as_tensor(drafts[row].tokens).tolist() for drafts in self.drafts]


# -- against the official code ---------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=FIXTURES)
def fixture(request: pytest.FixtureRequest) -> tuple[Path, dict, Target]:
    folder = PARITY / request.param
    if not folder.is_dir():
        pytest.skip("the golden files are not on this machine")
    loaded = load(str(folder / "target"), dtype="float32", device="cpu")
    return folder, json.loads((folder / "golden.json").read_text()), Target(loaded.model)


def test_every_round_is_the_official_one(fixture: tuple[Path, dict, Target]) -> None:
    folder, golden, target = fixture
    block, limit = golden["settings"]["block_size"], golden["settings"]["max_new_tokens"]
    stop = frozenset({golden["settings"]["eos_token_id"]})
    compared = 0
    for prompt, output, rounds in zip(golden["prompts"], golden["outputs"], golden["rounds"], strict=True):
        recorded = Recorded(DFlash(target, draft=str(folder / "draft")))
        request = Request([prompt], limit + block, stop)
        (ours,), ran = generate(DraftVerify(target, recorded.drafter), request)
        assert ours[: len(output)] == output
        assert ours[len(output) :] == [] or len(output) == limit
        for number, (official, tokens) in enumerate(zip(rounds, recorded.tokens(), strict=False)):
            assert tokens == official["draft_tokens"], f"round {number}"
            cut = ran[1 + number].tokens[0][-1] in stop
            assert cut or ran[1 + number].accepted[0] == official["accepted"]
            compared += 1
    assert compared == sum(map(len, golden["rounds"])), "no round is left out"


def test_logits_of_the_first_rounds_are_the_official_ones(fixture: tuple[Path, dict, Target]) -> None:
    folder, golden, target = fixture
    tensors = np.load(folder / "tensors.npz")
    recorded = Recorded(DFlash(target, draft=str(folder / "draft")))
    prompt = golden["prompts"][golden["settings"]["tensors_prompt_index"]]
    generate(DraftVerify(target, recorded.drafter), Request([prompt], 60))
    for number in range(2):
        expected = torch.from_numpy(tensors[f"round{number}_draft_logits"])
        torch.testing.assert_close(recorded.logits[number][0], expected, atol=1e-4, rtol=0)


def test_a_batch_drafts_as_its_rows_alone(fixture: tuple[Path, dict, Target]) -> None:
    folder, golden, target = fixture
    rows = golden["prompts"][:4]
    recorded = Recorded(DFlash(target, draft=str(folder / "draft")))
    outputs, _ = generate(DraftVerify(target, recorded.drafter), Request(rows, 56))
    for row, rounds in enumerate(golden["rounds"][:4]):
        official = [r["draft_tokens"] for r in rounds]
        if golden["settings"]["eos_token_id"] not in outputs[row]:
            assert recorded.tokens(row)[: len(official)] == official
    assert len(outputs) == 4


def test_default_layers_are_spread_as_the_official_code_does() -> None:
    assert default_layer_ids(36, 5) == [1, 9, 17, 25, 33]
    assert default_layer_ids(8, 3) == [1, 3, 5]
    assert default_layer_ids(8, 1) == [4]


# -- against a slow re-computation -----------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "chain": {},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7},
    "activation": {"hidden_act": "gelu"},
    "dspark-vanilla": {"markov": "vanilla"},
    "dspark-gated": {"markov": "gated"},
    "dspark-rnn": {"markov": "rnn"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_equal_a_plain_recomputation(llama: Target, tmp_path: Path, variant: str) -> None:
    folder = write_draft(tmp_path, llama, **VARIANTS[variant])
    prompts = [*tiny.prompts(3, 64, seed=5), [9]]
    recorded = Recorded(DFlash(llama, draft=str(folder)))
    outputs, rounds = generate(DraftVerify(llama, recorded.drafter), Request(prompts, NEW))
    assert outputs == [hf_greedy(llama, prompt, NEW) for prompt in prompts]
    slow = SlowDFlash(folder, llama)
    for row, prompt in enumerate(prompts):
        text = list(prompt)
        for one, drafted in zip(rounds, recorded.tokens(row), strict=False):
            text += one.tokens[row]
            assert drafted == slow.tokens(text)[: len(drafted)]
        assert len(recorded.tokens(row)[0]) == recorded.drafter.settings.drafts


def test_every_tree_is_built_of_its_blocks_marginals(llama: Target, draft: Path) -> None:
    prompts = [*tiny.prompts(2, 64, seed=6), [9]]
    recorded = Recorded(DFlash(llama, draft=str(draft), tree="ddtree", nodes=40))
    _, rounds = generate(DraftVerify(llama, recorded.drafter), Request(prompts, 16))
    assert any(n for r in rounds for n in r.accepted), "some context comes from inside a tree"
    slow = SlowDFlash(draft, llama)
    for row, prompt in enumerate(prompts):
        text = list(prompt)
        for one, drafts in zip(rounds, recorded.drafts, strict=False):
            text += one.tokens[row]
            if len(drafts[row]):
                tree = paths(drafts[row].tokens.tolist(), drafts[row].parents.tolist())
                depth = max(map(len, tree))
                assert set(tree) == set(by_heap(slow.logits(text).log_softmax(-1)[:depth], len(tree)))


def by_heap(log_probs: torch.Tensor, nodes: int) -> list[tuple[int, ...]]:
    """The likeliest prefixes one by one, best first: every prefix may be followed by every token."""
    table = log_probs.tolist()
    heap = [(-score, (token,)) for token, score in enumerate(table[0])]
    heapq.heapify(heap)
    found = []
    while heap and len(found) < nodes:
        score, prefix = heapq.heappop(heap)
        found.append(prefix)
        if len(prefix) < len(table):
            for token, more in enumerate(table[len(prefix)]):
                heapq.heappush(heap, (score - more, (*prefix, token)))
    return found


def paths(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    out: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        assert parent < len(out), "a node stands behind its parent"
        out.append((*(out[parent] if parent >= 0 else ()), token))
    return out


@pytest.mark.parametrize("nodes", [1, 2, 7, 40, 500])
@pytest.mark.parametrize("peak", [0.3, 3.0])
def test_best_first_equals_enumeration(nodes: int, peak: float) -> None:
    generator = torch.Generator().manual_seed(nodes)
    log_probs = (torch.randn(4, 3, 5, generator=generator, dtype=torch.double) * peak).log_softmax(-1)
    depths = [3, 0, 1, 2]
    tokens, parents = best_first(log_probs, nodes, depths)
    for row, depth in enumerate(depths):
        every = itertools.chain(*(itertools.product(range(5), repeat=d) for d in range(1, depth + 1)))
        score = {path: sum(log_probs[row, d, t].item() for d, t in enumerate(path)) for path in every}
        expected = sorted(score, key=lambda path: -score[path])[:nodes]
        count = count_nodes(nodes, 5, depth)
        assert count == min(nodes, sum(5**d for d in range(1, depth + 1)))
        assert paths(tokens[row, :count].tolist(), parents[row, :count].tolist()) == expected


def test_best_first_puts_parents_first_where_all_are_equally_likely() -> None:
    certain = torch.full((1, 60, 3), -torch.inf)
    certain[..., 1] = 0.0
    tokens, parents = best_first(certain, 60, [60])
    assert paths(tokens[0].tolist(), parents[0].tolist()) == [(1,) * depth for depth in range(1, 61)]
    assert count_nodes(60, 3, 60) == 60


# -- lossless --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_output_is_the_targets(name: str, tmp_path: Path) -> None:
    config, attention = ARCHITECTURES[name]
    target = tiny.build(tiny.of_few_tokens(config), seed=1, attn=attention)
    folder = str(write_draft(tmp_path, target))
    prompts = tiny.prompts(4, target.vocab_size, seed=2)
    answers = [hf_greedy(target, prompt, NEW) for prompt in prompts]
    for options in ({}, {"tree": "ddtree", "nodes": 20}):
        method = DraftVerify(target, DFlash(target, draft=folder, **options))
        for rows in (1, 4):
            outputs, rounds = generate(method, Request(prompts[:rows], NEW))
            assert outputs == answers[:rows]
            assert sum(n for r in rounds for n in r.accepted) > 0


@pytest.mark.parametrize("tree", ["chain", "ddtree"])
def test_stop_tokens_limits_and_short_prompts(llama: Target, draft: Path, tree: str) -> None:
    prompts = [*tiny.prompts(3, 64, seed=7), [3]]
    free = [hf_greedy(llama, prompt, NEW) for prompt in prompts]
    stop = frozenset({free[0][9], free[2][0]})
    method = DraftVerify(llama, DFlash(llama, draft=str(draft), tree=tree))
    outputs, _ = generate(method, Request(prompts, NEW, stop))
    assert outputs == [hf_greedy(llama, prompt, NEW, sorted(stop)) for prompt in prompts]
    for limit in (1, 2, 3):
        outputs, rounds = generate(method, Request(prompts, limit))
        assert outputs == [answer[:limit] for answer in free]
        assert all(max(r.depth, default=0) <= limit - 2 for r in rounds[1:])


@pytest.fixture(scope="module")
def six() -> Target:
    return tiny.llama(VOCAB, seed=3, layers=2, hidden=16, std=0.6)


@pytest.mark.parametrize("sampling", SAMPLINGS[1:], ids=str)
@pytest.mark.parametrize("kind", ["chain", "ddtree", "dspark"])
def test_sampling_is_exact(six: Target, tmp_path: Path, kind: str, sampling: Any) -> None:
    folder = str(write_draft(tmp_path, six, block=4, layers=1, markov="vanilla" if kind == "dspark" else ""))
    tree = {"tree": "ddtree", "nodes": 9} if kind == "ddtree" else {}
    check(six, DFlash(six, draft=folder, **tree), sampling)


# -- costs and refusals ----------------------------------------------------------------------------------------


def test_what_it_holds(llama: Target, draft: Path) -> None:
    drafter = DFlash(llama, draft=open_checkpoint(str(draft)))
    assert drafter.weights_bytes() == sum(t.nbytes for t in load_file(draft / "model.safetensors").values())
    assert drafter.draft_identity()["notes"] == ["DFlash draft"]
    assert drafter.taps == ("layer:0", "final"), "transformers' last hidden state is the normed one"
    assert drafter.kv_bytes() == 0
    method = DraftVerify(llama, drafter)
    generate(method, Request([[1, 2, 3]], 8))
    assert drafter.kv_bytes() > 0
    method.release()
    assert drafter.kv_bytes() == 0


def test_copies_of_the_targets_weights_are_not_kept_and_others_are_used(
    llama: Target, tmp_path: Path
) -> None:
    folder = write_draft(tmp_path, llama, markov="vanilla")
    state = load_file(folder / "model.safetensors")
    plain = DFlash(llama, draft=str(folder)).weights_bytes()
    copies = {"embed_tokens.weight": llama.embeddings.weight, "lm_head.weight": llama.lm_head.weight}
    save_file(state | {k: v.detach().clone() for k, v in copies.items()}, folder / "model.safetensors")
    assert DFlash(llama, draft=str(folder)).weights_bytes() == plain
    other = {"lm_head.weight": -llama.lm_head.weight.detach()}
    save_file(state | other, folder / "model.safetensors")
    drafter = DFlash(llama, draft=str(folder))
    assert drafter.weights_bytes() == plain + llama.lm_head.weight.nbytes
    hidden = torch.randn(1, 2, llama.config.hidden_size)
    torch.testing.assert_close(drafter.net.logits(hidden), -llama.lm_head(hidden))


def test_without_a_base_of_its_own_the_rope_is_the_targets(tmp_path: Path) -> None:
    target = tiny.llama(rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    ours = DFlash(target, draft=str(write_draft(tmp_path / "a", target, rope_theta=None)))
    given = DFlash(target, draft=str(write_draft(tmp_path / "b", target, rope_theta=500.0)))
    other = DFlash(target, draft=str(write_draft(tmp_path / "c", target, rope_theta=10000.0)))
    frequencies = [drafter.net._frequencies[0] for drafter in (ours, given, other)]
    assert torch.equal(frequencies[0], frequencies[1])
    assert not torch.equal(frequencies[0], frequencies[2])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "hidden": ({"hidden_size": 16}, r"states of size 16 \(hidden_size\), this target's have size 32"),
    "layers": ({"num_target_layers": 7}, "made for a target of 7 layers, this one has 2"),
    "ids": ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 9]}}, "reads target layer 9"),
    "mask": (
        {"dflash_config": {"mask_token_id": 64, "target_layer_ids": [0, 1]}},
        "mask_token_id 64, the target's",
    ),
    "no mask": ({"dflash_config": {"target_layer_ids": [0, 1]}}, "mask_token_id"),
    "block": ({"block_size": 1}, "leaves nothing to draft"),
    "no heads": ({"num_attention_heads": None}, "num_attention_heads"),
    "jetspec": ({"causal_head": True}, "is a JetSpec draft"),
    "selector": ({"selector_rank": 8}, "DFlash 2's candidate selector"),
    "types": ({"layer_types": ["full_attention"]}, "has 2 layers and layer types full_attention"),
    "speculators": ({"speculators_model_type": "dflash"}, "written by speculators"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_config_that_does_not_fit_is_one_clear_line(llama: Target, tmp_path: Path, case: str) -> None:
    config, words = WRONG[case]
    with pytest.raises(SpecbenchError, match=words):
        DFlash(llama, draft=str(write_draft(tmp_path, llama, **config)))


@pytest.mark.parametrize(
    ("key", "tensor", "words"),
    [
        ("layers.1.mlp.up_proj.weight", None, "has no weight layers.1.mlp.up_proj.weight"),
        ("fc.weight", torch.zeros(32, 96), "weight fc.weight is 32 x 96, expected 32 x 64"),
        ("layers.0.attention_conv.base_kernel", torch.zeros(2), "holds layers.0.attention_conv.base_kernel"),
        ("norm.weight", torch.full((32,), torch.nan), "norm.weight holds NaN"),
    ],
)
def test_wrong_weights_are_one_clear_line(
    llama: Target, tmp_path: Path, key: str, tensor: torch.Tensor | None, words: str
) -> None:
    folder = write_draft(tmp_path, llama)
    state = load_file(folder / "model.safetensors")
    state.pop(key, None)
    save_file(state | ({} if tensor is None else {key: tensor}), folder / "model.safetensors")
    with pytest.raises(SpecbenchError, match=words):
        DFlash(llama, draft=str(folder))


def test_options_that_cannot_be(llama: Target, draft: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecbenchError, match="needs a DFlash draft"):
        DFlash(llama)
    for nodes in (0, 100_000):
        with pytest.raises(ValueError, match="nodes must be 1 to 1024"):
            DFlash(llama, draft=str(draft), nodes=nodes)
    markov = write_draft(tmp_path, llama, markov="vanilla")
    with pytest.raises(ValueError, match="do not depend on each other"):
        DFlash(llama, draft=str(markov), tree="ddtree")


@pytest.mark.parametrize("tree", ["chain", "ddtree"])
def test_drafting_reads_nothing_from_the_device(
    llama: Target, draft: Path, monkeypatch: pytest.MonkeyPatch, tree: str
) -> None:
    drafter = DFlash(llama, draft=str(draft), tree=tree)
    reads = []

    def quietly(step: Any) -> Any:
        def run(*args: Any) -> Any:
            with monkeypatch.context() as patch:
                for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__"):
                    real = getattr(torch.Tensor, name)
                    patch.setattr(
                        torch.Tensor,
                        name,
                        lambda self, *a, real=real, **k: (reads.append(real), real(self, *a, **k))[1],
                    )
                return step(*args)

        return run

    drafter.propose, drafter.observe = quietly(drafter.propose), quietly(drafter.observe)
    generate(DraftVerify(llama, drafter), Request(tiny.prompts(2, 64), 12))
    assert reads == []
    assert isinstance(drafter, Drafter)
