"""Medusa: heads on the target's last hidden state guess the next few tokens, verified as a tree of a fixed shape.

Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (2024);
FasterDecoding/Medusa, medusa/model/{medusa_model_new,utils}.py. The official loop pads short paths with token 0 and
keeps the wrong cache row where that token is emitted; paths are never padded here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from specbench.decoding.draft import Draft, Outcome
from specbench.decoding.learned import LearnedDrafter
from specbench.decoding.method import Request
from specbench.decoding.sampling import Sampling, probabilities
from specbench.decoding.static_tree import StaticTree, named
from specbench.decoding.tree import Tree, arange, walk
from specbench.decoding.verify import Verdict
from specbench.models.checkpoint import Checkpoint, open_checkpoint
from specbench.models.device import send
from specbench.models.drafts import open_heads, quantised
from specbench.models.fixed_pass import Tensors
from specbench.models.medusa import INSIDE, only_heads, open_medusa
from specbench.models.quantize import Quantize
from specbench.models.target import Target


class Medusa(LearnedDrafter):
    """The heads' best guesses, laid out by a static tree; lossless unless posterior=typical and sampling.

    Options:
        draft: the heads, a folder or Hub id; by default those inside the target's own checkpoint (Medusa-2).
        tree: the tree's shape, by name; no deeper than there are heads.
        posterior: greedy, the lossless rules at any temperature; or typical, the official rule for temperatures
            above 0, which is not lossless: see `typical`.
        epsilon, alpha: for `typical`; as the official generate() sets them.
        draft.quantize: what all layers of the heads are quantised to, those to the vocabulary too, which hold most of
            their weights: none, int8, int4 or fp8.
    """

    taps = ("final",)

    def __init__(
        self,
        target: Target,
        *,
        draft: str | Checkpoint | None = None,
        tree: str = "mc_sim_7b_63",
        posterior: Literal["greedy", "typical"] = "greedy",
        epsilon: float = 0.09,
        alpha: float = 0.3,
        quantize: Quantize = "none",
    ) -> None:
        checkpoint = _heads_for(target, draft)
        self.heads = open_medusa(checkpoint, target)
        who = quantised(self.heads, checkpoint.identity("Medusa heads"), quantize, target)
        super().__init__(target, self.heads, who)
        self.tree = named(tree).narrow(self.heads.vocab).clip(len(self.heads))
        self.posterior, self.epsilon, self.alpha = posterior, epsilon, alpha
        self.lossless = posterior == "greedy"
        self.max_nodes = self.tree.width
        self._hidden: torch.Tensor | None = None  # of each row's last verified token, `[B, H]`

    def prepare(self, request: Request) -> None:
        super().prepare(request)
        self.make_ahead(request, request.capacity)

    def release(self) -> None:
        super().release()
        self._hidden = None

    def begin(self, prompts: list[list[int]]) -> None:
        self._lengths = [len(prompt) for prompt in prompts]
        self._hidden = None

    def observe(self, outcome: Outcome) -> None:
        final = outcome.along_path(outcome.taps["final"])
        ends = [n - 1 for n in self._lengths] if outcome.prefill else outcome.accepted
        self._hidden = final[arange(len(ends), final.device), send(ends, final.device)]

    def propose(self, budgets: list[int], generators: Sequence[torch.Generator] | None) -> list[Draft]:
        tree = self.tree.clip(max(budgets))
        if not tree.width:
            return [Draft()] * len(budgets)
        assert self._hidden is not None, "propose comes after observe"
        if tree is self.tree:
            tokens = self.fixed("tree", self._whole_tree, {"hidden": self._hidden[:, None]})["tokens"]
        else:  # near an end
            tokens = self._guess(tree, self._hidden)
        return tree.drafts(tokens, budgets)

    def _guess(self, tree: StaticTree, hidden: torch.Tensor) -> torch.Tensor:
        """The tokens `[B, n]` of a tree, from hidden states `[B, H]`."""
        return tree.pick(self.heads.logits(hidden, tree.depth).topk(tree.ranks).indices)

    def _whole_tree(self, inputs: Tensors, _length: int) -> Tensors:
        return {"tokens": self._guess(self.tree, inputs["hidden"][:, 0])}

    def judge(
        self, tree: Tree, logits: torch.Tensor, generators: Sequence[torch.Generator] | None
    ) -> Verdict | None:
        sampling = self.request.sampling
        if self.posterior == "greedy" or sampling.greedy:
            return None
        return typical(tree, logits, sampling, self.epsilon, self.alpha)


def typical(tree: Tree, logits: torch.Tensor, sampling: Sampling, epsilon: float, alpha: float) -> Verdict:
    """Typical acceptance: keep the longest path of tokens that are not improbable; the rest is argmax.

    A token is kept if p > min(epsilon, alpha · exp(-H)), H the entropy (in nats) of the distribution p it is judged
    by; of the longest paths the likeliest is taken. Nothing is drawn, the prefill's token included, so that the
    output depends on the temperature but not on the seed. This is the official `evaluate_posterior` with fast=True
    (its 1e-5 inside the logarithm too), without the padding of short paths.
    """
    p = probabilities(logits, sampling)
    entropy = -(p * (p + 1e-5).log()).sum(-1)
    threshold = (alpha * (-entropy).exp()).clamp(max=epsilon)
    at = tree.parents[..., None].expand(-1, -1, p.shape[-1])
    own = p.gather(1, at).gather(2, tree.tokens[..., None])[..., 0]
    kept = tree.candidate & (own > threshold.gather(1, tree.parents))
    kept[:, 0] = True
    whole = ~(tree.visible & ~kept[:, None, :]).any(-1) & kept
    likelihood = (tree.visible * torch.where(kept & tree.candidate, own, 1).log()[:, None, :]).sum(-1)
    depth = torch.where(whole, tree.depth, -1)
    longest = depth == depth.max(1, keepdim=True).values
    best = torch.where(longest, likelihood, float("-inf")).argmax(1)
    on_path = tree.visible.gather(1, best[:, None, None].expand(-1, 1, kept.shape[1]))[:, 0]
    accepted, last, path = walk(tree, on_path & tree.candidate)
    return Verdict(accepted, logits.argmax(-1).gather(1, last[:, None])[:, 0], path)


def _heads_for(target: Target, draft: str | Checkpoint | None) -> Checkpoint:
    identity = target.identity
    if draft is None and identity is not None and identity.source in ("hub", "local"):
        own = open_checkpoint(identity.hub_id or identity.ref, identity.revision, (INSIDE,))
        if own.state:
            return only_heads(own)
    return only_heads(open_heads(draft, "medusa", ("medusa", "medusa-2")))
