"""PARD: a small language model that was taught to guess k tokens in one pass, through mask tokens behind the text.

Source: An et al., "PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation" (arXiv 2504.18583;
AMD-AGI/PARD, pard/pard_infer.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specbench.decoding.context import Context
from specbench.decoding.draft import Draft, Outcome
from specbench.decoding.draft_length import K, draft_length
from specbench.decoding.learned import LearnedDrafter
from specbench.decoding.method import Request
from specbench.errors import SpecbenchError
from specbench.models.device import send
from specbench.models.drafts import known_ids, open_draft_model
from specbench.models.quantize import Quantize
from specbench.models.target import Target


class Pard(LearnedDrafter):
    """The draft's argmax at the last token of the text and at k-1 mask tokens behind it.

    The text's tokens are seen once and kept in the draft's cache, mask tokens never: what a round accepted is read
    by the next pass, together with that round's masks. Drafts are argmax at every temperature, judged as the
    deterministic proposals they are: lossless.

    Options:
        draft: the PARD draft, any REF a target may be; its config has a `pard_token`.
        k: tokens proposed a round, or auto.
        draft.quantize: what the draft's linear layers are quantised to: none, int8, int4 or fp8.
    """

    def __init__(
        self,
        target: Target,
        *,
        draft: str | Target | None = None,
        k: K = 12,
        quantize: Quantize = "none",
    ) -> None:
        self.length = draft_length(k)
        self.draft = open_draft_model(draft, target, "pard", kinds=("pard",), share=False, quantize=quantize)
        super().__init__(target, self.draft.model, self.draft.identity, self.draft.cache, self.draft.passes)
        self.mask = _mask_token(self.draft)
        self.max_nodes = self.length.longest

    def prepare(self, request: Request) -> None:
        super().prepare(request)
        rows, spare = len(request.prompts), self.max_nodes
        self.draft.reserve(rows, request.capacity, spare)
        self.draft.ahead(rows, request.longest_prompt, request.capacity + spare)

    def release(self) -> None:
        self.draft.release()

    def begin(self, prompts: list[list[int]]) -> None:
        self.length.begin(len(prompts))
        self._texts = [list(prompt) for prompt in prompts]
        self._context = Context(self.draft)

    def observe(self, outcome: Outcome) -> None:
        self.length.observe(outcome)
        if outcome.prefill and not all(outcome.finished):
            self.draft.prefill([known_ids(text, self.draft, self.target) for text in self._texts])
            self._context.rewind([len(text) for text in self._texts])
        for text, tokens in zip(self._texts, outcome.tokens, strict=True):
            text += tokens

    def propose(self, budgets: list[int], generators: Sequence[torch.Generator] | None) -> list[Draft]:
        wanted = [
            max(0, min(length, self.draft.context - len(text)))
            for length, text in zip(self.length.wanted(budgets), self._texts, strict=True)
        ]
        if not any(wanted):
            return [Draft()] * len(budgets)
        unread = [
            known_ids(text[length:], self.draft, self.target) if want else []
            for text, length, want in zip(self._texts, self._context.lengths, wanted, strict=True)
        ]
        tokens = self._guess(unread, wanted)
        return self.length.proposed(
            [Draft(tokens[row, :n]) if n else Draft() for row, n in enumerate(wanted)]
        )

    def _guess(self, unread: list[list[int]], wanted: list[int]) -> torch.Tensor:
        """One pass over what each row has not read and its masks; int64 `[B, k]`, `wanted[b]` of them real."""
        device = self.draft.device
        lines = [new + [self.mask] * (want - 1) for new, want in zip(unread, wanted, strict=True)]
        width = max(map(len, lines))
        sizes = [[len(line), len(new)] for line, new in zip(lines, unread, strict=True)]
        table = [line + [0] * (width - len(line)) + pair for line, pair in zip(lines, sizes, strict=True)]
        ids, size, read = send(table, device).split([width, 1, 1], dim=1)
        column = torch.arange(width, device=device).expand(len(lines), -1)
        at = self._context.layout(column, column < size)
        logits = self.draft.forward(ids, at.positions, at.slots, at.masks).logits
        # Only what was committed stays: the masks stand behind it and are written over.
        self._context.rewind(
            [length + len(new) for length, new in zip(self._context.lengths, unread, strict=True)]
        )
        named = logits[..., : self.target.vocab_size].argmax(-1)
        places = (read - 1 + torch.arange(max(wanted), device=device)).clamp(0, width - 1)
        return named.gather(1, places)


def _mask_token(draft: Target) -> int:
    """The id that stands for a token to be guessed.

    Raises:
        SpecbenchError: the draft's config has none, or one it has no embedding for.
    """
    name = draft.identity.name if draft.identity is not None else "the draft model"
    token = getattr(draft.config, "pard_token", None)
    rows = draft.embeddings.weight.shape[0]  # type: ignore[index]
    if token is None:
        raise SpecbenchError(
            f"{name} is no PARD draft: its config.json has no pard_token",
            "give pard a PARD draft with draft=REF; plain models are for --method draft-model",
        )
    if not isinstance(token, int) or not 0 <= token < rows:
        raise SpecbenchError(
            f"{name}: config.json has pard_token = {token!r}, expected an id below {rows}",
            "download or copy the draft again",
        )
    return token
