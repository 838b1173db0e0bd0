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
    if sampling.top_p < 1:
        ordered, index = scores.sort(dim=-1, descending=False)
        beyond = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - sampling.top_p
        beyond[..., -1:].fill_(False)  # the likeliest token always stays, whatever top_p is
        scores = scores.masked_fill(beyond.scatter(-1, index, beyond), float("-inf"))
    return scores.softmax(dim=-1)


def draw(probs: torch.Tensor, generators: Sequence[torch.Generator], counts: Sequence[int]) -> torch.Tensor:
    """A token for the first `counts[b]` distributions of each row of `probs` `[B, T, V]`: int64 `[B, T]`.

    Row b draws by `generators[b]`, as many times as it needs and no more, so that its tokens do not depend on
    how wide its neighbours make the batch. What is not drawn is 0.
    """
    tokens = torch.zeros(probs.shape[:2], dtype=torch.long, device=probs.device)
    for row, (generator, count) in enumerate(zip(generators, counts, strict=True)):
        if count:
            tokens[row, :count] = torch.multinomial(probs[row, :count], 1, generator=generator)[:, 0]
    return tokens


def drawn(probs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """A token of each distribution of `probs` `[…, V]`, by exponential variates `[…, V]`: int64 `[…]`.

    The largest of p / (an exponential variate) is a draw from p, which is how `torch.multinomial` draws one. A pass
    of fixed shape can draw so: the variates come in, and it need not know the rows' generators.
    """
    return (probs / noise).argmax(-1)


def exponentials(
    width: int, vocab: int, generators: Sequence[torch.Generator], counts: Sequence[int]
) -> torch.Tensor:
    """`counts[b]` times `vocab` exponential variates by `generators[b]`, then infinity: float `[B, width, vocab]`."""
    noise = torch.empty(len(generators), width, vocab, device=generators[0].device)
    for row, (generator, count) in enumerate(zip(generators, counts, strict=True)):
        if count:
            noise[row, :count].exponential_(generator=generator)
        if count < width:
            noise[row, count:].fill_(float("inf"))
    return noise


def drawn_distinct(probs: torch.Tensor, count: int, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` different tokens of each distribution of `probs` `[B, P, V]`, drawn one after the other.

    The largest of p / (an exponential variate), in order, are draws without replacement (Efraimidis and Spirakis
    2006).

    Args:
        noise: exponential variates `[B, P, V]`; where they are infinite, what is drawn is arbitrary.

    Returns:
        int64 `[B, P, count]`, and the distribution each was drawn from, earlier ones removed, `[B, P, count, V]`.
        Where fewer than `count` tokens have a probability, the rest are arbitrary, of a distribution of their own.
    """
    tokens = (probs / noise.clamp(min=torch.finfo(noise.dtype).tiny)).topk(count, -1).indices
    left, drawn_from = probs, []
    for rank in range(count):
        token = tokens[..., rank : rank + 1]
        mass = left.sum(-1, keepdim=True)
        sure = torch.zeros_like(left).scatter_(-1, token, 1.0)
        drawn_from.append(torch.where(mass > 0, left / mass.clamp(min=torch.finfo(left.dtype).tiny), sure))
        left = left.scatter(-1, token, 0.0)
    return tokens, torch.stack(drawn_from, -2)


def uniforms(width: int, generators: Sequence[torch.Generator], counts: Sequence[int]) -> torch.Tensor:
    """`counts[b]` uniform numbers in [0, 1) by `generators[b]`, then ones: float `[B, width]`."""
    device = generators[0].device
    numbers = torch.ones(len(generators), width, device=device)
    for row, (generator, count) in enumerate(zip(generators, counts, strict=True)):
        if count:
            numbers[row, :count] = torch.rand(count, generator=generator, device=device)
    return numbers
