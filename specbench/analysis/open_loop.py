"""Requests that come at a rate of their own: whether the server kept up with them."""

from __future__ import annotations

import numpy as np
import pandas as pd

from specbench.analysis.intervals import Floats

RAMP = (
    0.25  # of a block's requests: the queue is empty when the first of them come, and fills whatever the rate
)
LEAST = 32  # requests of a block: chance alone makes the slope of fewer rise
PILING = 0.15  # share of the requests sent from which on a queue grows
SURE = 2.0  # standard errors by which latencies must rise with it
# In simulated servers with one queue and one slot or four, one to five blocks of 32, both together are found at 1.2
# times the capacity in two of three runs and at 1.5 times in nine of ten; at 0.8 times in one of six runs of a single
# block (its queue did grow, for a while), at 0.6 times in 3%, and at any rate of a server that never queues in 2%.
# Where all requests share one processor, a rate above its capacity delays early and late ones alike: 32 of them tell
# no queue from a block that still fills, and `caution` speaks of the short block.


def queue_growth(rows: pd.DataFrame) -> float | None:
    """By how much the number of unanswered requests rises with each one sent; None where it cannot be told.

    0: as many are answered as are sent. At R times what the server can do it nears 1 - 1/R or more. It is the slope
    (least squares) of what is in flight at each sending against the number sent, over all blocks together. It rises
    too while a block only fills, which lasts as long as one request: where it reaches PILING although later requests
    take no longer than earlier ones, it says nothing.

    Args:
        rows: of one method at one request rate; `unit` is the block, `sent_s` the moment in it.
    """
    flights = [_after_ramp(block) for _, block in rows.groupby("unit") if len(block) >= LEAST]
    known = [flight for flight in flights if flight is not None]
    if not known:
        return None
    numbers, waiting, seconds = np.concatenate(known, axis=1)
    growth = float(numbers @ waiting / (numbers @ numbers))
    return growth if growth < PILING or _rises(numbers, seconds, len(known)) else None


def _rises(numbers: Floats, seconds: Floats, blocks: int) -> bool:
    """Whether the slope of `seconds` is SURE standard errors above 0; both have their blocks' means taken off."""
    square = numbers @ numbers
    slope = numbers @ seconds / square
    left = seconds - slope * numbers
    return bool(slope > SURE * np.sqrt(left @ left / (len(numbers) - blocks - 1) / square))


def _after_ramp(block: pd.DataFrame) -> Floats | None:
    """[3, requests]: number of each request after the ramp, what was unanswered then, and its own seconds; their
    means taken off."""
    times = block[["sent_s", "total_s"]].to_numpy(dtype=np.float64)
    if not np.isfinite(times).all():
        return None
    sent, seconds = times[np.argsort(times[:, 0], kind="stable")].T
    numbers = np.arange(len(sent), dtype=np.float64)
    waiting = numbers - np.searchsorted(np.sort(sent + seconds), sent, side="right")
    after = np.stack([numbers, waiting, seconds])[:, int(len(sent) * RAMP) :]
    return after - after.mean(axis=1, keepdims=True)
