"""Numbers of the host on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def send(
    values: Sequence[Any] | torch.Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`values` (numbers, rows of numbers, or a tensor) as a tensor on `device`, without waiting for it.

    `torch.tensor(values, device=…)` waits until a GPU has done all it was asked to, and then it has nothing to do.
    """
    if isinstance(values, torch.Tensor):
        made = values if dtype is None else values.to(dtype)
        if device.type == "cuda" and made.device.type == "cpu":
            made = made.pin_memory()
    else:
        made = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return made.to(device, non_blocking=True)
