"""The command line: one Typer command a file, each with its heavy imports inside the command."""

from __future__ import annotations

import importlib
import io
import keyword
import os
import sys

import typer

from specbench.errors import SpecbenchError

app = typer.Typer(
    name="specbench",
    help="Benchmarks of speculative decoding that can be believed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

COMMANDS = (
    "run",
    "report",
    "compare",
    "baseline",
    "history",
    "import",
    "ls",
    "inspect",
    "doctor",
    "datastore",
    "roofline",
)
for _name in COMMANDS:
    _module = f"{_name}_" if keyword.iskeyword(_name) else _name
    importlib.import_module(f"specbench.cli.{_module}").register(app)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and leave.")) -> None:
    if version:
        from specbench import __version__

        typer.echo(f"specbench {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line. Exit codes: design §8."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that has no τ must not end a run
            stream.reconfigure(errors="backslashreplace")
    try:
        app(standalone_mode=True)
    except SpecbenchError as error:
        from specbench.report.plain import plain

        print(f"error: {plain(error.message)}\n  hint: {plain(error.hint)}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
