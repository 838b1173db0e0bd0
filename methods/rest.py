"""REST: the end of the text is searched in a datastore, and what most often followed it is proposed.

Source: He et al. 2023, "REST: Retrieval-Based Speculative Decoding" (arXiv 2311.08252); FasterDecoding/REST,
rest/model/utils.py and DraftRetriever. Where nothing matches, nothing is proposed (there the token 100).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specbench.decoding.draft import Draft, Drafter, Outcome
from specbench.decoding.frequent_tree import frequent_tree
from specbench.errors import SpecbenchError
from specbench.models.datastore import Datastore, open_datastore
from specbench.models.target import Target


class Rest(Drafter):
    """The most frequent continuations, in a datastore, of the longest matching end of the text.

    Options:
        datastore: its path or name; made with `specbench datastore build`, or an official .idx file.
        longest, shortest: lengths of the end looked for, the longest first.
        matches: continuations looked at (of each shard).
        depth: most tokens of a continuation.
        nodes: the tree's budget, see `specbench.decoding.frequent_tree`.
    """

    def __init__(
        self,
        target: Target,
        *,
        datastore: str | Datastore | None = None,
        longest: int = 16,
        shortest: int = 2,
        matches: int = 5000,
        depth: int = 10,
        nodes: int = 64,
    ) -> None:
        super().__init__(target)
        if not 1 <= shortest <= longest or min(matches, depth, nodes) < 1:
            raise ValueError("longest must be at least shortest, and every number at least 1")
        if datastore is None:
            raise SpecbenchError(
                "rest needs a datastore",
                "make one with `specbench datastore build FILE --target T`, then rest:datastore=NAME",
            )
        self.datastore = datastore if isinstance(datastore, Datastore) else open_datastore(datastore)
        self.datastore.check_target(target)
        self.longest, self.shortest, self.matches = longest, shortest, matches
        self.depth, self.nodes = depth, nodes
        self.max_nodes = nodes
        self._ends: list[list[int]] = []  # of each row's text, as long as is looked for

    def draft_identity(self) -> dict[str, Any] | None:
        return self.datastore.identity()

    def begin(self, prompts: list[list[int]]) -> None:
        self._ends = [prompt[-self.longest :] for prompt in prompts]

    def observe(self, outcome: Outcome) -> None:
        self._ends = [
            (end + new)[-self.longest :] for end, new in zip(self._ends, outcome.tokens, strict=True)
        ]

    def propose(self, budgets: list[int], generators: Sequence[torch.Generator] | None) -> list[Draft]:
        return [
            self._draft(end, min(budget, self.depth)) for end, budget in zip(self._ends, budgets, strict=True)
        ]

    def _draft(self, end: list[int], depth: int) -> Draft:
        if not depth:
            return Draft()
        found = self.datastore.search(
            end,
            longest=self.longest,
            shortest=self.shortest,
            matches=self.matches,
            depth=depth,
            vocab=self.target.vocab_size,
        )
        return Draft(*frequent_tree(found, self.nodes)) if len(found) else Draft()
