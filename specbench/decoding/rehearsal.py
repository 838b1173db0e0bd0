"""What a round costs by the number of tokens proposed, measured before the clock of any trial runs.

The rounds are real ones, of the loop itself, over prompts that mean nothing: drafting, verifying and all that lies
between cost what they will cost later, and nothing is learned about the questions to come. They stand behind a
context of 64 tokens and some: what attention over a longer one adds is not in these costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from specbench.decoding.draft import Draft, Drafter, Outcome
from specbench.decoding.draft_length import AdaptiveLength
from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Request
from specbench.decoding.sampling import Sampling
from specbench.decoding.tree import Tree
from specbench.decoding.verify import Verdict
from specbench.measure.clock import Clock
from specbench.models.target import Target

PROMPT = 64  # tokens
REPEATS = 3  # rounds of each length, after one that is not counted


def adaptive_parts(drafter: Drafter) -> Iterator[Drafter]:
    """The drafters with `k=auto` in `drafter` (those whose `length` is adaptive): itself, or parts of it."""
    if isinstance(getattr(drafter, "length", None), AdaptiveLength):
        yield drafter
    for part in getattr(drafter, "parts", ()):
        yield from adaptive_parts(part)


def length_of(drafter: Drafter) -> AdaptiveLength:
    """What one of the `adaptive_parts` chooses by."""
    length = getattr(drafter, "length", None)
    assert isinstance(length, AdaptiveLength)
    return length


def rehearse(
    target: Target,
    drafter: Drafter,
    rows: int,
    sampling: Sampling = Sampling(),
    clock: Callable[[torch.device], Clock] = Clock,
) -> dict[int, float]:
    """Seconds of a round of `rows` rows by tokens proposed, for each of the lengths that `drafter` may choose from.

    The least of several, and of all longer rounds: what else a machine does only ever adds. Lengths that the target's
    context has no room for are left out; without room for any nothing is run.
    """
    length = length_of(drafter)
    ladder = [
        k for k in length.ladder if PROMPT + sum(n + 1 for n in length.ladder if n <= k) < target.context
    ]
    if not ladder:
        return {}
    paced = _Paced(drafter, length, ladder)
    seconds: dict[int, float] = {}
    try:
        for repeat in range(REPEATS + 1):
            for k, round_s in _cycle(target, paced, rows, sampling, clock(target.device)):
                if repeat:
                    seconds[k] = min(round_s, seconds.get(k, round_s))
    finally:
        length.forced = None
        drafter.forget()
        drafter.release()
    return _rising(seconds)


def _rising(seconds: dict[int, float]) -> dict[int, float]:
    """A round that was disturbed every time it was tried still costs no more than a longer one."""
    least, found = float("inf"), {}
    for k in sorted(seconds, reverse=True):
        found[k] = least = min(least, seconds[k])
    return dict(sorted(found.items()))


def _cycle(
    target: Target, paced: _Paced, rows: int, sampling: Sampling, clock: Clock
) -> list[tuple[int, float]]:
    """One round of each length; those that came out as long as they should."""
    tokens = range(PROMPT)
    prompts = [
        [(7 + 13 * row + 31 * place * place) % target.vocab_size for place in tokens] for row in range(rows)
    ]
    generators = None
    if not sampling.greedy:
        generators = [torch.Generator(target.device).manual_seed(row) for row in range(rows)]
    room = 2 + sum(k + 1 for k in paced.ladder)
    method = DraftVerify(target, paced)
    request = Request(prompts, room, sampling=sampling, generators=generators)
    method.prepare(request)
    depths: list[set[int]] = []
    clock.start()
    for one in method.generate(request, clock):
        if not one.prefill:
            depths.append(set(one.depth))
        if len(depths) == len(paced.ladder):
            break
    round_s = clock.stop().round_s
    found = zip(paced.ladder, depths, round_s, strict=True)
    return [(k, seconds) for k, depth, seconds in found if depth == {k}]


class _Paced(Drafter):
    """A drafter made to propose `ladder[i]` tokens in round i: what it has too few of is made up with id 0."""

    def __init__(self, drafter: Drafter, length: AdaptiveLength, ladder: Sequence[int]) -> None:
        super().__init__(drafter.target)
        self.drafter, self.pace, self.ladder = drafter, length, ladder
        self.taps, self.max_nodes, self.lossless = drafter.taps, drafter.max_nodes, drafter.lossless

    def prepare(self, request: Request) -> None:
        super().prepare(request)
        self.drafter.prepare(request)

    def begin(self, prompts: list[list[int]]) -> None:
        self.drafter.begin(prompts)
        self._round = 0

    def observe(self, outcome: Outcome) -> None:
        self.drafter.observe(outcome)

    def propose(self, budgets: list[int], generators: Sequence[torch.Generator] | None) -> list[Draft]:
        self.pace.forced = k = self.ladder[self._round]
        self._round += 1
        return [_filled(draft, k) for draft in self.drafter.propose(budgets, generators)]

    def judge(
        self, tree: Tree, logits: torch.Tensor, generators: Sequence[torch.Generator] | None
    ) -> Verdict | None:
        return self.drafter.judge(tree, logits, generators)


def _filled(draft: Draft, k: int) -> Draft:
    if draft.probs is not None or len(draft) >= k:
        return draft
    return replace(draft, tokens=[*torch.as_tensor(draft.tokens).tolist(), *[0] * (k - len(draft))])
