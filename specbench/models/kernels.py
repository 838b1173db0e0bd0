"""Matrix kernels on a CPU: oneDNN with pre-packed weights where it is faster than what torch would call.

torch's own small-batch matrix product (MKL) can take three times as long for four tokens as for one, and a
verify pass is just that. Which kernel wins depends on the processor, the shape and the number of tokens, so it is
measured once, for vanilla and methods alike, kept on disk (same kernels, same tokens) and in the manifest. What other
processes disturbed is not kept.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn.functional import linear

from specbench.measure.machine import cpu_facts
from specbench.models.joined import Switch
from specbench.models.kept import DISTURBED, kept, measured

TOKENS = (1, 2, 4, 8, 16, 64)  # measured; between two of them the larger one's choice holds
SMALLEST = 20_000_000  # weights below which nothing is gained
PACKED_FOR = 8  # tokens the packed layout is made for; it serves other numbers as well
CLEARLY = 0.97  # a packed kernel must be this much faster to be worth a second copy of the weights
REPEATS = 4
DTYPES = (torch.float32, torch.bfloat16)

Choices = dict[str, dict[str, str]]  # "out x in" -> tokens -> "packed" or "stock"


class PackedLinear(nn.Linear):
    """A linear layer that also holds its weight packed for oneDNN, and takes the faster of the two by tokens.

    Made by giving a layer this class (`pack`), so that tied weights, hooks and names stay what they are.
    """

    packed: torch.Tensor
    packed_at: tuple[bool, ...]  # for each of TOKENS
    switch: Switch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.numel() // self.in_features
        # A compiler knows torch's own product alone.
        if self.switch.on and not torch.compiler.is_compiling() and self.packed_at[_bucket(tokens)]:
            return _packed(x, self.packed, self.bias)
        return linear(x, self.weight, self.bias)


def pack(
    model: nn.Module, folder: Path, switch: Switch, notify: Callable[[str], None] = lambda line: None
) -> Choices:
    """Give the linear layers of a CPU model the faster kernel for each number of tokens.

    Args:
        model: its layers change class in place; weights are shared, not replaced.
        folder: where choices are kept.
        switch: where it is off, torch's own kernels are called.

    Returns the choices by shape (empty: nothing was changed).
    """
    layers = [layer for layer in model.modules() if type(layer) is nn.Linear]
    if not _worthwhile(layers):
        return {}
    shapes: dict[str, list[nn.Linear]] = defaultdict(list)
    for layer in layers:
        shapes[f"{layer.out_features}x{layer.in_features}"].append(layer)
    file = folder / f"kernels-{_key(layers[0], shapes)}.json"
    choices = _kept(file, shapes) or _choose(file, shapes, notify)
    for shape, group in shapes.items():
        if "packed" in choices[shape].values():
            at = tuple(choices[shape][str(tokens)] == "packed" for tokens in TOKENS)
            for layer in group:
                _convert(layer, at, switch)
    return choices


def _choose(file: Path, shapes: dict[str, list[nn.Linear]], notify: Callable[[str], None]) -> Choices:
    """The choices by shape, measured now."""
    notify(f"measuring which matrix kernels are fastest here, once; delete {file} to measure again…")

    def measure() -> Choices:
        return {shape: _measure(group) for shape, group in shapes.items()}

    choices, quiet = measured(file, measure, torch.get_num_threads())
    if not quiet:
        notify(DISTURBED)
    return choices


def _worthwhile(layers: list[nn.Linear]) -> bool:
    if not layers or not torch.backends.mkldnn.is_available():
        return False
    weights = [layer.weight for layer in layers]
    same = {(weight.dtype, weight.device.type) for weight in weights}
    if len(same) > 1 or weights[0].device.type != "cpu" or weights[0].dtype not in DTYPES:
        return False
    size = sum(weight.nbytes for weight in weights)
    return sum(w.numel() for w in weights) >= SMALLEST and psutil.virtual_memory().available > 1.5 * size


def _convert(layer: nn.Linear, at: tuple[bool, ...], switch: Switch) -> None:
    layer.__class__ = PackedLinear
    assert isinstance(layer, PackedLinear)
    layer.packed, layer.packed_at, layer.switch = _reorder(layer.weight), at, switch


def _measure(layers: list[nn.Linear]) -> dict[str, str]:
    """The faster kernel for each number of tokens, over all layers of a shape (so that caches do not flatter)."""
    packed = [_reorder(layer.weight) for layer in layers]
    choice = {}
    for tokens in TOKENS:
        x = torch.randn(tokens, layers[0].in_features, dtype=layers[0].weight.dtype)

        def stock(x: torch.Tensor = x) -> None:
            for layer in layers:
                linear(x, layer.weight, layer.bias)

        def ours(x: torch.Tensor = x) -> None:
            for layer, weight in zip(layers, packed, strict=True):
                _packed(x, weight, layer.bias)

        times = _interleaved(stock, ours)
        choice[str(tokens)] = "packed" if times[1] < CLEARLY * times[0] else "stock"
    return choice


def _interleaved(*runs: Callable[[], None]) -> list[float]:
    """The best seconds of each, taken in turn."""
    best = [float("inf")] * len(runs)
    for _ in range(REPEATS):
        for number, run in enumerate(runs):
            begin = time.perf_counter()
            run()
            best[number] = min(best[number], time.perf_counter() - begin)
    return best


def _bucket(tokens: int) -> int:
    for index, most in enumerate(TOKENS):
        if tokens <= most:
            return index
    return len(TOKENS) - 1


def _reorder(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_FOR)


def _packed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _key(layer: nn.Linear, shapes: dict[str, list[nn.Linear]]) -> str:
    """What the choices depend on: processor, threads, torch, dtype and the shapes with their layer counts."""
    facts: list[Any] = [
        cpu_facts().get("model"),
        platform.machine(),
        torch.get_num_threads(),
        torch.__version__,
    ]
    facts += [str(layer.weight.dtype), sorted((shape, len(group)) for shape, group in shapes.items())]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _kept(file: Path, shapes: dict[str, list[nn.Linear]]) -> Choices | None:
    found = kept(file)
    whole = isinstance(found, dict) and all(
        isinstance(found.get(shape), dict) and set(found[shape]) == set(map(str, TOKENS)) for shape in shapes
    )
    return found if whole else None
