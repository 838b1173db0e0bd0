"""Speculative decoding with a small draft model of the same vocabulary.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), and Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling" (2023). The adaptive schedules are those of
transformers' assisted generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from specbench.decoding.chain import draft_chain
from specbench.decoding.context import Context
from specbench.decoding.draft import Draft, Drafter, Outcome
from specbench.decoding.draft_length import DraftLength, HeuristicLength, K, draft_length
from specbench.decoding.method import Request
from specbench.models.device import send
from specbench.models.drafts import known_ids, open_draft_model
from specbench.models.quantize import Quantize
from specbench.models.target import Target


class DraftModel(Drafter):
    """A draft model's next k tokens, greedy or sampled as the target samples.

    A round costs k draft passes: the first takes what the draft's cache lacks (the token the target added, and
    after a full acceptance the last proposal too, which no draft pass has seen yet), and the last proposal is not
    passed through the draft.

    Options:
        draft: the draft model, any REF a target may be.
        k: tokens proposed a round (at first, for `heuristic`; at most, for `confidence`), or auto.
        schedule: constant; heuristic, k + 2 after a full acceptance, else k - 1; or confidence, which stops *after*
            a token the draft itself gave less than `threshold` (dropping a sampled token would be biased).
        threshold: for `confidence`.
        draft.quantize: what the draft model's linear layers are quantised to: none, int8, int4 or fp8.
    """

    def __init__(
        self,
        target: Target,
        *,
        draft: str | Target | None = None,
        k: K = 5,
        schedule: Literal["constant", "heuristic", "confidence"] = "constant",
        threshold: float = 0.4,
        quantize: Quantize = "none",
    ) -> None:
        super().__init__(target)
        self.length = _length(k, schedule)
        self.draft = open_draft_model(draft, target, "draft-model", quantize=quantize)
        self.threshold = threshold if schedule == "confidence" else 0.0
        self.max_nodes = self.length.longest

    def release(self) -> None:
        self.draft.release()

    def draft_identity(self) -> dict[str, Any] | None:
        return None if self.draft.identity is None else self.draft.identity.to_json()

    def weights_bytes(self) -> int:
        return 0 if self.draft.model is self.target.model else self.draft.weights_bytes()

    def kv_bytes(self) -> int:
        return self.draft.cache.nbytes()

    def graph_bytes(self) -> int:
        return self.draft.passes.nbytes()

    def prepare(self, request: Request) -> None:
        super().prepare(request)
        rows, spare = len(request.prompts), self.max_nodes + 1
        self.draft.reserve(rows, request.capacity, spare)
        self.draft.ahead(rows, request.longest_prompt, request.capacity + spare)

    def begin(self, prompts: list[list[int]]) -> None:
        self._texts = [list(prompt) for prompt in prompts]
        self.length.begin(len(prompts))
        self._context = Context(self.draft)

    def observe(self, outcome: Outcome) -> None:
        self.length.observe(outcome)
        for row, (tokens, accepted) in enumerate(zip(outcome.tokens, outcome.accepted, strict=True)):
            if not outcome.prefill and tokens:
                self._after_round(row, accepted)
            self._texts[row] += tokens

    def propose(self, budgets: list[int], generators: Sequence[torch.Generator] | None) -> list[Draft]:
        wanted = [
            max(0, min(length, self.draft.context - len(text)))
            for length, text in zip(self.length.wanted(budgets), self._texts, strict=True)
        ]
        if not any(wanted):
            return [Draft()] * len(budgets)

        def advance(tokens: torch.Tensor, counts: list[int]) -> torch.Tensor:
            return self._context.append(self.draft, tokens[:, None], counts).logits[:, 0]

        drafts = draft_chain(
            self._catch_up(wanted),
            advance,
            wanted,
            self.request.sampling,
            generators,
            self.target.vocab_size,
            self.threshold,
        )
        return self.length.proposed(drafts)

    def _after_round(self, row: int, accepted: int) -> None:
        proposed = self.length.drafted[row]
        if proposed:
            # Of the proposals all but the last stand in the draft's cache, behind the text they continued.
            self._context.lengths[row] = len(self._texts[row]) + min(accepted, proposed - 1)

    def _catch_up(self, wanted: list[int]) -> torch.Tensor:
        """Feed each row what its cache lacks; logits `[B, V]` after its last token."""
        if not self._context.lengths:
            self._context.rewind([len(text) for text in self._texts])
            return self.draft.prefill([self._known(text) for text in self._texts]).logits[:, 0]
        missing = [
            self._known(text[length:]) if want else []
            for text, length, want in zip(self._texts, self._context.lengths, wanted, strict=True)
        ]
        counts = [len(tokens) for tokens in missing]
        width = max(counts)
        device = self.draft.device
        padded = send([tokens + [0] * (width - len(tokens)) for tokens in missing], device)
        logits = self._context.append(self.draft, padded, counts).logits
        last = send([max(count - 1, 0) for count in counts], device)
        return logits[torch.arange(len(counts), device=device), last]

    def _known(self, tokens: list[int]) -> list[int]:
        return known_ids(tokens, self.draft, self.target)


def _length(k: K, schedule: str) -> DraftLength:
    if schedule != "heuristic":
        return draft_length(k)
    if k == "auto":
        raise ValueError("k=auto and schedule=heuristic exclude each other")
    return HeuristicLength(k)
