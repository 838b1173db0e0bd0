"""What a comparison says beside its rows: methods it cannot compare, and what moved that no metric shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from specbench.analysis.caution import warning
from specbench.analysis.matching import BASE, NEW, Matching, Place
from specbench.analysis.setting import in_words

Note = dict[str, Any]

UNTRIED = "only in BASE"


def missing(table: Matching, lost: Collection[Place], engines: Mapping[str, str]) -> list[Note]:
    """The places that cannot be compared, with the reason, but those that count as `lost`.

    Args:
        engines: the name of each side's; it is said where they are two.
    """
    seen = table.seen[BASE] | table.seen[NEW]
    swept = {method for method, count in Counter(place.method for place in seen).items() if count > 1}
    found = []
    for place in sorted(seen - set(table.shared) - set(lost), key=lambda place: place.order):
        fields = place.setting.fields()
        load = "one request at a time" if place.method in swept and not in_words(fields) else ""
        found.append({"method": place.method, **fields, "reason": _reason(table, place, engines, load)})
    return found


def _reason(table: Matching, place: Place, engines: Mapping[str, str], load: str) -> str:
    """`only in NEW (vllm, one request at a time)`; other loads stand beside the method's name."""
    if place in table.seen[BASE] & table.seen[NEW]:
        return "every trial failed in BASE"
    side, reason = (NEW, "only in NEW") if place in table.seen[NEW] else (BASE, UNTRIED)
    engine = engines[side] if engines[BASE] != engines[NEW] else ""
    where = ", ".join(filter(None, (engine, load)))
    return f"{reason} ({where})" if where else reason


def lost(table: Matching) -> list[Place]:
    """The places that BASE measured and of which every trial fails in NEW."""
    places = (table.measured[BASE] & table.seen[NEW]) - table.measured[NEW]
    return sorted(places, key=lambda place: place.order)


def untried(table: Matching) -> list[Place]:
    """The places that BASE measured and that NEW did not try."""
    return sorted(table.measured[BASE] - table.seen[NEW], key=lambda place: place.order)


def outputs(table: Matching, name: str) -> Iterator[Note]:
    """Methods whose output was vanilla's in BASE more often than it is now."""
    compared = table.rows[table.rows["used"] & table.rows["same"].notna()]
    counts = compared.groupby(["label", "side"])["same"].agg(["sum", "count"])
    for label in dict.fromkeys(compared["label"]):
        if not {(label, BASE), (label, NEW)} <= set(counts.index):
            continue
        (was, of), (now, of_now) = ((counts.loc[(label, side)]) for side in (BASE, NEW))
        if now / of_now < was / of:
            message = (
                f"{label}: output identical to vanilla's on {now:.0f} of {of_now:.0f}, "
                f"in BASE on {was:.0f} of {of:.0f}"
            )
            yield warning("output", message, "see `specbench report` for where they differ", name, label)


def failures(table: Matching, name: str) -> Iterator[Note]:
    """Methods that fail more often than in BASE; those trials are in no number here."""
    rows = table.rows[table.rows["excluded"].isna()]
    shares = rows.groupby(["label", "side"])["failed"].mean()
    for label in dict.fromkeys(rows["label"]):
        was, now = shares.get((label, BASE)), shares.get((label, NEW))
        if was is not None and now is not None and now > was:
            message = f"{label}: {now:.0%} of the trials failed, in BASE {was:.0%}"
            yield warning("failed", message, "see `error` in trials.jsonl", name, label)
