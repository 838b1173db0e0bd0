"""`specbench import`: results of other benchmarks as runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbench.errors import SpecbenchError

if TYPE_CHECKING:
    from specbench.importers import Source

FORMAT_NAMES = ("spec-bench", "vllm", "sglang")


def register(app: typer.Typer) -> None:
    app.command("import")(import_)


def import_(
    form: Annotated[str, typer.Argument(metavar="FORMAT", help=f"{', '.join(FORMAT_NAMES)}.")],
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="[METHOD=]FILE…", help="A method's results; without METHOD the file names it."
        ),
    ],
    baseline: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Results without speculation; repeat for repeated measurements."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="NAME", help="The target's name, where the files do not say.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="That the outputs were sampled at, where the files do not say.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The run's name. Default: date, time and format.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for runs.")] = Path("results"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Move an existing run of that name aside.")] = False,
) -> None:
    """Read other benchmarks' result files into a run, for `report` and `compare`.

    spec-bench: its answer files.

    vllm: what `vllm bench serve --save-result --save-detailed` writes.

    sglang: what `sglang.bench_serving --output-details` writes.

    What a format cannot give is unknown in the run, and said.
    """
    from specbench.importers import FORMATS, Source
    from specbench.importers.base import BASELINE, manifest
    from specbench.store import RunStore, default_name
    from specbench.trial_file import trial_of

    if form not in FORMATS:
        raise SpecbenchError(f"there is no importer for {form}", f"use one of: {', '.join(FORMATS)}")
    sources = [*(Source(path, BASELINE) for path in baseline or []), *map(_source, files)]
    store = RunStore(output / _plain(name or default_name(form)))
    if store.exists and not fresh:
        raise SpecbenchError(
            f"there is a run {store.path}", "choose another --name, or --fresh to move it aside"
        )
    found = FORMATS[form].read(sources, temperature)
    try:
        trials = [trial_of(row) for row in found.rows]
    except ValueError as error:
        raise SpecbenchError(
            f"the {form} files hold what is no trial: {error}", "give the benchmark's own result files"
        ) from error
    about = manifest(FORMATS[form], sources, found, store.path.name, target, sys.argv[1:])
    if not about["target"].get("name"):
        raise SpecbenchError(f"the {form} files do not say what the target is", "name it with --target")
    if fresh:
        store.move_aside()
    store.write_manifest(about)
    store.append(trials)
    for note in about["target"]["notes"]:
        print(f"note: {note}", file=sys.stderr)
    typer.echo(str(store.path))


def _source(text: str) -> Source:
    from specbench.importers import Source

    label, equals, path = text.partition("=")
    if not equals or Path(text).exists():
        return Source(Path(text))
    if not label:
        raise SpecbenchError(f"{text} names no method", "write METHOD=FILE, or FILE")
    return Source(Path(path), label)


def _plain(name: str) -> str:
    if Path(name).name != name or name in ("", ".", ".."):
        raise SpecbenchError(f"--name {name} is a path", "give a plain name, and the folder with --output")
    return name
