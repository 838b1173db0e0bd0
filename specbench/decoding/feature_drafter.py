"""Drafters whose own network continues the target's hidden states: EAGLE and its kind.

The network's cache holds verified tokens only, each stored with the *target's* hidden state: after every round the
accepted tokens are fed again with what the target made of them, and what the tree had written is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch

from specbench.decoding.context import Cached, Context, Layout
from specbench.decoding.draft import Draft, Outcome
from specbench.decoding.growth import DynamicTree
from specbench.decoding.learned import LearnedDrafter, column_of
from specbench.decoding.method import Request
from specbench.models.checkpoint import Checkpoint
from specbench.models.device import send
from specbench.models.drafts import open_heads, quantised
from specbench.models.eagle import open_eagle
from specbench.models.fixed_pass import Tensors
from specbench.models.quantize import Quantize
from specbench.models.random_draft import RANDOM, random_eagle3
from specbench.models.target import Target


class FeatureNet(Cached, Protocol):
    """A network that continues hidden states (see `specbench.models.eagle.Eagle`)."""

    kind: str
    taps: tuple[str, ...]
    positions: int
    vocab: int

    def __call__(self, tokens: torch.Tensor, hidden: torch.Tensor, at: Layout | None) -> torch.Tensor: ...
    def features(self, taps: dict[str, torch.Tensor]) -> torch.Tensor: ...
    def feedback(self, out: torch.Tensor) -> torch.Tensor: ...
    def logits(self, out: torch.Tensor) -> torch.Tensor: ...
    def to_target(self, ids: torch.Tensor) -> torch.Tensor: ...
    def reserve(self, rows: int, tokens: int) -> None: ...


class FeatureDrafter(LearnedDrafter):
    """Keeps the network's cache in step with the target; subclasses draft from `self._out`.

    A row whose text outgrows the positions the network was made for (`max_position_embeddings` of its config: 2048
    in the official EAGLE-3 drafts) gets no drafts from there on, and near that end shallower ones.

    Attributes:
        kind: what the draft was recognised as.
    """

    def __init__(
        self,
        target: Target,
        draft: str | Checkpoint | None,
        method: str,
        kinds: Sequence[str],
        quantize: Quantize,
    ) -> None:
        made = draft == RANDOM and "eagle3" in kinds
        checkpoint = random_eagle3(target) if made else open_heads(draft, method, kinds)
        net: Any = open_eagle(checkpoint, target)
        who = quantised(net, checkpoint.identity(*self.notes(net.kind)), quantize, target)
        super().__init__(target, net, who, net.cache)
        self.net: FeatureNet = net
        self.kind, self.taps = self.net.kind, self.net.taps
        self._out: torch.Tensor | None = None  # of each row's last verified token, `[B, 1, h]`

    def notes(self, kind: str) -> list[str]:
        """What a reader of the results should know of a draft of this kind."""
        return [kind]

    def prepare(self, request: Request) -> None:
        super().prepare(request)
        longest = request.capacity + self.scratch + 1
        self.net.reserve(len(request.prompts), longest)
        self.make_ahead(request, longest)

    def release(self) -> None:
        super().release()
        self._out = None

    @property
    def scratch(self) -> int:
        """Cache slots a draft may use besides the text's."""
        raise NotImplementedError

    def begin(self, prompts: list[list[int]]) -> None:
        self._prompts = prompts
        self._context = Context(self.net)
        self._context.rewind([0] * len(prompts))
        self._fits = [True] * len(prompts)
        self._out = None

    def observe(self, outcome: Outcome) -> None:
        if outcome.prefill:
            next_tokens = [p[1:] + new for p, new in zip(self._prompts, outcome.tokens, strict=True)]
        else:
            next_tokens = outcome.tokens
        lengths = [n + len(new) for n, new in zip(self._context.lengths, next_tokens, strict=True)]
        self._fits = [
            fits and not done and n <= self.net.positions
            for fits, done, n in zip(self._fits, outcome.finished, lengths, strict=True)
        ]
        fed = [new if fits else [] for new, fits in zip(next_tokens, self._fits, strict=True)]
        if any(fed):
            self._feed(fed, outcome)

    def _feed(self, tokens: list[list[int]], outcome: Outcome) -> None:
        """Store each row's new tokens with the target's hidden states; keep what comes out after the last."""
        counts = [len(row) for row in tokens]
        width, device = max(counts), self.net.device
        taps = {name: outcome.along_path(outcome.taps[name])[:, :width].to(device) for name in self.taps}
        padded = send([row + [0] * (width - len(row)) for row in tokens], device)
        inputs = {"tokens": padded, **taps}
        if outcome.prefill and self.net.window is None:
            self._context.rewind(counts)
            fed = self._continue(inputs, None, send([max(n - 1, 0) for n in counts], device))
        else:
            new = not outcome.prefill
            fed = self.feed("pass", self._context, self._continue, counts, inputs, fixed=new)
        self._out = fed["out"]

    def _continue(self, inputs: Tensors, at: Layout | None, last: torch.Tensor) -> Tensors:
        features = self.net.features({name: inputs[name] for name in self.taps})
        out = self.net(inputs["tokens"], features, at)
        return {"out": column_of(out, last)[:, None]}

    def allowed(self, budgets: Sequence[int]) -> list[int]:
        """How deep each row may draft: its budget, cut where the network's positions end."""
        return [
            min(budget, self.net.positions - length + 1) if fits else 0
            for budget, fits, length in zip(budgets, self._fits, self._context.lengths, strict=True)
        ]

    def expand(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        visible: torch.Tensor,
        level: int,
        start: torch.Tensor,
        read: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass over T nodes of one level of a tree, all of them at the same position.

        Args:
            tokens: int64 `[B, T]`.
            hidden: `[B, T, h]`, from the pass of their parents.
            visible: bool `[B, T, earlier + T]`, the nodes of this tree that each attends to.
            level: of these nodes, 0 for children of the root.
            start, read: of the context, see `Context.layout`.

        Returns:
            logits `[B, T, D]` and hidden `[B, T, h]` for their children.
        """
        depth = torch.full_like(tokens, level)
        live = torch.ones_like(tokens, dtype=torch.bool)
        at = self._context.layout(depth, live, visible, visible.shape[-1] - tokens.shape[1], start, read)
        out = self.net(tokens, hidden, at)
        return self.net.logits(out), self.net.feedback(out)


class DynamicDrafter(FeatureDrafter):
    """A feature drafter that grows EAGLE-2's dynamic trees (see `specbench.decoding.growth`).

    Its proposals are deterministic, also when the target samples: exact by the rule for drafts without q.
    """

    name: str  # of the method, for what it says of a draft it cannot take
    accepts: tuple[str, ...] = ("eagle3", "eagle")  # kinds of draft (`specbench.models.detect`)

    def __init__(
        self,
        target: Target,
        *,
        draft: str | Checkpoint | None = None,
        total_token: int = 60,
        depth: int = 5,
        top_k: int = 10,
        quantize: Quantize = "none",
    ) -> None:
        self.tree = DynamicTree(total_token, depth, top_k)
        super().__init__(target, draft, self.name, self.accepts, quantize)
        self.max_nodes = self.tree.nodes

    @property
    def scratch(self) -> int:
        return self.tree.depth * self.tree.top_k

    def propose(self, budgets: list[int], generators: Sequence[torch.Generator] | None) -> list[Draft]:
        allowed = self.allowed(budgets)
        if not any(allowed):
            return [Draft()] * len(budgets)
        assert self._out is not None, "propose comes after observe"
        deepest = self.depth(max(allowed), self.tree.depth + 1)
        limits = send(self.tree.limits(allowed, self.net.vocab), self.net.device)
        inputs = {"out": self._out, "limits": limits[:, None], "start": self._context.starts()}
        grow = partial(self._grow, deepest)
        grown = self.fixed(("tree", deepest), grow, inputs, self._context.reach(self.scratch))
        return self.tree.drafts(grown["tokens"], grown["parents"], allowed, self.net.vocab)

    def _grow(self, deepest: int, inputs: Tensors, length: int) -> Tensors:
        """Trees of every row in one go: tokens and parents, int64 `[B, n]` each."""
        out = inputs["out"]
        expand = partial(self.expand, start=inputs["start"], read=length)
        tokens, parents = self.tree.nodes_of(
            self.net.logits(out)[:, 0],
            self.net.feedback(out)[:, 0],
            expand,
            self.net.to_target,
            deepest,
            inputs["limits"][:, 0],
        )
        return {"tokens": tokens, "parents": parents}
