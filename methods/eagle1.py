"""EAGLE-1: one layer drafts in feature space, in a tree of fixed shape.

Source: Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (arXiv 2401.15077);
SafeAILab/EAGLE, branch v1, model/cnets.py and model/choices.py (its 25-node tree).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from specbench.decoding.draft import Draft
from specbench.decoding.feature_drafter import FeatureDrafter
from specbench.decoding.sampling import Sampling, drawn_distinct, exponentials, probabilities
from specbench.decoding.static_tree import Level, named
from specbench.models.checkpoint import Checkpoint
from specbench.models.fixed_pass import Tensors
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
        draft.quantize: what the draft's linear layers are quantised to: none, int8, int4 or fp8.
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
        deepest = self.depth(max(depths), self.tree.depth)
        start, read = self._context.starts(), self._context.reach(self.scratch)
        if generators is None or not self.sampled:
            given = {"out": self._out, "start": start}
            likeliest = partial(self._likeliest, deepest)
            return self.tree.drafts(self.fixed(("tree", deepest), likeliest, given, read)["tokens"], depths)
        tokens, probs = self._drawn(start, read, generators, depths)
        drafts = self.tree.drafts(tokens, depths)
        return [replace(d, probs=probs[row, : len(d)]) if len(d) else d for row, d in enumerate(drafts)]

    def _likeliest(self, deepest: int, inputs: Tensors, length: int) -> Tensors:
        """The tokens `[B, n]` of the tree down to `deepest`."""
        logits, hidden = self.net.logits(inputs["out"]), self.net.feedback(inputs["out"])
        tokens: list[torch.Tensor] = []
        for number, level in enumerate(self.tree.levels(self.net.device)[:deepest]):
            tokens.append(self.net.to_target(level.pick(logits.topk(level.ranks, -1).indices)))
            if number + 1 < deepest:
                given = {"tokens": tokens[-1], "hidden": hidden, "start": inputs["start"]}
                found = self._descend(number, given, length)
                logits, hidden = found["logits"], found["hidden"]
        return {"tokens": torch.cat(tokens, 1)}

    def _drawn(
        self, start: torch.Tensor, read: int, generators: Sequence[torch.Generator], depths: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same with each node's q `[B, n, V]`, drawn level by level, `depths[b]` of them by row b's generator.

        Drawing is a pass of its own, which reads no slots: the noise is too large for each length to have a buffer.
        """
        assert self._out is not None
        logits, hidden = self.net.logits(self._out), self.net.feedback(self._out)
        tokens: list[torch.Tensor] = []
        probs: list[torch.Tensor] = []
        sampling, levels = self.request.sampling, self.tree.levels(self.net.device)[: max(depths)]
        for number, level in enumerate(levels):
            places = [logits.shape[1] if depth > number else 0 for depth in depths]
            noise = exponentials(logits.shape[1], logits.shape[2], generators, places)
            choose = partial(self._choose, level, sampling)
            chosen = self.fixed(("draw", number, sampling), choose, {"logits": logits, "noise": noise})
            tokens.append(chosen["tokens"])
            probs.append(chosen["probs"])
            if number + 1 < len(levels):
                given = {"tokens": tokens[-1], "hidden": hidden, "start": start}
                found = self.fixed(("level", number), partial(self._descend, number), given, read)
                logits, hidden = found["logits"], found["hidden"]
        return torch.cat(tokens, 1), torch.cat(probs, 1)

    def _choose(self, level: Level, sampling: Sampling, inputs: Tensors, _length: int) -> Tensors:
        """A level's tokens `[B, n]` and q `[B, n, V]`, from its parents' logits and noise, `[B, P, V]` each."""
        q = probabilities(inputs["logits"], sampling)
        tokens, drawn_from = drawn_distinct(q, level.ranks, inputs["noise"])
        return {"tokens": self.net.to_target(level.pick(tokens)), "probs": level.pick(drawn_from)}

    def _descend(self, number: int, inputs: Tensors, length: int) -> Tensors:
        """Logits and hidden states for the children of level `number`, from its tokens `[B, n]` and its parents'
        hidden states `[B, <= n, h]`."""
        level = self.tree.levels(self.net.device)[number]
        tokens = inputs["tokens"][:, level.inner]
        hidden = inputs["hidden"][:, level.parent[level.inner]]
        visible = level.visible.expand(len(tokens), -1, -1)
        logits, hidden = self.expand(tokens, hidden, visible, number, inputs["start"][:, :1], length)
        return {"logits": logits, "hidden": hidden}
