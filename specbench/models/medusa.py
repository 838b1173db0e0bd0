"""Medusa's heads: small networks that guess the tokens after the next one from the target's last hidden state.

Head i is a few residual blocks, x + silu(W x + b), and a linear layer to the vocabulary; it guesses the token i + 1
places after the root. Sources: Cai et al., "Medusa" (2024); FasterDecoding/Medusa, medusa/model/medusa_model.py.

Formats: Medusa-1 is a file of heads alone, `{head}.{block}.linear.{weight,bias}` and `{head}.{blocks}.weight`;
Medusa-2 a whole model whose keys include the same under `medusa_head.`. Heads and blocks are counted from the keys:
configs on the Hub say two heads where the weights hold five.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu

from specbench.models.checkpoint import Checkpoint
from specbench.models.fill import fill
from specbench.models.fits import check_vocabulary
from specbench.models.target import Target

INSIDE = "medusa_head."  # where a whole model keeps its heads


class ResidualBlock(nn.Module):
    """x + silu(W x + b). One that narrows its input takes that x through a layer of its own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.res_connection = nn.Linear(inputs, outputs) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.res_connection(x) + silu(self.linear(x))


class Head(nn.Module):
    """A few residual blocks, the first of which reads `inputs` numbers, and a linear layer to `vocab` logits."""

    def __init__(self, inputs: int, hidden: int, blocks: int, vocab: int, bias: bool) -> None:
        super().__init__()
        widths = [inputs, *[hidden] * blocks]
        self.blocks = nn.Sequential(*(ResidualBlock(n, hidden) for n in widths[:-1]))
        self.out = nn.Linear(widths[-1], vocab, bias=bias)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Logits `[…, V]` for `x` `[…, inputs]`."""
        return self.out(self.blocks(x))


class MedusaHeads(nn.Module):
    """`count` heads of `blocks` blocks each.

    Args:
        rows: the vocabulary the heads were made for.
        vocab: the target's, V; the two may differ by padding, and ids beyond the smaller one are not drafted.
    """

    def __init__(self, count: int, blocks: int, hidden: int, rows: int, vocab: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(hidden, hidden, blocks, rows, bias=False) for _ in range(count))
        self.vocab = min(rows, vocab)

    def __len__(self) -> int:
        return len(self.heads)

    def logits(self, hidden: torch.Tensor, heads: int | None = None) -> torch.Tensor:
        """Logits `[B, heads, V]` of the first `heads` heads (None: all) for hidden states `[B, H]`."""
        own = next(self.parameters())
        x = hidden.to(own.device, own.dtype)
        chosen: Iterator[Any] = islice(self.heads, heads)
        return torch.stack([head.logits(x) for head in chosen], 1)[..., : self.vocab]


def open_medusa(checkpoint: Checkpoint, target: Target) -> MedusaHeads:
    """The heads of a Medusa-1 or Medusa-2 checkpoint, in the target's dtype.

    Raises:
        SpecbenchError: a missing, unknown or misshapen weight, or heads for another vocabulary.
    """
    checkpoint = only_heads(checkpoint)
    count, blocks = _count(checkpoint.state)
    hidden, vocab = target.config.hidden_size, target.vocab_size
    first = f"0.{blocks}.weight"
    rows = len(checkpoint.take(first, None, hidden)) if first in checkpoint.state else vocab
    check_vocabulary(checkpoint.ref, first, rows, vocab)
    with torch.device("meta"):
        net = MedusaHeads(count, blocks, hidden, rows, vocab)

    def official(name: str) -> str:
        return name.removeprefix("heads.").replace("blocks.", "").replace("out.", f"{blocks}.")

    fill(net, checkpoint, device=target.device, dtype=target.dtype, key_of=official)
    return net


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
