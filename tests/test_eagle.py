"""EAGLE-1, EAGLE-2 and EAGLE-3: as the official code drafts, lossless, and clear about drafts that do not fit."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import eagle_heads as heads
import parity
import pytest
import tiny
import torch
from test_loop import generate, hf_greedy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma3TextConfig, GptOssConfig, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from specbench.decoding.draft import Draft
from specbench.decoding.growth import DynamicTree
from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Request
from specbench.decoding.sampling import Sampling
from specbench.models.target import Target

Eagle, Eagle1, Eagle2, Eagle3 = (
    getattr(importlib.import_module(f"specbench.methods.{name}"), name.capitalize())
    for name in ("eagle", "eagle1", "eagle2", "eagle3")
)
FIXTURES = Path(__file__).parents[2] / "shared" / "parity"
VOCAB = 16
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2}
ARCHITECTURES = {
    "llama": (LlamaConfig(**SMALL), "sdpa"),
    "qwen3": (Qwen3Config(**SMALL), "sdpa"),
    "qwen3-moe": (Qwen3MoeConfig(**SMALL, **EXPERTS, num_experts=4, moe_intermediate_size=32), "sdpa"),
    "gemma3": (Gemma3TextConfig(**SMALL, sliding_window=9), "sdpa"),
    "gpt-oss": (GptOssConfig(**SMALL, **EXPERTS, num_local_experts=4, sliding_window=9), "eager"),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from more, and wait for them on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def llama() -> Target:
    return tiny.build(LlamaConfig(**SMALL), seed=1)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def target(request: pytest.FixtureRequest) -> Target:
    config, attention = ARCHITECTURES[request.param]
    return tiny.build(config, seed=1, attn=attention)


def drafter(target: Target, name: str, **options: Any) -> Any:
    """A drafter with random weights. Its trees are wide, so that some of every shape is accepted by chance."""
    if name == "eagle1":
        return Eagle1(target, draft=heads.eagle1(target), **options)
    if name == "eagle2":
        return Eagle2(target, draft=heads.eagle1(target, seed=1), **options)
    return Eagle3(target, draft=heads.eagle3(target, drafts=12), **options)


NAMES = ("eagle1", "eagle2", "eagle3")


# -- as the official code ------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", sorted(FIXTURES.glob("eagle*")) or [None], ids=lambda f: f and f.name)
def test_parity(folder: Path | None) -> None:
    if folder is None:
        pytest.skip(f"no golden fixtures at {FIXTURES}")
    assert parity.check(folder).startswith("ok")


# -- lossless ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [1, 4])
def test_greedy_output_is_the_targets(target: Target, name: str, rows: int) -> None:
    prompts = tiny.prompts(rows, VOCAB, seed=rows)
    prompts[0] = prompts[0][:1]  # a prompt of one token
    outputs, rounds = generate(DraftVerify(target, drafter(target, name)), Request(prompts, 24))
    assert outputs == [hf_greedy(target, prompt, 24) for prompt in prompts]
    if rows == 4:  # else the test would show little; deep paths are accepted in the golden fixtures
        assert max(max(r.accepted) for r in rounds[1:]) >= 1


@pytest.mark.parametrize("name", NAMES)
def test_stop_tokens_and_limits(llama: Target, name: str) -> None:
    prompts = tiny.prompts(3, VOCAB, seed=5)
    free = [hf_greedy(llama, prompt, 20) for prompt in prompts]
    stop = frozenset({free[0][6], free[2][9]})
    for limit in (1, 2, 5, 20):
        outputs, _ = generate(DraftVerify(llama, drafter(llama, name)), Request(prompts, limit, stop))
        assert outputs == [hf_greedy(llama, prompt, limit, sorted(stop)) for prompt in prompts]


# -- one row is as if it were alone --------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_row_does_not_depend_on_its_neighbours(llama: Target, name: str) -> None:
    prompts = tiny.prompts(3, VOCAB, seed=11)
    limits = Sampling(0.9)

    def plain(draft: Draft) -> tuple[list[int], list[int]] | None:
        """As lists; None if nothing is drafted."""
        return ([int(t) for t in draft.tokens], [int(p) for p in draft.parents]) if len(draft) else None

    def run(rows: list[int]) -> tuple[list[list[int]], list[list[Any]]]:
        made, drafts = drafter(llama, name), []
        propose = made.propose

        def recorded(budgets: list[int], generators: Any) -> Any:
            out = propose(budgets, generators)
            drafts.append([plain(draft) for draft in out])
            return out

        made.propose = recorded
        generators = [torch.Generator().manual_seed(100 + row) for row in rows]
        request = Request([prompts[row] for row in rows], 20, frozenset(), limits, generators)
        outputs, _ = generate(DraftVerify(llama, made), request)
        return outputs, [[d[row] for d in drafts if d[row] is not None] for row in range(len(rows))]

    outputs, drafts = run([0, 1, 2])
    for row in range(3):
        alone, alone_drafts = run([row])
        assert alone[0] == outputs[row]
        assert alone_drafts[0] == drafts[row]


# -- the shape of the drafts ---------------------------------------------------------------------------------


def test_dynamic_trees_are_whole_and_within_their_budgets(llama: Target) -> None:
    made = drafter(llama, "eagle3", total_token=30, depth=3, top_k=4)
    made.request = Request(tiny.prompts(4, VOCAB), 50)
    method = DraftVerify(llama, made)
    rounds = iter(
        method.generate(made.request, importlib.import_module("specbench.measure.clock").NullClock())
    )
    next(rounds)
    drafts = made.propose([0, 1, 2, 9], None)
    assert [len(d) for d in drafts] == [0, 4, 4 + 16, 29]
    passes: list[int] = []
    made.net.register_forward_pre_hook(lambda *_: passes.append(1))
    made.propose([0, 2, 1, 0], None)
    assert len(passes) == 1, "no pass for nodes that no budget allows"
    for draft, deepest in zip(drafts, (0, 1, 2, 4), strict=True):
        depth: list[int] = []
        parents = [int(p) for p in draft.parents] if len(draft) else []
        for node, parent in enumerate(parents):
            assert parent < node
            depth.append(1 if parent < 0 else depth[parent] + 1)
        assert max(depth, default=0) <= deepest
        siblings = {(parent, int(token)) for parent, token in zip(parents, draft.tokens, strict=True)}
        assert len(siblings) == len(draft)


def test_equal_scores_never_part_a_node_from_its_parent() -> None:
    """All candidates tie: a child may be as likely as its parent (probability 1)."""
    tree = DynamicTree(total=8, depth=2, top_k=3)

    def sure(tokens: torch.Tensor, hidden: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([40.0, 0, 0, 0]).expand(*tokens.shape, 4), hidden

    logits = torch.tensor([[40.0, 0, 0, 0]])
    limits = torch.tensor(tree.limits([9], 4))
    nodes = tree.nodes_of(logits, torch.zeros(1, 2), sure, lambda ids: ids, 3, limits)
    (draft,) = tree.drafts(*nodes, [9], 4)
    assert draft.parents.tolist()[:2] == [-1, -1]
    assert all(parent < node for node, parent in enumerate(draft.parents.tolist()))
    # Seen in order: the root's children, then the children of each; the sure path is 0, 0, 0.
    assert draft.tokens[draft.parents == -1].tolist()[0] == 0


def test_one_child_a_node_is_a_chain(llama: Target) -> None:
    made = drafter(llama, "eagle3", depth=4, top_k=1)
    assert made.max_nodes == 5
    prompts = tiny.prompts(2, VOCAB, seed=3)
    outputs, rounds = generate(DraftVerify(llama, made), Request(prompts, 20))
    assert outputs == [hf_greedy(llama, prompt, 20) for prompt in prompts]
    assert rounds[1].drafted == [5, 5]


@pytest.mark.parametrize("name", NAMES)
def test_no_drafts_beyond_the_drafts_positions(llama: Target, name: str) -> None:
    """The last fed position and every drafted one stay below `max_position_embeddings`; the output does not care."""
    prompt, positions = tiny.prompts(1, VOCAB, seed=2)[0], 24
    checkpoint = heads.eagle3(llama) if name == "eagle3" else heads.eagle1(llama)
    checkpoint.config["max_position_embeddings"] = positions
    made = {"eagle1": Eagle1, "eagle2": Eagle2, "eagle3": Eagle3}[name](llama, draft=checkpoint)
    seen: list[int] = []
    forward = made.net.forward

    def watched(tokens: torch.Tensor, hidden: torch.Tensor, at: Any) -> torch.Tensor:
        seen.append(tokens.shape[1] - 1 if at is None else int(at.positions.max()))
        return forward(tokens, hidden, at)

    made.net.forward = watched
    new = positions + 6 - len(prompt)
    outputs, rounds = generate(DraftVerify(llama, made), Request([prompt], new))
    assert outputs == [hf_greedy(llama, prompt, new)]
    assert max(seen) == positions - 1
    assert rounds[-2].drafted == [0]
    long = tiny.prompts(1, VOCAB, seed=2, longest=60)[0] * 2
    outputs, rounds = generate(DraftVerify(llama, made), Request([long], 5))
    assert outputs == [hf_greedy(llama, long, 5)]
    assert all(r.drafted == [0] for r in rounds[1:])


@pytest.mark.parametrize("name", NAMES)
def test_prompts_that_are_all_too_long_from_the_first_on(llama: Target, name: str) -> None:
    """Nothing was ever fed to the network, so there is nothing to draft from."""
    checkpoint = heads.eagle3(llama) if name == "eagle3" else heads.eagle1(llama)
    checkpoint.config["max_position_embeddings"] = 16
    made = {"eagle1": Eagle1, "eagle2": Eagle2, "eagle3": Eagle3}[name](llama, draft=checkpoint)
    long, short = list(range(14)) * 2, [1, 2, 3]
    for prompts in ([long], [long, long], [short, long], [long]):
        outputs, rounds = generate(DraftVerify(llama, made), Request(prompts, 8))
        assert outputs == [hf_greedy(llama, prompt, 8) for prompt in prompts]
        assert bool(rounds[1].drafted[0]) == (prompts[0] is short)
    made.release()


class _Reads(TorchDispatchMode):
    """Counts what would make a GPU wait for the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero"):
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=str)
def test_drafting_never_reads_the_device(
    llama: Target, name: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, reads = drafter(llama, name), _Reads()
    to_list = torch.Tensor.tolist

    def counted(self: torch.Tensor) -> Any:
        reads.count += 1
        return to_list(self)

    for method in ("observe", "propose"):
        plain = getattr(made, method)

        def watched(*args: Any, plain: Any = plain) -> Any:
            with reads, monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "tolist", counted)
                return plain(*args)

        setattr(made, method, watched)
    generators = None if sampling.greedy else [torch.Generator().manual_seed(row) for row in range(3)]
    generate(DraftVerify(llama, made), Request(tiny.prompts(3, VOCAB), 12, frozenset(), sampling, generators))
    assert reads.count == 0


# -- what a drafter says of itself ---------------------------------------------------------------------------


def test_eagle_takes_what_the_draft_is(llama: Target) -> None:
    for checkpoint, taken in ((heads.eagle1(llama), "eagle2"), (heads.eagle3(llama), "eagle3")):
        made = Eagle(llama, draft=checkpoint, total_token=10, depth=2, top_k=3)
        assert made.draft_identity()["notes"] == [made.kind, f"eagle took {taken}"]
        prompts = tiny.prompts(2, VOCAB, seed=3)
        outputs, _ = generate(DraftVerify(llama, made), Request(prompts, 12))
        assert outputs == [hf_greedy(llama, prompt, 12) for prompt in prompts]


def test_memory_is_the_drafters_own(llama: Target) -> None:
    """Not the target's embeddings and head, which it only borrows; the cache is given back."""
    checkpoint = heads.eagle1(llama)
    made = Eagle2(llama, draft=checkpoint)
    assert made.weights_bytes() == checkpoint.bytes
    assert made.draft_identity()["bytes"] == checkpoint.bytes
    assert made.lossless
    generate(DraftVerify(llama, made), Request(tiny.prompts(1, VOCAB), 5))
    assert made.kv_bytes() > 0
    made.release()
    assert made.kv_bytes() == 0
    generate(DraftVerify(llama, made), Request(tiny.prompts(1, VOCAB), 5))
