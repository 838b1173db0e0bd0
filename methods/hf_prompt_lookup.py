"""Prompt lookup by transformers' own `generate`."""

from __future__ import annotations

from typing import Any

from specbench.decoding.reference import Reference
from specbench.models.target import Target


class HFPromptLookup(Reference):
    """transformers' `generate(prompt_lookup_num_tokens=k)`; a reference for prompt-lookup.

    Options (transformers' own defaults):
        k: most tokens proposed.
        ngram: longest n-gram looked for.
    """

    def __init__(self, target: Target, *, k: int = 10, ngram: int = 2) -> None:
        super().__init__(target)
        self.k, self.ngram = k, ngram

    def extras(self) -> dict[str, Any]:
        return {"prompt_lookup_num_tokens": self.k, "max_matching_ngram_size": self.ngram}
