"""`specbench history`: a metric over time, from the runs on disk."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from specbench.errors import SpecbenchError

NAMES = "speedup, decode_speedup, tau, acceptance_rate, tokens_per_s, ttft_s, tpot_s or memory"
FORMAT_NAMES = ("md", "csv", "json", "svg", "png")


def register(app: typer.Typer) -> None:
    app.command("history")(history)


def history(
    metric: Annotated[str, typer.Argument(metavar="METRIC", help=f"{NAMES}.")],
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]…", help="Run names or folders. Default: all in the results folder."),
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(metavar="LABEL", help="Only this method; may be repeated.")
    ] = None,
    form: Annotated[
        str | None,
        typer.Option("--format", help=f"{', '.join(FORMAT_NAMES)}. Default: lines for a terminal."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="File for the --format. Default: standard output.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    results: Annotated[Path, typer.Option("--results", help="Folder that holds the runs.")] = Path("results"),
) -> None:
    """Print each method's METRIC run by run, oldest first, with a small plot.

    Runs of another target or engine, other tasks, sampling or limits stand apart; so do other machines for what
    depends on them (tokens_per_s, ttft_s, tpot_s, memory).
    """
    from specbench.analysis.history import TRACKED
    from specbench.analysis.history import history as tracked
    from specbench.cli.report import write
    from specbench.report.history import FORMATS, terminal

    form = form or ("json" if as_json else None)
    if metric not in TRACKED:
        raise SpecbenchError(f"there is no history of {metric}", f"use {NAMES}")
    if form is not None and form not in FORMATS:
        raise SpecbenchError(f"--format {form}: no such format", f"use one of: {', '.join(FORMATS)}")
    if output is not None and form is None:
        raise SpecbenchError("--output needs a --format", f"add one of: {', '.join(FORMATS)}")
    if form == "png" and output is None:
        raise SpecbenchError("a PNG is no text for standard output", "add --output FILE.png")
    found = tracked(_read(results, runs or []), metric)
    for group in found["groups"]:
        group["series"] = [s for s in group["series"] if not method or s["method"] in method]
    found["groups"] = [group for group in found["groups"] if group["series"]]
    if not found["groups"]:
        which = f" of {', '.join(method)}" if method else ""
        raise SpecbenchError(f"no run in {results} has {metric}{which}", "see `specbench ls runs`")
    text = terminal(found) if form is None else FORMATS[form](found)
    if output is not None:
        write(output, text)
    else:
        typer.echo(text, nl=False)


def _read(results: Path, names: list[str]) -> list:
    """The runs; where none is named, one that cannot be read is said and left out."""
    from specbench.report.plain import plain
    from specbench.store import find_runs, list_runs, read_run

    if names:
        return [read_run(path) for path in find_runs(results, names)]
    runs = []
    for path in list_runs(results):
        try:
            runs.append(read_run(path))
        except SpecbenchError as error:
            print(f"note: left out: {plain(error.message)}", file=sys.stderr)
    return runs
