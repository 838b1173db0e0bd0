"""Taking down what a drafter proposes and what became of it, round by round, without touching the loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from parity_scores import NodeScores, Scores, overheard


class NotAFixture(Exception):
    """The folder is no golden folder, or of a method that is not checked."""


class Difference(Exception):
    """The first thing that is not as golden."""

    def __init__(self, prompt: int, index: int | None, name: str, ours: Any, golden: Any) -> None:
        where = f"prompt {prompt}" + ("" if index is None else f", round {index}")
        super().__init__(f"{where}, {name}: ours {ours}, golden {golden}")


def first_difference(prompt: int, index: int | None, name: str, ours: Any, golden: Any) -> None:
    """Raise Difference unless both are the same; of lists, say where they part."""
    if ours == golden:
        return
    if isinstance(ours, list) and isinstance(golden, list):
        pairs = zip(ours, golden, strict=False)
        place = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(golden)))
        if len(ours) != len(golden):
            raise Difference(prompt, index, f"{name} (at {place})", _some(ours), _some(golden))
        raise Difference(prompt, index, f"{name}[{place}]", ours[place], golden[place])
    raise Difference(prompt, index, name, ours, golden)


def trim(tokens: list[int], limit: int, stop: frozenset[int]) -> list[int]:
    """`tokens` up to the limit, and up to and with the first stop token."""
    tokens = tokens[:limit]
    end = next((place for place, token in enumerate(tokens) if token in stop), None)
    return tokens if end is None else tokens[: end + 1]


def _some(values: list[Any]) -> str:
    return f"{len(values)} values {values}"


@dataclass
class Mine:
    """One of our rounds of one row; nodes are numbered as golden ones are, the root left out."""

    root: int
    tokens: list[int]
    parents: list[int]
    accepted: int = 0
    accepted_nodes: list[int] = field(default_factory=list)
    next_token: int | None = None
    probes: list[int] = field(default_factory=list)
    scores: NodeScores | None = None  # where the method is listened to

    def tied_with(self, golden: Sequence[int]) -> bool:
        """Whether ties are all that this draft and the golden one, of the same shape, differ by."""
        return self.scores is not None and self.scores.explain(self.tokens, golden, self.parents)


@dataclass
class Run:
    """A batch that was generated: what each row emitted, and its rounds by the tokens that were out before."""

    emitted: list[list[int]]
    rounds: list[dict[int, Mine]]

    def by_emitted(self, row: int) -> dict[int, Mine]:
        return self.rounds[row]


class Recorder:
    """Stands between the loop and a drafter, and notes what passes."""

    def __init__(self, drafter: Any, scores: Scores | None = None) -> None:
        self.drafter, self.run, self._scores = drafter, Run([], []), scores
        self._began, self._proposed, self._observed = drafter.begin, drafter.propose, drafter.observe
        drafter.begin, drafter.propose, drafter.observe = self.begin, self.propose, self.observe

    def stop(self) -> Run:
        """Step aside; what was noted."""
        for name in ("begin", "propose", "observe"):
            del self.drafter.__dict__[name]
        return self.run

    def begin(self, prompts: list[list[int]]) -> None:
        self.run = Run([[] for _ in prompts], [{} for _ in prompts])
        self._began(prompts)

    def propose(self, budgets: list[int], generators: Any) -> Any:
        drafts, scores = self._listen(budgets, generators)
        for row, draft in enumerate(drafts):
            tokens = [int(token) for token in draft.tokens]
            chain = list(range(-1, len(tokens) - 1))
            parents = chain if draft.parents is None else [int(parent) for parent in draft.parents]
            out = self.run.emitted[row]
            mine = Mine(out[-1] if out else -1, tokens, parents)
            if draft.probes is not None:
                mine.probes = [int(token) for token in draft.probes.tokens]
            if scores is not None and self._scores is not None:
                mine.scores = NodeScores(scores[row], self._scores.follow)
            self.run.rounds[row].setdefault(len(out), mine)
        return drafts

    def _listen(self, budgets: list[int], generators: Any) -> tuple[Any, Any]:
        """The drafts, and the scores `[B, nodes, V]` they were chosen by where the method is listened to."""
        if self._scores is None:
            return self._proposed(budgets, generators), None
        with overheard(getattr(self.drafter, self._scores.owner), "logits") as outputs:
            drafts = self._proposed(budgets, generators)
        tree = self.drafter.tree.clip(max(budgets))
        return drafts, self._scores.rows(tree, outputs) if outputs else None

    def observe(self, outcome: Any) -> None:
        for row, tokens in enumerate(outcome.tokens):
            out = self.run.emitted[row]
            if not outcome.prefill and tokens:
                mine = self.run.rounds[row][len(out)]
                mine.accepted = outcome.accepted[row]
                columns = outcome.path[row, 1 : mine.accepted + 1].tolist()
                mine.accepted_nodes = [column - 1 for column in columns]
                mine.next_token = tokens[-1] if len(tokens) == mine.accepted + 1 else None
            out += tokens
        self._observed(outcome)
