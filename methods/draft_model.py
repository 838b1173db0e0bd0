"""Speculative decoding with a small draft model of the same vocabulary.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), and Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling" (2023). The adaptive schedules are those of
transformers' assisted generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from specbench.decoding.context import Context
from specbench.decoding.draft import Draft, Drafter, Outcome
from specbench.decoding.sampling import draw, probabilities
from specbench.models.drafts import known_ids, open_draft_model
from specbench.models.target import Target


class DraftModel(Drafter):
    """A draft model's next k tokens, greedy or sampled as the target samples.

    A round costs k draft passes: the first takes what the draft's cache lacks (the token the target added, and
    after a full acceptance the last proposal too, which no draft pass has seen yet), and the last proposal is not
    passed through the draft.

    Options:
        draft: the draft model, any REF a target may be.
        k: tokens proposed a round (at first, for `heuristic`; at most, for `confidence`).
        schedule: constant; heuristic, k + 2 after a full acceptance, else k - 1; or confidence, which stops *after*
            a token the draft itself gave less than `threshold` (dropping a sampled token would be biased).
        threshold: for `confidence`.
    """

    def __init__(
        self,
        target: Target,
        *,
        draft: str | Target | None = None,
        k: int = 5,
        schedule: Literal["constant", "heuristic", "confidence"] = "constant",
        threshold: float = 0.4,
    ) -> None:
        super().__init__(target)
        if k < 1:
            raise ValueError("k must be at least 1")
        self.draft = open_draft_model(draft, target, "draft-model")
        self.k, self.schedule, self.threshold = k, schedule, threshold
        self.max_nodes = k if schedule != "heuristic" else max(k, _LONGEST)

    def release(self) -> None:
        self.draft.cache.release()

    def draft_identity(self) -> dict[str, Any] | None:
        return None if self.draft.identity is None else self.draft.identity.to_json()

    def weights_bytes(self) -> int:
        return 0 if self.draft.model is self.target.model else self.draft.weights_bytes()

    def kv_bytes(self) -> int:
        return self.draft.cache.nbytes()

    def begin(self, prompts: list[list[int]]) -> None:
        self._texts = [list(prompt) for prompt in prompts]
        self._lengths = [self.k] * len(prompts)  # the next draft's length, by row
        self._proposed = [0] * len(prompts)
        self._context = Context(self.draft)
        self.draft.reserve(len(prompts), self.request.capacity + self.max_nodes + 1)

    def observe(self, outcome: Outcome) -> None:
        for row, (tokens, accepted) in enumerate(zip(outcome.tokens, outcome.accepted, strict=True)):
            if not outcome.prefill and tokens:
                self._after_round(row, accepted)
            self._texts[row] += tokens

    def propose(self, budgets: list[int], generators: Sequence[torch.Generator] | None) -> list[Draft]:
        wanted = [
            max(0, min(length, budget, self.draft.context - len(text)))
            for length, budget, text in zip(self._lengths, budgets, self._texts, strict=True)
        ]
        self._proposed = wanted
        if not any(wanted):
            return [Draft()] * len(budgets)
        logits = self._catch_up(wanted)
        tokens: list[torch.Tensor] = []
        probs: list[torch.Tensor] = []
        for step in range(1, max(wanted) + 1):
            token, q, confidence = self._next(logits, generators, [int(w >= step) for w in wanted])
            tokens.append(token)
            if q is not None:
                probs.append(q)
            if confidence is not None:  # the one schedule that must look, a read a draft pass
                doubtful = (confidence < self.threshold).tolist()
                wanted = [min(w, step) if stop else w for w, stop in zip(wanted, doubtful, strict=True)]
            if step >= max(wanted):
                break
            logits = self._context.append(self.draft, token[:, None], [int(w > step) for w in wanted]).logits[
                :, 0
            ]
        self._proposed = wanted
        chain = torch.stack(tokens, 1)
        q_all = torch.stack(probs, 1) if probs else None
        return [
            Draft(chain[row, :n], probs=None if q_all is None else q_all[row, :n]) if n else Draft()
            for row, n in enumerate(wanted)
        ]

    def _after_round(self, row: int, accepted: int) -> None:
        proposed = self._proposed[row]
        if proposed:
            # Of the proposals all but the last stand in the draft's cache, behind the text they continued.
            self._context.lengths[row] = len(self._texts[row]) + min(accepted, proposed - 1)
        if self.schedule == "heuristic" and proposed:
            longer = min(self._lengths[row] + 2, self.max_nodes)
            self._lengths[row] = longer if accepted == proposed else max(1, self._lengths[row] - 1)

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
        padded = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in missing], device=device)
        logits = self._context.append(self.draft, padded, counts).logits
        last = torch.tensor([max(count - 1, 0) for count in counts], device=device)
        return logits[torch.arange(len(counts), device=device), last]

    def _known(self, tokens: list[int]) -> list[int]:
        return known_ids(tokens, self.draft, self.target)

    def _next(
        self, logits: torch.Tensor, generators: Sequence[torch.Generator] | None, drawing: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The next token of each row, its q where sampled, and the draft's confidence in it where asked for."""
        logits = logits[:, : self.target.vocab_size]
        sampling = self.request.sampling
        if sampling.greedy:
            token, q = logits.argmax(-1), None
        else:
            assert generators is not None
            q = probabilities(logits, sampling)
            token = draw(q[:, None], generators, drawing)[:, 0]
        if self.schedule != "confidence":
            return token, q, None
        belief = logits.float().softmax(-1) if q is None else q
        return token, q, belief.gather(1, token[:, None])[:, 0]


_LONGEST = 32  # where the heuristic schedule stops growing
