"""`specbench roofline`: what a device's memory and arithmetic allow a target, and speculation with it, at best."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbench.errors import SpecbenchError
from specbench.models.packed import BYTES_A_WEIGHT

if TYPE_CHECKING:
    from specbench.analysis.roofline import Architecture, Device, Speculation
    from specbench.models.architecture import Described

AUTO = "auto"
MEASURED = "measured"
SCHEMA = 1
MOST = {
    "--batch-size": 2**20, "--draft-tokens": 2**17, "--context": 2**27, "--gpus": 4096, "--draft-cost": 10**9,
    "--threads": 4096,
}  # fmt: skip
"""Far beyond what anybody has: up to here all sums are exact enough."""


def register(app: typer.Typer) -> None:
    app.command("roofline")(roofline)


def roofline(
    target: Annotated[str, typer.Option(help="Alias, random:ALIAS, folder, or a Hub id in the local cache.")],
    tau: Annotated[float, typer.Option(help="Tokens a round (τ), bonus included, that the method reaches.")],
    gpu: Annotated[
        str, typer.Option(metavar="NAME|measured", help="A known GPU's published peak, or this device.")
    ] = MEASURED,
    gpus: Annotated[int, typer.Option(help="So many of them, sharing the work ideally.")] = 1,
    draft_tokens: Annotated[int, typer.Option(help="Tokens drafted a round, all nodes of a tree.")] = 4,
    draft_cost: Annotated[float, typer.Option(help="Seconds of drafting a round over vanilla's pass.")] = 0.0,
    context: Annotated[int, typer.Option(help="Tokens of prompt and text so far.")] = 1024,
    batch_size: Annotated[
        str, typer.Option(metavar="1[,4,16]", help="Rows decoded together.")
    ] = "1,2,4,8,16,32,64,128,256",
    dtype: Annotated[
        str,
        typer.Option(
            help=f"Of the weights: auto, {', '.join(BYTES_A_WEIGHT)}, as --quantize makes them. auto: as stored."
        ),
    ] = AUTO,
    device: Annotated[str, typer.Option(help="With --gpu measured: auto, cpu, cuda, cuda:N.")] = "auto",
    threads: Annotated[
        str | None, typer.Option(help="With --gpu measured on a CPU: auto or a number.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure the device anew.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg|FILE.png", help="Draw it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Print the floor of a pass, the speedup speculation can reach at best, and the batch size where it stops paying.

    The floor is the longer of reading what the pass must read (weights once, the experts its tokens choose, keys
    and values) and of its arithmetic. No implementation is faster; real ones are slower, and drafting costs too. The
    speedup is that of passes which take their floors: where only vanilla's are far from theirs, more is possible.
    """
    from specbench.analysis.gpus import known_gpu
    from specbench.analysis.roofline import Speculation
    from specbench.cli.report import write
    from specbench.cli.run import numbers
    from specbench.models.architecture import described

    _check_target(target)
    batches = numbers(batch_size, "--batch-size") or ()
    for option, least, values in (
        ("--batch-size", 1, batches), ("--draft-tokens", 1, (draft_tokens,)), ("--context", 0, (context,)),
        ("--gpus", 1, (gpus,)), ("--draft-cost", 0, (draft_cost,)),
    ):  # fmt: skip
        _check_range(option, least, values)
    if not 1 <= tau <= draft_tokens + 1:
        raise SpecbenchError(
            f"--tau {tau:g} is not possible with {draft_tokens} drafted tokens",
            f"a round gains 1 to {draft_tokens + 1} tokens: give another --tau or --draft-tokens",
        )
    _check_plot(plot)
    kind, computes, model = _stored(described(target), target, dtype)
    if gpu == MEASURED:
        place = _measured(gpus, computes, device, threads, again)
    else:
        _check_published(device, threads, again)
        place = known_gpu(gpu, computes, gpus)
    how = Speculation(draft_tokens + 1, tau, draft_cost)
    facts = _facts(target, kind, model, place, how, context, batches) | {"gpus": gpus}
    if as_json:
        print(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        _print(facts)
    if plot is not None:
        from specbench.report.figures import limit, style

        save = style.svg if plot.suffix == ".svg" else style.png
        with style.styled():
            drawn = limit.figure(f"{Path(target).name}, {kind}", model, place, how, context)
            write(plot, save(drawn), option="--plot")


def _check_target(target: str) -> None:
    if not target.strip():
        raise SpecbenchError(
            "--target is empty", "name an alias (`specbench ls targets`) or a model's folder"
        )


def _check_range(option: str, least: int, values: Sequence[float]) -> None:
    for value in values:
        if not least <= value <= MOST[option]:  # NaN is not, either
            raise SpecbenchError(f"{option} {value} is not possible", f"give {least} to {MOST[option]:,}")


def _check_published(device: str, threads: str | None, again: bool) -> None:
    """Refuse what is said of a measurement where none is made."""
    given = {"--device": device != AUTO, "--threads": threads is not None, "--again": again}
    if any(given.values()):
        named = " and ".join(option for option, there in given.items() if there)
        raise SpecbenchError(
            f"{named} would have no effect: --gpu names a published peak", f"leave out --gpu, or {named}"
        )


def _check_plot(plot: Path | None) -> None:
    if plot is None:
        return
    if plot.suffix not in (".svg", ".png"):
        raise SpecbenchError(f"--plot {plot} is neither .svg nor .png", "give a file name that ends so")
    if not plot.parent.is_dir():
        raise SpecbenchError(f"--plot {plot}: there is no folder {plot.parent}", "make it, or name another")


def _stored(target: Described, ref: str, dtype: str) -> tuple[str, str, Architecture]:
    """What its weights are called as they are read, the numbers it computes with, and its architecture in bytes."""
    stored = target.stored
    if dtype != AUTO or stored is None:
        kind = _dtype(target.dtype if dtype == AUTO else dtype)
        return (
            kind,
            kind,
            target.architecture.in_bytes(BYTES_A_WEIGHT[kind], 4.0 if kind == "float32" else 2.0),
        )
    weight = stored.bytes_a_weight
    if weight is None:
        raise SpecbenchError(
            f"{ref} is quantised ({stored.name}), and its config.json does not say to how many bits",
            f"give --dtype: {', '.join(BYTES_A_WEIGHT)}",
        )
    number = BYTES_A_WEIGHT[_dtype(target.dtype)]
    model = target.architecture.in_bytes(weight, number, number if stored.experts_only else None)
    return stored.name, stored.computes_in or target.dtype, model


def _dtype(name: str) -> str:
    if name not in BYTES_A_WEIGHT:
        raise SpecbenchError(f"unknown dtype {name!r}", f"use --dtype {AUTO}, {', '.join(BYTES_A_WEIGHT)}")
    return name


def _measured(count: int, dtype: str, device: str, threads: str | None, again: bool) -> Device:
    """This device. What disturbed the measurement is said on standard error, and in the device's name."""
    import torch

    from specbench.analysis.roofline import Device
    from specbench.cli.run import thread_count
    from specbench.measure.speed import device_speed
    from specbench.models.gguf import cache_folder
    from specbench.models.placement import DTYPES, pick_device

    if count > 1:
        raise SpecbenchError("--gpus is for --gpu NAME", "one device is measured; leave --gpus out")
    numbers = {**DTYPES, "fp8": torch.float8_e4m3fn}.get(dtype, torch.bfloat16)
    wanted = thread_count(threads)
    if wanted is not None:
        _check_range("--threads", 1, (wanted,))
        torch.set_num_threads(wanted)
    speed = device_speed(
        pick_device(device), numbers, cache_folder(), lambda line: print(line, file=sys.stderr), again
    )
    if speed is None:
        raise SpecbenchError(
            "this device's speed could not be measured", "free some memory, or use --gpu NAME"
        )
    how = f"measured in {speed.dtype}" + (" while it was busy" if speed.disturbed else "")
    return replace(Device.measured(speed.to_json()), name=f"{speed.device} ({how})")


def _facts(
    target: str, dtype: str, model: Architecture, place: Device, how: Speculation, context: int,
    batches: tuple[int, ...],
) -> dict[str, Any]:  # fmt: skip
    """Everything that is printed, as the JSON document. Bytes, operations, seconds."""
    from specbench.analysis.roofline import by_batch, most_rows, pays_at

    return {
        "schema": SCHEMA,
        "target": target,
        "dtype": dtype,
        "weights_bytes": model.all_bytes,
        "device": {
            "name": place.name,
            "bytes_per_s": place.bandwidth,
            "operations_per_s": place.rate,
            "memory_bytes": place.memory_bytes,
        },
        "architecture": model.to_json(),
        "context": context,
        "draft_tokens": how.query - 1,
        "draft_cost": how.draft,
        "tau": how.tau,
        "batches": list(by_batch(model, place, how, batches, context)),
        "pays_at_batch_sizes": pays_at(model, place, how, context),
        "largest_batch_that_fits": most_rows(model, place, how.query, context),
    }


def _print(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    place, model, kind = facts["device"], facts["architecture"], facts["dtype"]
    kind = kind if kind in BYTES_A_WEIGHT else f"{kind}, as stored"
    print(f"target   {facts['target']}, {kind}: {facts['weights_bytes'] / 1e9:.1f} GB of weights read")
    if model["experts"]:
        print(f"experts  {model['active_experts']} of {model['experts']} a token in {model['moe_layers']} layers, "
              "counted as if tokens chose at random")  # fmt: skip
    tera = place["operations_per_s"] / 1e12
    speed = f"{place['bytes_per_s'] / 1e9:,.0f} GB/s, {tera:,.{0 if tera >= 10 else 2}f} TFLOP/s"
    print(f"device   {place['name']}: {speed}")
    draft = (
        f", drafting costs {facts['draft_cost']:g} of a pass" if facts["draft_cost"] else ", drafting is free"
    )
    print(f"method   {facts['draft_tokens']} tokens drafted, τ {facts['tau']:g} (bonus included){draft}; "
          f"context {facts['context']:,}")  # fmt: skip
    _print_memory(facts)
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    experts = ["experts\na layer"] if model["experts"] else []
    heads = [
        "batch",
        "vanilla's\nfloor",
        "set by",
        "verify\nfloor",
        "set by",
        *experts,
        "inflation",
        "speedup\nat most",
    ]
    for head in heads:
        table.add_column(head, justify="left" if head == "set by" else "right", no_wrap=True)
    for entry in facts["batches"]:
        table.add_row(*_cells(entry))
    console.print(table)
    print(f"speculation can pay {_where(facts['pays_at_batch_sizes'])}")


def _print_memory(facts: dict[str, Any]) -> None:
    """Say which batches do not fit, where the memory is known and the limits are of more."""
    memory, fits = facts["device"]["memory_bytes"], facts["largest_batch_that_fits"]
    if fits is None or fits >= MOST["--batch-size"]:
        return
    if facts["weights_bytes"] > memory:
        needed = math.ceil(facts["weights_bytes"] * facts["gpus"] / memory)
        print(f"note     the weights do not fit into {memory / 1e9:.0f} GB: see --gpus {needed}")
    else:
        what = f"weights, keys and values do not fit into {memory / 1e9:.0f} GB"
        print(f"note     from batch size {fits + 1:,} on, {what}")


def _where(ranges: Sequence[tuple[int, int | None]]) -> str:
    """The batch sizes at which it pays, in words."""
    if not ranges:
        return "at no batch size"
    if list(ranges) == [(1, None)]:
        return "at every batch size"
    words = (f"{a:,} to {b:,}" if b and b > a else f"{a:,}" if b else f"{a:,} and more" for a, b in ranges)
    return f"at batch sizes {', '.join(words)}"


def _cells(entry: dict[str, Any]) -> list[str]:
    passes = [(entry[name]["seconds"], entry[name]["bound"]) for name in ("vanilla", "verify")]
    cells = [f"{entry['batch_size']:,}"]
    for seconds, bound in passes:
        cells += [f"{seconds * 1e3:,.3g} ms" if seconds < 1 else f"{seconds:,.2f} s", bound]
    if entry["experts"] is not None:
        cells.append("→".join(f"{count:.3g}" for count in entry["experts"]))
    return [*cells, f"{entry['inflation']:.2f}x", f"{entry['limit']:.2f}x"]
