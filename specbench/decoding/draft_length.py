"""How many tokens a chain drafter proposes a round: a fixed k, or the k that pays best by what is known so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, repeat
from typing import Literal

from specbench.decoding.draft import Draft, Outcome

K = int | Literal["auto"]  # the option `k` of chain drafters

LONGEST = 16  # tokens `auto` may propose
HEURISTIC_LONGEST = 32  # tokens transformers' rule may grow to
LADDER = (1, 2, 4, 8, 16)  # lengths whose costs are measured; between two of them costs are interpolated
# Acceptance before a question has shown any: 1.6 of 2 tokens. Of little weight, so that a few rounds overrule it.
PRIOR_ACCEPTED, PRIOR_JUDGED = 1.6, 2.0
KEPT = 0.98  # of what was learned, a round later: the last fifty rounds or so count
CLEARLY = 1.01  # another length must promise this much more speed than the last one

Costs = Mapping[int, float]  # seconds of a round by tokens proposed, for some of 1..LONGEST
# Where nothing was measured: each token makes the round, draft and verification, a tenth longer.
NOMINAL: Costs = {1: 1.1, LONGEST: 1.0 + 0.1 * LONGEST}


class DraftLength:
    """A fixed k of at least 1, else ValueError.

    Attributes:
        longest: the most tokens ever proposed.
        drafted: tokens that this drafter proposed in the round under way, by row.
        forced: a k for all rows for now (while costs are measured), or None.
    """

    def __init__(self, k: int) -> None:
        if k < 1:
            raise ValueError("k must be at least 1")
        self.longest = k
        self.forced: int | None = None

    def begin(self, rows: int) -> None:
        """A new batch of `rows` rows: forget what the last one's tokens taught."""
        self._lengths, self.drafted = [self.longest] * rows, [0] * rows

    def observe(self, outcome: Outcome) -> None:
        """Learn from a round what was accepted of what was proposed."""

    @property
    def lengths(self) -> list[int]:
        """Tokens to propose next, by row."""
        return list(self._lengths) if self.forced is None else [self.forced] * len(self._lengths)

    def wanted(self, budgets: Sequence[int]) -> list[int]:
        """Tokens to propose for each row, no more than its budget. A round begins: nothing is proposed yet."""
        self.drafted = [0] * len(budgets)
        return [min(length, budget) for length, budget in zip(self.lengths, budgets, strict=True)]

    def uncut(self, wanted: Sequence[int]) -> int:
        """The most that a row that wants any would propose if no budget were short."""
        return max(length for length, want in zip(self.lengths, wanted, strict=True) if want)

    def proposed(self, drafts: list[Draft]) -> list[Draft]:
        """`drafts`, taken down: what is learned from are a drafter's own proposals, and others may draft too."""
        self.drafted = [len(draft) for draft in drafts]
        return drafts

    def _outcomes(self, outcome: Outcome) -> list[tuple[int, int]]:
        """Own tokens proposed and accepted in a round, by row."""
        return [(n, min(n, accepted)) for n, accepted in zip(self.drafted, outcome.accepted, strict=True)]


class HeuristicLength(DraftLength):
    """transformers' rule: two more after a full acceptance, else one less, from `k` on and at least 1."""

    def __init__(self, k: int) -> None:
        super().__init__(max(k, HEURISTIC_LONGEST))
        self.first = DraftLength(k).longest

    def begin(self, rows: int) -> None:
        super().begin(rows)
        self._lengths = [self.first] * rows

    def observe(self, outcome: Outcome) -> None:
        for row, (drafted, accepted) in enumerate(self._outcomes(outcome)):
            if drafted:
                step = 2 if accepted == drafted else -1
                self._lengths[row] = max(1, min(self._lengths[row] + step, self.longest))


class AdaptiveLength(DraftLength):
    """`k=auto`: the k that promises the most tokens a second, by Leviathan's closed form with measured costs.

    With a the chance that a token is accepted, a round of k proposals emits 1 + a + ... + a^k tokens on average
    (Leviathan et al. 2023, equation 1) and takes `costs[k]` seconds, which covers that both drafting and verifying
    more tokens take longer; the closed form's (ck + 1) is the case of a verification that costs the same at any
    length. a is estimated from the tokens judged so far, those before a round's first rejection and that one.

    Each row has a k of its own from its own acceptance, so that what a row proposes does not depend on its
    neighbours. A batch's pass is as wide as its longest draft: the others could ride along in it for nothing.

    The costs are those of a short context, whatever a question's own (`decoding.rehearsal`). With thousands of tokens
    of context a pass is dearer at every length; what a longer draft adds to it may have grown more or less than the
    rest, and the choice does not know. A fixed k, swept, is the safer one there.

    Attributes:
        costs: by batch size; a size that was not measured takes `NOMINAL`.
    """

    def __init__(self, longest: int = LONGEST) -> None:
        super().__init__(min(longest, LONGEST))
        self.costs: dict[int, Costs] = {}

    @property
    def ladder(self) -> tuple[int, ...]:
        """The lengths whose costs should be measured."""
        return (*(k for k in LADDER if k < self.longest), self.longest)

    def begin(self, rows: int) -> None:
        super().begin(rows)
        self._seconds = interpolated(self.costs.get(rows, NOMINAL), self.longest)
        self._accepted, self._judged = [PRIOR_ACCEPTED] * rows, [PRIOR_JUDGED] * rows
        first = _best(self._rates(PRIOR_ACCEPTED / PRIOR_JUDGED))
        self._lengths = [first] * rows

    def observe(self, outcome: Outcome) -> None:
        for row, (drafted, accepted) in enumerate(self._outcomes(outcome)):
            if drafted:
                self._accepted[row] = KEPT * self._accepted[row] + accepted
                self._judged[row] = KEPT * self._judged[row] + min(accepted + 1, drafted)
                self._lengths[row] = self._next(row)

    def _next(self, row: int) -> int:
        rates = self._rates(self._accepted[row] / self._judged[row])
        best, now = _best(rates), self._lengths[row]
        return best if rates[best - 1] > CLEARLY * rates[now - 1] else now

    def _rates(self, chance: float) -> list[float]:
        """Tokens a second with k = 1, 2, …"""
        powers = accumulate(repeat(chance, self.longest), lambda power, a: power * a)
        tokens = accumulate(powers, initial=1.0)
        next(tokens)
        return [n / seconds for n, seconds in zip(tokens, self._seconds, strict=True)]


def draft_length(k: K, longest: int = LONGEST) -> DraftLength:
    """The option `k`: a number of at least 1 (else ValueError), or `auto`, which stays within 1..`longest`."""
    return AdaptiveLength(longest) if k == "auto" else DraftLength(k)


def interpolated(costs: Costs, longest: int) -> list[float]:
    """Seconds of a round at k = 1..`longest`: on the line between the measured neighbours, level outside them."""
    known = sorted(costs)
    found = []
    for k in range(1, longest + 1):
        below = max((n for n in known if n <= k), default=known[0])
        above = min((n for n in known if n >= k), default=known[-1])
        share = (k - below) / (above - below) if above > below else 0.0
        found.append(costs[below] + share * (costs[above] - costs[below]))
    return found


def _best(rates: Sequence[float]) -> int:
    return 1 + max(range(len(rates)), key=rates.__getitem__)
