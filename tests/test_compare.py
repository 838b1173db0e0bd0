"""Comparing two runs: what pairs, what the interval and verdict say, and what is never compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from run_folder import run, trials
from trial_factory import FakeRun, trial

from specbench.analysis.compare import METRICS, compare, independent, verdict
from specbench.analysis.intervals import RATIO, ratio_of_sums
from specbench.errors import SpecbenchError
from specbench.report.comparison import method
from specbench.store import Trial

ALL = tuple(METRICS)


def row(found: dict[str, Any], metric: str = "speedup", task: str = "overall", method: str = "fast") -> dict:
    (one,) = [r for r in found["rows"] if (r["metric"], r["task"], r["method"]) == (metric, task, method)]
    return one


def codes(found: dict[str, Any]) -> set[str]:
    return {warning["code"] for warning in found["warnings"]}


# -- verdicts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.90, 0.949, "regressed"),
        (0.90, 0.951, "ambiguous"),
        (0.90, 1.20, "ambiguous"),
        (0.951, 1.05, "no change"),
        (1.0, 1.0, "no change"),
        (0.99, 1.06, "ambiguous"),  # no loss, but a gain is neither shown nor excluded
        (1.01, 1.04, "no change"),  # surely more, and surely less more than what is told from nothing
        (1.03, 1.20, "ambiguous"),
        (1.06, 1.50, "improved"),
        (None, None, "ambiguous"),
    ],
)
def test_verdict(low: float | None, high: float | None, expected: str) -> None:
    assert verdict({"low": low, "point": 1.0, "high": high}, 0.95) == expected
    if low and high:  # the same, turned round, for what should be small
        turned = {"low": 1 / high, "point": 1.0, "high": 1 / low}
        assert verdict(turned, 1 / 0.95, smaller=True) == expected


# -- numbers -------------------------------------------------------------------------------------------------


def test_a_run_against_itself_has_not_changed() -> None:
    given = trials(memory={"peak_bytes": 100})
    found = compare(run(given), run(given), ALL)
    assert {r["verdict"] for r in found["rows"]} == {"no change"}
    for r in found["rows"]:
        assert [r["change"][k] for k in ("low", "point", "high")] == pytest.approx([1, 1, 1], abs=1e-12)
    assert {r["method"] for r in found["rows"] if r["metric"] == "speedup"} == {"fast"}
    assert {r["method"] for r in found["rows"] if r["metric"] == "tokens_per_s"} == {"vanilla", "fast"}
    assert {r["task"] for r in found["rows"] if r["metric"] == "tau"} == {"chat", "code", "overall"}
    assert not found["warnings"]
    assert not found["changes"]
    assert not found["missing"]


def test_a_slower_method_regresses_by_what_it_is_slower() -> None:
    found = compare(run(trials()), run(trials(slower=1.25)), ("speedup", "tau", "tokens_per_s"))
    slower = row(found)
    assert slower["change"] == pytest.approx(
        {"low": 0.8, "point": 0.8, "high": 0.8}
    )  # the same on every question
    assert slower["paired"] is True
    assert slower["questions"] == {"base": 40, "new": 40}
    assert slower["verdict"] == "regressed"
    assert slower["new"]["point"] == pytest.approx(0.8 * slower["base"]["point"])
    assert slower["new"]["low"] < slower["new"]["point"] < slower["new"]["high"]
    assert row(found, "tau")["verdict"] == "no change"
    assert row(found, "tokens_per_s")["change"]["point"] == pytest.approx(0.8)
    assert row(found, "tokens_per_s", method="vanilla")["change"]["point"] == pytest.approx(1)
    assert row(compare(run(trials(slower=1.25)), run(trials())))["verdict"] == "improved"


def test_the_point_is_a_ratio_of_sums_of_eight_columns() -> None:
    base, new = trials(noise=0.2, seed=1), trials(noise=0.2, seed=2)

    def speedup(given: list[Trial]) -> float:
        sums = {
            method: (
                sum(t.batch_s or 0 for t in given if t.method == method),
                sum(t.output_tokens for t in given if t.method == method),
            )
            for method in ("vanilla", "fast")
        }
        (vs, vt), (fs, ft) = sums["vanilla"], sums["fast"]
        return (vs / vt) / (fs / ft)

    found = row(compare(run(base), run(new)))
    assert found["base"]["point"] == pytest.approx(speedup(base), rel=1e-12)
    assert found["change"]["point"] == pytest.approx(speedup(new) / speedup(base), rel=1e-12)
    assert found["change"]["low"] < found["change"]["point"] < found["change"]["high"]


def test_pairing_narrows_the_interval() -> None:
    base, new = run(trials(noise=0.05, seed=1)), run(trials(noise=0.05, seed=2))
    other = run(
        trials(noise=0.05, seed=2), tasks=[{"name": "chat", "sha256": "x"}, {"name": "code", "sha256": "y"}]
    )
    paired, unpaired = (
        row(compare(base, side, ("tokens_per_s",)), "tokens_per_s") for side in (new, other)
    )  # what a question costs differs much, its speedup little
    assert paired["paired"] is True
    assert unpaired["paired"] is False
    assert unpaired["change"]["point"] == pytest.approx(paired["change"]["point"])
    widths = [r["change"]["high"] - r["change"]["low"] for r in (paired, unpaired)]
    assert widths[0] < 0.5 * widths[1]
    assert "prompts" in codes(compare(base, other))


def test_only_questions_of_both_are_paired() -> None:
    found = row(compare(run(trials(questions=20)), run(trials(questions=8, slower=2))))
    assert (found["paired"], found["questions"]) == (True, {"base": 16, "new": 16})
    assert found["unmatched"] == {"base": 24, "new": 0}
    assert found["change"]["point"] == pytest.approx(0.5)


def test_prompts_of_other_lengths_do_not_match() -> None:
    new = trials()
    for t in new:
        if t.task == "code" or t.question in ("q0", "q1"):
            t.prompt_tokens = 8
    found = compare(run(trials()), run(new))
    assert row(found, task="chat")["questions"] == {"base": 18, "new": 18}
    assert row(found, task="chat")["unmatched"] == {"base": 2, "new": 2}
    assert row(found, task="code")["paired"] is False
    assert row(found)["questions"] == {"base": 18, "new": 18}


def test_overall_is_over_the_tasks_of_both() -> None:
    found = compare(run(trials(tasks=("chat", "code"))), run(trials(tasks=("chat", "qa"))))
    assert {r["task"] for r in found["rows"]} == {"chat", "overall"}
    assert row(found)["questions"] == {"base": 20, "new": 20}
    assert row(found)["change"]["point"] == pytest.approx(1)


def test_overall_is_over_the_tasks_of_both_when_unpaired() -> None:
    new = run(trials(tasks=("chat", "qa"), prompt_tokens=9))
    found = row(compare(run(trials(tasks=("chat", "code"))), new))
    assert (found["paired"], found["questions"]) == (False, {"base": 20, "new": 20})
    assert found["change"]["point"] == pytest.approx(1)


def test_too_few_questions_are_ambiguous() -> None:
    found = row(compare(run(trials(questions=2, tasks=("chat",))), run(trials(questions=2, tasks=("chat",)))))
    assert (found["verdict"], found["change"]["low"]) == ("ambiguous", None)
    assert "too few" in found["reason"]


def test_batches_pair_whole() -> None:
    def batched(slower: float) -> list[Trial]:
        made = trials(slower=slower, batch_size=4)
        for t in made:
            number = int(t.question[1:]) // 4
            t.block, t.batch = number + 100 * (t.task == "code"), f"b{number}"
        for t in made:
            mates = [o for o in made if (o.task, o.batch, o.method) == (t.task, t.batch, t.method)]
            t.batch_s = max(o.total_s or 0 for o in mates)
        return made

    found = row(compare(run(batched(1)), run(batched(2))))
    assert (found["batch_size"], found["questions"]["base"]) == (4, 10)
    assert found["change"]["point"] == pytest.approx(0.5)


def test_memory_has_an_upper_limit_and_no_interval() -> None:
    base = run(trials(memory={"peak_bytes": 1000}))
    for peak, expected in ((1040, "no change"), (1060, "regressed"), (900, "improved")):
        found = row(compare(base, run(trials(memory={"peak_bytes": peak})), ("memory",)), "memory")
        assert found["verdict"] == expected
        assert found["change"]["point"] == pytest.approx(peak / 1000)
        assert found["paired"] is None
    wider = compare(base, run(trials(memory={"peak_bytes": 1060})), ("memory",), {"memory": 1.1})
    assert row(wider, "memory")["verdict"] == "no change"


def test_limits_differ_by_metric_and_machine() -> None:
    here = compare(run(), run())
    assert here["limits"] == {"speedup": 0.95, "tau": 0.98}
    away = compare(run(), run(machine_fingerprint="m2"))
    assert away["limits"] == {"speedup": 0.80, "tau": 0.98}
    assert "machine" in codes(away)
    assert compare(run(), run(), ("speedup",), {"speedup": 0.5})["limits"] == {"speedup": 0.5}


def test_independent_intervals_cover() -> None:
    """MOVER of two bootstrap-t intervals holds the truth about 95% of the time, from 30 questions a side."""
    random, truth, hits, runs = np.random.default_rng(5), 1.3, 0, 300
    for _ in range(runs):
        sides = []
        for factor in (1.0, truth):
            tokens = random.gamma(4, 25, 30)
            cost = factor * random.lognormal(0, 0.4, 30)
            # a factor of the ratio alone: E[tokens·cost] / E[tokens]
            sides.append(ratio_of_sums(np.stack([tokens * cost, tokens], axis=1), RATIO))
        change = independent(*sides)
        assert change["low"] is not None
        assert change["high"] is not None
        hits += change["low"] <= truth <= change["high"]
    assert 0.92 <= hits / runs <= 0.985


def test_paired_intervals_cover() -> None:
    """Eight columns at once: the truth is in the interval of the change about 95% of the time."""
    random, truth, hits, runs = np.random.default_rng(6), 0.9, 0, 200
    signs = tuple(-s for s in METRICS["speedup"].signs) + METRICS["speedup"].signs
    for _ in range(runs):
        tokens, cost, gain = (
            random.gamma(4, 25, 30),
            random.lognormal(0, 0.3, 30),
            random.lognormal(0.7, 0.3, 30),
        )
        noise = random.lognormal(0, 0.05, (4, 30))
        base = [tokens * cost * noise[0], tokens, tokens * cost / gain * noise[1], tokens]
        new = [tokens * cost * noise[2], tokens, tokens * cost / gain / truth * noise[3], tokens]
        change = ratio_of_sums(np.stack([*base, *new], axis=1), signs)
        hits += change["low"] <= truth <= change["high"]
    assert 0.91 <= hits / runs <= 0.99


# -- what may be compared ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"target__name": "other"}, "name tiny and other"),
        ({"target__dtype": "bfloat16"}, "dtype float32 and bfloat16"),
        ({"target__quantization": "q4_1"}, "quantization none and q4_1"),
        ({"target__revision": "abd"}, "revision abc and abd"),
        ({"target__parameters": 11}, "parameters 10 and 11"),
        ({"target__files": {"model.safetensors": "12"}}, "hash of model.safetensors"),
        ({"target": None}, "tiny and unknown"),
        ({"config__temperature": 0.7}, "temperature 0.0 and 0.7"),
        ({"config__ignore_eos": True}, "ignore_eos False and True"),
    ],
)
def test_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecbenchError, match=said) as error:
        compare(run(), run(**changed))
    assert error.value.exit_code == 2
    assert "\n" not in error.value.message


def test_what_greedy_decoding_ignores_may_differ() -> None:
    assert compare(run(), run(config__top_p=0.9))["rows"]
    with pytest.raises(SpecbenchError, match="top_p"):
        compare(run(config__temperature=0.7), run(config__temperature=0.7, config__top_p=0.9))


def test_unknown_revisions_and_hashes_are_no_difference() -> None:
    assert compare(run(target__revision=None, target__files={}), run())["rows"]


@pytest.mark.parametrize("metric", ["tokens_per_s", "memory"])
@pytest.mark.parametrize("other", ["m2", None])
def test_absolute_numbers_stay_on_their_machine(metric: str, other: str | None) -> None:
    with pytest.raises(SpecbenchError, match="across machines") as error:
        compare(run(), run(machine_fingerprint=other), ("speedup", metric))
    assert "--metric speedup" in error.value.hint


def test_two_unknown_machines_are_not_the_same() -> None:
    nowhere = run(machine_fingerprint=None)
    with pytest.raises(SpecbenchError, match="across machines"):
        compare(nowhere, nowhere, ("tokens_per_s",))


def test_a_method_of_one_side_is_listed() -> None:
    extra = trials() + [trial(f"q{i}", "extra", task="chat", block=i) for i in range(20)]
    assert compare(run(extra), run())["missing"] == [
        {
            "method": "extra",
            "batch_size": 1,
            "concurrency": None,
            "request_rate": None,
            "reason": "only in BASE",
        }
    ]
    assert compare(run(), run(extra))["missing"][0]["reason"] == "only in NEW"


def at_loads(*loads: tuple[int | None, float | None]) -> list[Trial]:
    """The same trials at each (concurrency, request rate)."""
    return [
        replace(t, concurrency=concurrency, request_rate=rate)
        for concurrency, rate in loads
        for t in trials(tasks=("chat",))
    ]


def test_open_loops_come_after_closed_ones() -> None:
    loads = [(None, 2.0), (8, None), (None, 0.5), (4, None)]
    found = compare(run(at_loads(*loads)), run(at_loads(*loads)))
    rows = [r for r in found["rows"] if (r["metric"], r["task"]) == ("tau", "overall")]
    assert [(r["concurrency"], r["request_rate"]) for r in rows] == [
        (4, None),
        (8, None),
        (None, 0.5),
        (None, 2.0),
    ]


def test_what_one_side_has_is_named_with_engine_and_load() -> None:
    served = run(at_loads((1, None), (4, None)), engine={"name": "vllm", "version": "1", "attached": True})
    missing = compare(run(trials(tasks=("chat",))), served)["missing"]
    said = [f"{method(place)}: {place['reason']}" for place in missing if place["method"] == "fast"]
    assert said == [
        "fast: only in BASE (specbench/native, one request at a time)",
        "fast: only in NEW (vllm, one request at a time)",
        "fast, concurrency 4: only in NEW (vllm)",
    ]
    one_engine = compare(run(trials(tasks=("chat",))), run(at_loads((4, None))))["missing"]
    assert [place["reason"] for place in one_engine if place["method"] == "fast"] == [
        "only in BASE (one request at a time)",
        "only in NEW",
    ]


def test_a_failed_request_leaves_its_block_paired() -> None:
    """Its own prompt's length is not known, where the server did not answer; the others of its block are."""
    loads = at_loads((4, None))
    for number, t in enumerate(loads):
        t.batch = f"block{number // 8}"  # four questions, two methods
        t.block = number // 8
    new = [replace(t) for t in loads]
    broken = next(t for t in new if t.method == "fast")
    broken.error, broken.finish, broken.prompt_tokens = "boom", "error", 0
    found = row(compare(run(loads), run(new), metrics=("tau",)), "tau")
    assert found["paired"]
    assert found["unmatched"] == {"base": 0, "new": 0}


def failing(given: list[Trial], share: float = 1.0) -> list[Trial]:
    rows = [t for t in given if t.method == "fast"]
    for t in rows[: int(share * len(rows))]:
        t.error, t.finish = "boom", "error"
    return given


def test_a_method_that_no_longer_works_has_regressed() -> None:
    found = compare(run(), run(failing(trials())))
    assert {(r["verdict"], r["reason"]) for r in found["rows"]} == {
        ("regressed", "every trial failed in NEW")
    }
    assert "failed" in codes(found)
    (gone,) = compare(run(failing(trials())), run())["missing"]
    assert gone["reason"] == "every trial failed in BASE"


def test_more_failures_are_said_and_left_out() -> None:
    found = compare(run(), run(failing(trials(), share=0.25)))
    assert row(found)["questions"]["base"] == 30
    assert "25% of the trials failed, in BASE 0%" in str(found["warnings"])


def test_a_faster_vanilla_is_said() -> None:
    new = trials()
    for t in new:
        t.batch_s = (t.batch_s or 0) * (0.5 if t.method == "vanilla" else 1)
    found = compare(run(), run(new))
    assert row(found)["verdict"] == "regressed"
    assert "vanilla itself runs at 2.00x" in str(found["warnings"])
    loads = at_loads((4, None), (8, None))
    new = [replace(t, batch_s=(t.batch_s or 0) * (0.5 if t.concurrency == 8 else 1)) for t in loads]
    moved = [w["message"] for w in compare(run(loads), run(new))["warnings"] if w["code"] == "vanilla-moved"]
    assert [message[:42] for message in moved] == ["concurrency 8: vanilla itself runs at 2.00"]


def test_outputs_that_differ_more_than_before_are_said() -> None:
    def compared(differ: int) -> FakeRun:
        given = trials()
        for number, t in enumerate(t for t in given if t.method == "fast"):
            t.agreement = {"same": number >= differ, "first_difference": None, "logit_gap": None}
        return run(given)

    assert "identical to vanilla's on 37 of 40, in BASE on 40 of 40" in str(
        compare(compared(0), compared(3))["warnings"]
    )
    assert not compare(compared(3), compared(0))["warnings"]


def test_other_settings_are_said() -> None:
    found = compare(
        run(),
        run(
            config__max_new_tokens=96,
            config__threads=4,
            versions={"torch": "2.14.0"},
            git={"commit": "b" * 40},
        ),
    )
    assert "lengths" in codes(found)
    assert {(c["what"], c["base"], c["new"]) for c in found["changes"]} == {
        ("specbench commit", "a" * 12, "b" * 12),
        ("--threads", None, "4"),
        ("torch", "2.13.0", "2.14.0"),
    }


def test_another_template_pairs_nothing() -> None:
    found = compare(run(), run(chat_template="u"))
    assert row(found)["paired"] is False
    assert "templates differ" in str(found["warnings"])


def test_the_order_of_the_trials_does_not_matter() -> None:
    base, new = trials(noise=0.1, seed=1), trials(noise=0.1, seed=2)
    assert compare(run(base[::-1]), run(new[::-1]), ALL[:3]) == compare(run(base), run(new), ALL[:3])
