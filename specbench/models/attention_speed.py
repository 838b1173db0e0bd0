"""Which of several implementations of attention is the fastest on this device, for inputs of one shape."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from specbench.measure.clock import Stamps, cuda_stamps
from specbench.models.kernels import CLEARLY

REPEATS = 10
OVERWRITES = 8  # of the cache before each run: 0.2 ms of a large GPU's time, in which Python gets ahead of it
MOST_DIFFERENCE = 0.05  # of an output, over the largest one: rounding makes it 0.01, a wrong mask about 1

Implementation = Callable[..., torch.Tensor]
Run = Callable[[], torch.Tensor]


def fastest(
    implementations: Mapping[str, Implementation], inputs: Sequence[torch.Tensor], scaling: float | None
) -> str:
    """The implementation to take for such inputs: the first, unless another is clearly faster and says the same.

    Measured on random inputs: while passes are made ahead, a cache and its masks are all zeros, and nothing differs.

    Args:
        implementations: functions of query, key, value, mask and scaling, by name.
        inputs: these four; their shapes and strides are what matters.

    Raises:
        RuntimeError: the first implementation failed, or there is no memory to measure in.
    """
    generator = torch.Generator(inputs[0].device).manual_seed(0)  # the device's own stays as it is
    *given, mask = inputs
    drawn = [_random(like, generator) for like in given] + [_random_mask(mask, generator)]
    runs = {name: partial(each, *drawn, scaling) for name, each in implementations.items()}
    default = next(iter(runs))
    expected = runs[default]()
    able = {name: run for name, run in runs.items() if name == default or _agrees(run, expected)}
    seconds = dict(zip(able, device_seconds(list(able.values()), expected.device), strict=True))
    best = min(able, key=lambda name: seconds[name])
    return best if seconds[best] < CLEARLY * seconds[default] else default


def device_seconds(
    runs: Sequence[Run], device: torch.device, stamps: Stamps | None = None, overwritten: int | None = None
) -> list[float]:
    """The device's median seconds of each, in turn, each after the cache was overwritten, as a layer's weights do.

    Args:
        stamps: the source of time (tests).
        overwritten: bytes; None: twice the device's cache.
    """
    stamps = stamps or cuda_stamps(str(device))
    size = overwritten or 2 * torch.cuda.get_device_properties(device).L2_cache_size
    other = torch.empty(size, dtype=torch.uint8, device=device)
    taken: list[list[tuple[Any, Any]]] = [[] for _ in runs]
    for _ in range(REPEATS):
        for pairs, run in zip(taken, runs, strict=True):
            for _ in range(OVERWRITES):
                other.zero_()
            begin = stamps.now()
            run()
            pairs.append((begin, stamps.now()))
    stamps.synchronize()
    return [median(stamps.seconds(begin, end) for begin, end in pairs) for pairs in taken]


def _agrees(run: Run, expected: torch.Tensor) -> bool:
    """Whether it runs here, and its output is `expected` but for rounding."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch tells every reason why a kernel is not for these inputs
            out = run().float()
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001 - libraries refuse in many ways
        return False
    expected = expected.float()
    return bool((out - expected).abs().max() <= MOST_DIFFERENCE * expected.abs().max())  # false for NaN


def _random(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Of its shape and strides: some kernels are planned for those."""
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return made.normal_(generator=generator)


def _random_mask(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Hides every other slot or so, but never the first."""
    hidden = torch.rand(like.shape, device=like.device, generator=generator) < 0.5
    hidden[..., 0] = False
    shown = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    return shown.masked_fill_(hidden, torch.finfo(like.dtype).min)
