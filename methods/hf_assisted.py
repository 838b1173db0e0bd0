"""Assisted decoding (a draft model) by transformers' own `generate`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from specbench.decoding.method import Clock, Request, Round
from specbench.decoding.reference import Reference
from specbench.models.drafts import open_draft_model
from specbench.models.quantize import Quantize
from specbench.models.target import Target


class HFAssisted(Reference):
    """transformers' `generate(assistant_model=draft)`; a reference for draft-model.

    Options (transformers' own defaults):
        draft: the draft model, any REF a target may be.
        k: tokens proposed a round.
        schedule: constant or heuristic.
        threshold: stop drafting after a token the draft gave less than this; 0 is off.
        draft.quantize: what the draft model's linear layers are quantised to: none, int8, int4 or fp8.
    """

    def __init__(
        self,
        target: Target,
        *,
        draft: str | Target | None = None,
        k: int = 20,
        schedule: Literal["constant", "heuristic"] = "constant",
        threshold: float = 0.4,
        quantize: Quantize = "none",
    ) -> None:
        super().__init__(target)
        self.draft = open_draft_model(draft, target, "hf-assisted", share=False, quantize=quantize)
        config = self.draft.model.generation_config
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = k, schedule
        config.assistant_confidence_threshold = threshold

    def generate(self, request: Request, clock: Clock) -> Iterator[Round]:
        with self.draft.stock_attention():
            yield from super().generate(request, clock)

    def extras(self) -> dict[str, Any]:
        return {"assistant_model": self.draft.model}

    def weights_bytes(self) -> int:
        return self.draft.weights_bytes()

    def draft_identity(self) -> dict[str, Any] | None:
        return None if self.draft.identity is None else self.draft.identity.to_json()
