"""The device is read once a round, and nothing waits for an upload: what a GPU needs to be kept busy."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import eagle_heads
import heads
import pytest
import tiny
import tiny_datastore
import torch
from device_reads import device_reads
from test_loop import VOCAB, generate
from test_pard import write_pard
from tiny_dflash import write_draft as write_dflash

from specbench.decoding.draft import Drafter
from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Request
from specbench.measure.clock import NullClock
from specbench.models.target import Target

NEW = 60
TWICE = {"lookahead"}  # the n-grams it collects are the host's


def test_the_spy_sees_what_waits() -> None:
    numbers = torch.arange(4)
    with device_reads() as spy:
        numbers.tolist()
        numbers[0].item()
        if numbers[1]:
            pass
        numbers[numbers > 2]
        torch.tensor([1], device="cpu")
        _ = numbers + 1, numbers[numbers], torch.tensor([1])
    assert len(spy.names) == 5, spy.names


def method_of(name: str) -> Any:
    return next(
        found
        for found in vars(importlib.import_module(f"specbench.methods.{name}")).values()
        if isinstance(found, type)
        and found.__module__ == f"specbench.methods.{name}"
        and issubclass(found, Drafter)
    )


def drafters(target: Target, answers: list[list[int]], folder: Path) -> dict[str, Drafter]:
    oracle = method_of("oracle")(target, rate=0.7, k=4)
    oracle.answer = answers
    draft = Target(target.model)
    lookup = method_of("prompt_lookup")
    return {
        "vanilla": Drafter(target),
        "prompt-lookup": lookup(target, k=4, ngram=2, partial=True),
        "draft-model": method_of("draft_model")(target, draft=draft, k=4),
        "self-speculation": method_of("self_speculation")(target, k=3),
        "token-recycling": method_of("token_recycling")(target),
        "rest": method_of("rest")(target, datastore=tiny_datastore.store(*answers), shortest=1),
        "suffix": method_of("suffix")(target, tree=True, factor=2, offset=1),
        "sam": method_of("sam")(
            target, threshold=2, fallback=method_of("token_recycling")(target, tree="sam")
        ),
        "oracle": oracle,
        "oracle's tree": _tree(oracle),
        "lookahead": method_of("lookahead")(target, level=4, window=4, guess=3),
        "cascade": method_of("cascade")(
            target,
            first=lookup(target, k=4, ngram=2),
            then=method_of("draft_model")(target, draft=draft, k=2),
        ),
        "medusa": method_of("medusa")(target, draft=heads.checkpoint(heads.medusa_state(target))),
        "hydra": method_of("hydra")(target, draft=heads.checkpoint(heads.hydra_state(target))),
        "eagle1": method_of("eagle1")(target, draft=eagle_heads.eagle1(target)),
        "eagle2": method_of("eagle2")(target, draft=eagle_heads.eagle1(target)),
        "eagle3": method_of("eagle3")(target, draft=eagle_heads.eagle3(target, drafts=12)),
        "pard": method_of("pard")(target, draft=write_pard(folder / "pard", like=target), k=4),
        "dflash": method_of("dflash")(target, draft=str(write_dflash(folder / "dflash", target))),
    }


def _tree(oracle: Any) -> Any:
    made = type(oracle)(oracle.target, rate=0.7, k=4, tree=12)
    made.answer = oracle.answer
    return made


@pytest.mark.parametrize("rows", [1, 3])
def test_one_read_a_round(rows: int, tmp_path: Path) -> None:
    target = tiny.llama(VOCAB, layers=8)
    prompts = tiny.prompts(rows, VOCAB, seed=4)
    answers, _ = generate(DraftVerify(target, Drafter(target)), Request(prompts, NEW))
    for name, drafter in drafters(target, answers, tmp_path).items():
        rounds = DraftVerify(target, drafter).generate(Request(prompts, NEW), NullClock())
        next(rounds)
        next(rounds)  # static trees are laid out in the first round, once and for all
        for _ in range(5):
            with device_reads() as spy:
                next(rounds)
            assert spy.names == ["tolist"] * (2 if name in TWICE else 1), name
        rounds.close()
