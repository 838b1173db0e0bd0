"""The floor of every verify pass a run made, from its manifest and its rounds alone (design §6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbench.analysis.frame import Frame, RoundColumns
from specbench.analysis.intervals import Floats
from specbench.analysis.roofline import Architecture, Device

AT_ONCE = (
    10_000  # batches whose passes are worked out together: bounds the memory of runs with millions of rounds
)


def with_floors(frame: Frame, manifest: Mapping[str, Any]) -> Frame:
    """The frame with `floor_s` of each batch: the floors of its verify passes together, NaN where unknown.

    A manifest knows what is needed under `roofline`: the target's architecture, and the speed of the device. A
    pass's rows each have `drafted + probes + 1` tokens to look at, over the prompt and what they had emitted before;
    where a round says how many experts it woke, those are read, else as many as tokens at random would wake.
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
    floors = np.full(len(frame.batches), np.nan)
    unit = frame.rows["unit"].to_numpy()
    for first in range(0, len(floors), AT_ONCE):
        batches = slice(first, min(first + AT_ONCE, len(floors)))
        rounds = frame.rounds.of((unit >= batches.start) & (unit < batches.stop))
        number = unit[rounds.row] - first
        prompt = frame.rows["prompt_tokens"].to_numpy()[rounds.row]
        floors[batches] = _floors_of(rounds, number, prompt, batches.stop - first, target, device)
    return floors


def _floors_of(
    rounds: RoundColumns,
    batch: NDArray[np.int64],
    prompt: NDArray[np.int64],
    count: int,
    target: Architecture,
    device: Device,
) -> Floats:
    """The floors of `count` batches with these rounds: of each one, the number of its batch and its prompt tokens."""
    query = rounds.drafted + rounds.probes + 1.0
    context = prompt + _emitted_before(rounds)
    # A pass is one batch's n-th round: the rows of a batch begin together, and those that are done drop out.
    place = _place(rounds)
    passes = np.zeros(count, dtype=np.int64)
    np.maximum.at(passes, batch, place + 1)
    of_pass = (np.cumsum(passes) - passes)[batch] + place

    def summed(values: Any) -> Floats:
        return np.bincount(of_pass, weights=values, minlength=int(passes.sum())).astype(np.float64)

    tokens = summed(query)
    experts = np.full(len(tokens), np.nan)
    experts[of_pass] = rounds.experts
    experts = np.where(np.isfinite(experts), experts, target.unique_experts(tokens))
    read = target.weight_bytes(tokens, experts) + summed(target.cache_bytes(query, context))
    floors = device.floor_s(read, summed(target.operations(query, context)))
    total = np.bincount(np.repeat(np.arange(count), passes), weights=floors, minlength=count)
    unknown = passes == 0
    unknown[batch[(rounds.drafted < 0) | (rounds.count != 1)]] = True
    return np.where(unknown, np.nan, total)


def _place(rounds: RoundColumns) -> Any:
    """Of each round, how many of its trial's came before it. Rounds of a trial stand together, in order."""
    first = np.searchsorted(rounds.row, rounds.row)
    return np.arange(len(rounds.row)) - first


def _emitted_before(rounds: RoundColumns) -> Any:
    """Tokens that a trial had emitted by the beginning of each of its rounds, and that so lie in its cache."""
    total = np.concatenate([[0], np.cumsum(rounds.emitted)])
    return total[:-1] - total[np.searchsorted(rounds.row, rounds.row)]
