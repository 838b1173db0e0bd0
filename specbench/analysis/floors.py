"""The floor of every verify pass a run made, from its manifest and its rounds alone (design §6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from specbench.analysis.frame import Frame, RoundColumns
from specbench.analysis.intervals import Floats
from specbench.analysis.roofline import Architecture, Device


def with_floors(frame: Frame, manifest: Mapping[str, Any]) -> Frame:
    """The frame with `floor_s` of each batch: the floors of its verify passes together, NaN where unknown.

    A manifest knows what is needed under `roofline`: the target's architecture, and the speed of the device. A
    pass's rows each have `drafted + 1` tokens to look at, over the prompt and what they had emitted before; where a
    round says how many experts it woke, those are read, else as many as tokens at random would wake.
    """
    known = _read(manifest)
    floor = np.full(len(frame.batches), np.nan) if known is None else _batch_floors(frame, *known)
    return replace(frame, batches=frame.batches.assign(floor_s=floor))


def _read(manifest: Mapping[str, Any]) -> tuple[Architecture, Device] | None:
    facts = manifest.get("roofline") or {}
    target, speed = facts.get("architecture"), facts.get("speed")
    if not target or not speed:
        return None
    return Architecture.from_json(target), Device.measured(speed)


def _batch_floors(frame: Frame, target: Architecture, device: Device) -> Floats:
    rounds = frame.rounds
    unit = frame.rows["unit"].to_numpy()[rounds.row]
    query = rounds.drafted + 1.0
    context = frame.rows["prompt_tokens"].to_numpy()[rounds.row] + _emitted_before(rounds)
    # A pass is one batch's n-th round: the rows of a batch begin together, and those that are done drop out.
    passes, of_pass = np.unique(np.stack([unit, _place(rounds)]), axis=1, return_inverse=True)
    of_pass = of_pass.ravel()

    def summed(values: Any) -> Floats:
        return np.bincount(of_pass, weights=values, minlength=passes.shape[1]).astype(np.float64)

    tokens = summed(query)
    experts = np.full(passes.shape[1], np.nan)
    experts[of_pass] = rounds.experts
    experts = np.where(np.isfinite(experts), experts, target.unique_experts(tokens))
    read = target.weight_bytes(tokens, experts) + summed(target.cache_bytes(query, context))
    floors = device.floor_s(read, summed(target.operations(query, context)))
    total = np.bincount(passes[0], weights=floors, minlength=len(frame.batches))
    unknown = np.zeros(len(frame.batches), dtype=bool)
    unknown[unit[(rounds.drafted < 0) | (rounds.count != 1)]] = True
    unknown |= np.bincount(unit, minlength=len(frame.batches)) == 0
    return np.where(unknown, np.nan, total)


def _place(rounds: RoundColumns) -> Any:
    """Of each round, how many of its trial's came before it. Rounds of a trial stand together, in order."""
    first = np.searchsorted(rounds.row, rounds.row)
    return np.arange(len(rounds.row)) - first


def _emitted_before(rounds: RoundColumns) -> Any:
    """Tokens that a trial had emitted by the beginning of each of its rounds, and that so lie in its cache."""
    total = np.concatenate([[0], np.cumsum(rounds.emitted)])
    return total[:-1] - total[np.searchsorted(rounds.row, rounds.row)]
