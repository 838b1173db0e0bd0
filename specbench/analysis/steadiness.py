"""What the clock did during a run: trials that stand out, and a drift from the first block to the last.

Both look at a trial's `pace`: decode seconds a round (a token, where rounds are unknown). How many tokens a
round brings is the drafter's doing and differs by question; how long a round takes is the machine's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from specbench.analysis.setting import AXES

OUTLYING = 3.5  # robust standard deviations (Iglewicz & Hoaglin 1993)
NORMAL_MAD = 1.4826  # the standard deviation of a normal distribution in median absolute deviations
LEAST_SPREAD = 0.01  # of the log: trials of a very steady machine do not stand out by 3%
LEAST_TRIALS = 8  # fewer say nothing about what is usual
BINS = 200  # blocks are looked at in at most this many groups: Theil-Sen takes their pairs
SURE = 0.99  # of the drift's interval


@dataclass(frozen=True)
class Drift:
    """By how much the last block's pace differs from the first one's, as shares; `low` and `high` at SURE."""

    low: float
    point: float
    high: float
    blocks: int  # from the first to the last

    @property
    def is_certain(self) -> bool:
        """Whether the machine drifted one way, beyond its noise."""
        return self.low > 0 or self.high < 0


def pace(rows: pd.DataFrame) -> NDArray[np.float64]:
    """Decode seconds a round of each trial, NaN where unknown."""
    steps = np.where(rows["rounds"] > 0, rows["rounds"], rows["decode_tokens"]).astype(np.float64)
    seconds = rows["decode_s"].to_numpy()
    return np.divide(seconds, steps, out=np.full(len(rows), np.nan), where=(steps > 0) & (seconds > 0))


def outliers(rows: pd.DataFrame) -> NDArray[np.bool_]:
    """Which trials that count are OUTLYING standard deviations from the median of their method on their task.

    In logs, the deviation estimated by the median absolute one, so that outliers do not hide each other.
    """
    log = np.log(rows["pace"].where(rows["used"]))
    keys = [rows[name] for name in ("method", "task", *AXES)]
    away = (log - _median(log, keys)).abs()
    spread = (NORMAL_MAD * _median(away, keys)).clip(lower=LEAST_SPREAD)
    enough = log.groupby(keys, observed=True).transform("count") >= LEAST_TRIALS
    return ((away > OUTLYING * spread) & enough).to_numpy(dtype=bool)


def drift(rows: pd.DataFrame) -> Drift | None:
    """The trend of the pace of one method's trials over the run's blocks: Theil and Sen's slope.

    Each task and turn is compared with its own median, since their blocks need not be spread evenly.
    """
    log = np.log(rows["pace"].where(rows["used"]))
    level = (log - _median(log, [rows["task"], rows["turn"]])).groupby(rows["block"]).median().dropna()
    if len(level) < LEAST_TRIALS:
        return None
    groups = np.array_split(level.to_numpy(), min(len(level), BINS))
    medians = [float(np.median(group)) for group in groups]
    slope, _, low, high = stats.theilslopes(medians, np.linspace(0, 1, len(medians)), alpha=SURE)
    return Drift(
        float(np.expm1(low)),
        float(np.expm1(slope)),
        float(np.expm1(high)),
        int(level.index[-1] - level.index[0]),
    )


def left_in_speedups(found: Drift, rows: pd.DataFrame, baseline: str) -> float:
    """The share by which the drift moves the speedup of the method it moves most.

    What passes between vanilla's trial of a question and the method's is in the comparison; over blocks in
    alternating order (ABBA) these parts cancel, over whole passes one after another they add up.

    Args:
        rows: all methods' trials.
    """
    used = rows[rows["used"]]
    when = used["block"] + used["order"] / (rows["order"].max() + 1)
    by_trial = when.groupby(
        [used[name] for name in ("method", "task", "question", "turn", "repeat")], observed=True
    )
    moments = by_trial.mean().unstack("method")
    if baseline not in moments:
        return 0.0
    apart = moments.sub(moments[baseline], axis=0).mean().abs().max()
    return float(abs(found.point) * apart / found.blocks)


def _median(values: pd.Series, keys: list[pd.Series]) -> pd.Series:
    return values.groupby(keys, observed=True).transform("median")
