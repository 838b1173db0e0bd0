"""DSpark's Markov heads: what the token before says of the next, added to a block drafter's logits step by step.

Source: deepseek-ai/DeepSpec, deepspec/modeling/dspark/markov_head.py (arXiv 2607.05147).
"""

from __future__ import annotations

import torch
from torch import nn

KINDS = ("vanilla", "gated", "rnn")


class MarkovHead(nn.Module):
    """A bias on the logits of a token, of low rank: `w2(f(w1(token before)))`.

    Args:
        kind: vanilla, f is the identity; gated, a gate that also reads the hidden state; rnn, a recurrent state
            over the block.
        vocab: the vocabulary's size V.
        rank: width R of the bottleneck.
        hidden: width H of the block's hidden states.
    """

    def __init__(self, kind: str, vocab: int, rank: int, hidden: int) -> None:
        super().__init__()
        self.kind, self.rank = kind, rank
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, vocab, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def start(self, rows: int) -> torch.Tensor:
        """The state before a block's first step, `[B, R]` (only `rnn` changes it)."""
        return self.markov_w1.weight.new_zeros(
            rows, self.rank
        )  # of w2, a quantised tensor has no such method

    def step(
        self, before: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The bias `[B, V]` of the token after `before` int64 `[B]`, with hidden state `[B, H]`; the new state."""
        latent = self.markov_w1(before)
        if self.kind == "gated":
            latent = torch.sigmoid(self.gate_proj(torch.cat([hidden, latent], -1))) * latent
        elif self.kind == "rnn":
            joint = self.joint_proj(torch.cat([state, latent, hidden], -1))
            gate, candidate, out = joint.chunk(3, -1)
            keep = torch.sigmoid(gate)
            state = keep * state + (1 - keep) * torch.tanh(candidate)
            latent = torch.tanh(out)
        return self.markov_w2(latent), state
