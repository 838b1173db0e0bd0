"""`specbench compare`: what changed between two runs, and whether that is a regression."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specbench.errors import SpecbenchError

HELP = """Compare two runs, or a run with a saved baseline: NEW / BASE with an interval and a verdict a row.

With F the limit (--fail-below), and the 95% interval of NEW / BASE:

regressed: the whole interval is below F.

improved: the whole interval is above 1/F.

no change: the whole interval lies within F and 1/F.

ambiguous: the interval reaches across F or 1/F, so more questions are needed; or there is none.

The interval is over questions, so F must leave room for what differs between two starts of a machine or engine
(seen: 11% of an engine's throughput). Defaults: speedup 0.95 on one machine and 0.80 across two, tau 0.98,
tokens_per_s 0.90; memory at most 1.05 (--fail-above).

Prompts that both runs measured are paired; without enough of them a row is marked unpaired. Runs of different
targets or sampling are never compared, nor tokens_per_s and memory across machines.

Exit code: 1 a regression, 2 nothing could be compared, 0 otherwise, ambiguous rows included.
"""
METRIC_NAMES = "speedup, tau, tokens_per_s or memory"
FORMAT_NAMES = ("md", "json", "junit", "github-action-benchmark")
PIPED_WIDTH = 160


def register(app: typer.Typer) -> None:
    app.command("compare", help=paragraphs(HELP))(compare)


def paragraphs(text: str) -> str:
    """The text with the line breaks within its paragraphs taken out: the terminal's width breaks them."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def compare(
    base: Annotated[str, typer.Argument(metavar="BASE", help="Run name, folder, or saved baseline.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="Run name or folder.")],
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"{METRIC_NAMES}; may be repeated. Default: speedup and tau."),
    ] = None,
    fail_below: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[METRIC=]F", help="Smallest NEW / BASE that is no regression; may be repeated."
        ),
    ] = None,
    fail_above: Annotated[
        float | None, typer.Option(metavar="F", help="Largest NEW / BASE of memory that is no regression.")
    ] = None,
    overall: Annotated[bool, typer.Option("--overall", help="Only each method's overall row.")] = False,
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", help=f"{', '.join(FORMAT_NAMES)}; may be repeated, each with its --output."),
    ] = None,
    output: Annotated[
        list[str] | None, typer.Option("--output", help="File for the --format; - or none: standard output.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The comparison as one JSON document.")] = False,
    every: Annotated[bool, typer.Option("--all", help="List tasks without a change as well.")] = False,
    results: Annotated[Path, typer.Option("--results", help="Folder that holds the runs.")] = Path("results"),
) -> None:
    targets = _targets([*(formats or []), *(["json"] if as_json else [])], output or [])
    from specbench.analysis.compare import DEFAULT, REGRESSED
    from specbench.analysis.compare import compare as compared
    from specbench.cli.report import write
    from specbench.report.ci import FORMATS
    from specbench.store import find_runs, read_run

    wanted = _metrics(metric or list(DEFAULT))
    first, second = (read_run(path) for path in find_runs(results, [base, new]))
    found = compared(first, second, wanted, _limits(wanted, fail_below or [], fail_above))
    if overall:
        found["rows"] = [row for row in found["rows"] if row["task"] == "overall"]
    if not found["rows"]:
        raise SpecbenchError(
            f"{base} and {new} share nothing that could be compared: {_why(found)}",
            "compare runs that measured the same methods at the same batch size on common tasks",
        )
    if "-" not in [file for _, file in targets]:
        _print(found, every)
    for name, file in targets:
        text = FORMATS[name](found)
        if file == "-":
            typer.echo(text, nl=False)
        else:
            write(Path(file), text)
    if any(row["verdict"] == REGRESSED for row in found["rows"]):
        raise typer.Exit(1)


def _print(found: dict[str, Any], every: bool) -> None:
    from rich.console import Console

    from specbench.report.comparison import terminal

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, PIPED_WIDTH)
    console.print(terminal(found, every))


def _targets(formats: list[str], output: list[str]) -> list[tuple[str, str]]:
    """(format, file) pairs; `-` is standard output, which only one may have."""
    for name in formats:
        if name not in FORMAT_NAMES:
            raise SpecbenchError(f"--format {name}: no such format", f"use one of: {', '.join(FORMAT_NAMES)}")
    if len(output) > len(formats):
        raise SpecbenchError("there are more --output than --format", "give each --format its --output")
    files = output + ["-"] * (len(formats) - len(output))
    if files.count("-") > 1:
        raise SpecbenchError("two formats go to standard output", "give each --format its --output FILE")
    return list(zip(formats, files, strict=True))


def _metrics(names: list[str]) -> list[str]:
    from specbench.analysis.compare import METRICS

    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise SpecbenchError(f"--metric {unknown[0]}: no such metric", f"use {METRIC_NAMES}")
    return list(dict.fromkeys(names))


def _limits(metrics: list[str], below: list[str], above: float | None) -> dict[str, float]:
    """The limits given, by metric: a bare --fail-below is for every metric of which more is better."""
    limits: dict[str, float] = {}
    for text in sorted(below, key=lambda text: "=" in text):  # the named ones last: they win
        name, _, number = text.rpartition("=")
        if name == "memory" or (name and name not in metrics):
            hint = "memory has --fail-above" if name == "memory" else f"add --metric {name}, or leave it out"
            raise SpecbenchError(f"--fail-below {text}: not a metric of this comparison", hint)
        value = _ratio(f"--fail-below {text}", number)
        if value > 1:
            raise SpecbenchError(f"--fail-below {text} is above 1", "give the ratio NEW / BASE, e.g. 0.97")
        limits |= dict.fromkeys([name] if name else [m for m in metrics if m != "memory"], value)
    if above is not None:
        if "memory" not in metrics:
            raise SpecbenchError("--fail-above is memory's limit", "add --metric memory, or leave it out")
        if not 1 <= above < float("inf"):
            raise SpecbenchError(f"--fail-above {above} is below 1", "give the ratio NEW / BASE, e.g. 1.05")
        limits["memory"] = above
    return limits


def _ratio(option: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise SpecbenchError(f"{option} is not a ratio above 0", "write e.g. --fail-below 0.97 or tau=0.98")
    return value


def _why(found: dict[str, Any]) -> str:
    reasons = [f"{place['method']} {place['reason']}" for place in found["missing"]]
    return "; ".join(reasons) or "no method other than vanilla has numbers on a common task"
