"""Intervals hold the truth as often as they say: runs of a simulated machine over questions drawn anew."""

from __future__ import annotations

import numpy as np
import pytest
from simulator import (
    CASES,
    JUDGED,
    METHODS,
    SKEWED,
    SPREAD,
    Case,
    Found,
    Machine,
    report,
    simulate,
    study,
    trials,
    truth,
)
from trial_factory import FakeRun

from specbench.analysis.intervals import RATIO, SPEEDUP, ratio_of_sums
from specbench.analysis.summary import summarise

RUNS = 1000
LEAST = {20: 0.90, 80: 0.93, 480: 0.93}
MOST = 0.97
BIAS, FROM = 0.003, 80  # the bias of a ratio of sums falls with 1/n: so small from so many questions on
LUCK, RARE_LUCK = 2.6, 4.0  # standard errors of what so many runs show, so that a seed decides nothing


def within(found: Found, case: Case) -> bool:
    """Whether speedup and τ are covered as often as they should be, up to what `RUNS` runs can tell."""
    low, high = (
        share + way * LUCK * np.sqrt(share * (1 - share) / RUNS)
        for share, way in ((LEAST[case.questions], -1), (MOST, 1))
    )
    return all(low <= share <= high for share in (found.covered, found.tau_covered))


def is_biased_as_expected(found: Found, case: Case) -> bool:
    """Whether the speedup's bias is what the delta method says of the population, small where it should be, and
    small everywhere once each run's own estimate of it is taken off."""
    expected = truth(case.population).bias / case.questions
    small = case.questions < FROM or (abs(expected) < BIAS and abs(found.bias) < BIAS)
    as_expected = abs(found.bias - expected) < RARE_LUCK * found.bias_error
    return small and as_expected and abs(found.bias_left) < BIAS


@pytest.mark.parametrize("questions", [20, 80])
def test_intervals_of_a_drifting_machine_hold_the_truth(questions: int) -> None:
    case = Case("spread", SPREAD, questions, 0.06)
    found = study(case, RUNS)
    assert within(found, case)
    assert found.percentile_covered < found.covered
    assert is_biased_as_expected(found, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.questions}-{case.drift:.0%}")
def test_the_whole_study(case: Case) -> None:
    found = study(case, RUNS)
    assert within(found, case)
    assert is_biased_as_expected(found, case)


def test_trials_give_the_numbers_that_the_study_judges() -> None:
    run = simulate(30, np.random.default_rng(3), SKEWED, Machine(drift=0.06))
    rows = {
        row["method"]: row for row in summarise([FakeRun(trials(run))])["rows"] if row["task"] == "overall"
    }
    for method in METHODS:
        assert rows[method]["speedup"] == pytest.approx(
            ratio_of_sums(run.speed_sums(method), SPEEDUP), rel=1e-9
        )
        assert rows[method]["tau"] == pytest.approx(ratio_of_sums(run.tau_sums(method), RATIO), rel=1e-9)


def test_the_schedule_cancels_drift() -> None:
    run = simulate(80, np.random.default_rng(4), SPREAD, Machine(drift=0.06))
    with_drift, without = (ratio_of_sums(r.speed_sums(JUDGED), SPEEDUP)["point"] for r in (run, run.steady()))
    assert with_drift == pytest.approx(without, rel=1e-3)


def test_the_study_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulator.CASES", CASES[:1])
    *_, line = report(2)
    assert line.split()[:3] == ["even", "20", "0%"]
