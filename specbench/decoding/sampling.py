"""From logits to tokens: temperature, top-k, top-p, and draws with one generator a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """How the target's distribution is shaped. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Probabilities float32 `[..., V]` of logits `[..., V]` after temperature, top-k, then top-p.

    The order and the treatment of ties are those of transformers' logits warpers. Rows are independent.

    Raises:
        ValueError: for greedy sampling, which has no distribution.
    """
    if sampling.greedy:
        raise ValueError("greedy decoding has no distribution")
    scores = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        least = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    probs = scores.softmax(dim=-1)
    if sampling.top_p < 1:
        ordered, index = probs.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered
        # The likeliest token always stays, whatever top_p is.
        ordered[..., 1:].masked_fill_(before[..., 1:] >= sampling.top_p, 0.0)
        probs = torch.zeros_like(probs).scatter(-1, index, ordered)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return probs


def draw(probs: torch.Tensor, generators: Sequence[torch.Generator]) -> torch.Tensor:
    """One token for each distribution of `probs` `[B, ..., V]`, row b by `generators[b]`: int64 `[B, ...]`."""
    rows = [
        torch.multinomial(row.reshape(-1, row.shape[-1]), 1, generator=generator).view(row.shape[:-1])
        for row, generator in zip(probs, generators, strict=True)
    ]
    return torch.stack(rows)


def uniforms(shape: torch.Size, generators: Sequence[torch.Generator], device: torch.device) -> torch.Tensor:
    """Uniform numbers in [0, 1) of `shape` `[B, ...]`, row b by `generators[b]`."""
    return torch.stack([torch.rand(shape[1:], generator=g, device=device) for g in generators])
