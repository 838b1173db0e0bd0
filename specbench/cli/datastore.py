"""`specbench datastore`: texts made ready to be searched by the methods rest and sam."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

HELP = "Datastores of text, for the methods rest (datastore=) and sam (corpus=)."

group = typer.Typer(no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="datastore")


@group.callback(help=HELP)
def _root() -> None:
    """Without it the one command would be no group."""


@group.command()
def build(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE…", help="Plain text or JSONL (text or turns); also as .gz.")
    ],
    target: Annotated[str, typer.Option(help="Whose tokenizer: an alias, Hub id, folder or GGUF file.")],
    output: Annotated[
        Path | None, typer.Option(help="Folder to make. Default: in the cache, named after file and target.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Replace a datastore of other files.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that the checkpoint brings.")
    ] = False,
) -> None:
    """Build a datastore from texts, and print where it is: use it as rest:datastore=PATH or sam:corpus=PATH."""
    from specbench.errors import SpecbenchError
    from specbench.models.datastore import datastores_folder
    from specbench.models.datastore_build import build as build_datastore
    from specbench.models.load import load_tokenizer

    def notify(line: str) -> None:
        print(line, file=sys.stderr)

    for file in files:
        if not file.is_file():
            raise SpecbenchError(f"{file}: there is no such file", "give text or JSONL files")
    name, tokenizer = load_tokenizer(
        target, revision=revision, trust_remote_code=trust_remote_code, notify=notify
    )
    place = output or datastores_folder() / f"{files[0].name.partition('.')[0]}-{name.replace('/', '-')}"
    tokens = build_datastore(files, tokenizer, name, place, notify, fresh=fresh)
    size = sum(part.stat().st_size for part in place.iterdir())
    ref = output or place.name
    notify(
        f"{tokens:,} tokens in {size / 1e6:,.1f} MB; use --method rest:datastore={ref} or sam:corpus={ref}"
    )
    print(place)
