"""A cascade: a second drafter is asked where the first has nothing to propose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from specbench.decoding.combined import Combined
from specbench.decoding.draft import Draft, Drafter, Probes
from specbench.errors import SpecbenchError
from specbench.spec import Spec


class Cascade(Combined):
    """The draft of `first`, or where it has none that of `then`, row by row.

    Options:
        first, then: methods as SPECs in parentheses; a draft model or the like they find as they do alone.
    """

    def __init__(
        self, target: Any, *, first: Spec | Drafter | None = None, then: Spec | Drafter | None = None
    ) -> None:
        if first is None or then is None:
            raise SpecbenchError(
                "cascade needs two methods", "write cascade:first=(prompt-lookup),then=(suffix)"
            )
        assert isinstance(first, Drafter), "whoever makes a method makes those in its SPEC before"
        assert isinstance(then, Drafter), "whoever makes a method makes those in its SPEC before"
        if first.sends_probes and then.sends_probes:
            raise SpecbenchError(
                "only one of a cascade's methods can be lookahead, or another that sends a window with its draft",
                "write cascade:first=(prompt-lookup),then=(lookahead)",
            )
        super().__init__(target, (first, then))
        self.first, self.then = first, then
        self.max_nodes = first.max_nodes + then.max_nodes  # one's probes may ride beside the other's draft

    def propose(self, budgets: list[int], generators: Sequence[torch.Generator] | None) -> list[Draft]:
        drafts = self.first.propose(budgets, generators)
        left = [0 if len(draft) else budget for draft, budget in zip(drafts, budgets, strict=True)]
        others = self.then.propose(left, generators)
        self.authors = [
            self.first if len(draft) else self.then if len(other) else None
            for draft, other in zip(drafts, others, strict=True)
        ]
        return [
            draft if len(draft) else _beside(other, draft.probes)
            for draft, other in zip(drafts, others, strict=True)
        ]


def _beside(draft: Draft, probes: Probes | None) -> Draft:
    """`draft` with the probes that the first drafter sends although it has no candidates.

    Raises:
        ValueError: both have probes.
    """
    if probes is None:
        return draft
    if draft.probes is not None:
        raise ValueError("only one of a cascade's drafters can send probes")
    hidden = torch.zeros(len(probes.tokens), len(draft), dtype=torch.bool, device=probes.visible.device)
    visible = torch.cat([probes.visible[:, :1], hidden, probes.visible[:, 1:]], 1)
    return replace(draft, probes=replace(probes, visible=visible))
