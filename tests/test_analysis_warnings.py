"""Warnings as data: each is said when it should be, not otherwise, and has a cure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from simulator import SKEWED, SPREAD, Machine, simulate, trials
from trial_factory import FakeRun, block, blocks, spread

from specbench.analysis import steadiness
from specbench.analysis.frame import build
from specbench.analysis.summary import summarise
from specbench.store import Trial


def warnings_of(trials: list[Trial], told: list[str] | None = None, **manifest: object) -> dict[str, dict]:
    run = FakeRun(trials, {"name": "run", "target": {"name": "tiny"}} | manifest, told or [])
    found = summarise([run])["warnings"]
    assert all(warning["cure"] and warning["run"] for warning in found)
    return {warning["code"]: warning for warning in found}


def test_warns_of_few_prompts_once() -> None:
    found = warnings_of(spread([3, 4, 5]))
    assert set(found) == {"few-prompts"}
    assert "chat, overall" in found["few-prompts"]["message"]
    assert "few-prompts" not in warnings_of(spread([5, 5, 5, 5, 5, 5]))


def test_warns_of_a_speedup_above_tau() -> None:
    above = blocks(6, {"vanilla": {"seconds": 10.0}, "fast": {"seconds": 4.0, "accepted": [1] * 5}})
    assert "chat" in warnings_of(above)["speedup-above-tau"]["message"]
    below = blocks(6, {"vanilla": {"seconds": 10.0}, "fast": {"seconds": 5.1, "accepted": [1] * 5}})
    assert "speedup-above-tau" not in warnings_of(below)
    again = blocks(6, {"vanilla": {"seconds": 10.0}, "vanilla-again": {"seconds": 9.9}})
    assert warnings_of(again) == {}


def test_warns_of_vanilla_that_is_not_itself() -> None:
    assert (
        "1.07x"
        in warnings_of(blocks(6, {"vanilla": {"batch_s": 10.7}, "vanilla-again": {"batch_s": 10.0}}))[
            "vanilla-again"
        ]["message"]
    )


def test_warns_of_failures_and_exclusions() -> None:
    trials = blocks(6, {"vanilla": {}, "fast": {"seconds": 9.0}})
    trials[1].error = "out of memory"
    trials[2].excluded = trials[3].excluded = "contended"
    found = warnings_of(trials)
    assert found["failed"]["method"] == "fast"
    assert "1 of 6" in found["failed"]["message"]
    assert found["excluded"]["message"].startswith("2 trials are marked contended")
    assert "2 of them have no good second attempt" in found["excluded"]["message"]
    retry = [replace(t, attempt=1, excluded=None) for t in trials[2:4]]
    assert "no good" not in warnings_of(trials + retry)["excluded"]["message"]


def test_warns_of_contended_trials_that_count() -> None:
    trials = blocks(6, {"vanilla": {}, "fast": {"seconds": 9.0}})
    trials[3].contended = True
    assert warnings_of(trials)["contended"]["message"].startswith("1 of the 12 trials that count")
    trials[3].excluded = "contended"
    assert "contended" not in warnings_of(trials)


def test_warns_of_a_wide_interval_and_says_how_many() -> None:
    found = warnings_of(
        [
            t
            for i in range(6)
            for t in block(f"q{i}", i, {"vanilla": {}, "fast": {"seconds": 3.0 + 2 * i, "accepted": [4, 4]}})
        ]
    )
    words = found["wide-interval"]["cure"].split()
    assert int(words[1]) > 6
    assert (
        "leans" not in found["wide-interval"]["message"]
    )  # +3.3%, which at 6 questions errs by more than itself


def test_warns_of_bias_where_the_interval_is_narrow() -> None:
    def growing(power: float) -> list[Trial]:
        """Vanilla's seconds differ forty-fold between questions; the method's gain falls with them."""
        return [
            t
            for i, seconds in enumerate(np.geomspace(1, 40, 20).tolist())
            for t in block(f"q{i}", i, {"vanilla": {"seconds": seconds}, "fast": {"seconds": seconds**power}})
        ]

    found = warnings_of(growing(1.1))
    assert "wide-interval" not in found
    assert found["biased"]["message"] == "fast: a ratio of 20 questions itself leans by about +0.6%"
    assert found["biased"]["cure"].startswith("about 37 questions in all bring that under 0.3%")
    assert "biased" not in warnings_of(growing(1.02))


def test_names_the_tasks_of_a_wide_interval_in_the_same_line() -> None:
    def asked(task: str, questions: int, step: float) -> list[Trial]:
        fast = ({"seconds": 3.0 + step * (i % 7), "accepted": [4, 4]} for i in range(questions))
        return [
            t for i, f in enumerate(fast) for t in block(f"q{i}", i, {"vanilla": {}, "fast": f}, task=task)
        ]

    one = asked("chat", 40, 0.01) + asked("code", 40, 0.01)
    assert "wide-interval" not in warnings_of(one)
    found = warnings_of([*one, *asked("structured", 6, 3.0), *asked("odd", 5, 4.0)])["wide-interval"]
    assert "too wide to rank (above ±30%) on odd, structured" in found["message"]
    assert "chat" not in found["message"]
    alone = warnings_of(asked("structured", 6, 3.0))["wide-interval"]  # the overall row is the task's
    assert "rank" not in alone["message"]


@pytest.mark.parametrize(("gap", "said"), [(1e-5, "all at near-ties"), (0.5, "a bug"), (None, "a bug")])
def test_warns_of_outputs_that_differ(gap: float | None, said: str) -> None:
    trials = blocks(6, {"vanilla": {}, "fast": {"seconds": 9.0, "lossless": True}})
    for t in trials[1::2]:
        t.agreement = {"same": True, "first_difference": None, "logit_gap": None}
    assert "output-differs" not in warnings_of(trials)
    trials[1].agreement = {"same": False, "first_difference": 3, "logit_gap": gap}
    assert said in warnings_of(trials)["output-differs"]["message"]
    for t in trials:
        t.lossless = False
    assert "output-differs" not in warnings_of(trials)


@pytest.mark.parametrize("load", [{"concurrency": 1}, {"request_rate": 2.0}])
def test_outputs_of_an_engine_that_differ_are_not_called_a_bug(load: dict[str, float]) -> None:
    trials = blocks(6, {"vanilla": load, "fast": {"lossless": True, **load}})
    trials[1].agreement = {"same": False, "first_difference": 3, "logit_gap": None}
    message = warnings_of(trials)["output-differs"]["message"]
    assert "in the same engine" in message
    assert "a bug" not in message


def test_warns_of_token_totals_under_greedy_only() -> None:
    trials = blocks(6, {"vanilla": {}, "fast": {"output_tokens": 12}})
    assert (
        "72 output tokens, vanilla 66"
        in warnings_of(trials, config={"temperature": 0})["token-totals"]["message"]
    )
    assert "token-totals" not in warnings_of(trials, config={"temperature": 0.7})


def test_the_cure_of_imported_token_totals_is_none_of_our_options() -> None:
    trials = blocks(6, {"vanilla": {}, "fast": {"output_tokens": 12}})
    found = warnings_of(trials, config={"temperature": 0}, imported={"format": "vllm"})["token-totals"]
    assert "--dtype" not in found["cure"]
    assert "that benchmark" in found["cure"]


def test_warns_of_random_weights_and_passes_on_what_the_store_said() -> None:
    trials = blocks(6, {"vanilla": {}})
    assert (
        "timing only" in warnings_of(trials, target={"name": "random:llama-8b"})["random-weights"]["message"]
    )
    assert warnings_of(trials, told=["a half-written block was dropped"])["store"]["message"].startswith(
        "a half"
    )


def test_warns_of_throttled_trials_that_count() -> None:
    trials = blocks(6, {"vanilla": {}, "fast": {"seconds": 9.0}})
    for t in trials:
        t.nvml = {"throttle_reasons": ["sw_power_cap"]}
    assert "throttled" not in warnings_of(trials)
    trials[1].nvml = {"throttle_reasons": ["sw_power_cap", "hw_thermal"]}
    assert warnings_of(trials)["throttled"]["message"] == "1 of the 12 trials that count were throttled"
    trials[1].excluded = "throttled"
    assert "throttled" not in warnings_of(trials)


def test_warns_of_many_outliers() -> None:
    few = [t for i in range(40) for t in block(f"q{i}", i, {"vanilla": {"seconds": 20.0 if i < 3 else 10.0}})]
    assert "outliers" not in warnings_of(few)
    few[3].decode_s = 20.0
    assert "4 of 40 trials" in warnings_of(few)["outliers"]["message"]


@pytest.mark.parametrize(("drift", "said"), [(0.06, "% slower from"), (-0.05, "% faster from")])
def test_warns_of_drift_and_that_the_order_cancels_it(drift: float, said: str) -> None:
    run = trials(simulate(200, np.random.default_rng(5), SPREAD, Machine(drift=drift)))
    rows = build(run).rows
    estimate = steadiness.drift(rows[rows["method"] == "vanilla"])
    assert estimate is not None
    assert estimate.low < drift < estimate.high
    found = warnings_of(run)["order-drift"]
    assert said in found["message"]
    assert "at most 0.01%" in found["cure"]


def test_warns_that_drift_is_in_the_speedups_when_the_order_never_changes() -> None:
    rows = [
        t
        for i in range(10)
        for t in block(f"q{i}", i, {"vanilla": {"seconds": 10.0 + i}, "a": {}, "b": {}, "c": {}})
    ]
    drift = warnings_of(rows)["order-drift"]
    assert "87.2% slower" in drift["message"]
    # of nine blocks' drift, c sees what passes in three quarters of one
    assert "not take turns evenly: about 7.3%" in drift["cure"]


def test_warns_that_drift_is_in_the_speedups_of_whole_passes() -> None:
    rows = blocks(10, {"vanilla": {}, "fast": {}})
    for t in rows:
        t.decode_s *= 1 + 0.01 * t.block
        t.block, t.order = t.block + 10 * (t.method == "fast"), 0
    assert "about 10.0%" in warnings_of(rows)["order-drift"]["cure"]


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_drift(seed: int) -> None:
    run = simulate(100, np.random.default_rng(seed), SKEWED, Machine(noise=0.05))
    assert "order-drift" not in warnings_of(trials(run))


def batches(*members: int, turn: int = 0, size: int = 4) -> list[Trial]:
    """Two methods on batches of so many prompts each, planned for `size`."""
    return [
        t
        for number, count in enumerate(members)
        for q in range(count)
        for t in block(
            f"q{number}.{q}",
            number,
            {"vanilla": {}, "fast": {}},
            batch=f"b{number}",
            batch_size=size,
            turn=turn,
        )
    ]


def test_warns_of_batches_that_held_fewer_prompts() -> None:
    found = warnings_of(batches(4, 1))["part-filled"]
    assert found["message"] == "1 of the 2 batches of size 4 held fewer prompts"
    assert found["cure"].startswith("--limit a multiple of 4")
    assert warnings_of(batches(1, size=2))["part-filled"]["message"].startswith(
        "1 of the 1 batches of size 2"
    )
    assert "turns" in warnings_of(batches(4) + batches(2, turn=1))["part-filled"]["cure"]
    assert "part-filled" not in warnings_of(batches(4, 4))
    assert "part-filled" not in warnings_of(batches(1, 1, size=1))


def test_a_batch_that_lost_a_row_held_all() -> None:
    lost = batches(4, 4)
    lost[2].error = lost[3].error = "out of memory"  # of every method
    found = warnings_of(lost)
    assert "failed" in found
    assert "part-filled" not in found


def test_warns_of_prompts_that_begin_alike() -> None:
    lengths = {
        "rag": {"shared_chars": 900, "prompt_chars": 1200},
        "qa": {"shared_chars": 90, "prompt_chars": 100},
        "long": {"shared_chars": 900, "prompt_chars": 9000},
    }
    message = warnings_of(blocks(1, {"vanilla": {}}), shared_prefix=lengths)["shared-prefix"]["message"]
    assert message.endswith("rag (900 of 1,200)")
    lengths["rag"]["shared_chars"] = 30
    assert "shared-prefix" not in warnings_of(blocks(1, {"vanilla": {}}), shared_prefix=lengths)


@pytest.mark.parametrize(
    ("name", "template", "warned"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", None, True),
        ("google/gemma-3-4b-it", None, True),
        ("lmsys/vicuna-7b-v1.3", None, True),
        ("meta-llama/Llama-3.1-8B-Instruct", "872b", False),
        ("openai/gpt2-with", None, False),
        ("EleutherAI/pythia-italian", None, False),
        ("random:llama-8b-instruct", None, False),
    ],
)
def test_warns_of_a_chat_model_without_its_template(name: str, template: str | None, warned: bool) -> None:
    found = warnings_of(blocks(1, {"vanilla": {}}), target={"name": name}, chat_template=template)
    assert ("template" in found) == warned
    assert "template" not in warnings_of(blocks(1, {"vanilla": {}}), target={"name": name})  # not recorded


def test_warns_of_runs_that_do_not_belong_side_by_side() -> None:
    def manifest(name: str, **fields: object) -> dict:
        known = {"target": {"name": "tiny"}, "machine": {"cpu": {"model": "A"}}, "machine_fingerprint": "a"}
        return {"name": name, "chat_template": "t", **known, **fields}

    def codes(*manifests: dict) -> list[tuple[str, str]]:
        runs = [FakeRun(blocks(6, {"vanilla": {}}), m) for m in manifests]
        return [(w["code"], w["run"]) for w in summarise(runs)["warnings"]]

    first, same = manifest("first"), manifest("same")
    assert codes(first, same) == []
    other = manifest("other", machine={"cpu": {"model": "B"}}, machine_fingerprint="b")
    assert codes(first, same, other) == [("machines", "other")]
    thinking = manifest("thinking", config={"template_args": {"enable_thinking": True}})
    assert codes(first, thinking, manifest("new", chat_template="u")) == [
        ("template", "thinking"),
        ("template", "new"),
    ]
    assert codes(first, manifest("large", chat_template="u", target={"name": "large"})) == []
    int8 = {"name": "tiny@int8", "ref": "tiny", "dtype": "float32", "quantization": "int8", "bytes": 53_000}
    plain = int8 | {"name": "tiny", "quantization": None, "bytes": 105 << 20}
    packed = int8 | {"name": "tiny@q4_1", "dtype": "q4_1", "quantization": "q4_1", "bytes": 40 << 10}
    targets = (int8, plain, packed)
    runs = [FakeRun(blocks(6, {"vanilla": {}}), manifest(f"a {t['name']}", target=t)) for t in targets]
    found, served = [w for w in summarise(runs)["warnings"] if w["code"] == "precision"]
    assert found["message"].endswith("unquantised, float32, 105 MiB, not int8, float32, 52 KiB")
    assert served["message"].endswith("the same weights, q4_1, 40 KiB, not int8, float32, 52 KiB")
    assert "`specbench report 'a tiny@int8' 'a tiny' --format leaderboard`" in found["cure"]
    assert codes(first, {"name": "imported", "target": {"name": "tiny"}}) == []


def test_a_small_drift_is_not_worth_a_line() -> None:
    rows = blocks(20, {"vanilla": {}})
    for t in rows:
        t.decode_s *= 1 + 0.015 * t.block / 19
    assert "order-drift" not in warnings_of(rows)
    for t in rows:
        t.decode_s *= 1 + 0.015 * t.block / 19
    assert "order-drift" in warnings_of(rows)
