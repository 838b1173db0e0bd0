"""`specbench report`: render runs that are already measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specbench.errors import SpecbenchError

LATER = {"html": "the HTML report is not part of this version"}


def register(app: typer.Typer) -> None:
    app.command("report")(report)


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]", help="Run names or folders. Default: the newest."),
    ] = None,
    formats: Annotated[
        list[str] | None, typer.Option("--format", help="md, json, csv or svg; may be repeated. Default: md.")
    ] = None,
    output: Annotated[
        str, typer.Option("--output", help="Folder for the reports; - prints to standard output.")
    ] = "reports",
    results: Annotated[Path, typer.Option("--results", help="Folder that holds the runs.")] = Path("results"),
) -> None:
    """Render runs as Markdown, JSON, CSV or SVG into REPORTS/<run>/, and print where."""
    from specbench.analysis.summary import summarise
    from specbench.report import FORMATS
    from specbench.store import find_runs, read_run

    wanted = [_known(name, list(FORMATS)) for name in dict.fromkeys(formats or ["md"])]
    if output == "-" and len(wanted) > 1:
        raise SpecbenchError(
            "--output - takes one --format", "name one format, or a folder to hold all of them"
        )
    read = [read_run(path) for path in find_runs(results, runs or [])]
    summary = summarise(read)
    names = [run["name"] for run in summary["runs"]]
    for name in wanted:
        text = FORMATS[name].render(summary, read)
        if output == "-":
            typer.echo(text, nl=False)
        else:
            typer.echo(str(write(Path(output) / folder_name(names) / FORMATS[name].filename, text)))


def _known(name: str, known: list[str]) -> str:
    if name in known:
        return name
    message = f"--format {name}: {LATER.get(name, 'no such format')}"
    raise SpecbenchError(message, f"use one of: {', '.join(sorted(known))}")


def folder_name(names: list[str]) -> str:
    """The report's folder: the run's name, or the first one's and how many more are in it."""
    safe = "".join(c if c.isalnum() or c in "-_.@+" else "_" for c in names[0]).lstrip(".") or "run"
    return safe if len(names) == 1 else f"{safe}+{len(names) - 1}"


def write(path: Path, text: str) -> Path:
    """Write a report, its folder made where it is missing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        why = error.strerror or str(error)
        raise SpecbenchError(f"cannot write {path}: {why}", "give a writable folder with --output") from error
    return path
