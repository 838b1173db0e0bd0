"""The schedule, the effective config and the time it is expected to take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specbench.config import EMBEDDED_BATCH_METHODS, EMBEDDED_METHODS, RunConfig, read_config
from specbench.errors import SpecbenchError
from specbench.estimate import estimate
from specbench.measure import bandwidth
from specbench.plan import Block, in_order, plan, shortages
from specbench.questions import Question, Task
from specbench.session import effective_config


def task(name: str, turns: list[int], limit: int = 9) -> Task:
    questions = tuple(
        Question(f"{name}{number}", name, None, tuple(f"turn {t}" for t in range(count)))
        for number, count in enumerate(turns)
    )
    return Task(name, "", "", limit, questions, "", "")


def config(**settings: Any) -> RunConfig:
    return RunConfig(**({"target": "t", "methods": (), "tasks": ("x",)} | settings))


def shown(blocks: list[Block]) -> list[tuple[str, int]]:
    return [(block.batch, block.turn) for block in blocks]


def test_tasks_take_turns_and_conversations_stay_together() -> None:
    blocks = plan(config(), [task("a", [2, 1]), task("b", [1])])
    assert shown(blocks) == [("a0", 0), ("a0", 1), ("b0", 0), ("a1", 0)]
    assert [block.index for block in blocks] == [0, 1, 2, 3]


def test_batches_hold_the_questions_that_have_the_turn() -> None:
    blocks = plan(config(batch_sizes=(2,)), [task("a", [1, 3, 2])])
    assert shown(blocks) == [("a0+a1", 0), ("a1", 1), ("a1", 2), ("a2", 0), ("a2", 1)]


def test_batches_that_hold_fewer_prompts_are_told_of() -> None:
    (note,) = shortages(plan(config(batch_sizes=(1, 4)), [task("a", [1] * 5)]))
    assert note.startswith("1 of the 2 batches of size 4 held fewer prompts: --limit a multiple of 4")
    (note,) = shortages(plan(config(batch_sizes=(2,)), [task("a", [1, 3])]))
    assert note.startswith("2 of the 3 batches of size 2 held fewer prompts: conversations end")
    assert shortages(plan(config(batch_sizes=(1, 4)), [task("a", [1] * 8), task("b", [2] * 4)])) == []


def test_batch_sizes_and_repeats() -> None:
    blocks = plan(config(batch_sizes=(1, 2), repeats=2), [task("a", [1, 1])])
    assert [(b.batch_size, b.repeat, b.batch) for b in blocks] == [
        *((1, r, q) for r in (0, 1) for q in ("a0", "a1")),
        *((2, r, "a0+a1") for r in (0, 1)),
    ]


def test_new_tokens_are_the_tasks_own_unless_given() -> None:
    assert {block.max_new_tokens for block in plan(config(), [task("a", [1], limit=7)])} == {7}
    assert {block.max_new_tokens for block in plan(config(max_new_tokens=3), [task("a", [1])])} == {3}


def test_methods_go_back_and_forth() -> None:
    ahead, back = (Block(0, task("a", [1]), (), 0, 1, 0, 8, reverse) for reverse in (False, True))
    assert in_order(["v", "a", "b"], ahead) == ["v", "a", "b"]
    assert in_order(["v", "a", "b"], back) == ["b", "a", "v"]


@pytest.mark.parametrize("tasks", [1, 2, 3, 8])
@pytest.mark.parametrize("turns", [1, 2, 3])
def test_the_run_and_each_task_and_turn_see_both_orders_alike(tasks: int, turns: int) -> None:
    blocks = plan(config(), [task(f"t{number}", [turns] * 6) for number in range(tasks)])
    groups = [blocks] + [
        [b for b in blocks if (b.task.name, b.turn) == (f"t{number}", turn)]
        for number in range(tasks)
        for turn in range(turns)
    ]
    assert all(2 * sum(block.reverse for block in group) == len(group) for group in groups)


# -- config --------------------------------------------------------------------------------------------------


def test_without_arguments_the_embedded_default() -> None:
    found = effective_config({}, None)
    assert (found.target, found.methods, found.limit) == ("smollm2-135m", EMBEDDED_METHODS, 1)
    assert found.max_new_tokens == 48
    assert len(found.tasks) == 8


def test_what_is_given_is_not_overridden() -> None:
    found = effective_config({"limit": 3}, None)
    assert (found.limit, found.max_new_tokens) == (3, 48)
    assert effective_config({"batch_sizes": (4,)}, None).methods == EMBEDDED_BATCH_METHODS
    assert effective_config({"batch_sizes": (1, 4)}, None).methods == EMBEDDED_METHODS


def test_a_config_is_read_back_as_it_was(tmp_path: Path) -> None:
    written = config(
        methods=("a", "b"), batch_sizes=(1, 4), template_args={"x": True}, threads=2, temperature=1
    )
    file = tmp_path / "manifest.json"
    for content in (written.to_json(), {"config": written.to_json(), "name": "r"}):
        file.write_text(json.dumps(content))
        assert RunConfig(**read_config(file)) == written


def test_differences_name_both_sides() -> None:
    assert config(seed=1).differences(config(seed=2).to_json()) == ["seed: 2 -> 1"]
    older = config().to_json()
    del older["top_k"]  # a setting that did not exist yet
    assert config().differences(older) == []


@pytest.mark.parametrize(
    "setting",
    [
        {"limit": -1},
        {"top_p": 1.5},
        {"top_k": -1},
        {"batch_sizes": ()},
        {"repeats": 0},
        {"warmup": -1},
        {"tasks": ()},
    ],
)
def test_settings_that_measure_nothing(setting: dict[str, Any]) -> None:
    with pytest.raises(SpecbenchError):
        config(**setting)


# -- estimate ------------------------------------------------------------------------------------------------


def test_time_is_a_pass_over_the_weights_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "measure_bandwidth", lambda _: bandwidth.Bandwidth(20.0, 10.0, 1, 1))
    blocks = plan(config(), [task("a", [1, 1], limit=10)])
    found = estimate(config(target="smollm2-135m", device="cpu"), blocks, methods=3)
    size = 134_515_008 * 4
    assert found["seconds"] == pytest.approx(2 * 10 * 3 * size / 10e9, rel=0.02)
    assert "a floor" in found["text"]
    half = estimate(config(target="smollm2-135m", device="cpu", dtype="bfloat16"), blocks, methods=3)
    assert half["text"].count("0.3 GB") == 1


def test_time_of_a_target_that_is_not_known_before_it_is_loaded() -> None:
    assert estimate(config(target="some/model"), [], methods=1)["seconds"] is None
    with pytest.raises(SpecbenchError, match="unknown target"):
        estimate(config(target="llama-8c"), [], methods=1)
