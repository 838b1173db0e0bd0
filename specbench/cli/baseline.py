"""`specbench baseline`: keep a run, small enough to commit, for later runs to be compared with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from specbench.errors import SpecbenchError

HELP = "Save a run as a baseline for `specbench compare`, or show the saved ones."
COMMIT = 12  # hex digits shown
PIPED_WIDTH = 160  # of tables in a file or a CI log

Results = Annotated[Path, typer.Option("--results", help="Folder that holds the runs.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help=HELP, no_args_is_help=True)
    group.command("save")(save)
    group.command("show")(show)
    app.add_typer(group, name="baseline")


def save(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run name or folder.")],
    name: Annotated[str | None, typer.Option("--as", help="The baseline's name. Default: the run's.")] = None,
    to: Annotated[
        Path | None, typer.Option("--to", help="Folder for baselines. Default: RESULTS/reference.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Overwrite a baseline of that name.")] = False,
    results: Results = Path("results"),
) -> None:
    """Copy what `compare` and `report` need of a run: everything but texts, token ids and the time of each round.

    The baseline is itself a run folder, a few kilobytes a question; the same run gives the same bytes.
    """
    from specbench.baseline import save_baseline
    from specbench.store import REFERENCE, find_runs, read_run

    read = read_run(find_runs(results, [run])[0])
    name = name or read.path.name
    if Path(name).name != name or name in ("", ".", ".."):
        raise SpecbenchError(f"--as {name} is not a plain name", "give the folder with --to")
    folder = (to or results / REFERENCE) / name
    save_baseline(read, folder, replace=replace)
    typer.echo(str(folder))


def show(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="A baseline's name or folder. Default: list them all."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    results: Results = Path("results"),
) -> None:
    """List the saved baselines, or print one with its table."""
    from specbench.store import REFERENCE, find_baseline, list_runs, read_run

    if name is not None:
        path = find_baseline(results, name)
        if path is None:
            message = f"there is no baseline {name!r} in {results / REFERENCE}"
            raise SpecbenchError(message, "see `specbench baseline show`")
        _show_one(read_run(path), as_json)
        return
    found = [_facts(read_run(path)) for path in list_runs(results / REFERENCE)]
    if as_json:
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
    elif not found:
        typer.echo(f"no baselines in {results / REFERENCE}")
    else:
        _table(sorted(found, key=lambda facts: facts["baseline"]))


def _show_one(run: Any, as_json: bool) -> None:
    from rich.console import Console

    from specbench.analysis.summary import summarise
    from specbench.report import FORMATS
    from specbench.report.plain import plain
    from specbench.report.terminal import render

    summary = summarise([run])
    if as_json:
        typer.echo(FORMATS["json"].render(summary, [run]), nl=False)
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    for what, value in _facts(run).items():
        console.print(f"{what:9} {plain(value)}", markup=False, soft_wrap=True)
    console.print()
    console.print(render(summary, console.width))


def _facts(run: Any) -> dict[str, Any]:
    from specbench.analysis.extract import run_extract

    extract = run_extract(run.manifest, run.path.name)
    return {
        "baseline": run.path.name,
        "target": extract["target"],
        "methods": ", ".join(method["label"] for method in run.manifest.get("methods", [])),
        "tasks": ", ".join(str(task.get("name")) for task in run.manifest.get("tasks", [])),
        "trials": len(run.trials),
        "machine": extract["machine"],
        "commit": ((extract.get("git") or {}).get("commit") or "")[:COMMIT] or None,
        "start": extract["start"],
    }


def _table(rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from specbench.report.plain import plain

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if value is None else plain(value)) for value in row.values()))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    console.print(table)
