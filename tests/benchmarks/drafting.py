"""What drafting costs: milliseconds a round at 8,000 tokens of context, and a search among ten million tokens.

    python tests/benchmarks/drafting.py [METHOD | datastore]…

A method runs in the real loop on a target of one tiny layer with a full-size vocabulary; a round's `propose` and
`observe` (which includes what a drafter learns from the target's logits) are timed apart. The datastore is built of
seeded phrases whose frequencies fall as words' do, mapped from a temporary folder, and searched for ends of its own
text, one in four of them changed a few tokens back.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from specbench.build import make
from specbench.config import RunConfig
from specbench.decoding.draft import Drafter
from specbench.decoding.frequent_tree import frequent_tree
from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Request
from specbench.measure.clock import NullClock
from specbench.models.datastore import SCHEMA, open_datastore
from specbench.models.datastore_build import write
from specbench.models.suffix_array import suffix_array
from specbench.models.target import Target
from specbench.spec import parse_spec

VOCAB, CONTEXT, NEW = 49_152, 8_000, 200
STORED, SEARCHES = 10_000_000, 2_000
METHODS = (
    "prompt-lookup",
    "lookahead",
    "lookahead:pool_from_prompt=true",
    "token-recycling",
    "suffix",
    "suffix:tree=true",
    "suffix:factor=4,tree=true",
    "sam:fallback=none",
    "sam:threshold=2",
    "cascade:first=(prompt-lookup),then=(suffix)",
)


def main(wanted: list[str]) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    print(f"milliseconds a round at {CONTEXT:,} tokens of context, one thread: median, 95th percentile")
    target = _target()
    for text in wanted or METHODS:
        if text != "datastore":
            _print_method(target, text)
    if not wanted or "datastore" in wanted:
        _print_datastore()


def _target() -> Target:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=2 * CONTEXT, initializer_range=0.5,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return Target(AutoModelForCausalLM.from_config(config).float().eval())


def phrases(tokens: int, vocab: int) -> np.ndarray:
    """A text of phrases of twenty tokens, uint32 `[tokens]`: common tokens and common phrases come often."""
    dice = np.random.default_rng(0)
    known = dice.zipf(1.2, size=(tokens // 400 + 10, 20)) % vocab
    return known[dice.zipf(1.3, size=tokens // 20 + 1) % len(known)].ravel()[:tokens].astype(np.uint32)


def _print_method(target: Target, text: str) -> None:
    drafter = make(parse_spec(text), target, RunConfig("none", (text,), ("none",)))
    assert isinstance(drafter, Drafter)
    times = {name: _timed(drafter, name) for name in ("begin", "propose", "observe")}
    request = Request([phrases(CONTEXT, VOCAB).tolist()], NEW)
    rounds = list(DraftVerify(target, drafter).generate(request, NullClock()))[1:]
    tau = sum(len(one.tokens[0]) for one in rounds) / len(rounds)
    shown = "   ".join(f"{name} {_spread(times[name])}" for name in ("propose", "observe"))
    print(f"{text:<43} {shown}   begin {times['begin'][0]:7.1f}   ({len(rounds)} rounds, tau {tau:.2f})")


def _timed(drafter: Any, name: str) -> list[float]:
    """Milliseconds of each call of a drafter's method, from now on."""
    times: list[float] = []
    plain: Callable[..., Any] = getattr(drafter, name)

    def call(*args: Any) -> Any:
        begin = time.perf_counter()
        try:
            return plain(*args)
        finally:
            times.append((time.perf_counter() - begin) * 1e3)

    setattr(drafter, name, call)
    return times


def _spread(times: list[float]) -> str:
    return f"{np.median(times):6.3f} {np.percentile(times, 95):6.3f}"


def _print_datastore() -> None:
    for kind, vocab in ((np.uint16, VOCAB), (np.uint32, 128_256)):
        text = phrases(STORED, vocab).astype(kind)
        begin = time.perf_counter()
        suffixes = suffix_array(text)
        built = time.perf_counter() - begin
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "store"
            facts = {"schema": SCHEMA, "target": "none", "tokenizer": "none", "tokens": len(text)}
            write(path, text, suffixes, facts)
            size = sum(part.stat().st_size for part in path.iterdir()) / len(text)
            times = _searches(path, text, vocab)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"datastore of {STORED:,} {np.dtype(kind)} tokens: sorted in {built:.1f} s (peak {memory:.1f} GB), "
            f"{size:.1f} bytes a token; search and tree {_spread(times)}, most {max(times):.3f}"
        )


def _searches(path: Path, text: np.ndarray, vocab: int) -> list[float]:
    store, dice, times = open_datastore(str(path)), np.random.default_rng(1), []
    for number in range(SEARCHES):
        at = int(dice.integers(16, len(text)))
        end = text[at - 16 : at].tolist()
        if number % 4 == 0:
            end[-int(dice.integers(1, 8))] = int(dice.integers(vocab))
        begin = time.perf_counter()
        found = store.search(end, longest=16, shortest=2, matches=5000, depth=10, vocab=vocab)
        if len(found):
            frequent_tree(found, 64)
        times.append((time.perf_counter() - begin) * 1e3)
    return times


if __name__ == "__main__":
    main(sys.argv[1:])
