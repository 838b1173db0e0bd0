"""The figure of `specbench roofline`: the floor of a pass by its tokens, and the speedup limit by batch size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbench.analysis.roofline import Architecture, Device, Speculation, cost
from specbench.report.figures.style import INK, MARKERS, PALETTE, legend, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUERIES = tuple(2**power for power in range(9))  # tokens a row
ROWS = (1, 4, 16, 64)
SIZES = tuple(2**power for power in range(11))  # of batches
LONGER = (1, 8, 64)  # times the context


def figure(name: str, target: Architecture, device: Device, how: Speculation, context: int) -> Figure:
    """Left: floors over tokens a row, at several batch sizes; right: limits over batch size, at several contexts.

    `name` says what the target is, and in which numbers.
    """
    made, (left, right) = new_figure(3.0, columns=2)
    for place, rows in enumerate(ROWS):
        floors = [1e3 * cost(target, device, rows, query, context).seconds for query in QUERIES]
        left.plot(
            QUERIES, floors, color=PALETTE[place], marker=MARKERS[place], markersize=3, label=f"batch {rows}"
        )
    for place, times in enumerate(LONGER if context else (1,)):
        limits = [how.limit(target, device, rows, times * context) for rows in SIZES]
        right.plot(SIZES, limits, color=INK, linestyle=(0, (1 + 3 * place, 1 + place)),
                   label=f"context {times * context:,}")  # fmt: skip
    right.axhline(1, color=INK, linewidth=0.8)
    left.set(xscale="log", yscale="log", xlabel="tokens a row", ylabel="floor of a pass, ms")
    right.set(xscale="log", xlabel="batch size", ylabel="speedup at most")
    right.set_title(f"τ {how.tau:g} from {how.query - 1} drafted", loc="left")
    left.set_title(f"{name}\n{device.name}", loc="left")
    left.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    for axes, ticks in ((left, QUERIES), (right, SIZES)):
        axes.set_xticks(ticks[::2], [str(tick) for tick in ticks[::2]])
        axes.minorticks_off()
    legend(made, left)
    right.legend(loc="best")
    return made
