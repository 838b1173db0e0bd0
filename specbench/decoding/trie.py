"""Token paths that begin at the same place, as one tree without duplicates among siblings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def merged(paths: Iterable[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Tokens and parents (-1 = the root) of the tree whose paths are `paths` and their prefixes.

    Nodes come in the order in which they are first met, so parents stand before children.
    """
    tokens: list[int] = []
    parents: list[int] = []
    children: dict[tuple[int, int], int] = {}
    for path in paths:
        node = -1
        for token in path:
            child = children.setdefault((node, token), len(tokens))
            if child == len(tokens):
                tokens.append(token)
                parents.append(node)
            node = child
    return tokens, parents
