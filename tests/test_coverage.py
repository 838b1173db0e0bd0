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
)
from trial_factory import FakeRun

from specbench.analysis.intervals import RATIO, SPEEDUP, ratio_of_sums
from specbench.analysis.summary import summarise

RUNS = 1000
LEAST = {20: 0.90, 80: 0.93, 480: 0.93}
MOST = 0.97
BIAS = 0.003


def bias_at(questions: int) -> float:
    """What is allowed: the bias of a ratio of sums falls with 1/n."""
    return BIAS * max(1, 40 / questions)


def within(found: Found, case: Case) -> bool:
    return all(LEAST[case.questions] <= share <= MOST for share in (found.covered, found.tau_covered))


@pytest.mark.parametrize("questions", [20, 80])
def test_intervals_of_a_drifting_machine_hold_the_truth(questions: int) -> None:
    case = Case("spread", SPREAD, questions, 0.06)
    found = study(case, RUNS)
    assert within(found, case)
    assert found.percentile_covered < found.covered
    assert abs(found.bias) < bias_at(questions)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.questions}-{case.drift:.0%}")
def test_the_whole_study(case: Case) -> None:
    found = study(case, RUNS)
    assert within(found, case)
    assert abs(found.bias) < bias_at(case.questions)


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
