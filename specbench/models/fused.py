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
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm

from specbench.models.joined import Switch, held, join
from specbench.models.rope import rotate

TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
)  # read the same; the first is called first
ROTARY = "apply_rotary_pos_emb"
ROTARY_TAKES = ["q", "k", "cos", "sin", "unsqueeze_dim"]
RENAMES = "transformers.utils.deprecation"  # whose decorators do nothing but rename an argument

Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def fuse(model: Any, switch: Switch) -> dict[str, int]:
    """Fuse what can be in a transformers model, in place: how many norms, rotations and products of each kind.

    Modules change class; weights that are multiplied together become parts of one tensor, under their own names.
    Layers that something else has hold of (quantised ones, hooks of accelerate) are left alone.
    """
    like = model.get_input_embeddings().weight  # of what passes compute in, however the layers are stored
    classes: dict[type, type] = {}
    done = {
        "norms": sum(_fuse_norm(module, switch) for module in model.modules()),
        "rotations": sum(_fuse_rotary(module, switch, like, classes) for module in model.modules()),
        "products": join(model, switch),
    }
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
    if not named or not isinstance(weight, torch.Tensor) or not isinstance(eps, float) or held(module):
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


def _fuse_rotary(module: Any, switch: Switch, like: torch.Tensor, classes: dict[type, type]) -> bool:
    """Give an attention module a forward whose `apply_rotary_pos_emb` is ours, if the one it calls does the same."""
    kind = type(module)
    forward = kind.forward
    while getattr(forward, "__globals__", {}).get("__name__") == RENAMES and hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    if not inspect.isfunction(forward) or ROTARY not in forward.__code__.co_names or held(module):
        return False
    theirs: Any = forward.__globals__.get(ROTARY)
    if kind not in classes:
        if isinstance(theirs, _Rotary) or not _rotates_halves(theirs, like):
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


# -- what all of them ask ------------------------------------------------------------------------------------


def _numbers(like: torch.Tensor, *shape: int, seed: int = 0) -> torch.Tensor:
    """Normal ones, of the dtype and device of `like`; the random state stays what it is."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(like)


def _alike(theirs: Callable[[], Any], ours: Callable[[], torch.Tensor]) -> bool:
    """Whether both give the same but for rounding."""
    try:
        a, b = theirs(), ours()
        near = max(4 * torch.finfo(b.dtype).eps, 1e-5)
    except (TypeError, RuntimeError, AttributeError, ValueError, IndexError):
        return False
    return isinstance(a, torch.Tensor) and a.dtype == b.dtype and torch.allclose(a, b, rtol=near, atol=near)
