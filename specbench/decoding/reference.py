"""transformers' own `generate` behind the outer contract: a second reference, one row at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging as transformers_logging

from specbench.decoding.method import Clock, Method, Request, Round
from specbench.models.target import Target


class Reference(Method):
    """`model.generate` with stock attention and its own cache; a subclass says with which extras.

    Rounds are told apart by the streamer, which transformers calls once a pass with the tokens that came out of
    it, and drafts by the width of the pass. Spans inside `generate` are unknown, so draft and verify times are
    not split.
    """

    batches = False

    def __init__(self, target: Target) -> None:
        self.target = target
        transformers_logging.set_verbosity_error()  # its advice on generate's arguments is not for our users

    def extras(self) -> dict[str, Any]:
        """Further arguments of `generate`."""
        return {}

    def generate(self, request: Request, clock: Clock) -> Iterator[Round]:
        (prompt,) = request.prompts
        listener = _Listener(clock, len(prompt))
        model = self.target.model
        ids = torch.tensor([prompt], device=self.target.device)
        if request.generators is not None:
            torch.manual_seed(request.generators[0].initial_seed())
        hook = model.register_forward_pre_hook(listener.before_pass, with_kwargs=True)
        try:
            with self.target.stock_attention(), _only(model, _config(request)), torch.inference_mode():
                model.generate(ids, attention_mask=torch.ones_like(ids), streamer=listener, **self.extras())
        finally:
            hook.remove()
        yield from _trimmed(listener.rounds, request)


class _Listener:
    """A streamer: turns `generate`'s callbacks into rounds and clock marks."""

    def __init__(self, clock: Clock, prompt: int) -> None:
        self.clock, self.prompt = clock, prompt
        self.rounds: list[Round] = []
        self._seen_prompt = False
        self._widths: list[int] = []

    def before_pass(self, _model: Any, args: Any, kwargs: Any) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        self._widths.append(ids.shape[1])

    def put(self, value: torch.Tensor) -> None:
        if not self._seen_prompt:
            self._seen_prompt = True
            return
        tokens = value.flatten().tolist()
        if not self.rounds:
            self.clock.end_prefill()
            self.rounds.append(Round([tokens], prefill=True))
            return
        # A callback may come a pass late, so the width is taken by the round's number and not as the latest.
        drafted = self._widths[len(self.rounds)] - 1
        self.clock.end_round()
        self.rounds.append(Round([tokens], [drafted], [drafted], [len(tokens) - 1]))

    def end(self) -> None:
        """Nothing is left to flush."""


def _trimmed(rounds: list[Round], request: Request) -> Iterator[Round]:
    """Cut at the limit and after the first stop token: some versions return what lies beyond."""
    left = request.max_new_tokens
    for one in rounds:
        tokens = one.tokens[0][:left]
        stops = [i for i, token in enumerate(tokens) if token in request.stop]
        if stops:
            tokens = tokens[: stops[0] + 1]
        left -= len(tokens)
        accepted = [min(n, len(tokens)) for n in one.accepted]
        yield Round([tokens], one.drafted, one.depth, accepted, one.prefill)
        if stops or left == 0:
            return


def _config(request: Request) -> GenerationConfig:
    sampling = request.sampling
    stop = sorted(request.stop)
    warp: dict[str, Any] = {"do_sample": False}
    if not sampling.greedy:
        warp = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
        }
    return GenerationConfig(
        max_new_tokens=request.max_new_tokens,
        eos_token_id=stop or None,
        pad_token_id=stop[0] if stop else 0,
        **warp,
    )


@contextlib.contextmanager
def _only(model: Any, config: GenerationConfig) -> Iterator[None]:
    """The model's own generation defaults (penalties, temperature…) must not reach `generate`: swap them out."""
    own, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = own
