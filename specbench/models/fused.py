"""Fewer kernels for the same arithmetic: norms, rotary positions and matrix products of what a model's layers read.

A pass over a few tokens is bound by reading the weights, and a large GPU reads a layer's in the time that a few dozen
kernels take to start, even in a graph. Around a layer's seven matrix products transformers' code (Llama's, in half
precision) starts 33. Here a norm is one kernel, the rotation of queries and keys four, and a layer's queries, keys
and values (and a gated MLP's two inner products) are one product: four products and 13 kernels. Vanilla and methods
take the same; transformers' own `generate`, as a reference, takes what it always takes (`Switch`).

What is replaced is first compared with the model's own code on numbers of its own dtype; what differs, or is not
known, stays as it is.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn.functional import linear, rms_norm

from specbench.models.rope import rotate

TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
)  # read the same; the first is called first
ROTARY = "apply_rotary_pos_emb"
ROTARY_TAKES = ["q", "k", "cos", "sin", "unsqueeze_dim"]
RENAMES = "transformers.utils.deprecation"  # whose decorators do nothing but rename an argument

Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]


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


def fuse(model: nn.Module, switch: Switch) -> dict[str, int]:
    """Fuse what can be in a transformers model, in place: how many norms, rotations and products of each kind.

    Modules change class; weights that are multiplied together become parts of one tensor, under their own names.
    Layers that something else has hold of (quantised ones, hooks of accelerate) are left alone.
    """
    classes: dict[type, type] = {}
    done = {
        "norms": sum(_fuse_norm(module, switch) for module in model.modules()),
        "rotations": sum(_fuse_rotary(module, switch, classes) for module in model.modules()),
        "products": sum(_join(group, switch) for group in _groups(model)),
    }
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # the separate weights' memory, in pieces too small to be used again
    return {what: number for what, number in done.items() if number}


# -- norms ---------------------------------------------------------------------------------------------------


class FusedNorm(nn.Module):
    """Mixed into a class of RMS norms: torch's own function in place of its `forward`."""

    weight: torch.Tensor
    switch: Switch
    fused_eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.switch.on:
            return rms_norm(x, self.weight.shape, self.weight, self.fused_eps)
        return super().forward(x)


@cache
def _fused_norm(kind: type) -> type:
    return type(f"Fused{kind.__name__}", (FusedNorm, kind), {})


def _fuse_norm(module: Any, switch: Switch) -> bool:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    named = type(module).__name__.endswith("RMSNorm") and not isinstance(module, nn.RMSNorm | FusedNorm)
    if not named or not isinstance(weight, torch.Tensor) or not isinstance(eps, float) or _held(module):
        return False
    x = (
        _numbers(weight, 4, len(weight))
        * torch.logspace(0, -4, 4, dtype=weight.dtype).to(weight.device)[:, None]
    )
    if not _alike(lambda: module(x), lambda: rms_norm(x, weight.shape, weight, eps)):
        return False
    module.__class__ = _fused_norm(module.__class__)
    module.switch, module.fused_eps = switch, eps
    return True


# -- rotary positions ----------------------------------------------------------------------------------------


def _fuse_rotary(module: Any, switch: Switch, classes: dict[type, type]) -> bool:
    """Give an attention module a forward whose `apply_rotary_pos_emb` is ours, if the one it calls does the same."""
    kind = type(module)
    forward = kind.forward
    while getattr(forward, "__globals__", {}).get("__name__") == RENAMES and hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    if not inspect.isfunction(forward) or ROTARY not in forward.__code__.co_names or _held(module):
        return False
    theirs: Any = forward.__globals__.get(ROTARY)
    if kind not in classes:
        if isinstance(theirs, _Rotary) or not _rotates_halves(theirs, next(module.parameters())):
            return False
        classes[kind] = _rotating(kind, _with(forward, **{ROTARY: _Rotary(theirs, switch)}))
    module.__class__ = classes[kind]
    return True


def _rotating(kind: type, ours: Callable[..., Any]) -> type:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A compiler looks names up in the module they were written in; and it fuses by itself.
        return (kind.forward if torch.compiler.is_compiling() else ours)(self, *args, **kwargs)  # type: ignore[attr-defined]

    return type(f"Fused{kind.__name__}", (kind,), {"forward": forward})


def _with(function: types.FunctionType, **names: Any) -> types.FunctionType:
    """A function's code where these global names mean something else: for one model, not for its whole module."""
    made = types.FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


class _Rotary:
    """In place of transformers' function, for what its attention modules call it with."""

    def __init__(self, theirs: Rotary, switch: Switch) -> None:
        self._theirs, self._switch = theirs, switch

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        alike = q.dtype == k.dtype == cos.dtype and q.shape[-1] == k.shape[-1] == cos.shape[-1]
        if not self._switch.on or not alike:
            return self._theirs(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return _rotate_both(q, k, cos, sin, unsqueeze_dim)


def _rotate_both(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`q` and `k` as one tensor, along their dimension `heads`, which `cos` and `sin` have not."""
    both = rotate(torch.cat([q, k], heads), (cos.unsqueeze(heads), sin.unsqueeze(heads)))
    return both.split([q.shape[heads], k.shape[heads]], heads)


def _rotates_halves(theirs: Any, like: torch.Tensor) -> bool:
    if not callable(theirs) or list(inspect.signature(theirs).parameters) != ROTARY_TAKES:
        return False
    q, k, cos, sin = (
        _numbers(like, *shape, seed=seed)
        for seed, shape in enumerate([(2, 3, 4, 8), (2, 1, 4, 8), (2, 4, 8), (2, 4, 8)])
    )
    return _alike(
        lambda: torch.cat(theirs(q, k, cos, sin), 1), lambda: torch.cat(_rotate_both(q, k, cos, sin, 1), 1)
    )


# -- products ------------------------------------------------------------------------------------------------


class Group:
    """Layers that read the same: what the first one's product made for the others, until they ask for it."""

    def __init__(self, sizes: Sequence[int], switch: Switch) -> None:
        self.sizes, self.switch = list(sizes), switch
        self._read: torch.Tensor | None = None
        self._left: dict[int, torch.Tensor] = {}

    def leave(self, read: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
        self._read, self._left = read, dict(enumerate(outputs, 1))

    def take(self, place: int, read: torch.Tensor) -> torch.Tensor | None:
        """What was made for `place` of this very tensor; None if nothing was."""
        if self._read is not read:
            return None
        made = self._left.pop(place, None)
        if not self._left:
            self._read = None
        return made


class First(nn.Linear):
    """A linear layer that also multiplies for the layers of its group, in one product."""

    joined: nn.Linear
    group: Group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.group.switch.on:
            return linear(x, self.weight, self.bias)
        own, *others = self.joined(x).split(self.group.sizes, -1)
        self.group.leave(x, others)
        return own


class Further(nn.Linear):
    """A linear layer whose product the first of its group has made; if not, it makes it itself."""

    group: Group
    place: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.group.take(self.place, x)
        return linear(x, self.weight, self.bias) if made is None else made


def _groups(model: nn.Module) -> list[list[Any]]:
    """The layers to join; none where a CPU has no room for a second copy of them for a while."""
    found = []
    for module in model.modules():
        for names in TOGETHER:
            layers: list[Any] = [getattr(module, name, None) for name in names]
            if all(type(layer) is nn.Linear and not _held(layer) for layer in layers) and _match(layers):
                found.append(layers)
    size = sum(
        layer.weight.nbytes for layers in found for layer in layers if layer.weight.device.type == "cpu"
    )
    return found if size == 0 or psutil.virtual_memory().available > 1.5 * size else []


def _match(layers: Sequence[Any]) -> bool:
    kinds = {(each.in_features, each.weight.dtype, each.weight.device, each.bias is None) for each in layers}
    return len(kinds) == 1 and all(type(each.weight) is nn.Parameter for each in layers)


def _join(layers: Sequence[Any], switch: Switch) -> bool:
    first = layers[0]
    sizes = [layer.out_features for layer in layers]
    joined = nn.Linear(first.in_features, sum(sizes), bias=first.bias is not None, device="meta")
    group = Group(sizes, switch)
    for name in ("weight",) if first.bias is None else ("weight", "bias"):
        whole = torch.cat([getattr(layer, name).detach() for layer in layers])
        setattr(joined, name, nn.Parameter(whole, requires_grad=False))
        for layer, part in zip(layers, whole.split(sizes), strict=True):
            setattr(layer, name, nn.Parameter(part, requires_grad=False))
    for place, layer in enumerate(layers):
        layer.__class__, layer.group = (First if place == 0 else Further), group
        if place:
            layer.place = place
    first.joined = joined
    return True


# -- what all of them ask ------------------------------------------------------------------------------------


def _held(module: Any) -> bool:
    """Whether accelerate has put a forward of its own on it."""
    return hasattr(module, "_hf_hook") or "forward" in vars(module)


def _numbers(like: torch.Tensor, *shape: int, seed: int = 0) -> torch.Tensor:
    """Normal ones, of the dtype and device of `like`; the random state stays what it is."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(like)


def _alike(theirs: Callable[[], Any], ours: Callable[[], torch.Tensor]) -> bool:
    """Whether both give the same but for rounding."""
    try:
        a, b = theirs(), ours()
    except (TypeError, RuntimeError, AttributeError, ValueError, IndexError):
        return False
    near = max(4 * torch.finfo(b.dtype).eps, 1e-5)
    return isinstance(a, torch.Tensor) and a.dtype == b.dtype and torch.allclose(a, b, rtol=near, atol=near)
