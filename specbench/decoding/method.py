"""The outer contract: what the runner knows of a method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import torch

from specbench.decoding.sampling import Sampling


class Clock(Protocol):
    """Where a method marks its time (`specbench.measure.clock`): spans prefill, draft, verify, accept."""

    def span(self, name: str, /) -> AbstractSpan: ...
    def end_prefill(self) -> None: ...
    def end_round(self) -> None: ...


class AbstractSpan(Protocol):
    def __enter__(self) -> object: ...
    def __exit__(self, *exc: object) -> object: ...


@dataclass(frozen=True)
class Request:
    """One batch to generate: everything a method may depend on.

    prompts: ids of each row, none empty.
    max_new_tokens: exact for every method.
    stop: ids that end a row (counted once, as its last token); empty with `--ignore-eos`.
    generators: one a row, on the target's device; None when greedy.
    """

    prompts: list[list[int]]
    max_new_tokens: int
    stop: frozenset[int] = frozenset()
    sampling: Sampling = Sampling()
    generators: Sequence[torch.Generator] | None = None

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.prompts))

    @property
    def capacity(self) -> int:
        """The most tokens a row will hold."""
        return self.longest_prompt + self.max_new_tokens


@dataclass(frozen=True)
class Round:
    """One draft-verify cycle of a batch, or its prefill: what each row drafted, had accepted and emitted.

    A row that had finished before takes no part: None in `drafted`, no tokens. The prefill emits a row's first
    token (a reference that verifies a draft in its prefill: its first tokens).

    `experts`, of a mixture of experts: how many different ones the verify pass woke, the mean over its MoE layers;
    a float still on the device, to be read when the clock has stopped. `probes`: the nodes of each row that rode in
    the pass without being candidates; empty where there were none.
    """

    tokens: list[list[int]]
    drafted: list[int | None] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    prefill: bool = False
    experts: torch.Tensor | None = None
    probes: list[int] = field(default_factory=list)


class Method:
    """A named way to generate, wrapped so that the runner can treat native loops, references and engines alike."""

    lossless: bool = True
    warm: bool = False
    wants_answer: bool = False
    batches: bool = True  # False: one row at a time
    # What `k=auto` chooses by: seconds of a round by drafter, batch size and tokens proposed. For the manifest.
    draft_costs: Mapping[str, Any] = MappingProxyType({})

    def prepare(self, request: Request) -> None:
        """Untimed, before the clock starts: reserve memory. Never computes anything about the answer."""

    def set_answer(self, answer: list[list[int]]) -> None:
        """The target's own answer, for methods with `wants_answer`."""

    def generate(self, request: Request, clock: Clock) -> Iterator[Round]:
        """The prefill (its first token), then rounds until every row has stopped."""
        raise NotImplementedError

    def forget(self) -> None:
        """Untimed: drop what earlier prompts taught, if `warm`."""

    def release(self) -> None:
        """Untimed: give back the memory of the last request (caches), keep the weights."""

    def draft_identity(self) -> dict[str, Any] | None:
        """Who the drafter is, for the manifest; None if it has no weights."""
        return None

    def weights_bytes(self) -> int:
        """Bytes of weights beyond the target's."""
        return 0

    def kv_bytes(self) -> int | None:
        """Bytes of key-value cache held, the target's included; None if unknown."""
        return None

    def graph_bytes(self) -> int | None:
        """Bytes that the CUDA graphs of the drafter and the target hold now; None if unknown, or without a GPU.

        The target's are shared by all methods: those made for one serve the others.
        """
        return None
