"""Counters out of Prometheus' text format."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_SAMPLE = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
POSITIONS = ("position", "token_position")  # names of the label


def samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Name, labels and value of every sample; comments, broken lines and values that are no number are left out."""
    for line in text.splitlines():
        found = None if line.startswith("#") else _SAMPLE.match(line)
        if found:
            try:
                yield found["name"], dict(_LABEL.findall(found["labels"] or "")), float(found["value"])
            except ValueError:
                continue


def counters(text: str, names: Mapping[str, str]) -> dict[str, int]:
    """`{ours: value}` of the samples called `names[ours]`, summed over their labels (engines, ranks, models).

    A counter by position also gives `ours@0`, `ours@1`, …. What the text does not hold is not in the answer.
    """
    wanted = {theirs: ours for ours, theirs in names.items()}
    found: dict[str, float] = {}
    for name, labels, value in samples(text):
        if name in wanted and value == value:  # NaN is no count
            positions = [labels[label] for label in POSITIONS if label in labels]
            for key in (wanted[name], *(f"{wanted[name]}@{position}" for position in positions)):
                found[key] = found.get(key, 0.0) + value
    return {key: round(value) for key, value in found.items()}


def delta(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int] | None:
    """What was counted between two looks; a counter that was not there before began at 0.

    None if any went backwards: the server was restarted or reset, and what it counted is lost.
    """
    grown = {key: value - before.get(key, 0) for key, value in after.items()}
    return None if any(value < 0 for value in grown.values()) else grown
