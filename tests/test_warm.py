"""Methods that keep what earlier prompts taught: whole passes, one order, and the same lessons after a resume."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tiny_folder import DRAFTER, Workplace, write_task

from specbench.config import RunConfig
from specbench.plan import in_order, passes
from specbench.questions import Question, Task

# Drafts as many tokens as the prompts it has been taught, so that each row tells what it had learned.
LEARNER = (
    DRAFTER
    + """
class Mine(Drafter):
    max_nodes = 40

    def __init__(self, target, *, warm: bool = False):
        super().__init__(target)
        self.warm, self.taught = warm, 0

    def begin(self, prompts):
        self.taught = self.taught + 1 if self.warm else 1

    def forget(self):
        self.taught = 0

    def propose(self, budgets, generators):
        return [Draft([7] * min(budget, self.taught)) for budget in budgets]
"""
)


def lessons(rows: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    """Question, repeat and what was known of the learner's rows, in the order they were measured."""
    mine = [row for row in rows if "Mine" in row["method"]]
    return [(row["question"], row["repeat"], row["rounds"]["drafted"][0]) for row in mine]


@pytest.fixture(scope="module")
def place(make_place: Any) -> Workplace:
    made = make_place("warm")
    write_task(made.task, [[f"question number {number}"] for number in range(4)])
    return made


def options(place: Workplace, *more: object) -> list[object]:
    return [
        "--method",
        place.plug_in(LEARNER) + ":warm=true",
        "--method",
        "prompt-lookup",
        "--repeats",
        2,
        *more,
    ]


def test_each_pass_learns_from_nothing_in_one_order(place: Workplace) -> None:
    result = place.run(*options(place))
    assert result.code == 0, result.err
    rows = place.rows()
    once = [(f"q{n}", 0, n) for n in (1, 2, 3, 4)]
    assert lessons(rows) == once + [(question, 1, known) for question, _, known in once]
    methods = [row["method"].rpartition("::")[2] for row in rows]
    forward = ["vanilla"] * 4 + ["Mine:warm=true"] * 4 + ["prompt-lookup"] * 4
    assert methods == forward + forward[::-1]
    assert {row["state"] for row in rows if "Mine" in row["method"]} == {"warm"}
    assert all(row["agreement"]["same"] for row in rows if row["method"] != "vanilla")
    assert "keeps what earlier prompts taught it: whole passes" in result.err
    assert place.manifest()["schedule"] == "whole passes"


@pytest.mark.parametrize("blocks", [5, 6, 14])
def test_a_resumed_pass_knows_what_it_knew(place: Workplace, blocks: int) -> None:
    whole = place.run(*options(place), name=f"whole{blocks}")
    assert whole.code == 0
    expected = lessons(place.rows(f"whole{blocks}"))
    file = place.trials_file(f"whole{blocks}")
    os.truncate(file, sum(map(len, file.read_bytes().splitlines(keepends=True)[:blocks])))
    assert place.run(*options(place), name=f"whole{blocks}").code == 0
    assert lessons(place.rows(f"whole{blocks}")) == expected


def test_cold_runs_stay_interleaved(place: Workplace) -> None:
    assert place.run("--method", place.plug_in(LEARNER), name="cold").code == 0
    assert {known for *_, known in lessons(place.rows("cold"))} == {1}
    assert place.manifest("cold")["schedule"] == "interleaved"


def test_conversations_go_on_in_a_reversed_pass(place: Workplace, tmp_path: Path) -> None:
    task = write_task(tmp_path / "two.jsonl", [["a b", "c d"], ["e f"]])
    assert place.run(*options(place, "--task", task), name="turns").code == 0
    rows = place.rows("turns")
    assert len(rows) == 3 * 3 * 2
    assert all(row["error"] is None for row in rows)
    asked = {(row["question"], row["turn"], row["prompt_tokens"]) for row in rows}
    assert len(asked) == 3  # every method and repeat had the same prompts


def test_disturbed_trials_are_not_taught_twice(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    from specbench import runner

    monkeypatch.setattr(runner, "_disturbance", lambda measured: "contended")
    assert place.run(*options(place, "--repeats", 1), name="disturbed").code == 0
    rows = place.rows("disturbed")
    assert lessons(rows) == [(f"q{n}", 0, n) for n in (1, 2, 3, 4)]
    assert all(row["excluded"] is None for row in rows if "Mine" in row["method"])
    assert sum(row["method"] == "vanilla" for row in rows) == 8


def test_no_reverse_where_sampled_answers_differ_by_repeat() -> None:
    config = RunConfig(target="t", methods=(), tasks=("x",), repeats=2)
    questions = tuple(Question(f"q{n}", "a", None, ("hello",)) for n in range(2))
    task = Task("a", "", "", 8, questions, "", "")
    labels = ["vanilla", "m"]
    for reversible, second in (
        (True, ["m", "m", "vanilla", "vanilla"]),
        (False, ["vanilla", "vanilla", "m", "m"]),
    ):
        blocks = passes(config, [task], labels, reversible)
        assert [block.index for block in blocks] == list(range(8))
        assert [label for block in blocks for label in in_order(labels, block)][4:] == second


# -- --until -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many(make_place: Any) -> Workplace:
    made = make_place("until")
    write_task(
        made.task, [{"question_id": n, "category": "ab"[n >= 15], "turns": [f"say {n}"]} for n in range(30)]
    )
    return made


def test_until_stops_when_every_interval_is_narrow(many: Workplace) -> None:
    result = many.run("--method", "prompt-lookup", "--until", "90%", "--json")
    assert result.code == 0, result.err
    assert len(many.rows()) == 2 * 20  # the fewest questions it stops on
    assert {row["category"] for row in many.rows()[:4]} == {"a", "b"}  # round-robin
    assert "every method's speedup is known to ±90.0%: widest ±" in result.err
    assert many.manifest()["status"] == "until reached"
    (row,) = (
        r for r in json.loads(result.out)["rows"] if r["method"] == "prompt-lookup" and r["task"] == "overall"
    )
    assert row["speedup"]["high"] - row["speedup"]["low"] <= 2 * 0.9 * row["speedup"]["point"]


def test_until_goes_on_with_another_precision(many: Workplace) -> None:
    assert many.run("--method", "prompt-lookup", "--until", "90%", name="on").code == 0
    result = many.run("--method", "prompt-lookup", "--until", "0.0001%", name="on")
    assert result.code == 0
    assert len(many.rows("on")) == 2 * 30
    assert "the questions ran out; --until ±0.0%, widest ±" in result.err
    assert many.manifest("on")["status"] == "complete"


def test_until_tells_too_few_questions_from_no_interval(many: Workplace) -> None:
    result = many.run("--method", "prompt-lookup", "--until", "90%", "--limit", "12", name="few")
    assert result.code == 0, result.err
    assert "the questions ran out; --until ±90.0%, widest ±" in result.err
    assert "12 questions are too few to stop on" in result.err


def test_until_says_when_the_time_budget_ended_it(many: Workplace) -> None:
    result = many.run("--method", "prompt-lookup", "--until", "1%", "--time-budget", "0", name="late")
    assert result.code == 2
    assert "the time budget ran out; --until ±1.0%, no interval yet for any method" in result.err


@pytest.mark.parametrize("text", ["", "%", "x", "0", "-3%", "150%", "nan"])
def test_a_precision_that_is_none(many: Workplace, text: str) -> None:
    result = many.run("--until", text)
    assert result.code == 2
    assert result.error_lines[0].startswith(f"error: --until {text} is not a precision")


def test_until_and_learning_do_not_mix(place: Workplace) -> None:
    result = place.run(*options(place, "--until", "3%"), name="both")
    assert result.code == 2
    assert "what it has learned" in result.err or "has learned depends on where" in result.err
