"""The columns of the tables: heading, definition and cell, written once for every format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specbench.report import words
from specbench.report.base import Row


@dataclass(frozen=True)
class Column:
    """A column of numbers of a summary row.

    Args:
        title: the heading in a document.
        heading: the heading in a terminal, lines kept short.
        meaning: the definition, with the unit.
        cell: a row's text.
        keep: how long a narrow terminal keeps it; 0 is not shown there at all.
    """

    title: str
    heading: str
    meaning: str
    cell: Callable[[Row], str]
    keep: int = 0


COLUMNS = (
    Column(
        "speedup (end to end)",
        "speedup\nend to end",
        "vanilla's seconds per output token over the method's, whole requests, over the blocks both measured "
        "(a ratio of sums), with the 95% interval of a paired bootstrap over questions; n= where there are "
        "too few questions for an interval",
        words.speedup,
        9,
    ),
    Column(
        "decode speedup",
        "decode\nspeedup",
        "the same without the pass over the prompt and the first token",
        lambda row: words.times(row["decode_speedup"]["point"]),
        7,
    ),
    Column(
        "τ (tokens/round, bonus included)",
        "τ tokens/\nround,\nbonus\nincluded",
        "mean tokens a round emits, over all rounds, the target's own bonus token included; vanilla is 1",
        lambda row: words.number(row["tau"]["point"]),
        8,
    ),
    Column(
        "α (accepted/round, bonus excluded)",
        "",
        "mean drafted tokens of a round that end up in the output; the bonus token is not counted",
        lambda row: words.number(row["alpha"]),
    ),
    Column(
        "acceptance rate",
        "accept.\nrate",
        "accepted / drafted tokens",
        lambda row: words.percent(row["acceptance_rate"]),
        5,
    ),
    Column(
        "draft share",
        "draft\nshare",
        "share of decode time spent drafting",
        lambda row: words.percent(row["draft_share"]),
        3,
    ),
    Column(
        "verify inflation",
        "",
        "mean seconds of a pass of the target over vanilla's",
        lambda row: words.times(row["verify_inflation"]),
    ),
    Column(
        "predicted",
        "",
        "decode speedup that τ, drafting and verify inflation give; the gap to the measured is the harness",
        lambda row: words.times(row["predicted_speedup"]),
    ),
    Column(
        "tok/s",
        "tok/s",
        "output tokens per second, end to end; never compare it across machines",
        lambda row: words.number(row["tokens_per_s"], 1),
        4,
    ),
    Column(
        "TTFT",
        "",
        "mean time to the first token (the pass over the prompt)",
        lambda row: words.seconds(row["ttft_s"]),
    ),
    Column(
        "TPOT", "", "seconds of decode per token after the first", lambda row: words.seconds(row["tpot_s"])
    ),
    Column(
        "memory above vanilla",
        "memory\nabove\nvanilla",
        "peak bytes above vanilla's peak: drafter weights, extra KV, activations",
        lambda row: words.size(row["memory_overhead_bytes"], signed=True),
        2,
    ),
    Column(
        "output = vanilla's",
        "output =\nvanilla's",
        "greedy outputs identical to vanilla's, of those compared; lossy: the method does not promise them",
        words.output,
        6,
    ),
    Column(
        "near-ties",
        "",
        "outputs that differ where the target's top two logits are within 0.001, so that rounding decides",
        lambda row: words.NONE if row["near_ties"] is None else str(row["near_ties"]),
    ),
)
