"""Closed form, break-even, token gaps, outliers, published formulas: against numbers worked out another way."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from simulator import EVEN, JUDGED, METHODS, simulate, trials
from trial_factory import FakeRun, block, blocks, row_of, trial

from specbench.analysis.break_even import crossing
from specbench.analysis.closed_form import chance_of, expected_tokens, speedup
from specbench.analysis.definitions import DEFINITIONS
from specbench.analysis.summary import summarise
from specbench.questions import Question, shared_prefix
from specbench.store import Rounds, Trial


def test_every_field_is_defined_in_one_sentence() -> None:
    row = row_of(blocks(1, {"vanilla": {}}), "vanilla")
    assert list(row) == list(DEFINITIONS)
    for name, meaning in DEFINITIONS.items():
        assert meaning[0].isupper() or meaning[0] in "(`Στ", name
        assert meaning.endswith("."), name


def test_predicted_residual() -> None:
    spans = {"draft": 1.0, "verify": 6.0, "accept": 0.5, "other": 0.5}
    vanilla = {"seconds": 12.0, "spans": {"draft": 0.0, "verify": 12.0, "accept": 0.0, "other": 0.0}}
    row = row_of(
        blocks(1, {"vanilla": vanilla, "fast": {"seconds": 8.0, "accepted": [1] * 5, "spans": spans}}), "fast"
    )
    predicted = 2 / ((1 / 5) / 1.2 + 1.2 / 1.2)
    assert row["predicted_residual"] == pytest.approx((12 / 8) / predicted - 1)


def test_closed_form_of_chains() -> None:
    # Leviathan et al. 2023, table 1: the chance 0.8, 5 drafted at a cost of 0.02 a token each
    assert speedup(0.8, 5, 0.02) == pytest.approx((1 - 0.8**6) / (0.2 * 1.1))
    assert expected_tokens(1.0, 4) == 5
    three = np.array([3])
    assert chance_of(expected_tokens(0.7, 3) - 1, three) == pytest.approx(0.7)
    assert chance_of((0.7 + 0.7 + 0.7**2 + 0.7**3) / 2, np.array([3, 1])) == pytest.approx(0.7)
    assert chance_of(9.0, three) == 1.0
    assert chance_of(0.0, three) == 0.0
    # half of the rounds accept both drafted tokens, the others none: alpha 1, drafting a fifth of a round
    fast = {"accepted": [2, 0] * 5, "drafted": 2, "seconds": 10.0}
    trials = blocks(1, {"vanilla": {"seconds": 20.0, "accepted": [0] * 20}, "fast": fast})
    row = row_of(trials, "fast")
    chance, cost = (math.sqrt(5) - 1) / 2, 0.1 / 2  # a + a² = 1; a draft takes 0.1 of vanilla's round
    assert row["closed_form_speedup"] == pytest.approx((1 + 1) / (2 * cost + 1))
    candidates = [(1 - chance ** (k + 1)) / ((1 - chance) * (cost * k + 1)) for k in range(1, 17)]
    assert row["best_k"] == 1 + int(np.argmax(candidates))


def test_closed_form_is_unknown_for_trees_and_without_drafts() -> None:
    trials = blocks(1, {"vanilla": {}, "tree": {"accepted": [2, 0], "drafted": 3}})
    trials[1].rounds.drafted = [7, 7]
    for method in ("vanilla", "tree"):
        row = row_of(trials, method)
        assert (row["closed_form_speedup"], row["best_k"]) == (None, None)


def test_closed_form_meets_a_machine_that_is_as_it_assumes() -> None:
    """Independent acceptance, one chance for all, a pass of one cost: what it says is what is measured."""
    generator = np.random.default_rng(1)
    accepted = np.minimum(generator.geometric(0.3, 4000) - 1, 4).tolist()
    each = {"drafted": [4], "depth": [4], "draft_s": [0.2], "verify_s": [1.0], "round_s": [1.2]}
    columns = {name: value * len(accepted) for name, value in each.items()}
    rounds = Rounds(accepted=accepted, emitted=[a + 1 for a in accepted], **columns)
    tokens = sum(rounds.emitted) + 1
    vanilla = trial("q", accepted=[0] * (tokens - 1), seconds=float(tokens - 1))
    fast = trial("q", "fast", rounds=rounds, decode_s=4800.0, output_tokens=tokens)
    row = row_of([vanilla, fast], "fast")
    assert row["closed_form_speedup"] == pytest.approx(row["decode_speedup"]["point"])
    assert row["closed_form_speedup"] == pytest.approx(speedup(0.7, 4, 0.05), rel=0.03)


def test_closed_form_of_a_machine_that_often_has_no_draft() -> None:
    """40% of the rounds have none, as prompt-lookup's; a 0.8, k 4, c 0.2: the truth can be worked out."""
    chance, depth, cost, share = 0.8, 4, 0.2, 0.6
    of_625 = {
        0: 125,
        1: 100,
        2: 80,
        3: 64,
        4: 256,
    }  # exactly: 500 accept one or more, 400 two, 320 three, 256 four
    accepted = np.repeat([*of_625, 0], [*(3 * np.array([*of_625.values()])), 1250])
    depths = np.repeat([depth, 0], [1875, 1250])
    times = {"draft_s": cost * depths, "verify_s": np.ones(len(depths)), "round_s": 1 + cost * depths}
    rounds = Rounds(depths.tolist(), depths.tolist(), accepted.tolist(), (accepted + 1).tolist(), **times)
    seconds, tokens = float(times["round_s"].sum()), int(accepted.sum()) + len(depths)
    vanilla = trial("q", accepted=[0] * tokens, seconds=float(tokens))
    row = row_of(
        [vanilla, trial("q", "fast", rounds=rounds, decode_s=seconds, output_tokens=tokens + 1)], "fast"
    )

    def truth(k: int) -> float:
        return (1 + share * sum(chance**i for i in range(1, k + 1))) / (1 + share * cost * k)

    assert row["closed_form_speedup"] == pytest.approx(row["decode_speedup"]["point"])
    assert row["closed_form_speedup"] == pytest.approx(truth(depth))
    assert truth(depth) == pytest.approx(1.6331, abs=1e-4)
    assert row["best_k"] == max(range(1, 17), key=truth) == 5


def test_gaps_are_a_rounds_seconds_and_then_nothing() -> None:
    one = trial("q1", "fast", accepted=[0, 2, 1, 0, 3])
    one.rounds.round_s = [0.1, 0.2, 0.3, 0.4, 0.5]
    gaps = [0.1, 0.2, 0, 0, 0.3, 0, 0.4, 0.5, 0, 0, 0]
    expected = dict(zip(("p50", "p95", "p99"), np.percentile(gaps, [50, 95, 99]), strict=True))
    assert row_of([one], "fast")["itl_s"] == pytest.approx(expected)
    only = replace(one, rounds=Rounds([0], [0], [0], [1], round_s=[0.25]))
    assert row_of([only], "fast")["itl_s"] == {"p50": 0.25, "p95": 0.25, "p99": 0.25}


@pytest.mark.parametrize("seed", range(20))
def test_gaps_are_numpys_percentiles(seed: int) -> None:
    generator = np.random.default_rng(seed)
    accepted = generator.integers(0, 3, generator.integers(1, 30)).tolist()
    one = trial("q1", "fast", accepted=accepted)
    one.rounds.round_s = generator.random(len(accepted)).tolist()
    gaps = [gap for a, s in zip(accepted, one.rounds.round_s, strict=True) for gap in [s] + [0] * a]
    found = list(row_of([one], "fast")["itl_s"].values())
    assert found == pytest.approx(np.percentile(gaps, [50, 95, 99]).tolist())


def test_time_to_the_first_token() -> None:
    trials = [trial(f"q{i}", prefill_s=float(i)) for i in range(101)]
    row = row_of(trials, "vanilla")
    assert row["ttft"] == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert row["ttft_s"] == 50.0


def test_outliers_are_flagged_and_kept() -> None:
    trials = blocks(20, {"vanilla": {}, "fast": {"seconds": 5.0, "accepted": [4, 4]}})
    for place, t in enumerate(trials[1::2]):
        t.decode_s *= 1 + 0.01 * (place % 5)
    before = row_of(trials, "fast")
    assert before["outliers"] == 0
    trials[7].decode_s *= 1.5
    trials[9].rounds = Rounds([4], [4], [9], [10], round_s=[2.5])  # fewer rounds are not an outlier
    trials[9].decode_s = 2.5
    row = row_of(trials, "fast")
    assert (row["outliers"], row["trials"], row["prompts"]) == (1, 20, 20)
    assert row_of(trials, "vanilla")["outliers"] == 0
    assert row_of(trials[:14], "fast")["outliers"] == 0  # seven trials do not say what is usual


def test_outliers_are_the_trials_that_took_half_as_long_again() -> None:
    run = simulate(480, np.random.default_rng(2), EVEN)
    slow = {method: int((run.factor[method] > 1.3).sum()) for method in METHODS}
    rows = {
        row["method"]: row["outliers"]
        for row in summarise([FakeRun(trials(run))])["rows"]
        if row["task"] == "overall"
    }
    for method, found in rows.items():
        assert slow[method] <= found <= slow[method] + 3, method


def test_break_even() -> None:
    def at(batch_size: int, seconds: float, **fields: object) -> list[Trial]:
        sizes = {"batch_size": batch_size, "batch_s": None, **fields}
        return [
            replace(t, batch=f"b{batch_size}", **(sizes | {"batch_s": s}))
            for t, s in zip(block("q", batch_size, {"vanilla": {}, "fast": {}}), (10.0, seconds), strict=True)
        ]

    run = FakeRun(at(1, 5.0) + at(4, 8.0) + at(8, 20.0), {"name": "r"})
    (found,) = summarise([run])["break_even"]
    where = pytest.approx(4 + 4 * 0.25 / 0.75)
    of = found.pop("of")
    assert {size: speedup["point"] for size, speedup in of.items()} == pytest.approx(
        {"1": 2, "4": 1.25, "8": 0.5}
    )
    known = {"run": "r", "method": "fast", "axis": "batch_size", "low": None, "value": where, "high": None}
    assert found == known, "no interval from one question"
    assert summarise([FakeRun(at(1, 5.0))])["break_even"] == []
    served = FakeRun(at(1, 5.0, concurrency=1) + at(1, 8.0, concurrency=16), {"name": "r"})
    (found,) = summarise([served])["break_even"]
    assert (found["axis"], found["value"], list(found["of"])) == ("concurrency", None, ["1", "16"])
    assert crossing({1: 0.5, 2: 1.0, 4: 2.0}) == 2
    assert crossing({1: 1.5, 2: 1.2}) is None


def test_spec_benchs_own_numbers_beside_ours() -> None:
    """Its files hold per question seconds, new tokens and accepted lengths; `speed.py` makes two numbers of them.

    Speedup: mean over questions of tokens/s, over the baseline's mean. Mean accepted tokens: the mean of all
    steps of all questions, bonus included. Ours are ratios of sums; tokens a round is the same number.
    """
    generator = np.random.default_rng(8)
    answers = {m: [] for m in ("vanilla", "fast")}
    trials: list[Trial] = []
    for number in range(40):
        tokens = int(generator.integers(20, 200))
        for order, method in enumerate(answers):
            steps = []
            while (left := tokens - 1 - sum(steps)) > 0:
                steps.append(1 if method == "vanilla" else min(left, int(generator.integers(1, 6))))
            wall = 0.05 + len(steps) * (0.020 if method == "vanilla" else 0.024)
            answers[method].append({"new_tokens": tokens, "wall_time": wall, "accept_lengths": steps})
            timed = {"batch_s": wall, "prefill_s": 0.05, "decode_s": wall - 0.05}
            accepted = [step - 1 for step in steps]
            trials.append(trial(f"q{number}", method, block=number, order=order, accepted=accepted, **timed))
    rates = {m: np.mean([a["new_tokens"] / a["wall_time"] for a in answers[m]]) for m in answers}
    accepted = np.mean([step for a in answers["fast"] for step in a["accept_lengths"]])
    sums = {m: [sum(a[key] for a in answers[m]) for key in ("wall_time", "new_tokens")] for m in answers}
    row = row_of(trials, "fast")
    assert row["spec_bench_speedup"] == pytest.approx(rates["fast"] / rates["vanilla"], rel=1e-9)
    assert row["tau"]["point"] == pytest.approx(accepted, rel=1e-9)
    ours = (sums["vanilla"][0] / sums["vanilla"][1]) / (sums["fast"][0] / sums["fast"][1])
    assert row["speedup"]["point"] == pytest.approx(ours, rel=1e-9)
    assert abs(row["speedup"]["point"] / row["spec_bench_speedup"] - 1) > 1e-3  # they are not the same


def test_spec_benchs_formula_is_higher_where_short_answers_gain_more() -> None:
    trials = block("short", 0, {"vanilla": {"batch_s": 2.0}, "fast": {"batch_s": 0.5, "accepted": [4, 4]}})
    trials += block(
        "long",
        1,
        {
            "vanilla": {"batch_s": 40.0, "accepted": [0] * 109},
            "fast": {"batch_s": 40.0, "accepted": [0] * 109},
        },
    )
    row = row_of(trials, "fast")
    assert row["speedup"]["point"] == pytest.approx(42 / 40.5)
    assert row["spec_bench_speedup"] == pytest.approx((11 / 0.5 + 110 / 40) / (11 / 2 + 110 / 40))
    assert row["spec_bench_speedup"] > 2.9


def test_shared_prefixes_of_a_task() -> None:
    def asked(*turns: str) -> tuple[Question, ...]:
        return tuple(Question(str(i), "t", None, (turn,)) for i, turn in enumerate(turns))

    assert shared_prefix(asked("Sum up: one", "Add", "Sum up: two", "Sum up: three")) == {
        "shared_chars": 8,
        "prompt_chars": 11,
    }
    assert shared_prefix(asked("alone")) == {"shared_chars": 0, "prompt_chars": 5}


def test_the_judged_method_of_the_simulator_reads_what_it_costs() -> None:
    run = simulate(60, np.random.default_rng(9), EVEN)
    row = next(
        r
        for r in summarise([FakeRun(trials(run))])["rows"]
        if r["method"] == JUDGED and r["task"] == "overall"
    )
    assert row["predicted_residual"] == pytest.approx(0, abs=0.06)
    shares = [row[f"{name}_share"] for name in ("draft", "verify", "accept", "other")]
    assert sum(shares) == pytest.approx(1)
