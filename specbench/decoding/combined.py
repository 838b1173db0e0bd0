"""Drafters made of other drafters, each round's draft being one of theirs (or their own)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specbench.decoding.draft import Drafter, Outcome
from specbench.decoding.method import Request
from specbench.decoding.tree import Tree
from specbench.decoding.verify import Verdict, verify


class Combined(Drafter):
    """What holds of all of its parts together; what it is told is handed on to each of them.

    Every part sees every outcome, and is to be asked every round, with a budget of 0 where another drafts.

    Attributes:
        parts: the drafters.
        authors: of each row, the part that made its draft of this round; None for any other. Its rule of acceptance
            is the one that judges the row.
    """

    def __init__(self, target: Any, parts: Sequence[Drafter]) -> None:
        super().__init__(target)
        self.parts = tuple(parts)
        self.authors: list[Drafter | None] = []
        self.lossless = all(part.lossless for part in parts)
        self.warm = any(part.warm for part in parts)
        self.wants_answer = any(part.wants_answer for part in parts)
        self.sends_probes = any(part.sends_probes for part in parts)
        self.taps = tuple(dict.fromkeys(tap for part in parts for tap in part.taps))
        self.max_nodes = max((part.max_nodes for part in parts), default=0)

    @property
    def request(self) -> Request:
        return self._request

    @request.setter
    def request(self, request: Request) -> None:
        self._request = request
        for part in self.parts:
            part.request = request

    @property
    def answer(self) -> list[list[int]] | None:
        return self._answer

    @answer.setter
    def answer(self, answer: list[list[int]] | None) -> None:
        self._answer = answer
        for part in self.parts:
            part.answer = answer

    def prepare(self, request: Request) -> None:
        super().prepare(request)
        for part in self.parts:
            part.prepare(request)

    def begin(self, prompts: list[list[int]]) -> None:
        self.authors = [None] * len(prompts)
        for part in self.parts:
            part.begin(prompts)

    def forget(self) -> None:
        for part in self.parts:
            part.forget()

    def observe(self, outcome: Outcome) -> None:
        for part in self.parts:
            part.observe(outcome)

    def judge(
        self, tree: Tree, logits: torch.Tensor, generators: Sequence[torch.Generator] | None
    ) -> Verdict | None:
        """Each row by its author's rule, by the lossless rules where that has none."""
        own = {part: part.judge(tree, logits, generators) for part in self.parts if part in self.authors}
        if all(verdict is None for verdict in own.values()):
            return None
        plain = verify(tree, logits, self.request.sampling, generators)
        rows = [(own.get(author) if author else None) or plain for author in self.authors]
        return Verdict(
            *(
                torch.stack([getattr(verdict, name)[row] for row, verdict in enumerate(rows)])
                for name in ("accepted", "bonus", "path")
            )
        )

    def release(self) -> None:
        for part in self.parts:
            part.release()

    def draft_identity(self) -> dict[str, Any] | None:
        """That of the one part that has one; of several, all of them under a name that joins theirs."""
        known = [identity for part in self.parts if (identity := part.draft_identity()) is not None]
        return joined(known)

    def weights_bytes(self) -> int:
        return sum(part.weights_bytes() for part in self.parts)

    def kv_bytes(self) -> int:
        return sum(part.kv_bytes() for part in self.parts)

    def graph_bytes(self) -> int:
        return sum(part.graph_bytes() for part in self.parts)


def joined(identities: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """One identity for several; None for none."""
    if len(identities) < 2:
        return identities[0] if identities else None
    return {"name": " + ".join(str(one.get("name")) for one in identities), "parts": list(identities)}
