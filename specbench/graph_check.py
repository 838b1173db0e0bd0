"""Whether decoding through fixed-shape passes (CUDA graphs) says what plain passes say, on a small random target.

In float32 the tokens must be the same ones. In bfloat16 padding may change which kernel computes a product, and so
its last bit, and random weights have near-ties everywhere: what must agree there is the logits, over one text.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from specbench.decoding.context import Context
from specbench.decoding.draft import Drafter
from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Method, Request
from specbench.measure.clock import NullClock
from specbench.models.passes import Make, Passes
from specbench.models.target import Target

NEW, PROMPTS, VOCAB = 160, 2, 512
DRAFTERS = ("vanilla", "chain", "tree", "eagle3")
WIDTHS = (1, 5, 8, 13)  # of the passes whose logits are compared: whole buckets, and padded
# Of logits, over their spread. A wrong mask makes it 1 and more; in bfloat16 another attention kernel, which is as
# right, makes it 0.2 (measured on a CPU), and captured passes choose theirs.
MOST_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.5}


@dataclass(frozen=True)
class GraphCheck:
    """What one dtype showed.

    agreement: share of tokens, by drafter, before the first that differs from those with plain passes.
    difference: the largest of any logit over the same text, over the spread of the logits.
    shapes: passes made, as rows x columns x slots, by model: the target and the draft network.
    eager: why passes ran plainly after all, or None.
    reads: waits for the device a round, the most of any drafter; None where they cannot be counted.
    """

    dtype: str
    agreement: dict[str, float]
    difference: float
    shapes: dict[str, list[str]]
    eager: str | None
    reads: float | None

    @property
    def passed(self) -> bool:
        same = self.dtype != "float32" or min(self.agreement.values()) == 1
        close = self.difference <= MOST_DIFFERENCE[self.dtype]  # false for NaN
        return self.eager is None and all(self.shapes.values()) and same and close

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "passed": self.passed}


def check_graphs(device: torch.device | str, make: Make | None = None, new: int = NEW) -> list[GraphCheck]:
    """Vanilla, a chain, a tree and a draft network, with and without fixed passes, in float32 and bfloat16.

    Args:
        make: makes a pass; None captures CUDA graphs.
    """
    return [_check(torch.device(device), dtype, make, new) for dtype in (torch.float32, torch.bfloat16)]


def _check(device: torch.device, dtype: torch.dtype, make: Make | None, new: int) -> GraphCheck:
    model = _random_model(device, dtype)
    plain = Target(model).fuse()  # as runs have it
    fixed = Target(model)
    fixed.passes = Passes("random target of the self-check", make)
    request = Request(
        [[(7 * row + 3 * i * i) % VOCAB for i in range(20 + row)] for row in range(PROMPTS)], new
    )
    answer = _tokens(_method(plain, "vanilla", None), request)
    difference = _difference(plain, fixed, request.prompts)
    agreement, reads, made = {}, [], [fixed.passes]
    for name in DRAFTERS:
        method = _method(fixed, name, answer)
        _tokens(method, request)  # makes the passes
        method.prepare(request)
        found, waits = _counting_waits(method, request)
        agreement[name] = _agreement(_tokens(_method(plain, name, answer), request), found)
        reads += [] if waits is None else [waits]
        made += [own] if (own := getattr(method.drafter, "passes", None)) is not None else []
    facts = [passes.facts() for passes in made]
    return GraphCheck(
        dtype=str(dtype).removeprefix("torch."),
        agreement=agreement,
        difference=difference,
        shapes={fact["model"]: fact["shapes"] for fact in facts},
        eager=next((fact["eager"] for fact in facts if fact["eager"] is not None), None),
        reads=max(reads, default=None),
    )


@torch.inference_mode()
def _difference(plain: Target, fixed: Target, prompts: list[list[int]]) -> float:
    """The largest difference of logits of the same passes, over the standard deviation of the plain ones."""
    worst = 0.0
    for width in WIDTHS:
        tokens = torch.arange(width * len(prompts), device=plain.device).view(len(prompts), width) % VOCAB
        one, *others = (_logits(target, prompts, tokens) for target in (plain, fixed, fixed, fixed))
        worst = max(worst, *(float((other - one).abs().max() / one.std()) for other in others))
    return worst


def _logits(target: Target, prompts: list[list[int]], tokens: torch.Tensor) -> torch.Tensor:
    """Of a pass over `tokens` `[B, T]` behind the prompts: float32 `[B, T, V]`."""
    target.reserve(len(prompts), max(map(len, prompts)) + NEW)
    target.prefill(prompts)
    context = Context(target)
    context.rewind([len(prompt) for prompt in prompts])
    return context.append(target, tokens, [tokens.shape[1]] * len(prompts)).logits.float()


def _random_model(device: torch.device, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.15,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.to(device, dtype).eval().requires_grad_(False)


def _method(target: Target, name: str, answer: list[list[int]] | None) -> DraftVerify:
    from specbench.spec import find_method

    if name == "vanilla":
        return DraftVerify(target, Drafter(target))
    if name == "eagle3":
        return DraftVerify(
            target, find_method("eagle3")(target, draft="random", total_token=16, depth=3, top_k=4)
        )
    method = DraftVerify(
        target, find_method("oracle")(target, rate=0.8, k=4, tree=12 if name == "tree" else 0)
    )
    assert answer is not None
    method.set_answer(answer)
    return method


def _tokens(method: Method, request: Request) -> list[list[int]]:
    rounds = list(method.generate(request, NullClock()))
    return [[t for one in rounds for t in one.tokens[row]] for row in range(len(request.prompts))]


def _counting_waits(method: Method, request: Request) -> tuple[list[list[int]], float | None]:
    """The tokens, and how often a round waited for the device (by torch's own account of it)."""
    if not torch.cuda.is_available():
        return _tokens(method, request), None
    before = torch.cuda.get_sync_debug_mode()
    rounds = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            rounds = list(method.generate(request, NullClock()))
        finally:
            torch.cuda.set_sync_debug_mode(before)
    waits = sum("synchronizing" in str(one.message) for one in seen)
    tokens = [[t for one in rounds for t in one.tokens[row]] for row in range(len(request.prompts))]
    return tokens, waits / len(rounds)


def _agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    same = 0
    for one, other in zip(ours, theirs, strict=True):
        pairs = zip(one, other, strict=True)
        same += next((place for place, (a, b) in enumerate(pairs) if a != b), len(one))
    return same / sum(map(len, ours))
