"""One pass of SmolLM2 over 1, 2, 4, 8 and 16 tokens: ours, and transformers' own with its dynamic cache.

    python tests/benchmarks/passes.py [THREADS]

Interleaved, so that what else the machine does falls on all; prints the best and the median in milliseconds, and of
the medians, how much longer than one token's pass each takes.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from transformers import DynamicCache

from specbench.decoding.context import Context
from specbench.decoding.draft import Draft
from specbench.decoding.tree import collate
from specbench.models.gguf import cache_folder
from specbench.models.load import load
from specbench.models.target import Target

PROMPT, REPEATS = 300, 15
TOKENS = (1, 2, 4, 8, 16)


def main() -> None:
    torch.set_grad_enabled(False)
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else torch.get_num_threads())
    loaded = load("smollm2-135m@q4_1")
    target = Target(loaded.model).fuse().pack(cache_folder(), print)
    prompt = list(range(100, 100 + PROMPT))
    target.reserve(1, 2 * PROMPT)
    target.prefill([prompt])
    context = Context(target)
    context.rewind([PROMPT])
    cache = DynamicCache(config=target.config)
    argument = {target._cache_argument: cache}
    with target.stock_attention():
        target.model(torch.tensor([prompt]), **argument)

    def ours(tokens: int) -> None:
        tree = collate(torch.tensor([5]), [Draft(range(tokens - 1))], [True], target.vocab_size)
        context.verify(target, tree)

    def theirs(tokens: int) -> None:
        with target.stock_attention():
            target.model(torch.arange(tokens)[None], **argument)
        cache.crop(-tokens)

    print(
        f"{torch.get_num_threads()} threads; milliseconds, best and median of {REPEATS}, and over one token's"
    )
    times = _times([ours, theirs])
    for tokens in TOKENS:
        print(f"{tokens:3} tokens   ours {_said(times[0], tokens)}   transformers {_said(times[1], tokens)}")


def _times(kinds: list[Callable[[int], None]]) -> list[dict[int, list[float]]]:
    """Seconds of each kind's passes, by tokens. Those of a kind follow one another, as they do in decoding; the first
    after another kind's, which finds nothing where it left it, is not counted.
    """
    seconds: list[dict[int, list[float]]] = [{tokens: [] for tokens in TOKENS} for _ in kinds]
    for _ in range(REPEATS):
        for run, times in zip(kinds, seconds, strict=True):
            run(1)
            for tokens in TOKENS:
                begin = time.perf_counter()
                run(tokens)
                times[tokens].append(time.perf_counter() - begin)
    return seconds


def _said(times: dict[int, list[float]], tokens: int) -> str:
    median = statistics.median(times[tokens])
    return f"{min(times[tokens]) * 1e3:6.1f} {median * 1e3:6.1f} {median / statistics.median(times[1]):5.2f}x"


if __name__ == "__main__":
    main()
