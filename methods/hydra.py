"""Hydra++: Medusa's tree, drafted level by level by heads that see the tokens before theirs.

Source: Ankner et al., "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding" (2024); zankner/Hydra,
hydra/model/{hydra_model,utils}.py. Verification is by the lossless rules at any temperature.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from specbench.decoding.context import Context
from specbench.decoding.draft import Draft, Drafter, Outcome
from specbench.decoding.static_tree import Level, StaticTree, named
from specbench.decoding.tree import arange
from specbench.models import hydra
from specbench.models.checkpoint import Checkpoint
from specbench.models.drafts import open_heads
from specbench.models.target import Target


class Hydra(Drafter):
    """One head a level; only nodes that have children are passed through the next head.

    Options:
        draft: the heads, a folder or Hub id.
        tree: the tree's shape, by name; no deeper than there are heads.
    """

    taps = ("final",)

    def __init__(
        self, target: Target, *, draft: str | Checkpoint | None = None, tree: str = "mc_sim_7b_63"
    ) -> None:
        super().__init__(target)
        checkpoint = open_heads(draft, "hydra", ("hydra",))
        self.net = hydra.open_hydra(checkpoint, target)
        self.tree = named(tree).narrow(target.vocab_size).clip(len(self.net.heads))
        self.max_nodes = self.tree.width
        self._identity = checkpoint.identity("hydra").to_json()

    def draft_identity(self) -> dict[str, Any] | None:
        return self._identity

    def weights_bytes(self) -> int:
        return self.net.nbytes()

    def kv_bytes(self) -> int:
        return self.net.prefix.cache.nbytes()

    def release(self) -> None:
        self.net.prefix.cache.release()

    def begin(self, prompts: list[list[int]]) -> None:
        self._lengths = [len(prompt) for prompt in prompts]
        self._context = Context(self.net.prefix)
        self.net.prefix.reserve(len(prompts), self.request.capacity)

    def observe(self, outcome: Outcome) -> None:
        """Feed the prefix layer what was verified: the prompt, or the root and what was accepted after it."""
        if all(outcome.finished):
            return
        device = self.net.prefix.device
        hidden = outcome.along_path(outcome.taps["final"].to(device))
        if outcome.prefill:
            counts = self._lengths
            output = self.net.prefix.prefill(hidden)
            self._context.rewind(counts)
        else:
            verified = zip(outcome.accepted, outcome.finished, strict=True)
            counts = [0 if done else accepted + 1 for accepted, done in verified]
            output = self.net.prefix(hidden, self._context.extend(hidden.shape[1], counts))
        last = torch.tensor([max(n - 1, 0) for n in counts], device=device)
        self._state = output[arange(len(counts), device), last]
        self._roots = torch.tensor([new[-1] if new else 0 for new in outcome.tokens], device=device)

    def propose(self, budgets: list[int], generators: Sequence[torch.Generator] | None) -> list[Draft]:
        self._grown = self.tree.clip(max(budgets))
        if not self._grown.width:
            return [Draft()] * len(budgets)
        tokens = [tokens for _, _, tokens in self._grow(self._grown)]
        return self._grown.drafts(torch.cat(tokens, 1), budgets)

    @property
    def last_scores(self) -> torch.Tensor | None:
        """Logits `[B, nodes, V]` among which each node of the last draft was chosen (found again: for tests)."""
        if not self._grown.width:
            return None
        return torch.cat([logits[:, level.parent] for level, logits, _ in self._grow(self._grown)], 1)

    def _grow(self, tree: StaticTree) -> Iterator[tuple[Level, torch.Tensor, torch.Tensor]]:
        """Each level, its parents' logits `[B, parents, V]`, and its tokens `[B, n]`."""
        path = torch.cat([self._state, self._embed(self._roots)], -1)[:, None]
        for head, level in enumerate(tree.levels(path.device)):
            logits = self.net.logits(head, path)
            tokens = level.pick(logits.topk(level.ranks).indices)
            yield level, logits, tokens
            above = path[:, level.parent[level.inner]]
            path = torch.cat([above, self._embed(tokens[:, level.inner])], -1)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.net.embed(tokens, self.target).to(self._state)
