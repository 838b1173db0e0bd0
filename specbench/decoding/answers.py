"""The answers that suffix decoding keeps: no more than so many, and no room taken by those that have left."""

from __future__ import annotations

from collections import deque

from specbench.decoding.suffix_tree import SuffixTree, Text


class Answers:
    """Texts of answers in one tree, the oldest ones leaving when there are more than `most`.

    What left still has its states, which cannot be taken out one by one. Once that is more than what is kept, the
    tree is made anew of what is kept: about one more step for each token that left. A tree thus has the states of
    twice the tokens that are kept at most.
    """

    def __init__(self, depth: int, most: int) -> None:
        self.tree, self.most = SuffixTree(depth), most
        self.kept: deque[Text] = deque()

    def start(self) -> Text:
        text = Text()
        self.kept.append(text)
        if len(self.kept) > self.most:
            self.tree.remove(self.kept.popleft())
        if self.tree.removed > self.tree.size:
            self._make_anew()
        return text

    def _make_anew(self) -> None:
        self.tree = SuffixTree(self.tree.depth)
        for text in self.kept:
            tokens = text.tokens
            text.tokens, text.end, text.recent = [], 0, 0
            self.tree.append(text, tokens)
