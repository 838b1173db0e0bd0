"""Figures of rounds: tokens, acceptance by position, where the time goes, the k sweep."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from specbench.errors import SpecbenchError
from specbench.report import words
from specbench.report.base import Row
from specbench.report.figures.base import Drawn, Scene
from specbench.report.figures.style import CARD, GREY, INK, LINE, PALETTE, legend, new_figure
from specbench.report.plain import plain
from specbench.spec import parse_spec

SPANS = {
    "draft": (PALETTE[4], "///"),
    "verify": (PALETTE[0], ""),
    "accept": (PALETTE[2], "\\\\\\\\"),
    "other": (GREY, "xxx"),
}
LENGTHS = ("k", "depth", "draft_tokens")  # options that say how long a draft is


def tokens(scene: Scene) -> Drawn | None:
    """A bar a method, its interval, and a dot for each task."""
    rows = [row for row in scene.overall if row["tau"]["point"] is not None]
    if not any((row["acceptance_rate"] or 0) > 0 for row in rows):
        return None
    figure, axes = new_figure(0.6 + 0.3 * len(rows))
    for place, row in enumerate(rows):
        tau = row["tau"]
        axes.barh(place, tau["point"], height=0.62, color=scene.looks[row["method"]].colour, alpha=0.85)
        if tau["low"] is not None:
            reach = [[tau["point"] - tau["low"]], [tau["high"] - tau["point"]]]
            axes.errorbar(tau["point"], place, xerr=reach, color=INK, elinewidth=1.4, capsize=2.5)
        parts = [p["tau"]["point"] for p in _parts(scene, row["method"]) if p["tau"]["point"] is not None]
        axes.plot(
            parts, [place] * len(parts), "o", color=CARD, markeredgecolor=INK, markersize=4, linewidth=0
        )
    axes.axvline(1, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    _method_axis(axes, scene, rows)
    axes.set_xlabel("τ: tokens a round, bonus included (95% interval)")
    return figure, "; ".join(
        f"{scene.looks[row['method']].label}: {words.interval(row['tau'])}" for row in rows
    )


def _parts(scene: Scene, method: str) -> list[Row]:
    if len(scene.section.tasks) < 2:
        return []
    return [row for row in scene.section.parts if row["method"] == method and row["category"] is None]


def _method_axis(axes: Any, scene: Scene, rows: list[Row]) -> None:
    axes.set_yticks(range(len(rows)), [scene.looks[row["method"]].label for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def acceptance(scene: Scene) -> Drawn | None:
    """By position: of all drafts that deep, and of those accepted up to the position before."""
    rows = [row for row in scene.overall if row["acceptance_by_position"]]
    if not rows:
        return None
    figure, (left, right) = new_figure(2.9, columns=2, sharey=True)
    for axes, field in ((left, "acceptance_by_position"), (right, "conditional_by_position")):
        for row in rows:
            look = scene.looks[row["method"]]
            known = [(i, rate) for i, rate in enumerate(row[field] or (), 1) if rate is not None]
            if known:
                x, y = zip(*known, strict=True)
                axes.plot(x, y, color=look.colour, marker=look.marker, label=look.label)
        axes.set_ylim(0, 1.03)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("position in the draft")
    left.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    left.set_title("accepted, of all drafts that long", loc="left")
    right.set_title("accepted, if the one before was", loc="left")
    legend(figure, left)
    said = (
        f"{scene.looks[row['method']].label}: {', '.join(words.percent(r) for r in row['acceptance_by_position'])}"
        for row in rows
    )
    return figure, "; ".join(said)


def time(scene: Scene) -> Drawn | None:
    """Mean milliseconds of a round, split into its spans, with the roofline's floor where it is known."""
    rows = [row for row in scene.section.overall if _round_s(row)]
    if not any(row["verify_share"] is not None for row in rows):
        return None
    figure, axes = new_figure(0.85 + 0.3 * len(rows))
    said = []
    for place, row in enumerate(rows):
        total = _round_s(row) * 1e3
        start, words_of_row = 0.0, []
        for span, (colour, hatch) in SPANS.items():
            share = row[f"{span}_share"]
            if share is None:
                continue
            axes.barh(
                place,
                share * total,
                left=start,
                height=0.62,
                color=colour,
                hatch=hatch,
                edgecolor=CARD,
                linewidth=0.5,
            )
            start += share * total
            words_of_row.append(f"{span} {share:.0%}")
        if not words_of_row:
            axes.barh(place, total, height=0.62, fill=False, edgecolor=GREY)
        if row["roofline_share"]:
            floor = row["roofline_share"] * (row["verify_share"] or 0) * total
            axes.plot([floor, floor], [place - 0.42, place + 0.42], color=INK, linewidth=2)
            words_of_row.append(f"roofline floor {floor:.1f} ms")
        axes.annotate(
            f"{total:.1f} ms",
            (total, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
        )
        said.append(
            f"{scene.looks[row['method']].label}: {total:.1f} ms ({', '.join(words_of_row) or 'not split'})"
        )
    _method_axis(axes, scene, rows)
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel("milliseconds a round (mean)")
    _span_legend(figure, rows)
    return figure, "; ".join(said)


def _span_legend(figure: Any, rows: list[Row]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(facecolor=colour, hatch=hatch, edgecolor=CARD, label=span)
        for span, (colour, hatch) in SPANS.items()
    ]
    if any(row["verify_share"] is None for row in rows):
        handles.append(Patch(fill=False, edgecolor=GREY, label="not split"))
    if any(row["roofline_share"] for row in rows):
        handles.append(Line2D([], [], color=INK, linewidth=2, label="floor of a pass (roofline)"))
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), handlelength=1.6)


def _round_s(row: Row) -> float:
    """Mean seconds of a round: seconds a decoded token times tokens a round."""
    return (row["tpot_s"] or 0) * (row["tau"]["point"] or 0)


def k_sweep(scene: Scene) -> Drawn | None:
    """Decode speedup against the draft length, for methods measured at several; the closed form beside it."""
    sweeps = {name: rows for name, rows in _sweeps(scene).items() if len(rows) > 1}
    if not sweeps:
        return None
    figure, axes = new_figure(2.9)
    said = []
    for number, (name, rows) in enumerate(sweeps.items()):
        look = scene.looks[rows[min(rows)]["method"]]
        colour = PALETTE[number % len(PALETTE)]
        lengths = sorted(rows)
        speeds = [rows[k]["decode_speedup"] for k in lengths]
        axes.plot(
            lengths, [s["point"] for s in speeds], color=colour, marker=look.marker, label=f"{name}, measured"
        )
        for k, s in zip(lengths, speeds, strict=True):
            if s["low"] is not None:
                axes.plot([k, k], [s["low"], s["high"]], color=colour, linewidth=1.4)
        closed = [(k, value) for k in lengths if (value := rows[k].get("closed_form_speedup")) is not None]
        if closed:
            axes.plot(
                *zip(*closed, strict=True), color=colour, linestyle=(0, (4, 3)), label=f"{name}, closed form"
            )
        best = max(lengths, key=lambda k: rows[k]["decode_speedup"]["point"])
        said.append(
            f"{name}: "
            + ", ".join(f"k={k} {words.interval(rows[k]['decode_speedup'], 'x')}" for k in lengths)
        )
        said[-1] += f"; best measured k={best}"
    axes.axhline(1, color=LINE, linewidth=1)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("draft length k")
    axes.set_ylabel("decode speedup")
    legend(figure, axes, columns=2)
    return figure, "; ".join(said)


def _sweeps(scene: Scene) -> dict[str, dict[int, Row]]:
    """Method without its draft length -> length -> overall row."""
    found: dict[str, dict[int, Row]] = defaultdict(dict)
    for row in scene.overall:
        name, length = _length(row)
        if length is not None and row["decode_speedup"]["point"] is not None:
            found[name].setdefault(length, row)
    return found


def _length(row: Row) -> tuple[str, int | None]:
    """The label without its draft length, and the length: as an option, else as deep as its drafts went."""
    try:
        spec = parse_spec(row["method"])
    except SpecbenchError:  # a label of another program's
        return plain(row["method"]), None
    option = next((name for name in LENGTHS if name in spec.options), None)
    rest = {name: value for name, value in spec.options.items() if name != option}
    deepest = len(row["acceptance_by_position"] or ()) or None
    value = spec.options[option] if option else ""
    return plain(type(spec)(spec.name, rest).label), int(value) if value.isdecimal() else deepest
