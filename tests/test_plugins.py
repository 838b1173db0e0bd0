"""Methods from a file: what works by the contract, what fails in the middle, what lies about being lossless."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_folder import DRAFTER, Result, Workplace, write_task

from specbench.build import Named
from specbench.decoding.method import Clock, Method, Request, Round
from specbench.spec import Spec
from specbench.trial import generate

# -- methods that fail ---------------------------------------------------------------------------------------

FAILING = (
    DRAFTER
    + """
class Mine(Drafter):
    def begin(self, prompts):
        self.bad = len(prompts[0]) == {length}
        self.calls = 0
    def propose(self, budgets, generators):
        self.calls += 1
        if self.bad and self.calls == 3:
            raise {error}
        return [Draft()] * len(budgets)
"""
)


@pytest.mark.parametrize(
    ("error", "recorded"),
    [
        ('KeyError("table")', "KeyError: 'table'"),
        ('torch.OutOfMemoryError("CUDA out of memory")', "out of memory"),
        ("MemoryError()", "out of memory"),
    ],
)
def test_a_method_that_fails_in_the_middle(fresh: Workplace, error: str, recorded: str) -> None:
    length = len("<s>.second one x y z\n.") - len("<s>") + 1
    spec = fresh.plug_in(FAILING.format(length=length, error=error))
    result = fresh.run("--method", spec, "--method", "prompt-lookup", "--json")
    assert result.code == 0, result.err
    failed = [row for row in fresh.rows() if row["error"]]
    assert [(row["question"], row["method"], row["error"]) for row in failed] == [("q2", spec, recorded)]
    assert failed[0]["batch_s"] is None
    assert failed[0]["output_ids"] == []
    overall = {r["method"]: r for r in json.loads(result.out)["rows"] if r["task"] == "overall"}
    assert (overall[spec]["failed"], overall["prompt-lookup"]["failed"]) == (1, 0)
    counted = [row["output_tokens"] for row in fresh.rows() if row["method"] == spec and not row["error"]]
    assert len(counted) == 3
    assert overall[spec]["tokens"] == sum(counted)


def test_after_running_out_of_memory_its_caches_are_given_back() -> None:
    released = []

    class Hungry(Method):
        def generate(self, request: Request, clock: Clock) -> Iterator[Round]:
            raise torch.OutOfMemoryError("CUDA out of memory")
            yield

        def release(self) -> None:
            released.append(1)
            raise RuntimeError("even this fails")

    measured = generate(Named("hungry", Spec("hungry"), Hungry()), Request([[1], [2]], 4))
    assert (measured.error, measured.tokens, released) == ("out of memory", [[], []], [1])


def test_a_method_that_always_fails_is_named(fresh: Workplace, tmp_path: Path) -> None:
    task = write_task(tmp_path / "mixed.jsonl", [[""], ["one"], ["two"]])
    spec = fresh.plug_in(DRAFTER + "class Mine(Drafter):\n    def observe(self, outcome):\n        1 / 0\n")
    result = fresh.run("--task", task, "--method", spec, "--method", "prompt-lookup")
    refused_with_table(result, f"nothing was measured of {spec}: ZeroDivisionError: division by zero")
    assert sum(row["error"] is None for row in fresh.rows()) == 4


def refused_with_table(result: Result, wanted: str, code: int = 2) -> None:
    assert result.code == code, result.err
    assert "vanilla" in result.out  # what was measured is shown
    assert len(result.error_lines) == 2
    assert wanted in result.error_lines[0]


LIAR = """
from dataclasses import replace
from specbench.decoding.draft import Drafter
from specbench.decoding.loop import DraftVerify

class Mine(DraftVerify):
    def __init__(self, target, how="wrong"):
        super().__init__(target, Drafter(target))
        self.how = how
    def generate(self, request, clock):
        for number, one in enumerate(super().generate(request, clock)):
            if number == 4 and self.how == "short":
                return
            if number == 4:
                one = replace(one, tokens=[[(t + 1) % 100 for t in row] for row in one.tokens])
            yield one
"""


@pytest.mark.parametrize(("how", "said"), [("wrong", "logit gap"), ("short", "one output ends there")])
def test_a_lossless_method_that_differs_fails_the_gate(fresh: Workplace, how: str, said: str) -> None:
    spec = fresh.plug_in(LIAR) + f":how={how}"
    result = fresh.run("--method", spec)
    assert result.code == 1
    assert len(result.error_lines) == 2
    assert f"{spec} is said to be lossless but differs from vanilla in float32: work q1 turn 0" in result.err
    assert "at token 4" in result.err
    assert said in result.err
    wrong = [row for row in fresh.rows() if row["method"] == spec]
    assert [row["agreement"]["first_difference"] for row in wrong] == [4] * 4
    assert fresh.manifest()["status"] == "complete"


def test_a_lossy_method_that_says_so_passes(fresh: Workplace) -> None:
    spec = fresh.plug_in(LIAR.replace("self.how = how", "self.how, self.lossless = how, False"))
    assert fresh.run("--method", spec).code == 0
    assert not any(row["agreement"]["same"] for row in fresh.rows() if row["method"] == spec)
    assert fresh.manifest()["methods"][1]["lossless"] is False


def test_rounds_of_the_wrong_shape_are_a_recorded_error(fresh: Workplace) -> None:
    source = (
        "from specbench.decoding.method import Method, Round\n"
        "class Mine(Method):\n    def __init__(self, target): ...\n"
        "    def generate(self, request, clock):\n"
        "        yield Round([[5]], prefill=True)\n        clock.end_prefill()\n        yield Round([[6]])\n"
    )
    spec = fresh.plug_in(source)
    result = fresh.run("--method", spec)
    refused_with_table(result, "round 1 of the method does not have 1 rows in every column")


# -- plug-ins that work --------------------------------------------------------------------------------------

ANY_OPTIONS = (
    "from __future__ import annotations\n"
    "from dataclasses import dataclass\n"
    "from typing import TYPE_CHECKING\n"
    + DRAFTER
    + """
if TYPE_CHECKING:
    from somewhere import Target

@dataclass
class Memory:
    seen: list[int]

class Mine(Drafter):
    def __init__(self, target: Target, **options):
        self.options = options
        assert options == {"k": 2, "rate": 0.5, "loud": True, "mode": "x"}, options
    def begin(self, prompts):
        self.rows = [Memory(list(p)) for p in prompts]
    def observe(self, outcome):
        for row, tokens in zip(self.rows, outcome.tokens):
            row.seen += tokens
    def propose(self, budgets, generators):
        return [Draft(row.seen[-self.options["k"]:][:b]) for row, b in zip(self.rows, budgets)]
    max_nodes = 2
"""
)


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (ANY_OPTIONS, ":k=2,loud=true,mode=x,rate=0.5"),
        (ANY_OPTIONS.replace("**options):", "k=3, *, rate=0.1, loud=False, mode='y'):").replace(
            "self.options = options", "options = self.options = dict(k=k, rate=rate, loud=loud, mode=mode)"
        ), ":k=2,loud=true,mode=x,rate=0.5"),
    ],
    ids=["any options", "named options"],
)  # fmt: skip
def test_a_drafter_written_to_the_contract(fresh: Workplace, source: str, options: str) -> None:
    spec = fresh.plug_in(source) + options
    result = fresh.run("--method", spec, "--batch-size", "1,2", "--ignore-eos")
    assert result.code == 0, result.err
    mine = [row for row in fresh.rows() if row["method"] == spec]
    assert all(row["agreement"]["same"] for row in mine)
    assert {max(row["rounds"]["drafted"]) for row in mine} == {2}
