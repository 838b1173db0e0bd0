"""Drafting a chain with a language model, one pass a token: what draft models and self-speculation share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from specbench.decoding.draft import Draft
from specbench.decoding.sampling import Sampling, draw, probabilities

# A pass over one more token int64 `[B]`, of the rows that count 1 and not those that count 0: logits `[B, D]`.
Advance = Callable[[torch.Tensor, list[int]], torch.Tensor]


def draft_chain(
    logits: torch.Tensor,
    advance: Advance,
    wanted: Sequence[int],
    sampling: Sampling,
    generators: Sequence[torch.Generator] | None,
    vocab: int,
    threshold: float = 0.0,
) -> list[Draft]:
    """One chain a row, greedy, or drawn as the target draws and with the q it was drawn from.

    Args:
        logits: `[B, D]`, for the first token of each row.
        advance: see `Advance`; not asked for the last token.
        wanted: the most tokens of each row.
        generators: one a row; None when decoding greedily.
        vocab: the target's ids; a draft's further ones are never proposed.
        threshold: a chain stops *after* a token the draft gave less than this (dropping a sampled token would be
            biased). It costs a read of the device a pass; 0 is off.
    """
    wanted = list(wanted)
    tokens: list[torch.Tensor] = []
    probs: list[torch.Tensor] = []
    for step in range(1, max(wanted) + 1):
        logits = logits[:, :vocab]
        if sampling.greedy:
            token, q = logits.argmax(-1), None
        else:
            assert generators is not None
            q = probabilities(logits, sampling)
            token = draw(q[:, None], generators, [int(want >= step) for want in wanted])[:, 0]
            probs.append(q)
        tokens.append(token)
        if threshold and step < max(wanted):
            belief = logits.float().softmax(-1) if q is None else q
            doubtful = (belief.gather(1, token[:, None])[:, 0] < threshold).tolist()
            wanted = [min(want, step) if stop else want for want, stop in zip(wanted, doubtful, strict=True)]
        if step >= max(wanted):
            break
        logits = advance(token, [int(want > step) for want in wanted])
    chain = torch.stack(tokens, 1)
    q_all = torch.stack(probs, 1) if probs else None
    return [
        Draft(chain[row, :n], probs=None if q_all is None else q_all[row, :n]) if n else Draft()
        for row, n in enumerate(wanted)
    ]
