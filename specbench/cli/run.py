"""`specbench run`: measure methods on a target."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from specbench.errors import SpecbenchError

HELP = """Measure speculative methods on a target, each against plain decoding on the same prompts.

Without arguments: SmolLM2-135M-Instruct, all bundled tasks, methods that need no weights, short outputs.
"""

Repeatable = list[str] | None


def register(app: typer.Typer) -> None:
    app.command("run", help=HELP)(run)


def run(
    target: Annotated[
        str | None, typer.Option(help="Alias, Hub id, folder, GGUF file, or random:ALIAS (timing only).")
    ] = None,
    method: Annotated[
        Repeatable,
        typer.Option(metavar="SPEC", help="name or name:key=value,…; repeat for more. vanilla always runs."),
    ] = None,
    task: Annotated[
        Repeatable, typer.Option(help="Bundled name, FILE.jsonl, or hf:ID; repeat for more.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Questions a task, round-robin over its categories. 0: all.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="New tokens a request. Default: the task's own.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="1 is off.")] = None,
    top_k: Annotated[int | None, typer.Option(help="0 is off.")] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    ignore_eos: Annotated[
        bool | None, typer.Option("--ignore-eos", help="Always generate max-new-tokens.")
    ] = None,
    batch_size: Annotated[str | None, typer.Option(metavar="1[,4,16]", help="Prompts a batch.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Times each block is measured.")] = None,
    warmup: Annotated[int | None, typer.Option(help="Blocks run before, not measured.")] = None,
    draft: Annotated[
        str | None, typer.Option(metavar="REF", help="Drafter weights, for methods that need some.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:FLAG=value,…]",
            help="native, or a serving engine (see `specbench doctor --engines`) and flags for its servers.",
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Attach to a server that runs already, in place of starting one.")
    ] = None,
    baseline_url: Annotated[
        str | None, typer.Option(help="The same target without speculation, to go with --url.")
    ] = None,
    co_resident: Annotated[
        bool | None,
        typer.Option("--co-resident", help="Run all servers at once and interleave them block by block."),
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(metavar="1[,4,16]", help="Requests in flight (engines).")
    ] = None,
    request_rate: Annotated[
        str | None, typer.Option(metavar="R[,R]", help="Requests sent a second (engines).")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = None,
    device_map: Annotated[
        str | None, typer.Option(help="none, or auto to spread a target over devices.")
    ] = None,
    attn: Annotated[str | None, typer.Option(help="auto, sdpa or eager.")] = None,
    threads: Annotated[str | None, typer.Option(help="CPU threads: auto or a number.")] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            help="none, int8, int4 or fp8: the target's linear layers, by torchao. A draft's: SPEC with "
            "draft.quantize=int8."
        ),
    ] = None,
    graphs: Annotated[
        str | None, typer.Option(help="auto: CUDA graphs, for vanilla as for every method; or off.")
    ] = None,
    compile_: Annotated[
        bool | None, typer.Option("--compile", help="torch.compile, for vanilla as for every method.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the target.")] = None,
    trust_remote_code: Annotated[
        bool | None, typer.Option("--trust-remote-code", help="Run Python code that a checkpoint brings.")
    ] = None,
    template_arg: Annotated[
        Repeatable, typer.Option(metavar="K=V", help="For the chat template, e.g. enable_thinking=false.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for runs.")] = Path("results"),
    reports: Annotated[Path, typer.Option(help="Folder for the report written at the end.")] = Path(
        "reports"
    ),
    name: Annotated[str | None, typer.Option(help="The run's name; an existing one is resumed.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Move an existing run of that name aside.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and leave.")] = False,
    config: Annotated[
        Path | None, typer.Option(help="Settings from a manifest.json; options override them.")
    ] = None,
    time_budget: Annotated[
        str | None, typer.Option(metavar="10m", help="Begin no block after this long.")
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(metavar="3%", help="Stop once every method's speedup is known to this, each way."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Failed trials make the exit code 1.")] = False,
    no_text: Annotated[
        bool | None, typer.Option("--no-text", help="Leave the generated text out of the rows.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON document.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    given: dict[str, Any] = {
        "target": target,
        "methods": tuple(method) if method else None,
        "tasks": tuple(task) if task else None,
        "draft": draft,
        "limit": limit,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "ignore_eos": ignore_eos,
        "batch_sizes": numbers(batch_size, "--batch-size"),
        "repeats": repeats,
        "warmup": warmup,
        "dtype": dtype,
        "device": device,
        "device_map": device_map,
        "attn": attn,
        "threads": thread_count(threads),
        "quantize": quantize,
        "graphs": graphs,
        "compile": compile_,
        "revision": revision,
        "trust_remote_code": trust_remote_code,
        "template_args": _template_args(template_arg),
        "text": None if no_text is None else not no_text,
        "engine": engine,
        "url": url,
        "baseline_url": baseline_url,
        "co_resident": co_resident,
        "concurrency": numbers(concurrency, "--concurrency"),
        "request_rates": _rates(request_rate),
    }
    from specbench.precision import parse_width
    from specbench.session import effective_config, session_class_for

    wanted = effective_config({key: value for key, value in given.items() if value is not None}, config)
    session = session_class_for(wanted)(
        config=wanted,
        output=output,
        reports=reports,
        name=name,
        fresh=fresh,
        budget_s=_seconds(time_budget),
        until=None if until is None else parse_width(until),
        strict=strict,
        as_json=as_json,
        quiet=quiet,
        argv=sys.argv[1:],
    )
    if dry_run:
        session.dry_run()
        return
    raise typer.Exit(session.run())


def numbers(text: str | None, option: str) -> tuple[int, ...] | None:
    """The whole numbers of an option like `1,4,16`, each once."""
    if text is None:
        return None
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise SpecbenchError(
            f"{option} {text} is not a list of numbers", f"write e.g. {option} 1,4,16"
        ) from None
    return numbers


def _rates(text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise SpecbenchError(
            f"--request-rate {text} is not a list of numbers", "write e.g. --request-rate 0.5,2,8"
        ) from None


def thread_count(text: str | None) -> int | None:
    """The number of `--threads`; None: torch's own."""
    if text is None or text == "auto":
        return None
    if not text.isdecimal():
        raise SpecbenchError(f"--threads {text} is neither auto nor a number", "write e.g. --threads 4")
    return int(text)


def _template_args(values: list[str] | None) -> dict[str, Any] | None:
    if not values:
        return None
    from specbench.conversation import parse_template_args

    return parse_template_args(values)


def _seconds(text: str | None) -> float | None:
    """`90`, `90s`, `10m`, `1.5h` in seconds."""
    if text is None:
        return None
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
    try:
        seconds = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:  # NaN is no time either
        raise SpecbenchError(f"--time-budget {text} is not a time", "write e.g. 90s, 10m or 1.5h")
    return seconds
