"""Suffix automata: every substring of a growing text as a state, for a constant cost a token.

Source: Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text", in its online form for
several texts. A state stands for the strings that end at the same places; they are suffixes of one another, and its
link leads to the longest suffix that ends at further places. So the suffixes of a text, longest first, are the
states along the links from where the text ends.
"""

from __future__ import annotations


class SuffixAutomaton:
    """The substrings of one or several texts. State 0, the root, is the empty string.

    Attributes, each a list with an entry a state:
        next: the state that each token leads to.
        link: the state of the longest suffix that is not in the state itself; the root's is -1.
        length: of the state's longest string.
    """

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = []
        self.link: list[int] = []
        self.length: list[int] = []
        self.add_state(0, None)

    def add_state(self, length: int, copied: int | None) -> int:
        """A new state; if `copied`, it takes some strings of that one, which ended where these ended until now."""
        self.next.append({} if copied is None else self.next[copied].copy())
        self.link.append(-1 if copied is None else self.link[copied])
        self.length.append(length)
        return len(self.next) - 1

    def extend(self, last: int, token: int) -> int:
        """Append `token` to the text whose end is the state `last` (0 if it is empty); the state of its new end."""
        known = self.next[last].get(token)
        if known is not None:  # another text begins with this one
            return self._with_length(known, self.length[last] + 1, last, token)
        end = self.add_state(self.length[last] + 1, None)
        state = last
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = end
            state = self.link[state]
        if state < 0:
            self.link[end] = 0
        else:
            known = self.next[state][token]
            self.link[end] = self._with_length(known, self.length[state] + 1, state, token)
        return end

    def _with_length(self, state: int, length: int, before: int, token: int) -> int:
        """The state whose longest string has `length`: `state`, where `token` leads from `before`, or part of it."""
        if self.length[state] == length:
            return state
        part = self.add_state(length, state)
        while before >= 0 and self.next[before].get(token) == state:
            self.next[before][token] = part
            before = self.link[before]
        self.link[state] = part
        return part

    def suffix(self, state: int, length: int) -> int:
        """The state of the suffix of `length` of a string of `state` that is at least as long."""
        while state and self.length[self.link[state]] >= length:
            state = self.link[state]
        return state

    def match(self, text: list[int]) -> tuple[int, int]:
        """The longest end of `text` that is in the automaton: its state and length."""
        state = length = 0
        for token in text:
            while state and token not in self.next[state]:
                state = self.link[state]
                length = self.length[state]
            if token in self.next[state]:
                state = self.next[state][token]
                length += 1
        return state, length
