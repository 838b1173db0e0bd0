"""Draft logits of the first round against the golden tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parity_record import Difference
from parity_scores import overheard

TOLERANCE = 1e-4  # of the tensor's size, at least 1


@dataclass(frozen=True)
class Source:
    """Where a method makes its first draft's logits: the golden tensor, whose function, and the rows it fills."""

    tensor: str
    owner: str
    function: str
    rows: Callable[[torch.Tensor], torch.Tensor]


def _last(out: torch.Tensor) -> torch.Tensor:
    return out[0, -1]


SOURCES = {
    "eagle1": Source("round0_step0_logits", "net", "logits", _last),
    "eagle2": Source("round0_step0_logprobs", "net", "logits", lambda out: _last(out).log_softmax(-1)),
    "eagle3": Source("round0_step0_logprobs", "net", "logits", lambda out: _last(out).log_softmax(-1)),
    "medusa": Source("round0_medusa_logits", "heads", "logits", lambda out: out[0]),
    "hydra": Source("round0_head0", "net.heads.0", "logits", lambda out: out[0, 0]),
    "dflash": Source("round0_draft_logits", "net", "logits", lambda out: out[0]),
}


def compare_tensors(name: str, drafter: Any, folder: Path, number: int, run: Callable[[], Any]) -> str | None:
    """Compare what `run` makes the drafter compute first for prompt `number`; in words, None if there is nothing.

    Raises:
        Difference: they are further apart than the tolerance, or shaped otherwise.
    """
    source, file = SOURCES.get(name), folder / "tensors.npz"
    if source is None or not file.is_file():
        return None
    with np.load(file) as tensors:
        if source.tensor not in tensors.files:
            return None
        golden = torch.from_numpy(tensors[source.tensor])
    owner = _owner(drafter, source.owner.split("."))
    with overheard(owner, source.function) as outputs:
        run()
    if not outputs:
        raise Difference(number, 0, source.tensor, "never computed", tuple(golden.shape))
    ours = source.rows(outputs[0].float())
    golden = golden.reshape(-1, golden.shape[-1])
    ours = ours.reshape(-1, ours.shape[-1])
    rows = min(len(ours), len(golden))  # Medusa: heads beyond the tree's depth are not run
    if ours.shape[-1] != golden.shape[-1]:
        raise Difference(number, 0, f"{source.tensor} (shape)", tuple(ours.shape), tuple(golden.shape))
    apart = float((ours[:rows] - golden[:rows]).abs().max())
    if not apart <= TOLERANCE * max(1.0, float(golden.abs().max())):
        raise Difference(number, 0, f"{source.tensor} (largest difference)", apart, 0.0)
    return f"first draft logits to {apart:.0e}"


def _owner(drafter: Any, path: Sequence[str]) -> Any:
    for name in path:
        drafter = drafter[int(name)] if name.isdecimal() else getattr(drafter, name)
    return drafter
