"""Linear layers that read the same, multiplied as one: queries, keys and values; the two inner layers of a gated MLP.

One product over all their weights reads no more than three or two do, and starts once. The layers keep their names;
their weights become parts of one tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn.functional import linear

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
ROOM = 1.5  # times the weights to join must be free: what they leave behind is not always of use to others

_log = logging.getLogger("specbench")


class Switch:
    """Whether fused and packed kernels may be used: off while transformers' own `generate` runs as a reference."""

    def __init__(self) -> None:
        self.on = True

    @contextmanager
    def off(self) -> Iterator[None]:
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before


class Group:
    """Layers that read the same: whichever is asked first multiplies for all, and the others' are kept for them.

    Args:
        joined: all their weights, one after the other.
        sizes: outputs of each.
        switch: where it is off, each multiplies for itself.
    """

    def __init__(self, joined: nn.Linear, sizes: Sequence[int], switch: Switch) -> None:
        self.joined, self.sizes, self.switch = joined, list(sizes), switch
        self._read: torch.Tensor | None = None
        self._made: dict[int, torch.Tensor] = {}

    def output(self, place: int, read: torch.Tensor) -> torch.Tensor:
        """The output of the layer at `place` for `read`, which is told by its identity: nothing may change it."""
        if self._read is not read or place not in self._made:
            self._read, self._made = read, dict(enumerate(self.joined(read).split(self.sizes, -1)))
        output = self._made.pop(place)
        if not self._made:
            self._read = None
        return output


class Joined(nn.Linear):
    """A linear layer that is one of a group.

    Attributes:
        joined: of the first of a group: the layer with all their weights.
    """

    group: Group
    place: int
    joined: nn.Linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group.switch.on:
            return self.group.output(self.place, x)
        return linear(x, self.weight, self.bias)


def join(model: nn.Module, switch: Switch) -> int:
    """Join what layers of `model` can be; how many groups there are. What is joined takes no more memory.

    Layers that are quantised, or held by accelerate, are left alone; and all of them where memory is short.
    """
    groups = _groups(model)
    if not groups:
        return 0
    device = groups[0][0].weight.device
    if _free(device) < ROOM * sum(layer.weight.nbytes for layers in groups for layer in layers):
        _log.warning("memory is short: the products of the %s are not joined", type(model).__name__)
        return 0
    for layers in groups:
        _join(layers, switch)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of what the separate weights took, as much as can be had back
    return len(groups)


def _groups(model: nn.Module) -> list[list[Any]]:
    found = []
    for module in model.modules():
        for names in TOGETHER:
            layers: list[Any] = [getattr(module, name, None) for name in names]
            if all(type(layer) is nn.Linear and not held(layer) for layer in layers) and _match(layers):
                found.append(layers)
    return found


def _match(layers: Sequence[Any]) -> bool:
    kinds = {(each.in_features, each.weight.dtype, each.weight.device, each.bias is None) for each in layers}
    return len(kinds) == 1 and all(type(each.weight) is nn.Parameter for each in layers)


def _free(device: torch.device) -> int:
    """Bytes that can still be had on a device."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def _join(layers: Sequence[Any], switch: Switch) -> None:
    first = layers[0]
    sizes = [layer.out_features for layer in layers]
    joined = nn.Linear(first.in_features, sum(sizes), bias=first.bias is not None, device="meta")
    for name in ("weight",) if first.bias is None else ("weight", "bias"):
        whole = torch.cat([getattr(layer, name).detach() for layer in layers])
        setattr(joined, name, nn.Parameter(whole, requires_grad=False))
        for layer, part in zip(layers, whole.split(sizes), strict=True):
            setattr(layer, name, nn.Parameter(part, requires_grad=False))
    group = Group(joined, sizes, switch)
    for place, layer in enumerate(layers):
        layer.__class__, layer.group, layer.place = Joined, group, place
    first.joined = joined  # a module of the model, as others that look for its products see it


def held(module: Any) -> bool:
    """Whether accelerate has put a forward of its own on it."""
    return hasattr(module, "_hf_hook") or "forward" in vars(module)
