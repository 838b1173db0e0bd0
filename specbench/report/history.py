"""A metric over time (`analysis.history`) as terminal lines, Markdown, CSV, JSON and a figure."""

from __future__ import annotations

import csv as csv_module
import io
import json as json_module
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from specbench.analysis.extract import OURS
from specbench.analysis.setting import AXES
from specbench.report import words
from specbench.report.comparison import method
from specbench.report.csv import cell
from specbench.report.markdown import escape, table
from specbench.report.plain import plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

History = dict[str, Any]

BARS = "▁▂▃▄▅▆▇█"
COMMIT = 12  # hex digits shown
FOLD, TITLE_LINES = 90, 3  # characters of a panel's title that fit on a line; lines of each of its parts
HEADINGS = ("date", "run", "value", "prompts", "commit", "machine")


def terminal(history: History) -> str:
    """A block a group: its methods, each with its course as bars and a line a run."""
    return "\n".join(_lines(history)) + "\n"


def _lines(history: History) -> Iterator[str]:
    for group in history["groups"]:
        yield from (plain(line) for line in title(group))
        for series in group["series"]:
            points = [point["point"] for point in series["points"]]
            yield ""
            yield f"  {plain(method(series))}  {sparkline(points)}"
            rows = [_cells(point, history["metric"]) for point in series["points"]]
            widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
            for row in rows:
                yield (
                    "    "
                    + "  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
                )
        yield ""


def title(group: dict[str, Any]) -> list[str]:
    """The lines above a group: what all of its runs have in common."""
    target = " ".join(str(part) for part in (group["target"] or "unknown target", group["dtype"]) if part)
    engine = "" if group["engine"] == OURS else f" on {group['engine']}"
    return [f"{target}{engine}: {group['workload']}", *([group["machine"]] if group["machine"] else [])]


def sparkline(values: Sequence[float]) -> str:
    """A bar a value, from the smallest to the largest; all in the middle where they are equal."""
    low, high = min(values), max(values)
    if high - low <= 1e-9 * abs(high):
        return BARS[3] * len(values)
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1))] for value in values)


def _cells(point: dict[str, Any], metric: str) -> list[str]:
    commit = (point["commit"] or words.NONE)[:COMMIT] + ("+" if point["dirty"] else "")
    facts = [point["start"] or words.NONE, point["run"], value(point, metric), str(point["prompts"]), commit]
    return [plain(fact) for fact in (*facts, point["machine"] or words.NONE)]


def value(point: dict[str, Any], metric: str) -> str:
    """A point with its interval, in the metric's unit."""
    if metric == "memory":
        return words.size(point["point"])
    if metric in ("ttft_s", "tpot_s"):
        return words.seconds(point["point"])
    if metric == "acceptance_rate":
        return words.percent(point["point"], 1)
    if metric == "tokens_per_s":
        return words.number(point["point"], 1)
    return words.interval(point, "x" if "speedup" in metric else "")


def markdown(history: History) -> str:
    parts = [f"## {history['metric']} over time"]
    for group in history["groups"]:
        first, *rest = title(group)
        parts += [f"### {escape(first)}", *map(escape, rest)]
        lines = [
            [method(series), *_cells(point, history["metric"])]
            for series in group["series"]
            for point in series["points"]
        ]
        parts.append(table(["method", *HEADINGS], lines, texts=len(HEADINGS) + 1))
    parts.append("A commit with + had changes that were not committed. Intervals are 95%, over questions.")
    return "\n\n".join(parts) + "\n"


def csv(history: History) -> str:
    """A line a point, with everything that tells groups and series apart."""
    out = io.StringIO()
    writer = csv_module.writer(out, lineterminator="\n")
    group_fields = ("target", "dtype", "engine", "workload")
    series_fields = ("method", *AXES)
    point_fields = (
        "run",
        "start",
        "commit",
        "dirty",
        "engine_version",
        "machine",
        "prompts",
        "low",
        "point",
        "high",
    )
    writer.writerow(["metric", "group", *group_fields, *series_fields, *point_fields])
    for number, group in enumerate(history["groups"], start=1):
        for series in group["series"]:
            for point in series["points"]:
                parts = ((group, group_fields), (series, series_fields), (point, point_fields))
                values = [cell(part[name]) for part, names in parts for name in names]
                writer.writerow([history["metric"], number, *values])
    return out.getvalue()


def json(history: History) -> str:
    return json_module.dumps(history, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def figure(history: History) -> Figure:
    """A panel a group: a line a method over the runs in their order, with intervals where there are some."""
    from matplotlib.figure import Figure

    from specbench.report.figures.style import WIDTH, looks

    groups = history["groups"]
    drawn = Figure(figsize=(WIDTH, 0.4 + 2.8 * len(groups)), layout="constrained")
    panels = drawn.subplots(len(groups), 1, squeeze=False)[:, 0]
    unit = f" ({history['unit']})" if history["unit"] else ""
    for group, panel in zip(groups, panels, strict=True):
        runs = _runs(group)
        look = looks([method(series) for series in group["series"]])
        for series in group["series"]:
            style, points = look[method(series)], series["points"]
            places = [runs.index((point["start"], point["run"])) for point in points]
            values = [point["point"] for point in points]
            panel.errorbar(
                places,
                values,
                _whiskers(points),
                color=style.colour,
                marker=style.marker,
                label=style.label,
                capsize=2,
            )
        labels = [plain((start or run)[:10]) for start, run in runs]
        panel.set_xticks(range(len(runs)), labels, rotation=30, ha="right")
        panel.set_ylabel(f"{history['metric']}{unit}")
        panel.set_title("\n".join(_folded(title(group))), loc="left")
        panel.legend()
    return drawn


def _folded(lines: Sequence[str]) -> Iterator[str]:
    """Lines no wider than a panel, words without an end broken: what is wider leaves the panel no room."""
    for line in lines:
        yield from textwrap.wrap(plain(line), FOLD, max_lines=TITLE_LINES, placeholder=" …")


def _whiskers(points: Sequence[dict[str, Any]]) -> list[list[float]]:
    """Below and above each point; nothing where it has no interval."""
    below = [0.0 if p["low"] is None else p["point"] - p["low"] for p in points]
    above = [0.0 if p["high"] is None else p["high"] - p["point"] for p in points]
    return [below, above]


def _runs(group: dict[str, Any]) -> list[tuple[Any, str]]:
    """The group's runs, oldest first."""
    found = {(point["start"], point["run"]) for series in group["series"] for point in series["points"]}
    return sorted(found, key=lambda run: (str(run[0] or ""), run[1]))


def _svg(history: History) -> str:
    from specbench.report.figures.style import styled, svg

    with styled():
        return svg(figure(history)).decode()


def _png(history: History) -> bytes:
    from specbench.report.figures.style import png, styled

    with styled():
        return png(figure(history))


FORMATS: dict[str, Callable[[History], str | bytes]] = {
    "md": markdown,
    "csv": csv,
    "json": json,
    "svg": _svg,
    "png": _png,
}
