"""What drafters are and what they hand over: Draft, Probes, Outcome, Drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from specbench.decoding.method import Request
    from specbench.decoding.tree import Tree
    from specbench.decoding.verify import Verdict

Ids = Sequence[int] | torch.Tensor


@dataclass(frozen=True)
class Probes:
    """Nodes that ride in the target's pass under their own mask without being candidates (lookahead's window).

    `depth[i]` is the probe's distance from the root (its position is the root's plus that). `visible` is bool
    `[P, 1 + nodes + P]`: what each probe attends to among root, nodes and probes (itself included); what was
    committed before the root is always visible. Nodes never see probes.
    """

    tokens: Ids
    depth: Ids
    visible: torch.Tensor


@dataclass(frozen=True)
class Draft:
    """One row's proposal for one round.

    tokens: the proposed ids, `[nodes]`, a list or a tensor on the target's device.
    parents: None for a chain, else each node's parent (-1 = the last committed token), parents before children.
        Siblings hold distinct tokens: of two equal ones only the first counts.
    probs: q over the target's vocabulary for each node as its parent's siblings were sampled, `[nodes, V]`;
        None if the proposal is deterministic (an argmax, a table look-up).
    probes: see `Probes`; not counted as drafted.
    deepest, siblings: no path is longer and no node has more children than so many, where the drafter knows: it
        saves finding out on the device.
    """

    tokens: Ids = ()
    parents: Ids | None = None
    probs: torch.Tensor | None = None
    probes: Probes | None = None
    deepest: int | None = None
    siblings: int | None = None

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Outcome:
    """What a pass of the target brought, for a drafter to learn from.

    tokens: the ids each row emitted in this pass (the prefill's one first token included), on the host.
    finished: rows whose generation is over.
    accepted: drafted tokens of each row that were accepted (all 0 after the prefill).
    logits: `[B, T, V]` for every verified node (the root is column 0); after the prefill `[B, 1, V]`.
    taps: the hidden states asked for, `[B, T, H]`; after the prefill for every prompt position, right-padded.
    tree: the verified nodes, or None after the prefill.
    path: int64 `[B, T]`, the columns of the accepted path, root first, of which `accepted[b] + 1` are real;
        None after the prefill.
    """

    tokens: list[list[int]]
    finished: list[bool]
    accepted: list[int]
    logits: torch.Tensor
    taps: dict[str, torch.Tensor]
    tree: Tree | None = None
    path: torch.Tensor | None = None

    @property
    def prefill(self) -> bool:
        return self.tree is None

    def along_path(self, states: torch.Tensor) -> torch.Tensor:
        """Of `states` `[B, T, H]` (a tap), what each row keeps: its accepted path, root first, `[B, W, H]`.

        Entries past a row's `accepted + 1` are meaningless. After the prefill: `states` as they are.
        """
        if self.tree is None or self.path is None:
            return states
        width = max(self.accepted) + 1
        if self.tree.chain:
            return states[:, :width]
        columns = self.path[:, :width].to(states.device)
        return states.gather(1, columns[..., None].expand(-1, -1, states.shape[-1]))


class Drafter:
    """Proposes tokens for the target to verify. A file in `methods/` implements one; one instance serves a run.

    The rows of a batch are independent. The loop times `begin` as prefill, `observe` and `propose` as draft.

    Class attributes, which options may change per instance:
        lossless: False if the output distribution is not the target's own. Printed in every table.
        taps: hidden states of the target wanted: "embed", "layer:i", "final" (after the final norm).
        max_nodes: an upper bound on the nodes (and probes) of one draft: the target keeps that many spare slots.
        sends_probes: True if drafts may have `probes`.
        warm: True if `begin` keeps what earlier prompts taught, until `forget`.
        wants_answer: True if `answer` must be set to the target's own answer before each batch (oracle).

    Set by `prepare`, before `begin`:
        request: the batch's limits and sampling (`specbench.decoding.method.Request`).
    """

    lossless: bool = True
    taps: tuple[str, ...] = ()
    max_nodes: int = 0
    sends_probes: bool = False
    warm: bool = False
    wants_answer: bool = False
    answer: list[list[int]] | None = None
    request: Request

    def __init__(self, target: Any, **options: Any) -> None:
        self.target = target

    def prepare(self, request: Request) -> None:
        """Untimed, before each batch: take its limits, make room. Never computes anything about the answer."""
        self.request = request

    def begin(self, prompts: list[list[int]]) -> None:
        """A new batch: forget the last one (or keep it on purpose, and say `warm`)."""

    def forget(self) -> None:
        """Untimed: drop what earlier prompts taught, if `warm`. Each pass over the questions begins so."""

    def observe(self, outcome: Outcome) -> None:
        """Learn from the prefill or a round."""

    def propose(self, budgets: list[int], generators: Sequence[torch.Generator] | None) -> list[Draft]:
        """One draft a row, at most `budgets[row]` deep (0: nothing). `generators` is None when decoding greedily."""
        return [Draft()] * len(budgets)

    def judge(
        self, tree: Tree, logits: torch.Tensor, generators: Sequence[torch.Generator] | None
    ) -> Verdict | None:
        """A rule of the drafter's own for what is kept (Medusa's typical acceptance); it then sets `lossless`.

        Asked for the prefill's token too, with a tree of roots alone. None: the lossless rules of `decoding.verify`.
        """
        return None

    def release(self) -> None:
        """Give back the memory of the last batch (caches), keep the weights."""

    def draft_identity(self) -> dict[str, Any] | None:
        """Who the drafter's weights are, for the manifest; None if it has none."""
        return None

    def weights_bytes(self) -> int:
        """Bytes of weights the drafter holds beyond the target's."""
        return 0

    def kv_bytes(self) -> int:
        """Bytes of key-value cache the drafter holds beyond the target's."""
        return 0

    def graph_bytes(self) -> int:
        """Bytes that the CUDA graphs of the drafter's own network hold now."""
        return 0
