"""Requests that come at a rate of their own: whether the server kept up with them."""

from __future__ import annotations

import numpy as np
import pandas as pd

from specbench.analysis.intervals import Floats

RAMP = (
    0.25  # of a block's requests: the queue is empty when the first of them come, and fills whatever the rate
)
LEAST = 8  # requests of a block that say anything after it
PILING = 0.15  # share of the requests sent from which on a queue grows. In simulated servers (one queue, four slots,
# or all requests sharing one processor; blocks of 32) 1.2 times the capacity reads 0.17 and more, 0.6 times 0.02.


def queue_growth(rows: pd.DataFrame) -> float | None:
    """By how much the number of unanswered requests rises with each one sent; None where it cannot be told.

    0: as many are answered as are sent. At R times what the server can do it nears 1 - 1/R or more. It is the slope
    (least squares) of what is in flight at each sending against the number sent, over all blocks together.

    Args:
        rows: of one method at one request rate; `unit` is the block, `sent_s` the moment in it.
    """
    flights = [_in_flight(block) for _, block in rows.groupby("unit") if len(block) >= LEAST]
    known = [flight for flight in flights if flight is not None]
    if not known:
        return None
    numbers, waiting = np.concatenate(known, axis=1)
    return float(numbers @ waiting / (numbers @ numbers))


def _in_flight(block: pd.DataFrame) -> Floats | None:
    """[2, requests]: number of each request after the ramp, and what was unanswered then; their means taken off."""
    times = block[["sent_s", "total_s"]].to_numpy(dtype=np.float64)
    if not np.isfinite(times).all():
        return None
    sent, answered = np.sort(times[:, 0]), np.sort(times.sum(axis=1))
    numbers = np.arange(len(sent), dtype=np.float64)
    waiting = numbers - np.searchsorted(answered, sent, side="right")
    after = np.stack([numbers, waiting])[:, int(len(sent) * RAMP) :]
    return after - after.mean(axis=1, keepdims=True)
