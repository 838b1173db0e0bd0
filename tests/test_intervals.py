"""Points and intervals of ratios of sums; what they cover is in test_coverage.py."""

from __future__ import annotations

import numpy as np
import pytest
from simulator import JUDGED, PAIR, simulate

from specbench.analysis import intervals
from specbench.analysis.intervals import (
    RATIO,
    SPEEDUP,
    clusters_needed,
    half_width,
    jackknife_bias,
    jackknife_bias_error,
    ratio_of_sums,
    sums_by,
)


def population(count: int, seed: int) -> np.ndarray:
    """[count, 4]: vanilla's seconds and tokens, a drafting method's seconds and tokens, of each question."""
    return simulate(count, np.random.default_rng(seed), methods=PAIR).speed_sums(JUDGED)


def test_paired_is_much_narrower_than_unpaired() -> None:
    drawn = population(80, 5)
    paired = half_width(ratio_of_sums(drawn, SPEEDUP))
    drawn[:, 2:] = drawn[np.random.default_rng(6).permutation(80), 2:]
    drawn[:, 1] = drawn[:, 3]
    assert paired < 0.8 * half_width(ratio_of_sums(drawn, SPEEDUP))


def test_large_samples_agree_with_the_normal_interval_and_pooling_changes_little() -> None:
    drawn = population(4000, 1)[:, [0, 2]]
    influence = drawn / drawn.sum(axis=0) @ np.array(RATIO)
    normal = 1.96 * np.sqrt(np.sum(influence**2))
    assert half_width(ratio_of_sums(drawn, RATIO)) == pytest.approx(normal, rel=0.1)
    assert len(drawn) > intervals.MAX_CLUSTERS


def test_few_clusters_have_a_point_only() -> None:
    assert ratio_of_sums(np.array([[4.0, 2.0]] * 4), RATIO) == {"low": None, "point": 2.0, "high": None}
    assert ratio_of_sums(np.zeros((0, 2)), RATIO) == intervals.UNKNOWN
    assert ratio_of_sums(np.array([[4.0, 0.0]] * 9), RATIO) == intervals.UNKNOWN


def test_the_bias_is_what_leaving_questions_out_says() -> None:
    drawn = population(12, 5)

    def ratio(questions: np.ndarray) -> float:
        return float(ratio_of_sums(questions, SPEEDUP)["point"])

    without_one = [ratio(np.delete(drawn, i, axis=0)) for i in range(12)]
    expected = 11 * (np.mean(without_one) - ratio(drawn)) / ratio(drawn)
    assert jackknife_bias(drawn, SPEEDUP) == pytest.approx(expected, rel=1e-9)
    assert jackknife_bias(drawn[::-1], SPEEDUP) == jackknife_bias(drawn, SPEEDUP)


@pytest.mark.parametrize("questions", [10, 40])
def test_the_error_of_a_bias_is_about_its_spread(questions: int) -> None:
    draws = [population(questions, seed) for seed in range(60)]
    found = np.std([jackknife_bias(drawn, SPEEDUP) for drawn in draws])
    told = np.mean([jackknife_bias_error(drawn, SPEEDUP) for drawn in draws])
    assert 0.8 < told / found < 2


def test_a_bias_may_be_unknown() -> None:
    one_holds_all = np.array([[1.0, 0.0]] * 8 + [[1.0, 3.0]])
    for unknown in (np.array([[4.0, 2.0]] * 4), np.zeros((0, 2)), np.zeros((9, 2)), one_holds_all):
        assert jackknife_bias(unknown, RATIO) is None
        assert jackknife_bias_error(unknown, RATIO) is None
    assert jackknife_bias(np.array([[4.0, 2.0]] * 5), RATIO) == pytest.approx(0, abs=1e-12)


def test_no_spread_no_width() -> None:
    estimate = ratio_of_sums(np.array([[2.0 * i, float(i)] for i in range(1, 8)]), RATIO)
    assert estimate == pytest.approx({"low": 2.0, "point": 2.0, "high": 2.0})


def test_one_unusual_question_does_not_blow_the_interval_up() -> None:
    drawn = np.array([[1.0 + 0.001 * i, 1.0] for i in range(7)] + [[4.0, 1.0]])
    estimate = ratio_of_sums(drawn, RATIO)
    assert estimate["low"] < estimate["point"] < estimate["high"] < 6


def test_the_order_of_clusters_does_not_matter() -> None:
    drawn = population(30, 2)
    assert ratio_of_sums(drawn[::-1], SPEEDUP) == ratio_of_sums(drawn, SPEEDUP)


def test_helpers() -> None:
    assert half_width({"low": 0.9, "point": 1.0, "high": 1.2}) == pytest.approx(0.15)
    assert half_width({"low": None, "point": 1.0, "high": None}) is None
    drawn = population(400, 4)
    width = half_width(ratio_of_sums(drawn, SPEEDUP))
    assert clusters_needed(drawn, SPEEDUP, width / 2) == pytest.approx(1600, rel=0.1)
    columns = np.array([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]])
    assert sums_by(np.array([7, 3, 7]), columns).tolist() == [[2.0, 20.0], [5.0, 50.0]]
