"""`specbench doctor`: what this machine has, whether it is fit to measure on, and what to do about it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from specbench.measure.advice import Problem


def register(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
    engines: bool = typer.Option(
        False, "--engines", help="Look at the serving engines, and at nothing else."
    ),
    engine: list[str] = typer.Option(
        [], "--engine", help="Look at this one alone, e.g. vllm:binary=VENV/bin/vllm. Repeatable."
    ),
    strict: bool = typer.Option(
        False, "--strict", help="Exit code 1 if a self-check (clock, graphs, quantised layers) fails."
    ),
) -> None:
    """Look at versions, devices, caches, the Hub, memory bandwidth and noise; say what to do about problems.

    Exit code 0 if a run could work here, 2 if not.
    """
    from specbench.errors import SpecbenchError
    from specbench.measure.advice import problems
    from specbench.measure.checks import gather

    if engines or engine:
        _engines(engine, as_json)
        return
    facts = gather()
    found = problems(facts)
    fatal = next((problem for problem in found if problem.fatal), None)
    if as_json:
        listed = [vars(problem) for problem in found]
        print(json.dumps({**facts, "problems": listed, "ok": fatal is None}, indent=2))
    else:
        _print(facts, found)
    if fatal is not None:
        raise SpecbenchError(fatal.what, fatal.advice)
    if strict and not facts["gpu"]["torch_gpus"]:
        print("no GPU: no self-check of one was made", file=sys.stderr)
    if strict and any(problem.failed for problem in found):
        raise typer.Exit(1)


def _engines(asked: list[str], as_json: bool) -> None:
    """Which engines (all, or those asked for) are here, what each can do, and how missing ones are installed."""
    from specbench.engines import engines
    from specbench.serving.options import parse_engine
    from specbench.serving.probe import survey

    options = [parse_engine(text) for text in asked]
    found = survey(
        [(one.engine, one.binary) for one in options] or [(one, None) for one in engines().values()]
    )
    if as_json:
        print(json.dumps({"schema": 1, "engines": found}, indent=2))
        return
    for name, facts in found.items():
        state = f"found, version {facts['version'] or 'unknown'}" if facts["found"] else facts["missing"]
        print(f"{name}: {state}")
        for line in (
            f"methods: {', '.join(facts['methods'])}" if facts["methods"] else facts["no_speculation"],
        ):
            print(f"  {line}")
        if not facts["found"]:
            print(f"  install: {facts['install']}")
        for method, what in facts["lacking"].items():
            print(f"  {method} cannot run here: no {what}")


def _print(facts: dict[str, Any], found: list[Problem]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table.grid(padding=(0, 2))
    for name, value in _lines(facts):
        table.add_row(f"[bold]{name}[/bold]", escape(value))
    console.print(table)
    console.print()
    for problem in found:
        mark = "[red]error[/red]" if problem.fatal else "[yellow]note[/yellow]"
        text = f"{mark}: {escape(problem.what)}\n      {escape(problem.advice)}"
        console.print(text, highlight=False, soft_wrap=True)
    if not found:
        console.print("[green]nothing to complain about[/green]")


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """What is shown, a name and a line each."""
    lines = [("versions", ", ".join(f"{name} {version}" for name, version in facts["versions"].items()))]
    if facts["broken"]:
        return lines
    lines += _machine_lines(facts["machine"], facts["fingerprint"])
    lines += _gpu_lines(facts["machine"]["gpus"], facts["gpu"])
    memory = facts["memory"]
    lines.append(("memory", f"{_gb(memory['available_bytes'])} free of {_gb(memory['total_bytes'])}"))
    for device, measured in facts["bandwidth"].items():
        lines.append(("bandwidth", f"{device}: {_bandwidth(measured)}"))
    lines += [
        ("clocks", f"{device}: {_clocks(checks)}") for device, checks in facts["clocks"].items() if checks
    ]
    lines += [
        ("graphs", f"{device}: {_graphs(checks)}") for device, checks in facts["graphs"].items() if checks
    ]
    lines.append(("quantise", _quantisation(facts["quantisation"])))
    lines.append(("now", _quiet(facts["quiet"])))
    lines += [
        (f"{name.replace('_', ' ')} cache", _folder(folder)) for name, folder in facts["folders"].items()
    ]
    lines.append(("hub", _hub(facts["hub"])))
    return lines


def _machine_lines(machine: dict[str, Any], fingerprint: str) -> list[tuple[str, str]]:
    cpu, torch = machine["cpu"], machine["torch"]
    cores = f"{cpu['cores_physical']} cores, {cpu['cores_logical']} logical, {cpu['cores_usable']} usable"
    blas = ", ".join(f"{name} {torch[name] or 'none'}" for name in ("mkl", "onednn", "cuda"))
    return [
        ("system", f"{machine['os']} {machine['kernel']} {machine['arch']}, fingerprint {fingerprint}"),
        ("processor", f"{cpu['model'] or 'unknown'}: {cores}, {torch['cpu_capability']}"),
        ("torch", f"{torch['threads']} threads; {blas}"),
    ]


def _gpu_lines(gpus: list[dict[str, Any]], state: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [
        (
            f"cuda:{number}",
            f"{gpu['name']}, {_gb(gpu['memory_bytes'])}, driver {gpu.get('driver') or 'unknown'}",
        )
        for number, gpu in enumerate(gpus)
    ]
    works = f"works, {state['driver_gpus']} GPU(s)" if state["nvml"] else f"not used ({state['why_not']})"
    return [*(lines or [("gpu", "none that torch can use: runs go to the processor")]), ("nvml", works)]


def _clocks(checks: list[dict[str, Any]] | str) -> str:
    if isinstance(checks, str):
        return f"not checked: {checks}"
    worst = max(checks, key=lambda check: check["difference"])
    return f"event spans and the host differ by {worst['difference']:.2%} at most"


def _graphs(checks: list[dict[str, Any]] | str) -> str:
    if isinstance(checks, str):
        return f"not checked: {checks}"
    parts = []
    for check in checks:
        if check["eager"] is not None:
            parts.append(f"{check['dtype']}: none ({check['eager']})")
            continue
        least = min(check["agreement"].values())
        reads = "" if check["reads"] is None else f", {check['reads']:.2f} reads a round"
        apart = f"logits within {check['difference']:.1g} of their spread"
        parts.append(f"{check['dtype']}: {least:.0%} of tokens as without, {apart}{reads}")
    return "; ".join(parts)


def _quantisation(facts: dict[str, Any]) -> str:
    if facts["torchao"] is None:
        return 'torchao is not installed (pip install "specbench-llm[quantize]")'
    why_not = {
        scheme: why for scheme, why in {**facts["schemes"], **facts["failed"]}.items() if why is not None
    }
    works = [scheme for scheme in facts["schemes"] if scheme not in why_not]
    lacks = [f"; {scheme} not: {why}" for scheme, why in why_not.items()]
    return f"torchao {facts['torchao']}: {', '.join(works) or 'nothing'} on {facts['device']}{''.join(lacks)}"


def _quiet(quiet: dict[str, Any]) -> str:
    load = "unknown" if quiet["load"] is None else f"{quiet['load']:.2f}"
    busy = "unknown" if quiet["busy_cores"] is None else f"{quiet['busy_cores']:.2f} cores"
    return f"load {load}, others use {busy}, of {quiet['cores']}"


def _bandwidth(measured: dict[str, Any] | None) -> str:
    if measured is None:
        return "not measured: the buffers did not fit"
    threads = f", {measured['threads']} threads" if measured["threads"] else ""
    return f"copy {measured['copy_gb_s']:.1f} GB/s, read {measured['read_gb_s']:.1f} GB/s{threads}"


def _folder(folder: dict[str, Any]) -> str:
    free = "unknown" if folder["free_bytes"] is None else _gb(folder["free_bytes"])
    return f"{folder['path']} ({free} free{'' if folder['writable'] else ', not writable'})"


def _hub(hub: dict[str, Any]) -> str:
    if hub["offline"]:
        return "not asked: HF_HUB_OFFLINE is set"
    return f"{hub['endpoint']} {'answers' if hub['reachable'] else 'does not answer'}"


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
