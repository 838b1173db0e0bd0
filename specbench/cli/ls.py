"""`specbench ls`: what there is to measure with, and what has been measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from specbench.errors import SpecbenchError

PROSE = ("what", "options", "drafters", "methods", "status")  # columns that may wrap on a terminal


class What(StrEnum):
    targets = "targets"
    methods = "methods"
    tasks = "tasks"
    runs = "runs"


def register(app: typer.Typer) -> None:
    app.command("ls")(ls)


def ls(
    what: Annotated[What, typer.Argument(help="targets, methods, tasks or runs.")],
    output: Annotated[Path, typer.Option(help="Folder that holds the runs.")] = Path("results"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """List known targets, methods, tasks, or the runs on disk."""
    listings: dict[What, Callable[[], list[dict[str, Any]]]] = {
        What.targets: _targets,
        What.methods: _methods,
        What.tasks: _tasks,
        What.runs: lambda: _runs(output),
    }
    rows = listings[what]()
    if as_json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
    elif rows:
        _table(rows)
    else:
        print(f"no {what.value}" + (f" in {output}" if what is What.runs else ""))


def _targets() -> list[dict[str, Any]]:
    from specbench.models import registry

    return [
        {
            "alias": entry.alias,
            "hub": entry.hub,
            "parameters": f"{entry.parameters / 1e9:.3g} B",
            "access": "gated" if entry.gated else "open",
            "id": "verified" if entry.verified else "unverified",
            "random": "yes" if entry.config is not None else "no",
            "drafters": ", ".join(sorted(filter(entry.usable, entry.drafts))),
        }
        for entry in registry.targets()
    ]


def _methods() -> list[dict[str, Any]]:
    from specbench.spec import find_method, method_names, options_of, summary_line, written

    rows = []
    for name in method_names():
        cls = find_method(name)
        options = [
            written(option) + ("" if p.default in (p.empty, None) else f"={_spelled(p.default)}")
            for option, p in options_of(cls).items()
        ]
        lossless = "lossless" if getattr(cls, "lossless", True) else "lossy"
        rows.append(
            {"method": name, "what": summary_line(cls), "options": ", ".join(options), "output": lossless}
        )
    return rows


def _tasks() -> list[dict[str, Any]]:
    from specbench.prompts import PRESETS, bundled

    rows = [
        {
            "task": info.name,
            "questions": info.rows,
            "turns": info.turns,
            "new tokens": info.max_new_tokens,
            "licence": info.licence,
            "what": info.description,
        }
        for info in bundled()
    ]
    presets = [{"task": f"hf:{name}", "what": "from the Hugging Face Hub"} for name in PRESETS]
    return rows + [dict.fromkeys(rows[0], "") | preset for preset in presets] if rows else presets


def _runs(output: Path) -> list[dict[str, Any]]:
    from specbench.store import list_runs

    return [_run(path) for path in list_runs(output)]


def _run(path: Path) -> dict[str, Any]:
    """One run's line; a damaged one says so and leaves the others in peace."""
    from specbench.store import read_run

    row: dict[str, Any] = dict.fromkeys(("run", "target", "methods", "trials", "status", "start"))
    row["run"] = path.name
    try:
        run = read_run(path)
    except SpecbenchError as error:
        return row | {"status": f"unreadable: {error.message}"}
    manifest = run.manifest
    return row | {
        "target": manifest.get("target", {}).get("name"),
        "methods": ", ".join(method["label"] for method in manifest.get("methods", [])),
        "trials": len(run.trials),
        "status": manifest.get("status"),
        "start": manifest.get("start"),
    }


def _spelled(value: Any) -> str:
    """A default as it would be written in a SPEC."""
    from specbench.spec import Spec

    if isinstance(value, Spec):
        return f"({value.label})"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _table(rows: list[dict[str, Any]]) -> None:
    """Words are never cut: in a pipe or a log a row is one line, on a terminal prose wraps between words."""
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    from specbench.report.plain import plain

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    cells = [["" if value is None else plain(value) for value in row.values()] for row in rows]
    for column, *texts in zip(rows[0], *cells, strict=True):
        pieces = [piece for text in texts for piece in (text.split() if column in PROSE else [text])]
        widest = max(map(len, [*pieces, column]))
        table.add_column(column, no_wrap=column not in PROSE, min_width=widest, overflow="fold")
    for texts in cells:
        table.add_row(*map(Text, texts))
    console = Console(highlight=False)
    needed = Measurement.get(console, console.options.update(max_width=10_000), table)
    wraps = console.is_terminal and console.width >= needed.minimum
    console.width = console.width if wraps else needed.maximum
    console.print(table, crop=False)
