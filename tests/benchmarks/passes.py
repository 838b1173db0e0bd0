"""One pass of SmolLM2 over 1, 2, 4, 8 and 16 tokens: ours, and transformers' own with its dynamic cache.

    python tests/benchmarks/passes.py [THREADS]

Interleaved, so that what else the machine does falls on both; prints the best and the median in milliseconds.
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

    print(f"{torch.get_num_threads()} threads; milliseconds, best and median of {REPEATS}")
    for tokens in (1, 2, 4, 8, 16):
        print(f"{tokens:3} tokens   ours {_times(ours, theirs, tokens)}")


def _times(ours: Callable[[int], None], theirs: Callable[[int], None], tokens: int) -> str:
    seconds: dict[Callable[[int], None], list[float]] = {ours: [], theirs: []}
    for _ in range(REPEATS):
        for run, times in seconds.items():
            begin = time.perf_counter()
            run(tokens)
            times.append(time.perf_counter() - begin)
    best, middle = ([f(times) * 1e3 for times in seconds.values()] for f in (min, statistics.median))
    return f"{best[0]:6.1f} {middle[0]:6.1f}   transformers {best[1]:6.1f} {middle[1]:6.1f}"


if __name__ == "__main__":
    main()
