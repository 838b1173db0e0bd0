"""Points, 95% intervals and bias of ratios of sums, by resampling questions (design §6).

Every ratio here is exp(Σ signs·log(sums)): a speedup is (seconds₀ / tokens₀) / (seconds₁ / tokens₁), tokens
per round is emitted / rounds. What is resampled is a cluster: a question with its turns and repeats, or, for
batches, the batch of questions. All columns of a cluster move together, which makes the comparison paired.

The interval is the bootstrap-t on the log ratio: each resample is studentised by its own delta-method
standard error, so that skewed costs (a few questions that accept nearly everything) move the interval to
where the truth is. Over simulated runs it covers the truth 93-95% of the time at 20, 80 and 480 questions, where the
percentile bootstrap covers 91-93% at 20 (`python tests/simulator.py` prints the study).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from specbench.thresholds import MIN_CLUSTERS

Floats = NDArray[np.float64]
Estimate = dict[str, float | None]

RESAMPLES = 2000
MAX_CLUSTERS = 1000  # more are pooled into this many random groups: as good, and bounded in time
SLICE = 5  # resamples multiplied at once: so few that BLAS starts no threads, which fight over a busy machine
LEVEL = 0.95
CAP = 2.0  # a resample without the one unusual question has nearly no spread of its own; its t is held to
# CAP times Student's quantile. Costs no coverage and keeps 5-13 questions from giving [0.9, 30]

SPEEDUP = (1.0, -1.0, -1.0, 1.0)  # vanilla seconds, vanilla tokens, method seconds, method tokens
RATIO = (1.0, -1.0)  # numerator, denominator

UNKNOWN: Estimate = {"low": None, "point": None, "high": None}


def ratio_of_sums(clusters: Floats, signs: tuple[float, ...]) -> Estimate:
    """{low, point, high} of the product of column sums to the power of their signs.

    Args:
        clusters: [questions, columns], non-negative sums over each question.
        signs: +1 for a column above the line, -1 for one below.

    Unknown (all None) where a column sums to nothing; low and high are None under MIN_CLUSTERS questions.
    """
    clusters = clusters[np.lexsort(clusters.T)]  # whatever the questions are called
    totals = clusters.sum(axis=0)
    if len(clusters) == 0 or not np.all(totals > 0):
        return dict(UNKNOWN)
    weights = np.asarray(signs)
    log_point = float(np.log(totals) @ weights)
    low, high = _bootstrap_t(clusters, weights)
    return {
        "low": None if low is None else float(np.exp(log_point + low)),
        "point": float(np.exp(log_point)),
        "high": None if high is None else float(np.exp(log_point + high)),
    }


def jackknife_bias(clusters: Floats, signs: tuple[float, ...]) -> float | None:
    """By what share of itself the ratio of sums leans: what its mean over many such draws of questions exceeds the
    truth by, so that point · (1 - bias) is rid of what falls with 1/n.

    From the ratios that each leave out one question (M. H. Quenouille, "Notes on bias in estimation", Biometrika 43,
    1956): (n - 1)·(their mean / the ratio - 1). Itself an estimate, at 20 questions good to about ±0.5%.

    Args:
        clusters, signs: as `ratio_of_sums` takes them.

    None under MIN_CLUSTERS questions, or where one question holds all of a column.
    """
    shares = _shares_below_one(clusters)
    return None if shares is None else float((len(shares) - 1) * np.mean(_moved(shares, signs)))


def jackknife_bias_error(clusters: Floats, signs: tuple[float, ...]) -> float | None:
    """The standard error of `jackknife_bias`, unknown where that is.

    What leaving out a question moves is nearly all linear in its shares, which adds up to nothing over the questions:
    the bias is the mean of what is left, and errs as a mean does. In simulated runs (`tests/simulator.py`) it is
    1 to 1.8 times the spread of the biases found at 10 to 40 questions.
    """
    shares = _shares_below_one(clusters)
    if shares is None:
        return None
    curved = _moved(shares, signs) + shares @ np.asarray(signs)
    return float((len(shares) - 1) * np.std(curved, ddof=1) / np.sqrt(len(shares)))


def _shares_below_one(clusters: Floats) -> Floats | None:
    """[clusters, columns]: of each column's sum; None under MIN_CLUSTERS questions, or where one holds all of it."""
    clusters = clusters[np.lexsort(clusters.T)]
    totals = clusters.sum(axis=0)
    return clusters / totals if len(clusters) >= MIN_CLUSTERS and np.all(clusters < totals) else None


def _moved(shares: Floats, signs: tuple[float, ...]) -> Floats:
    """By what share of itself the ratio moves when each question is left out."""
    return np.expm1(np.log1p(-shares) @ np.asarray(signs))


def sums_by(cluster: NDArray[Any], columns: Floats) -> Floats:
    """[clusters, columns]: each column summed over the lines of each cluster."""
    _, place = np.unique(cluster, return_inverse=True)
    totals = [np.bincount(place, weights=column) for column in columns.T]
    return np.stack(totals, axis=1) if len(cluster) else np.zeros((0, columns.shape[1]))


def half_width(estimate: Estimate) -> float | None:
    """Half the interval's width as a share of the point (0.1 = ±10%)."""
    low, point, high = estimate["low"], estimate["point"], estimate["high"]
    if low is None or high is None or not point:
        return None
    return (high - low) / 2 / point


def clusters_needed(clusters: Floats, signs: tuple[float, ...], wanted: float) -> int:
    """About how many questions like these give a half width of `wanted`: it falls with their root.

    From the spread of the questions seen, not from their interval, which at few questions is wider than that.
    """
    spread = _spread(clusters / clusters.sum(axis=0), np.asarray(signs))
    quantile = float(stats.norm.ppf((1 + LEVEL) / 2))
    return int(np.ceil(len(clusters) * (quantile * spread / wanted) ** 2))


def _spread(shares: Floats, signs: Floats) -> float:
    """The delta method's standard error of a log ratio, from each cluster's shares of the column sums."""
    return float(np.sqrt(np.sum((shares @ signs) ** 2)))


def _bootstrap_t(clusters: Floats, signs: Floats) -> tuple[float | None, float | None]:
    """Offsets (low, high) from the log of the point."""
    if len(clusters) < MIN_CLUSTERS:
        return None, None
    shares = _pooled(clusters)
    shares = shares / shares.sum(axis=0)
    spread = _spread(shares, signs)
    if spread < 1e-12:  # every question agrees exactly: vanilla against itself
        return 0.0, 0.0
    resampled, variances = _resample(shares, signs)
    usable = variances > 1e-12 * spread**2
    if usable.sum() < RESAMPLES // 20:
        return None, None
    t = resampled[usable] / np.sqrt(variances[usable])
    bottom, top = np.quantile(t, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    limit = CAP * float(stats.t.ppf((1 + LEVEL) / 2, len(shares) - 1))
    low = -min(max(float(top), 0.0), limit) * spread
    high = -max(min(float(bottom), 0.0), -limit) * spread
    return low, high


def _resample(shares: Floats, signs: Floats) -> tuple[Floats, Floats]:
    """Of each resample: its log ratio relative to the point's, and that ratio's own delta-method variance."""
    count, columns = shares.shape
    products = (shares[:, :, None] * shares[:, None, :]).reshape(count, columns * columns)
    drawn = _counts(count).reshape(-1, SLICE, count)
    moments = (drawn @ np.concatenate([shares, products], axis=1)).reshape(RESAMPLES, -1)
    sums = np.maximum(moments[:, :columns], 1e-300)
    second = moments[:, columns:].reshape(-1, columns, columns)
    slopes = signs / sums
    return np.log(sums) @ signs, np.einsum("bi,bij,bj->b", slopes, second, slopes)


@lru_cache(maxsize=64)
def _counts(count: int) -> Floats:
    """[RESAMPLES, count]: how often each question is drawn; the same for all estimates of that many."""
    generator = np.random.default_rng(20_240 + count)
    return generator.multinomial(count, np.full(count, 1 / count), size=RESAMPLES).astype(np.float64)


def _pooled(clusters: Floats) -> Floats:
    if len(clusters) <= MAX_CLUSTERS:
        return clusters
    groups = np.arange(len(clusters)) % MAX_CLUSTERS
    shuffled = np.random.default_rng(len(clusters)).permutation(len(clusters))
    pooled = np.zeros((MAX_CLUSTERS, clusters.shape[1]))
    np.add.at(pooled, groups, clusters[shuffled])
    return pooled
