"""`specbench ls`: what there is to measure with, and what has been measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer


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
            "drafters": ", ".join(sorted(entry.drafts)),
        }
        for entry in registry.targets()
    ]


def _methods() -> list[dict[str, Any]]:
    from specbench.spec import find_method, method_names, options_of, summary_line

    rows = []
    for name in method_names():
        cls = find_method(name)
        options = [
            option if p.default is p.empty or p.default is None else f"{option}={_spelled(p.default)}"
            for option, p in options_of(cls).items()
        ]
        lossless = "lossless" if getattr(cls, "lossless", True) else "lossy"
        rows.append({"method": name, "what": summary_line(cls), "options": ", ".join(options), "output": lossless})
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
    from specbench.store import list_runs, read_run

    rows = []
    for path in list_runs(output):
        run = read_run(path)
        manifest = run.manifest
        rows.append(
            {
                "run": path.name,
                "target": manifest.get("target", {}).get("name"),
                "methods": ", ".join(m["label"] for m in manifest.get("methods", [])),
                "trials": len(run.trials),
                "status": manifest.get("status"),
                "start": manifest.get("start"),
            }
        )
    return rows


def _spelled(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _table(rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(value)) for value in row.values()))
    Console(highlight=False).print(table)
