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
tokens_per_s 0.90; memory at most 1.05 (--fail-above). METRIC=F sets one metric's limit (--fail-below tau=0.95);
a bare F is for all of them, save that it never loosens tau's, which hardly varies.

Prompts that both runs measured are paired; without enough of them a row is marked unpaired. Runs of different
targets or sampling are never compared, nor tokens_per_s and memory across machines. A method that only one of them
measured is listed and not compared; with --strict one that only BASE measured is a regression.

--identical compares the tokens of greedy outputs as well: of the same method on the same prompt they must be the same
ones where both runs are in float32. In a narrower dtype near-ties fall either way: it says how many are identical.

As BASE a saved baseline comes before a run of the same name, as NEW a run before a baseline.

Exit code: 1 a regression or a difference that --identical finds in float32, 2 nothing could be compared, 0 otherwise,
ambiguous rows included.
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
    base: Annotated[str, typer.Argument(metavar="BASE", help="Saved baseline or run: name or folder.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="Run name or folder.")],
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"{METRIC_NAMES}; may be repeated. Default: speedup and tau."),
    ] = None,
    fail_below: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[METRIC=]F",
            help="Smallest NEW / BASE that is no regression: 0.9, or tau=0.9 for one metric; may be repeated.",
        ),
    ] = None,
    fail_above: Annotated[
        float | None, typer.Option(metavar="F", help="Largest NEW / BASE of memory that is no regression.")
    ] = None,
    overall: Annotated[bool, typer.Option("--overall", help="Only each method's overall row.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="A method that only BASE measured is a regression.")
    ] = False,
    identical: Annotated[
        bool, typer.Option("--identical", help="Compare the tokens of greedy outputs as well.")
    ] = False,
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
    from specbench.analysis.same_tokens import same_tokens, sentence
    from specbench.cli.report import write
    from specbench.report.ci import FORMATS
    from specbench.store import find_baseline, find_runs, read_run

    wanted = _metrics(metric or list(DEFAULT))
    limits = _limits(wanted, fail_below or [], fail_above)
    first = read_run(find_baseline(results, base) or find_runs(results, [base])[0])
    second = read_run(find_runs(results, [new])[0])
    found = compared(first, second, wanted, limits, strict)
    if identical:
        found["identical"] = same_tokens(first, second)
    if overall:
        found["rows"] = [row for row in found["rows"] if row["task"] == "overall"]
    if not found["rows"]:
        raise SpecbenchError(
            f"{base} and {new} share nothing that could be compared: {_why(found)}",
            "compare runs that measured the same methods at the same batch size on common tasks",
        )
    printed = "-" in [file for _, file in targets]
    if not printed:
        _print(found, every)
    if identical:
        typer.echo(sentence(found["identical"]), err=printed)
    for name, file in targets:
        text = FORMATS[name](found)
        if file == "-":
            typer.echo(text, nl=False)
        else:
            write(Path(file), text)
    differs = identical and found["identical"]["failure"]
    if differs or any(row["verdict"] == REGRESSED for row in found["rows"]):
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
    """The limits given, by metric: a bare --fail-below is for every metric of which more is better.

    It is meant for what the machine's noise is in, which tau is not: tau's own limit stays where it is tighter.
    """
    from specbench.analysis.compare import METRICS

    tight = METRICS["tau"].limit
    limits: dict[str, float] = {}
    for text in sorted(below, key=lambda text: "=" in text):  # the named ones last: they win
        name, _, number = text.rpartition("=")
        if name == "memory" or (name and name not in metrics):
            hint = "memory has --fail-above" if name == "memory" else f"add --metric {name}, or leave it out"
            raise SpecbenchError(f"--fail-below {text}: not a metric of this comparison", hint)
        value = _ratio(f"--fail-below {text}", number)
        if value > 1:
            raise SpecbenchError(f"--fail-below {text} is above 1", "give the ratio NEW / BASE, e.g. 0.97")
        if name:
            limits[name] = value
            continue
        if metrics == ["tau"] and value < tight:
            raise SpecbenchError(
                f"--fail-below {text} is looser than tau's limit, {tight}", f"write --fail-below tau={text}"
            )
        limits |= {m: max(value, tight) if m == "tau" else value for m in metrics if m != "memory"}
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
    from specbench.report.comparison import method

    reasons = [f"{method(place)} {place['reason']}" for place in found["missing"]]
    return "; ".join(reasons) or "no method other than vanilla has numbers on a common task"
