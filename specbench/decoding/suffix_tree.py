"""Suffix decoding's frequencies: what followed each suffix of a text, how often, and the drafts that makes.

Source: Oliaro et al. 2024, "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications" (arXiv
2411.04975); snowflakedb/ArcticInference, csrc/suffix_decoding/suffix_tree.cc and arctic_inference/suffix_decoding/
cache.py. There it is a suffix tree with `depth` steps a token; here a suffix automaton with counts, which says the
same in as many steps as there are different sets of places where the last tokens have occurred.

Everything that decides between equals is as there, so that drafts are the same ones: the order of tokens that
followed equally often, single-precision probabilities, and a heap that compares probabilities alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from specbench.decoding.ranking import Ranking
from specbench.decoding.suffix_automaton import SuffixAutomaton

NEAR = 1e-3  # more than rounding adds up to in a score


@dataclass(frozen=True)
class Rule:
    """How long drafts are.

    k: most tokens.
    factor, offset: no more than `factor` x length of the match + `offset`.
    min_prob: only tokens to which at least this share of the match's occurrences has led.
    tree: branch where occurrences went different ways, likeliest first; else follow the most frequent token.
    """

    k: int = 32
    factor: float = 1.0
    offset: float = 0.0
    min_prob: float = 0.1
    tree: bool = False

    def most(self, match: int) -> int:
        """Tokens after a match of so many."""
        return int(min(self.k, match * self.factor + self.offset + 1e-6))


class Limits(NamedTuple):
    """Of one draft: most tokens, and most in depth."""

    tokens: int
    depth: int


@dataclass
class Speculation:
    """A draft: tokens, parents (-1 = the last token of the text), each token's probability, and their sum.

    match: tokens of the text's end that it was found by.
    depth: of its deepest token.
    """

    match: int = 0
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[np.float32] = field(default_factory=list)
    score: np.float32 = field(default_factory=lambda: np.float32(0))
    depth: int = 0

    def add(self, token: int, parent: int, prob: np.float32, depth: int) -> int:
        """The index of the new token."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.probs.append(prob)
        self.score += prob
        self.depth = max(self.depth, depth)
        return len(self.tokens) - 1

    def again(self, had: Limits, limits: Limits, tree: bool) -> bool:
        """Whether this draft, which had some limits, may be another and as good a one with others.

        A full tree that becomes too deep may get other nodes that are as likely.
        """
        full = len(self.tokens) == had.tokens
        wider = (full and had.tokens < limits.tokens) or self.depth == had.depth < limits.depth
        return wider or (tree and full and limits.depth < self.depth)

    def within(self, limits: Limits) -> bool:
        return len(self.tokens) <= limits.tokens and self.depth <= limits.depth


@dataclass(eq=False)
class Text:
    """One text of a `SuffixTree`: its tokens, the state where it ends, and that of its last `depth` tokens."""

    tokens: list[int] = field(default_factory=list)
    end: int = 0
    recent: int = 0
    removed: bool = False


class SuffixTree(SuffixAutomaton):
    """Texts, and how often each of their substrings of up to `depth` tokens occurs in them.

    A text that is removed no longer counts; its states stay until the whole is dropped.

    Attributes:
        size, removed: tokens of the texts that count, and of those that were removed.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.size = self.removed = 0
        self.count: list[int] = []  # occurrences of each state's strings
        self.ranked: dict[int, Ranking] = {}  # what followed, where several tokens have
        super().__init__()

    def add_state(self, length: int, copied: int | None) -> int:
        state = super().add_state(length, copied)
        self.count.append(0 if copied is None else self.count[copied])
        if copied in self.ranked:
            self.ranked[state] = self.ranked[copied].copy()
        return state

    def append(self, text: Text, tokens: list[int]) -> None:
        """Nothing for a text that was removed."""
        for token in tokens if not text.removed else ():
            self._append(text, token)

    def _append(self, text: Text, token: int) -> None:
        length = min(len(text.tokens), self.depth - 1)
        text.end = self.extend(text.end, token)
        text.recent = self._step(text.recent, length, token, 1)
        text.tokens.append(token)
        self.size += 1

    def remove(self, text: Text) -> None:
        text.removed = True
        self.size -= len(text.tokens)
        self.removed += len(text.tokens)
        recent = 0
        for place, token in enumerate(text.tokens):
            recent = self._step(recent, min(place, self.depth - 1), token, -1)

    def _step(self, state: int, length: int, token: int, times: int) -> int:
        """`token` comes `times` more often after the last `length` tokens and their suffixes; the state this makes.

        Args:
            state: of a string that ends with those tokens.
        """
        before = self.suffix(state, length)
        after = longest = self.suffix(self.next[before][token], length + 1)
        while after:
            self.count[after] += times
            after = self.link[after]
        while before:
            self._rank(before, token, times)
            before = self.link[before]
        return longest

    def _rank(self, state: int, token: int, times: int) -> None:
        ranking = self.ranked.get(state)
        if ranking is None:
            if len(self.next[state]) == 1:
                return
            ranking = self.ranked[state] = Ranking()
            for other, after in self.next[state].items():
                if other != token and self.count[after]:
                    ranking.put(other, self.count[after])
        count = self.count[self.next[state][token]]
        ranking.move(token, count - times, count)

    def _followers(self, state: int) -> Iterator[int]:
        """Tokens that came after the state's strings, the most frequent first."""
        ranking = self.ranked.get(state)
        if ranking is not None:
            return iter(ranking)
        return iter([token for token, after in self.next[state].items() if self.count[after]])

    def speculate(self, context: list[int], rule: Rule, budget: int) -> Speculation:
        """The draft with the highest sum of probabilities, of equals the one by the longest match.

        Args:
            context: the text whose continuation is wanted, or its last `depth` tokens. Never matched as a whole.
            budget: most tokens in depth.
        """
        state, matched = self._longest_match(context[-self.depth :])
        best = Speculation(matched)
        grow = self._tree if rule.tree else self._path
        grown: dict[int, tuple[Speculation, Limits]] = {}  # the last draft from each state
        for reachable, match, place, limits in self._candidates(state, matched, rule, budget):
            if reachable + NEAR < best.score:
                break
            draft, had = grown.get(place, (None, limits))
            if draft is None or draft.again(had, limits, rule.tree):
                draft = grow(place, limits, np.float32(rule.min_prob))
                grown[place] = draft, limits
            elif not draft.within(limits):
                continue  # it would be a part of that one
            if (draft.score, match) > (best.score, best.match):
                best = replace(draft, match=match)
        return best

    def _longest_match(self, context: list[int]) -> tuple[int, int]:
        state, length = self.match(context)
        length = min(length, len(context) - 1)
        state = self.suffix(state, length)
        while state and not self.count[state]:  # removed
            state = self.link[state]
            length = self.length[state]
        return state, length

    def _candidates(
        self, state: int, matched: int, rule: Rule, budget: int
    ) -> list[tuple[float, int, int, Limits]]:
        """(score it can reach at most, length, state, limits) of all matches, the most promising first."""
        found = []
        while state:
            shortest = self.length[self.link[state]] + 1
            if share := self._continuing(state):
                for match in range(matched, shortest - 1, -1):
                    limits = Limits(rule.most(match), min(self.depth - match, budget))
                    if min(limits) > 0:
                        found.append((min(limits) * share, match, state, limits))
            matched, state = shortest - 1, self.link[state]
        return sorted(found, reverse=True)

    def _continuing(self, state: int) -> float:
        """The share of the state's occurrences that something has followed: no level of a draft is likelier."""
        ranking = self.ranked.get(state)
        total = ranking.total if ranking else sum(self.count[after] for after in self.next[state].values())
        return total / self.count[state] if total else 0.0

    def _path(self, state: int, limits: Limits, least: np.float32) -> Speculation:
        draft, prob = Speculation(), np.float32(1)
        for depth in range(min(limits)):
            token = next(self._followers(state), None)
            if token is None:
                break
            after = self.next[state][token]
            if self.count[after] != self.count[state]:
                prob = prob * (np.float32(self.count[after]) / np.float32(self.count[state]))
                if prob < least:
                    break
            draft.add(token, depth - 1, prob, depth + 1)
            state = after
        return draft

    def _tree(self, state: int, limits: Limits, least: np.float32) -> Speculation:
        draft, heap = Speculation(), [_Item(np.float32(1), state, None, -1, 0)]
        while heap and len(draft.tokens) < limits.tokens:
            item = heappop(heap)
            if item.token is None and item.depth < limits.depth:
                only = self._only_follower(item.state)
                if only is None:
                    for child in self._children(item):
                        if child.prob < least:
                            break
                        heappush(heap, child)
                else:
                    item.token, item.state = only, self.next[item.state][only]
            if item.token is not None:
                node = draft.add(item.token, item.parent, item.prob, item.depth + 1)
                heappush(heap, _Item(item.prob, item.state, None, node, item.depth + 1))
        return draft

    def _only_follower(self, state: int) -> int | None:
        """The token that came after every occurrence, if there is one."""
        token = next(self._followers(state), None)
        always = token is not None and self.count[self.next[state][token]] == self.count[state]
        return token if always else None

    def _children(self, item: _Item) -> Iterator[_Item]:
        whole = np.float32(self.count[item.state])
        for token in self._followers(item.state):
            after = self.next[item.state][token]
            prob = item.prob * np.float32(self.count[after]) / whole
            yield _Item(prob, after, token, item.parent, item.depth)


@dataclass
class _Item:
    """A place to draft from: `token` leads to `state` and is not drafted yet; None: it is, as node `parent`."""

    prob: np.float32
    state: int
    token: int | None
    parent: int
    depth: int

    def __lt__(self, other: _Item) -> bool:
        return bool(self.prob > other.prob)
