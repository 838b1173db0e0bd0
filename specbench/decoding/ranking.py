"""Tokens by how often each came, in constant time a token: what suffix decoding reads its drafts from.

Source: the sibling lists of snowflakedb/ArcticInference, csrc/suffix_decoding/suffix_tree.cc, whose order of equals
is kept: it decides which of equally frequent tokens is drafted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class Ranking:
    """Tokens by how often each came, most often first.

    Of equals, one that has just left its equals behind comes last among its new ones, and one that had none first.
    """

    def __init__(self) -> None:
        self.groups: dict[int, OrderedDict[int, None]] = {}  # count -> its tokens, in order
        self.total = 0  # of all counts

    def __iter__(self) -> Iterator[int]:
        for count in sorted(self.groups, reverse=True):
            yield from self.groups[count]

    def copy(self) -> Ranking:
        copied = Ranking()
        copied.groups = {count: tokens.copy() for count, tokens in self.groups.items()}
        copied.total = self.total
        return copied

    def put(self, token: int, count: int, first: bool = False) -> None:
        group = self.groups.setdefault(count, OrderedDict())
        group[token] = None
        self.total += count
        if first:
            group.move_to_end(token, last=False)

    def move(self, token: int, before: int, count: int) -> None:
        """`token` came `before` times until now, and has come `count` times."""
        first = count < before
        if before:
            group = self.groups[before]
            first |= next(iter(group)) == token
            del group[token]
            self.total -= before
            if not group:
                del self.groups[before]
        if count:
            self.put(token, count, first)
