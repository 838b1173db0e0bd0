"""The draft-verify loop, the only one there is: vanilla is the drafter that proposes nothing.

The device is read once a round, for what was accepted and which token came after.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from specbench.decoding.context import Context
from specbench.decoding.draft import Draft, Drafter, Outcome
from specbench.decoding.method import Clock, Method, Request, Round
from specbench.decoding.tree import Tree, collate
from specbench.decoding.verify import Verdict, verify
from specbench.models.routers import split
from specbench.models.target import Target


class DraftVerify(Method):
    """A drafter and the target it drafts for, as a method."""

    def __init__(self, target: Target, drafter: Drafter) -> None:
        self.target, self.drafter = target, drafter
        self.lossless, self.warm, self.wants_answer = drafter.lossless, drafter.warm, drafter.wants_answer
        self._prepared: Request | None = None

    def prepare(self, request: Request) -> None:
        rows, spare = len(request.prompts), self.drafter.max_nodes + 1
        self.target.reserve(rows, request.capacity, spare)
        self.drafter.prepare(request)
        self.target.ahead(rows, request.longest_prompt, request.capacity + spare)
        self._prepared = request

    def set_answer(self, answer: list[list[int]]) -> None:
        self.drafter.answer = answer

    def forget(self) -> None:
        self.drafter.forget()

    def release(self) -> None:
        self.target.release()
        self.drafter.release()

    def draft_identity(self) -> dict[str, Any] | None:
        return self.drafter.draft_identity()

    def weights_bytes(self) -> int:
        return self.drafter.weights_bytes()

    def kv_bytes(self) -> int:
        return self.target.cache.nbytes() + self.drafter.kv_bytes()

    def graph_bytes(self) -> int | None:
        if self.target.device.type != "cuda":
            return None
        return self.target.passes.nbytes() + self.drafter.graph_bytes()

    def generate(self, request: Request, clock: Clock) -> Iterator[Round]:
        if self._prepared is not request:
            self.prepare(request)
        self._prepared = None
        taps = (*self.drafter.taps, *self.target.router_taps)
        with torch.inference_mode(), self.target.tapping(taps):
            yield from _Generation(self.target, self.drafter, request, clock).rounds()


class _Generation:
    """The state of one batch while it is generated."""

    def __init__(self, target: Target, drafter: Drafter, request: Request, clock: Clock) -> None:
        self.target, self.drafter, self.request, self.clock = target, drafter, request, clock
        self.context = Context(target)
        rows = len(request.prompts)
        self.remaining = [request.max_new_tokens] * rows
        self.finished = [False] * rows

    def rounds(self) -> Iterator[Round]:
        roots, first = self._prefill()
        yield first
        generators = self.request.generators
        while not all(self.finished):
            with self.clock.span("draft"):
                budgets = [
                    0 if done else left - 1 for done, left in zip(self.finished, self.remaining, strict=True)
                ]
                drafts = self.drafter.propose(budgets, generators)
            active = [not done for done in self.finished]
            tree = collate(roots, drafts, active, self.target.vocab_size)
            with self.clock.span("verify"):
                result = self.context.verify(self.target, tree)
            taps, experts = split(result.taps, self.target.experts)
            with self.clock.span("accept"):
                verdict = self._judge(tree, result.logits)
                accepted, depth, paths, tokens = _read(tree, verdict)
                self.context.commit(accepted, paths, self.finished)
                roots = verdict.bonus
                emitted = [self._emit(row, new) for row, new in enumerate(tokens)]
            done = self._round(drafts, depth, accepted, emitted, budgets, active, experts)
            with self.clock.span("draft"):
                self.drafter.observe(
                    Outcome(emitted, list(self.finished), accepted, result.logits, taps, tree, verdict.path)
                )
            self.clock.end_round()
            yield done

    def _prefill(self) -> tuple[torch.Tensor, Round]:
        request = self.request
        with self.clock.span("prefill"):
            self.drafter.begin(request.prompts)
            result = self.target.prefill(request.prompts)
            self.context.rewind([len(prompt) for prompt in request.prompts])
            rows = len(request.prompts)
            empty = collate(torch.zeros(rows, dtype=torch.long, device=self.target.device), [Draft()] * rows,
                            [True] * rows, self.target.vocab_size)  # fmt: skip
            first = self._judge(empty, result.logits).bonus
            emitted = [self._emit(row, [token]) for row, token in enumerate(first.tolist())]
        self.clock.end_prefill()
        with self.clock.span("draft"):
            taps, _ = split(result.taps, self.target.experts)
            outcome = Outcome(emitted, list(self.finished), [0] * rows, result.logits, taps)
            self.drafter.observe(outcome)
        return first, Round(emitted, prefill=True)

    def _judge(self, tree: Tree, logits: torch.Tensor) -> Verdict:
        own = self.drafter.judge(tree, logits, self.request.generators)
        return verify(tree, logits, self.request.sampling, self.request.generators) if own is None else own

    def _emit(self, row: int, tokens: list[int]) -> list[int]:
        """What of `tokens` the row may still emit: up to its limit, and up to and with the first stop token."""
        if self.finished[row]:
            return []
        tokens = tokens[: self.remaining[row]]
        for index, token in enumerate(tokens):
            if token in self.request.stop:
                tokens = tokens[: index + 1]
                self.finished[row] = True
                break
        self.remaining[row] -= len(tokens)
        self.finished[row] |= self.remaining[row] == 0
        return tokens

    def _round(
        self,
        drafts: list[Draft],
        depth: list[int],
        accepted: list[int],
        emitted: list[list[int]],
        budgets: list[int],
        active: list[bool],
        experts: torch.Tensor | None,
    ) -> Round:
        for row, new in enumerate(emitted):
            if not active[row]:
                accepted[row] = 0
                continue
            if depth[row] > budgets[row]:
                raise AssertionError(
                    f"row {row}: the draft is {depth[row]} deep, its budget was {budgets[row]}"
                )
            # A stop token among the accepted ones cuts what follows it from the output and from the count.
            assert len(new) == accepted[row] + 1 or self.finished[row], "a round emits accepted + 1 tokens"
            accepted[row] = min(accepted[row], len(new))
        return Round(
            emitted,
            [len(draft) if on else None for draft, on in zip(drafts, active, strict=True)],
            depth,
            list(accepted),
            experts=experts,
            probes=[0 if draft.probes is None else len(draft.probes.tokens) for draft in drafts]
            if self.drafter.sends_probes
            else [],
        )


def _read(
    tree: Tree, verdict: Verdict
) -> tuple[list[int], list[int], list[list[int]] | None, list[list[int]]]:
    """The one read of a round: accepted counts, draft depths, paths (None for chains), tokens of each row."""
    if tree.tokens.shape[1] == 1:
        none = [0] * len(tree.drafted)
        return list(none), none, None, verdict.bonus[:, None].tolist()
    if tree.chain:
        packed = torch.cat([verdict.accepted[:, None], verdict.bonus[:, None], tree.tokens], 1).tolist()
        accepted = [row[0] for row in packed]
        tokens = [[*row[3 : 3 + row[0]], row[1]] for row in packed]
        return accepted, list(tree.drafted), None, tokens
    depth = torch.where(tree.candidate, tree.depth, 0).amax(1, keepdim=True)
    words = torch.cat(
        [verdict.accepted[:, None], verdict.bonus[:, None], depth, verdict.path, tree.tokens], 1
    )
    width = tree.tokens.shape[1]
    packed = words.tolist()
    accepted = [row[0] for row in packed]
    paths = [row[3 : 3 + width] for row in packed]
    tokens = [
        [row[3 + width + column] for column in path[1 : row[0] + 1]] + [row[1]]
        for row, path in zip(packed, paths, strict=True)
    ]
    return accepted, [row[2] for row in packed], paths, tokens
