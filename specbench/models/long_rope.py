"""Rotary positions of long-context models (type `longrope`: Phi-3 and its kind), one set of frequencies a request.

transformers takes the frequencies for short or for long texts anew in every pass, by the furthest position in it. A
pass that verifies a draft reaches further than vanilla's pass over the same token, so that near the border the two
would not compute the same; and up to 5.23 the choice reads the device. Here it is made once a request, by all the
tokens that it may come to, on the host.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

KIND = "longrope"


class LongRope:
    """The rotary modules of `model` that change with the length of the text; none in most models."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules: list[Any] = [m for m in model.modules() if getattr(m, "rope_type", None) == KIND]
        self._long = [self._frequencies(module) for module in self._modules]
        self._short = [module.original_inv_freq.clone() for module in self._modules]
        self._take_over()

    def choose(self, tokens: int) -> None:
        """The frequencies for a request of up to `tokens` tokens. Addresses stay (a graph reads them)."""
        for module, short, long in zip(self._modules, self._short, self._long, strict=True):
            module.inv_freq.copy_(long if tokens > _border(module) else short)

    @contextmanager
    def stock(self) -> Iterator[None]:
        """While open, transformers chooses. It replaces what our passes read, where they read it: that comes back."""
        ours = [module.inv_freq for module in self._modules]
        for module in self._modules:
            del module.forward
        try:
            yield
        finally:
            self._take_over()
            for module, frequencies in zip(self._modules, ours, strict=True):
                module.inv_freq = frequencies

    def _take_over(self) -> None:
        for module in self._modules:
            module.forward = MethodType(inspect.unwrap(type(module).forward), module)

    @staticmethod
    def _frequencies(module: Any) -> torch.Tensor:
        device = module.inv_freq.device
        long, _ = ROPE_INIT_FUNCTIONS[KIND](module.config, device, seq_len=_border(module) + 1)
        return long


def depends_on_text(model: torch.nn.Module) -> bool:
    """Whether rotary frequencies still are computed from positions, in the pass (type `dynamic`, or one a layer)."""
    kinds = [getattr(module, "rope_type", None) for module in model.modules()]
    return any(
        "dynamic" in each or (each == KIND and isinstance(kind, dict))
        for kind in kinds
        if kind is not None
        for each in (kind.values() if isinstance(kind, dict) else (kind,))
    )


def _border(module: Any) -> int:
    return module.config.rope_parameters["original_max_position_embeddings"]
