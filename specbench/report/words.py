"""Numbers and sentences as every format prints them. Plain text: each format escapes for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from specbench.analysis.extract import OURS
from specbench.analysis.setting import Setting, in_words, setting_of
from specbench.analysis.sizes import in_bytes
from specbench.report.base import Row, Summary
from specbench.thresholds import RANKED_QUESTIONS, RANKED_WIDTH

NONE = "–"
BASELINE, AGAIN, OVERALL = "vanilla", "vanilla-again", "overall"


@dataclass(frozen=True)
class Section:
    """The rows of one run at one setting."""

    run: dict[str, Any]
    load: Setting
    rows: list[Row]

    @property
    def overall(self) -> list[Row]:
        return [row for row in self.rows if row["task"] == OVERALL]

    @property
    def parts(self) -> list[Row]:
        """Task rows and category rows."""
        return [row for row in self.rows if row["task"] != OVERALL]

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(row["task"] for row in self.parts))

    @property
    def places(self) -> list[tuple[str, str | None]]:
        """(task, category) in order, each task before its categories."""
        places = {(row["task"], row["category"]) for row in self.parts}
        rank = {task: index for index, task in enumerate(self.tasks)}
        return sorted(places, key=lambda place: (rank[place[0]], place[1] is not None, place[1] or ""))

    @property
    def methods(self) -> list[str]:
        """All but vanilla, in order."""
        return [row["method"] for row in self.overall if row["method"] != BASELINE]

    @property
    def where(self) -> str:
        """What `overall` is over."""
        return self.tasks[0] if len(self.tasks) == 1 else f"all {len(self.tasks)} tasks"

    @property
    def how(self) -> str:
        """How its speedups count time."""
        return how(self.load.request_rate)

    @property
    def title(self) -> str:
        """Target, batch and what else must stand over every table."""
        return ", ".join([self.run.get("target") or "unknown target", *self.setting])

    @property
    def setting(self) -> list[str]:
        """What else, beside the target, must stand over every table."""
        words = []
        engine = self.run.get("engine") or {}
        if engine.get("attached") is not None and engine["name"] != OURS:  # None: imported
            words.append(f"served by {engine['name']}")
        if self.run.get("random_weights"):
            words.append("RANDOM WEIGHTS, timing only")
        words += in_words(self.load.fields())
        if any(row["state"] not in (None, "cold") for row in self.rows):
            words.append("some state kept between prompts (warm)")
        return words


def sections(summary: Summary) -> Iterator[Section]:
    """The summary's rows by run and setting, in their order."""
    runs = {run["name"]: run for run in summary["runs"]}
    groups: dict[tuple[str, Setting], list[Row]] = {}
    for row in summary["rows"]:
        groups.setdefault((row["run"], setting_of(row)), []).append(row)
    for (run, setting), rows in groups.items():
        yield Section(runs.get(run, {"name": run}), setting, rows)


def how(request_rate: float | None) -> str:
    """How a speedup counts time: where requests come at a rate, the whole is set by their coming."""
    return "per request" if request_rate else "end to end"


def place(task: str, category: str | None) -> str:
    """A task, or a category of it, in one line."""
    return task if category is None else f"{task} / {category}"


def times(value: float | None) -> str:
    """A ratio: `1.12x`."""
    return NONE if value is None else f"{value:.2f}x"


def sentence(text: str) -> str:
    """With a capital, unless that would change a symbol (τ is no T), and a full stop."""
    return (text[:1].upper() if text[:1].isascii() else text[:1]) + text[1:] + "."


def number(value: float | None, digits: int = 2) -> str:
    return NONE if value is None else f"{value:,.{digits}f}"


def percent(value: float | None, digits: int = 0, signed: bool = False) -> str:
    return NONE if value is None else f"{value:{'+' if signed else ''}.{digits}%}"


def seconds(value: float | None) -> str:
    """`1.20 s`, `12.3 ms`."""
    if value is None:
        return NONE
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def size(value: float | None, signed: bool = False) -> str:
    """Bytes: `1.2 GiB`; with a sign where it is a difference."""
    return NONE if value is None else in_bytes(value, signed)


def interval(estimate: dict[str, float | None], suffix: str = "") -> str:
    """`1.12x [1.05, 1.19]`, or the point alone."""
    point = estimate["point"]
    if point is None:
        return NONE
    return f"{point:.2f}{suffix}{bracket(estimate)}"


def bracket(estimate: dict[str, float | None]) -> str:
    low, high = estimate["low"], estimate["high"]
    return "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"


def speedup(row: Row) -> str:
    """The end-to-end speedup with its interval, or with `n=` where there are too few questions for one.

    Vanilla's is 1 by definition and has none.
    """
    estimate = row["speedup"]
    if estimate["point"] is None or row["method"] == BASELINE:
        return times(estimate["point"])
    if estimate["low"] is None:
        return f"{times(estimate['point'])} {few(row)}"
    return interval(estimate, "x")


def few(row: Row) -> str:
    """What too small an interval would rest on: questions, or the batches or blocks that were in flight together."""
    return f"n={row['clusters']}"


def output(row: Row) -> str:
    """How the output compares with vanilla's: `24/24` identical, `lossy 10/24`, `lossless`: not compared."""
    if row["method"] == BASELINE:
        return NONE
    if not row["compared"]:
        return promise(row)
    lossy = "lossy " if row["lossless"] is False else ""
    return f"{lossy}{row['identical']}/{row['compared']}"


def tau(row: Row) -> str:
    """τ over all rounds with its interval, and over those that had a draft where that is another number."""
    all_rounds, drafted = row["tau"]["point"], row["tau_drafted"]
    if all_rounds is None or drafted is None or number(all_rounds) == number(drafted):
        return interval(row["tau"])
    return f"{interval(row['tau'])} ({number(drafted)} where there was a draft)"


def promise(row: Row) -> str:
    """Whether the method promises the target's own output, which vanilla is."""
    if row["method"] == BASELINE:
        return NONE
    return {True: "lossless", False: "lossy", None: NONE}[row["lossless"]]


def compared_by(row: Row) -> str:
    """How the outputs were compared: `ids (texts 3/4)`, with the texts' own count beside them, or `text`."""
    if not row["compared"]:
        return NONE
    texts = f"{row['identical_text']}/{row['compared_text']}"
    if row["compared_by"] == "ids" and row["compared_text"]:
        return f"ids (texts {texts})"
    return str(row["compared_by"])


def counts(row: Row) -> str:
    """Who counted accepted and drafted tokens: `response, by request`, `metrics-delta, by server`, `none`."""
    source, scope = row["counts_source"], row["counts_scope"]
    if source is None:
        return NONE
    return str(source) if source == "none" else f"{source}, by {scope}"


def requests(row: Row) -> str:
    """`1.85 of 2`: requests answered a second, of those that came; nothing in a closed loop."""
    rate = row["request_rate"]
    return NONE if rate is None else f"{number(row['requests_per_s'])} of {rate:g}"


def state(row: Row) -> str:
    """`warm`: it kept what earlier prompts taught; `cold`: it did not."""
    return row["state"] or NONE


def verdict(row: Row, section: Section, escape: Callable[[str], str] = str) -> str:
    """One sentence that says what the method did, from its overall row."""
    target = escape(section.run.get("target") or "the target")
    tasks = section.tasks
    over = f"on {escape(tasks[0])}" if len(tasks) == 1 else f"over {len(tasks)} tasks"
    parts = [f"{_effect(row, escape(row['method']), target)} {over}", *_output_words(row)]
    if row["failed"]:
        parts.append(f"{row['failed']} of {row['trials']} trials failed")
    return "; ".join(parts)


def ranks(row: Row) -> bool:
    """Whether the row's speedup is known well enough to be called the best or the worst of several."""
    from specbench.analysis.intervals import half_width  # brings scipy, which --help need not wait for

    width = half_width(row["speedup"])
    return width is not None and width <= RANKED_WIDTH and row["clusters"] >= RANKED_QUESTIONS


def extremes(row: Row, section: Section, escape: Callable[[str], str] = str) -> str | None:
    """The tasks on which the method does best and worst, of those that rank; None where all read alike."""
    found = [
        part
        for part in section.parts
        if part["method"] == row["method"] and part["category"] is None and ranks(part)
    ]
    found.sort(key=lambda part: part["speedup"]["point"])
    if not found or times(found[0]["speedup"]["point"]) == times(found[-1]["speedup"]["point"]):
        return None
    worst, best = (
        f"{escape(part['task'])} {interval(part['speedup'], 'x')}" for part in (found[0], found[-1])
    )
    return f"best on {best}, worst on {worst}"


def experts(row: Row, section: Section) -> str | None:
    """What of a mixture of experts' verify inflation its experts explain; None where nothing is to be explained."""
    mine, total = row["experts"], section.run.get("experts")
    vanilla = next((base["experts"] for base in section.overall if base["method"] == BASELINE), None)
    if mine is None or vanilla is None or mine <= vanilla:
        return None
    of = f" of {total}" if total else ""
    said = f"a verify pass wakes {number(mine, 1)}{of} experts a layer and vanilla's {number(vanilla, 1)}"
    if row["roofline_limit"] and row["pass_gain"]:
        said += f", so that its floor is {times(row['pass_gain'] / row['roofline_limit'])} vanilla's"
    if row["verify_inflation"]:
        said += f"; it takes {times(row['verify_inflation'])} as long (verify inflation)"
    return said


def effect(row: Row) -> str:
    """`faster`, `slower`, `no clear difference`, or `unknown`: what the interval allows to say."""
    low, high = row["speedup"]["low"], row["speedup"]["high"]
    if low is None or high is None:
        return "unknown"
    if low <= 1 <= high:
        return "no clear difference"
    return "faster" if low > 1 else "slower"


def _effect(row: Row, method: str, target: str) -> str:
    estimate = row["speedup"]
    counted = how(row["request_rate"])
    point, low, high = estimate["point"], estimate["low"], estimate["high"]
    if point is None:
        return f"{method} has no speedup on {target}: no block was measured by both it and vanilla,"
    if low is None or high is None:
        return f"{method} reads {times(point)} {counted} on {target}, from too few questions to say more,"
    known = bracket(estimate)
    if row["method"] == AGAIN:
        return f"vanilla measured again reads {times(point)}{known} (the truth is 1.00x) on {target}"
    if effect(row) == "no clear difference":
        return f"{method} makes no clear difference to {target}: {times(point)} {counted}{known}"
    if effect(row) == "slower":
        return f"{method} makes {target} slower: {times(point)} {counted}{known}"
    return f"{method} makes {target} {times(point)} faster {counted}{known}"


def _output_words(row: Row) -> list[str]:
    if not row["compared"]:
        return [] if row["lossless"] is not False else ["not lossless"]
    same = f"output identical on {row['identical']} of {row['compared']}"
    if row["near_ties"]:
        same += f" ({row['near_ties']} differ at a near-tie)"
    return [f"not lossless: {same}" if row["lossless"] is False else same]
