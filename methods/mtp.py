"""Multi-token prediction: the target drafts for itself with the layers it was trained to look ahead with.

Source: DeepSeek-V3 (arXiv 2412.19437, §2.2); GLM-4.5, Qwen3-Next and others carry such layers in their checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from specbench.decoding.context import Context, Layout
from specbench.decoding.draft import Draft, Outcome
from specbench.decoding.draft_length import K, draft_length
from specbench.decoding.learned import LearnedDrafter, column_of
from specbench.decoding.method import Request
from specbench.models.checkpoint import Checkpoint
from specbench.models.device import send
from specbench.models.drafts import quantised
from specbench.models.fixed_pass import Tensors
from specbench.models.mtp import open_mtp
from specbench.models.quantize import Quantize
from specbench.models.target import Target


class Mtp(LearnedDrafter):
    """A chain of the layers' argmax: layer after layer, then the last one again and again, as EAGLE does.

    A round feeds every layer the target's states of the tokens it has verified. What deeper layers have seen at the
    last positions were drafts, so those few are fed again. Drafts are argmax at every temperature, judged as the
    deterministic proposals they are: lossless.

    Options:
        draft: a folder or Hub id that holds the layers; the target's own without it.
        k: tokens proposed a round, or auto; 0 is one a layer.
        draft.quantize: what the layers' linear layers are quantised to: none, int8, int4 or fp8.
    """

    taps = ("final",)

    def __init__(
        self, target: Target, *, draft: str | Checkpoint | None = None, k: K = 0, quantize: Quantize = "none"
    ) -> None:
        if k != "auto" and k < 0:
            raise ValueError("k must be at least 1, or 0 for one a layer")
        self.net, checkpoint = open_mtp(target, draft)
        identity = checkpoint.identity("multi-token-prediction layers")
        who = quantised(self.net, identity, quantize, target)
        super().__init__(target, self.net, who, self.net.cache)
        self.layers = len(self.net.layers)
        self.length = draft_length(k or self.layers)
        self.max_nodes = self.length.longest

    def prepare(self, request: Request) -> None:
        super().prepare(request)
        longest = request.capacity + self.max_nodes + 1
        self.net.reserve(len(request.prompts), longest)
        self.make_ahead(request, longest)

    def release(self) -> None:
        super().release()
        self._states = torch.empty(0)

    def begin(self, prompts: list[list[int]]) -> None:
        self.length.begin(len(prompts))
        self._texts = [list(prompt) for prompt in prompts]
        self._context = Context(self.net)
        self._states = torch.empty(0)
        self._counts = [0] * len(prompts)
        self._first = True  # the next pass is over the prompt

    def observe(self, outcome: Outcome) -> None:
        self.length.observe(outcome)
        if all(outcome.finished):
            return
        kept = [len(text) for text in self._texts] if outcome.prefill else [n + 1 for n in outcome.accepted]
        new = outcome.along_path(outcome.taps["final"].to(self.net.device))
        self._append(new, [0 if done else n for n, done in zip(kept, outcome.finished, strict=True)])
        for text, tokens in zip(self._texts, outcome.tokens, strict=True):
            text += tokens

    def propose(self, budgets: list[int], generators: Sequence[torch.Generator] | None) -> list[Draft]:
        wanted = self.length.wanted(budgets)
        if not any(wanted):
            return [Draft()] * len(budgets)
        tokens = self._chain(wanted, self.depth(max(wanted), self.length.uncut(wanted)))
        return self.length.proposed(
            [Draft(tokens[row, :n]) if n else Draft() for row, n in enumerate(wanted)]
        )

    def _append(self, new: torch.Tensor, counts: list[int]) -> None:
        """Set the states to feed: the last `layers - 1` of those fed before, and the first `counts[b]` of `new`."""
        if not self._states.numel() or self.layers == 1:
            self._states, self._counts = new, counts
            return
        again = [
            min(self.layers - 1, n) if count else 0 for n, count in zip(self._counts, counts, strict=True)
        ]
        device, before = new.device, self._states.shape[1]
        repeat, skip = send([again, self._counts], device)[..., None]
        column = torch.arange(max(map(sum, zip(again, counts, strict=True))), device=device)
        source = torch.where(column < repeat, skip - repeat + column, before - repeat + column)
        joined = torch.cat([self._states, new], 1)
        source = source.clamp(max=joined.shape[1] - 1)[..., None].expand(-1, -1, joined.shape[2])
        self._states = joined.gather(1, source)
        self._counts = [n + m for n, m in zip(again, counts, strict=True)]

    def _chain(self, wanted: list[int], steps: int) -> torch.Tensor:
        """Drafts int64 `[B, steps]`, of which `wanted[b]` are wanted."""
        counts = [n if want else 0 for n, want in zip(self._counts, wanted, strict=True)]
        self._context.rewind([len(text) - 1 - n for text, n in zip(self._texts, self._counts, strict=True)])
        tokens = self._last_tokens(counts)
        given = {"tokens": tokens, "states": self._states[:, : tokens.shape[1]]}
        layers = min(steps, self.layers)
        along = partial(self._along_text, layers)
        found = self.feed(("text", layers), self._context, along, counts, given, fixed=not self._first)
        self._first = False
        drafts, further = found["drafts"][:, 0], steps - layers
        if not further:
            return drafts
        given = {"token": drafts[:, -1:], "state": found["state"], "start": self._context.starts()}
        beyond = partial(self._beyond, further)
        more = self.fixed(("beyond", further), beyond, given, self._context.reach(further))
        return torch.cat([drafts, more["drafts"]], 1)

    def _along_text(self, layers: int, inputs: Tensors, at: Layout, last: torch.Tensor) -> Tensors:
        """What the first so many layers draft, `[B, 1, layers]`, and the last one's state behind it `[B, 1, H]`."""
        tokens, states = inputs["tokens"], inputs["states"]
        drafts: list[torch.Tensor] = []
        for layer in range(layers):
            if layer:
                # Each layer reads one token further on: the text's, and at the end what was just drafted.
                tokens = tokens.roll(-1, 1).scatter(1, last[:, None], drafts[-1][:, None])
                tokens = torch.where(at.slots > 0, tokens, tokens[:, :1])  # padding goes on as column 0 does
            states = self.net.run(layer, tokens, states, at)
            state = column_of(states, last)
            drafts.append(self.net.logits(layer, state).argmax(-1))
        return {"drafts": torch.stack(drafts, 1)[:, None], "state": state[:, None]}

    def _beyond(self, steps: int, inputs: Tensors, length: int) -> Tensors:
        """What the last layer drafts `[B, steps]` on its own state and its own token, again and again."""
        layer, token, state = self.layers - 1, inputs["token"], inputs["state"]
        drafts: list[torch.Tensor] = []
        for step in range(steps):
            depth = torch.full_like(token, step)
            at = self._context.layout(depth, None, None, step, inputs["start"], length)
            state = self.net.run(layer, token, state, at)
            token = self.net.logits(layer, state[:, 0]).argmax(-1)[:, None]
            drafts.append(token)
        return {"drafts": torch.cat(drafts, 1)}

    def _last_tokens(self, counts: list[int]) -> torch.Tensor:
        """The last `counts[b]` tokens of each text, int64 `[B, W]`, right-padded."""
        width = max(counts)
        lines = [text[len(text) - n :] for text, n in zip(self._texts, counts, strict=True)]
        return send([line + [0] * (width - len(line)) for line in lines], self.net.device)
