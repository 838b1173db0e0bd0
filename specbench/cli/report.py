"""`specbench report`: render runs that are already measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from specbench.errors import SpecbenchError

PICTURES = ("png", "svg")


def register(app: typer.Typer) -> None:
    app.command("report")(report)


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]", help="Run names or folders. Default: the newest."),
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            help="html, md, leaderboard, csv, json, svg (the table as a picture); of trials: trials-csv, parquet. "
            "May be repeated. Default: html.",
        ),
    ] = None,
    figures: Annotated[
        str | None, typer.Option("--figures", metavar="png|svg", help="Write the figures as files too.")
    ] = None,
    output: Annotated[
        str, typer.Option("--output", help="Folder for the reports; - prints to standard output.")
    ] = "reports",
    results: Annotated[Path, typer.Option("--results", help="Folder that holds the runs.")] = Path("results"),
) -> None:
    """Render runs as HTML, Markdown, CSV, JSON, … into REPORTS/<run>/, and print where; of engines, their table."""
    from specbench.analysis.summary import summarise
    from specbench.report import FORMATS
    from specbench.store import find_runs, read_run

    wanted = [_known("--format", name, list(FORMATS)) for name in dict.fromkeys(formats or ["html"])]
    picture = None if figures is None else _known("--figures", figures, PICTURES)
    if output == "-" and (len(wanted) > 1 or picture):
        raise SpecbenchError("--output - takes one --format", "give a folder to hold more than one file")
    read = [read_run(path) for path in dict.fromkeys(find_runs(results, runs or []))]
    summary = summarise(read)
    if output != "-":
        _print_engines(summary)
    folder = Path(output) / folder_name([run["name"] for run in summary["runs"]])
    for name in wanted:
        content = FORMATS[name].render(summary, read)
        if output == "-":
            typer.echo(content, nl=False)
        else:
            typer.echo(str(write(folder / FORMATS[name].filename, content)))
    for path, picture_bytes in _pictures(summary, read, picture) if picture else ():
        typer.echo(str(write(folder / "figures" / path, picture_bytes)))


def _print_engines(summary: dict[str, Any]) -> None:
    """Runs of several engines side by side, where there are some."""
    from rich.console import Console

    from specbench.report.terminal import side_by_side

    console = Console(highlight=False)
    for part in side_by_side(summary, console.width):
        console.print(part)


def _pictures(summary: dict[str, Any], runs: Sequence[Any], kind: str) -> Iterator[tuple[str, bytes]]:
    """(file name, content) of every figure; where the report has several parts, their number stands in front."""
    from specbench.report import engines, figures
    from specbench.report.figures import style

    save = style.png if kind == "png" else style.svg
    scenes = list(figures.scenes(summary, runs))
    with style.styled():
        tables = list(engines.tables(summary))
        for number, table in enumerate(tables, 1):
            part = f"{number}-" if len(tables) > 1 else ""
            for drawn in figures.draw_engines(table):
                yield f"{part}{drawn.drawing.name}.{kind}", save(drawn.figure)
        for number, scene in enumerate(scenes, 1):
            part = f"{number}-" if len(scenes) > 1 else ""
            for drawn in figures.draw(scene):
                yield f"{part}{drawn.drawing.name}.{kind}", save(drawn.figure)


def _known(option: str, name: str, known: Sequence[str]) -> str:
    if name in known:
        return name
    raise SpecbenchError(f"{option} {name}: no such format", f"use one of: {', '.join(sorted(known))}")


def folder_name(names: list[str]) -> str:
    """The report's folder: the run's name, or the first one's and how many more are in it."""
    safe = "".join(c if c.isalnum() or c in "-_.@+" else "_" for c in names[0]).lstrip(".") or "run"
    return safe if len(names) == 1 else f"{safe}+{len(names) - 1}"


def write(path: Path, content: str | bytes, option: str = "--output") -> Path:
    """Write a report, its folder made where it is missing; `option` named the path."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        why = error.strerror or str(error)
        raise SpecbenchError(
            f"cannot write {path}: {why}", f"give a writable folder with {option}"
        ) from error
    return path
