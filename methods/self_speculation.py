"""Self-speculation: the target drafts for itself with some of its layers left out.

Sources: Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding"
(arXiv 2309.08168), for a fixed list of layers; Elhoushi et al., "LayerSkip: Enabling Early Exit Inference and
Self-Speculative Decoding" (arXiv 2404.16710), for the early exit; Xia et al., "SWIFT: On-the-Fly Self-Speculative
Decoding for LLM Inference Acceleration" (arXiv 2410.06916), for the search.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specbench.decoding.chain import draft_chain
from specbench.decoding.context import Context
from specbench.decoding.draft import Draft, Drafter, Outcome
from specbench.decoding.draft_length import K, draft_length
from specbench.decoding.layer_search import SEEN, LayerSearch, agreement
from specbench.models.device import send
from specbench.models.target import Target

RATIO = 0.45  # of the layers, left out by a search


class SelfSpeculation(Drafter):
    """A chain drafted by the target without some of its layers, over the target's own weights and KV cache.

    A draft pass reads what whole passes have left in the cache and writes behind it, into the slots that the verify
    pass then fills with the true values: nothing is held twice. At most one of `skip`, `exit` and `search` is given;
    with none, every second layer of the middle third is left out, a guess that suits no model in particular.

    Options:
        skip: the layers left out, from 0: 3+5+7 (Draft & Verify).
        exit: only the first so many layers are run, then the final norm and head (LayerSkip; good with targets
            trained for it).
        search: while a request is being answered, try sets of `ratio` of the layers on its first 16 tokens, one a
            round and at most 16, and keep the best (SWIFT; its sets are of half layers, these of whole ones). A try
            costs one pass of the shortened model over 16 tokens. The rows of a batch share a set.
        ratio: the share of the layers that `search` leaves out; 0.45 unless given.
        warm: with `search`, go on from the best set of the question before.
        k: tokens proposed a round, or auto.
        threshold: stop *after* a token the draft gave less than this; costs a device read a pass, 0 is off.
    """

    def __init__(
        self,
        target: Target,
        *,
        skip: list[int] | None = None,
        exit: int | None = None,
        search: bool = False,
        ratio: float | None = None,
        warm: bool = False,
        k: K = 4,
        threshold: float = 0.0,
    ) -> None:
        super().__init__(target)
        if (skip is not None) + (exit is not None) + search > 1:
            raise ValueError("skip, exit and search exclude each other")
        if warm and not search:
            raise ValueError("warm=true needs search=true: nothing else is learned")
        if ratio is not None and not search:
            raise ValueError("ratio needs search=true: skip and exit name the layers themselves")
        if not 0 <= threshold <= 1:
            raise ValueError("threshold must lie in [0, 1]")
        depth = target.config.num_hidden_layers
        if depth < 2:
            raise ValueError("the target has one layer only, there is none to leave out")
        self.warm, self.threshold = warm, threshold
        self.length = draft_length(k)
        self.search = LayerSearch(depth, RATIO if ratio is None else ratio) if search else None
        self._layers = _layers(depth, skip, exit)
        self.max_nodes = max(self.length.longest, SEEN if search else 0)

    @property
    def layers(self) -> frozenset[int]:
        """Those left out now."""
        return self._layers if self.search is None else self.search.best

    def begin(self, prompts: list[list[int]]) -> None:
        self._prompts = [len(prompt) for prompt in prompts]
        self._texts = [list(prompt) for prompt in prompts]
        self._finished = [False] * len(prompts)
        self.length.begin(len(prompts))
        if self.search is not None:
            self.search.begin(keep=self.warm)

    def forget(self) -> None:
        if self.search is not None:
            self.search.begin(keep=False)

    def observe(self, outcome: Outcome) -> None:
        self.length.observe(outcome)
        self._finished = outcome.finished
        for text, tokens in zip(self._texts, outcome.tokens, strict=True):
            text += tokens
        if self.search is not None and not all(outcome.finished):
            self._try_layers(self.search)

    def propose(self, budgets: list[int], generators: Sequence[torch.Generator] | None) -> list[Draft]:
        wanted = self.length.wanted(budgets)
        if not any(wanted):
            return [Draft()] * len(budgets)
        # All but the last token of a text stand in the cache; that one goes first.
        context = Context(self.target)
        context.rewind([len(text) - 1 for text in self._texts])

        def advance(tokens: torch.Tensor, counts: list[int]) -> torch.Tensor:
            return context.append(self.target, tokens[:, None], counts).logits[:, 0]

        roots = send([text[-1] for text in self._texts], self.target.device)
        with self.target.skipping(self.layers):
            logits = advance(roots, [int(want > 0) for want in wanted])
            drafts = draft_chain(
                logits,
                advance,
                wanted,
                self.request.sampling,
                generators,
                self.target.vocab_size,
                self.threshold,
            )
        return self.length.proposed(drafts)

    def _try_layers(self, search: LayerSearch) -> None:
        """One step of the search, once every row that goes on has the tokens to judge by.

        None while costs are measured: a try costs the same after a round of any length, and its pass would be taken
        for a part of those rounds that happen to come after the first `SEEN` tokens.
        """
        if search.done or self.length.forced is not None:
            return
        new = [len(text) - prompt for text, prompt in zip(self._texts, self._prompts, strict=True)]
        if any(n <= SEEN and not over for n, over in zip(new, self._finished, strict=True)):
            return
        rows = [n > SEEN for n in new]
        candidate = search.candidate()
        search.judge(candidate, agreement(self.target, candidate, self._texts, self._prompts, rows))


def _layers(depth: int, skip: list[int] | None, exit: int | None) -> frozenset[int]:
    if exit is not None:
        if not 0 < exit < depth:
            raise ValueError(f"exit must lie between 1 and {depth - 1}: the target has {depth} layers")
        return frozenset(range(exit, depth))
    if skip is None:
        return frozenset(range(depth // 3, max(2 * depth // 3, 1), 2))
    if len(set(skip)) < len(skip) or len(skip) >= depth or not set(skip) <= set(range(depth)):
        raise ValueError(
            f"skip must name different layers from 0 to {depth - 1}, and not all of them (skip=3+5)"
        )
    return frozenset(skip)
