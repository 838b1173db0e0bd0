"""Where along a sweep a method stops paying, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from specbench.report import words
from specbench.report.base import Summary

UNSURE = ", from too few questions to be sure"


def sentences(summary: Summary, escape: Callable[[str], str] = str) -> Iterator[str]:
    """The sentences of the summary's `break_even[]`, with a full stop; of several runs each names its own."""
    several = len(summary["runs"]) > 1
    for entry in summary.get("break_even", ()):
        run = f"{escape(entry['run'])}: " if several else ""
        yield f"{run}{sentence(entry, escape)}."


def sentence(entry: dict[str, Any], escape: Callable[[str], str] = str) -> str:
    """One sentence of the summary's `break_even[]`: at how much load a method still pays, and how sure that is."""
    axis = entry["axis"].replace("_", " ")
    pays = next(iter(entry["of"].values()))["point"] > 1
    over = ", ".join(f"{value}: {words.interval(speed, 'x')}" for value, speed in entry["of"].items())
    if entry["value"] is None:
        where = f"at {'every' if pays else 'no'} {axis} measured{_unclear(entry['of'])}"
    else:
        reach = f"{_reach(entry)}{_again(entry, pays)}"
        where = f"{'up to' if pays else 'from'} a {axis} of about {entry['value']:.3g}{reach}"
    return f"{escape(entry['method'])} pays {where} (speedup at {over})"


def _reach(entry: dict[str, Any]) -> str:
    """The interval of a break-even; an end that lies outside of what was measured is not a number."""
    low, high = entry["low"], entry["high"]
    if any(speed["low"] is None for speed in entry["of"].values()):
        return UNSURE
    smallest, *_, largest = entry["of"]
    begin = f"below {smallest}" if low is None else f"{low:.3g}"
    end = f"above {largest}" if high is None else f"{high:.3g}"
    return f" [{begin}, {end}]"


def _again(entry: dict[str, Any], pays: bool) -> str:
    """Whether the speedups come back over 1 beyond the break-even: a sweep that is no clear one."""
    beyond = [speed["point"] for value, speed in entry["of"].items() if float(value) > entry["value"]]
    return ", beyond which it crosses 1 again" if any((point > 1) == pays for point in beyond) else ""


def _unclear(speedups: dict[str, Any]) -> str:
    """Where an interval that holds 1, or none at all, leaves it open."""
    open_at = [value for value, speed in speedups.items() if (speed["low"] or 0) <= 1 <= (speed["high"] or 1)]
    if all(speed["low"] is None for speed in speedups.values()):
        return UNSURE
    return f", which is not sure at {', '.join(open_at)}" if open_at else ""
