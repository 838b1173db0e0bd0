"""EAGLE-1: one layer drafts in feature space, in a tree of fixed shape.

Source: Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (arXiv 2401.15077);
SafeAILab/EAGLE, branch v1, model/cnets.py and model/choices.py (its 25-node tree).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from specbench.decoding.draft import Draft
from specbench.decoding.feature_drafter import FeatureDrafter
from specbench.decoding.sampling import draw_distinct, probabilities
from specbench.decoding.static_tree import named
from specbench.models.checkpoint import Checkpoint
from specbench.models.quantize import Quantize
from specbench.models.target import Target


class Eagle1(FeatureDrafter):
    """EAGLE-1/2 weights, a static tree.

    When the target samples, the children of a node are drawn from the draft without replacement, each with the q it
    was drawn from, and judged by rejection (the paper's rule). With `sampled=false` they are the likeliest ones, as
    when decoding greedily. Both are exact.

    Options:
        draft: a folder or Hub id with an EAGLE-1, EAGLE-2 or HASS draft.
        tree: the shape: eagle1 (25 nodes, 5 deep), or Medusa's mc_sim_7b_63.
        sampled: draw proposals when the target samples.
        quantize: what the draft's linear layers are quantised to: none, int8, int4 or fp8.
    """

    def __init__(
        self,
        target: Target,
        *,
        draft: str | Checkpoint | None = None,
        tree: str = "eagle1",
        sampled: bool = True,
        quantize: Quantize = "none",
    ) -> None:
        super().__init__(target, draft, "eagle1", ("eagle",), quantize)
        self.tree, self.sampled = named(tree).narrow(self.net.vocab), sampled
        self.max_nodes = self.tree.width

    @property
    def scratch(self) -> int:
        """Cache slots of a draft: of the nodes that have children, which alone go through the network."""
        return sum(len(level.inner) for level in self.tree.levels(self.net.device))

    def propose(self, budgets: list[int], generators: Sequence[torch.Generator] | None) -> list[Draft]:
        depths = [min(n, self.tree.depth) for n in self.allowed(budgets)]
        if not any(depths):
            return [Draft()] * len(budgets)
        assert self._out is not None, "propose comes after observe"
        tokens: list[torch.Tensor] = []
        probs: list[torch.Tensor] = []
        logits = self.net.logits(self._out[:, None])
        hidden = self.net.feedback(self._out[:, None])
        for number, level in enumerate(self.tree.levels(self.net.device)[: max(depths)]):
            drawing = [depth > number for depth in depths]
            ranked, q = self._guess(logits, level.ranks, generators, drawing)
            tokens.append(self.net.to_target(level.pick(ranked)))
            if q is not None:
                probs.append(level.pick(q))
            if number + 1 < max(depths) and len(level.inner):
                logits, hidden = self.expand(
                    tokens[-1][:, level.inner],
                    hidden[:, level.parent[level.inner]],
                    level.visible.expand(len(budgets), -1, -1),
                    number,
                )
        drafts = self.tree.drafts(torch.cat(tokens, 1), depths)
        if not probs:
            return drafts
        every = torch.cat(probs, 1)
        return [replace(d, probs=every[row, : len(d)]) if len(d) else d for row, d in enumerate(drafts)]

    def _guess(
        self,
        logits: torch.Tensor,
        ranks: int,
        generators: Sequence[torch.Generator] | None,
        drawing: list[bool],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`ranks` different draft ids of each of P places, `[B, P, ranks]`, and the q `[B, P, ranks, V]` of each."""
        if generators is None or not self.sampled:
            return logits.topk(ranks, -1).indices, None
        return draw_distinct(probabilities(logits, self.request.sampling), ranks, generators, drawing)
