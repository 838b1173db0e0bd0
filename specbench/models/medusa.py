"""Medusa's heads: small networks that guess the tokens after the next one from the target's last hidden state.

Head i is a few residual blocks, x + silu(W x + b), and a linear layer to the vocabulary; it guesses the token i + 1
places after the root. Sources: Cai et al., "Medusa" (2024); FasterDecoding/Medusa, medusa/model/medusa_model.py.

Formats: Medusa-1 is a file of heads alone, `{head}.{block}.linear.{weight,bias}` and `{head}.{blocks}.weight`;
Medusa-2 a whole model whose keys include the same under `medusa_head.`. Heads and blocks are counted from the keys:
configs on the Hub say two heads where the weights hold five.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn
from torch.nn.functional import silu

from specbench.models.checkpoint import Checkpoint
from specbench.models.fill import check_no_others
from specbench.models.fits import check_vocabulary
from specbench.models.target import Target

INSIDE = "medusa_head."  # where a whole model keeps its heads


class MedusaHeads(nn.Module):
    """N heads, stacked so that one batched product serves them all.

    Args:
        blocks: weights `[N, H, H]` and biases `[N, 1, H]` of the residual blocks, first to last.
        out: `[N, V, H]`; V may be the target's vocabulary without its padding.
    """

    def __init__(self, blocks: list[tuple[torch.Tensor, torch.Tensor]], out: torch.Tensor) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(weight, False) for weight, _ in blocks)
        self.biases = nn.ParameterList(nn.Parameter(bias, False) for _, bias in blocks)
        self.out = nn.Parameter(out, False)

    def __len__(self) -> int:
        return len(self.out)

    def logits(self, hidden: torch.Tensor, heads: int | None = None) -> torch.Tensor:
        """Logits `[B, heads, V]` of the first `heads` heads (None: all) for hidden states `[B, H]`."""
        x = hidden.to(self.out).expand(len(self) if heads is None else heads, -1, -1)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = x + silu(torch.baddbmm(bias[:heads], x, weight[:heads].mT))
        return torch.bmm(x, self.out[:heads].mT).transpose(0, 1)


def open_medusa(checkpoint: Checkpoint, target: Target) -> MedusaHeads:
    """The heads of a Medusa-1 or Medusa-2 checkpoint, in the target's dtype.

    Raises:
        SpecbenchError: a missing, unknown or misshapen weight, or heads for another vocabulary.
    """
    checkpoint = only_heads(checkpoint)
    found, blocks = _count(checkpoint.state)
    hidden = target.config.hidden_size
    first = f"0.{blocks}.weight"
    vocab = len(checkpoint.take(first, None, hidden)) if first in checkpoint.state else target.vocab_size
    check_vocabulary(checkpoint.ref, first, vocab, target.vocab_size)
    shapes: dict[str, tuple[int, ...]] = {}
    for block in range(blocks):
        shapes |= {f"{block}.linear.weight": (hidden, hidden), f"{block}.linear.bias": (hidden,)}
    shapes[f"{blocks}.weight"] = (vocab, hidden)
    wanted = {f"{head}.{name}": shape for head in range(found) for name, shape in shapes.items()}
    taken = {key: checkpoint.take(key, *shape) for key, shape in wanted.items()}
    check_no_others(checkpoint, taken)

    def stacked(name: str) -> torch.Tensor:
        rows = [taken[f"{head}.{name}"] for head in range(found)]
        return torch.stack(rows).to(target.device, target.dtype)

    return MedusaHeads(
        [(stacked(f"{b}.linear.weight"), stacked(f"{b}.linear.bias")[:, None]) for b in range(blocks)],
        stacked(f"{blocks}.weight")[:, : target.vocab_size],
    )


def only_heads(checkpoint: Checkpoint) -> Checkpoint:
    """A whole model's heads (Medusa-2) under the names of a file of heads (Medusa-1), which is returned as it is.

    The official blocks of a head are one module repeated; a file that keeps shared weights once (safetensors does)
    holds the first block alone, and the others are filled in from it.
    """
    state = checkpoint.state
    if any(key.startswith(INSIDE) for key in state):
        state = {k.removeprefix(INSIDE): v for k, v in state.items() if k.startswith(INSIDE)}
    _, blocks = _count(state)
    if not any(re.fullmatch(r"\d+\.[1-9]\d*\.linear\.\w+", key) for key in state):
        first = {key: value for key, value in state.items() if re.fullmatch(r"\d+\.0\.linear\.\w+", key)}
        for block in range(1, blocks):
            state = state | {key.replace(".0.linear", f".{block}.linear"): v for key, v in first.items()}
    return checkpoint if state is checkpoint.state else replace(checkpoint, state=state)


def _count(state: Iterable[str]) -> tuple[int, int]:
    """How many heads, and blocks in each, the keys speak of; at least one head."""
    state = list(state)
    heads = [int(match[1]) for key in state if (match := re.match(r"(\d+)\.\d+\.", key))]
    outs = [int(match[1]) for key in state if (match := re.fullmatch(r"\d+\.(\d+)\.weight", key))]
    return max(heads, default=0) + 1, max(outs, default=1)
