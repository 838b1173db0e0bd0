"""Hydra++: Medusa's tree, drafted level by level by heads that see the tokens before theirs.

Source: Ankner et al., "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding" (2024); zankner/Hydra,
hydra/model/{hydra_model,utils}.py. Verification is by the lossless rules at any temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from specbench.decoding.context import Context, Layout
from specbench.decoding.draft import Draft, Outcome
from specbench.decoding.learned import LearnedDrafter, column_of
from specbench.decoding.method import Request
from specbench.decoding.static_tree import StaticTree, named
from specbench.models import hydra
from specbench.models.checkpoint import Checkpoint
from specbench.models.device import send
from specbench.models.drafts import open_heads, quantised
from specbench.models.fixed_pass import Tensors
from specbench.models.quantize import Quantize
from specbench.models.target import Target


class Hydra(LearnedDrafter):
    """One head a level; only nodes that have children are passed through the next head.

    Options:
        draft: the heads, a folder or Hub id.
        tree: the tree's shape, by name; no deeper than there are heads.
        draft.quantize: what linear layers, but those to the vocabulary, are quantised to: none, int8, int4 or fp8.
    """

    taps = ("final",)

    def __init__(
        self,
        target: Target,
        *,
        draft: str | Checkpoint | None = None,
        tree: str = "mc_sim_7b_63",
        quantize: Quantize = "none",
    ) -> None:
        checkpoint = open_heads(draft, "hydra", ("hydra",))
        self.net = hydra.open_hydra(checkpoint, target)
        who = quantised(self.net, checkpoint.identity("Hydra heads"), quantize, target)
        super().__init__(target, self.net, who, self.net.cache)
        self.tree = named(tree).narrow(self.net.vocab).clip(len(self.net.heads))
        self.max_nodes = self.tree.width

    def prepare(self, request: Request) -> None:
        super().prepare(request)
        self.net.prefix.reserve(len(request.prompts), request.capacity)
        self.make_ahead(request, request.capacity)

    def begin(self, prompts: list[list[int]]) -> None:
        self._lengths = [len(prompt) for prompt in prompts]
        self._context = Context(self.net.prefix)

    def observe(self, outcome: Outcome) -> None:
        """Feed the prefix layer what was verified: the prompt, or the root and what was accepted after it."""
        if all(outcome.finished):
            return
        device = self.net.prefix.device
        hidden = outcome.along_path(outcome.taps["final"].to(device))
        if outcome.prefill:
            output = self.net.prefix.prefill(hidden)
            self._context.rewind(self._lengths)
            self._state = column_of(output, send([n - 1 for n in self._lengths], device))
        else:
            verified = zip(outcome.accepted, outcome.finished, strict=True)
            counts = [0 if done else accepted + 1 for accepted, done in verified]
            fed = self.feed("prefix", self._context, self._continue, counts, {"hidden": hidden})
            self._state = fed["state"][:, 0]
        self._roots = send([new[-1] if new else 0 for new in outcome.tokens], device)

    def propose(self, budgets: list[int], generators: Sequence[torch.Generator] | None) -> list[Draft]:
        if not any(budgets):
            return [Draft()] * len(budgets)
        tree = self.tree.clip(self.depth(max(budgets), self.tree.depth))
        inputs = {"state": self._state[:, None], "roots": self._roots[:, None]}
        tokens = self.fixed(("tree", tree.depth), partial(self._grow, tree), inputs)["tokens"]
        return tree.drafts(tokens, budgets)

    def _continue(self, inputs: Tensors, at: Layout, last: torch.Tensor) -> Tensors:
        return {"state": column_of(self.net.prefix(inputs["hidden"], at), last)[:, None]}

    def _grow(self, tree: StaticTree, inputs: Tensors, _length: int) -> Tensors:
        """The tokens `[B, n]` of a tree, from the prefix layer's outputs `[B, 1, H]` and the roots `[B, 1]`."""
        path = torch.cat([inputs["state"], self._embed(inputs["roots"])], -1)
        grown = []
        for head, level in enumerate(tree.levels(path.device)):
            tokens = level.pick(self.net.logits(head, path).topk(level.ranks).indices)
            grown.append(tokens)
            above = path[:, level.parent[level.inner]]
            path = torch.cat([above, self._embed(tokens[:, level.inner])], -1)
        return {"tokens": torch.cat(grown, 1)}

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.net.embed(tokens, self.target).to(self.net.prefix.device, self.net.prefix.dtype)
