"""What the load generators of vLLM and SGLang share: results as arrays over requests.

Both write `input_lens`, `output_lens`, `ttfts`, `itls` (seconds between chunks), `generated_texts`, `errors`, one
entry a request, beside totals. Requests of two files are the same prompts where the files were made with one
seed, which their `input_lens` must bear out.

With one request at a time a request is a batch of its own. With more, the whole file is one batch whose seconds
are the file's `duration`: tokens/s is then the tool's own output throughput, and there is one ratio and no
interval. A request rate makes the arrivals, not the engine, set the throughput, so that no seconds are taken.

The events of a request are its first chunk and those that the gaps lead to. Where there are as many as tokens, each
is a token (SGLang's tool divides the wait for a chunk evenly among its tokens); elsewhere the tokens of a chunk are
not told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from specbench.errors import SpecbenchError
from specbench.importers.base import BASELINE, Imported, Row, Source, objects, refuse_again

ARRAYS = ("input_lens", "output_lens", "ttfts", "itls")
UNKNOWN = (
    *("tokens per round", "time in draft and verify", "memory", "energy", "token ids", "machine"),
    "hash of the weights",
)
PACED = "a file has a request rate: the arrivals set its throughput, so it has no speedup"
WHOLE = "with concurrency the whole file is one batch: one ratio, no interval; one failed request spoils it"
Result = dict[str, Any]


def read(
    sources: Sequence[Source],
    temperature: float | None,
    option: str,
    describe: Callable[[Result], tuple[dict[str, Any], str]],
) -> Imported:
    """The trials of all files, with a repeat for each time a label comes again at one concurrency.

    Args:
        option: of the tool, which makes it write the arrays.
        describe: a result's target (name) and task.
    """
    found = Imported([], config={"temperature": temperature})
    repeats: dict[tuple[str, int], int] = {}
    prompts: dict[int, tuple[str, list[int]]] = {}
    for source in sources:
        label = source.label or source.path.stem
        refuse_again(source, label, found.results)
        for line, result in objects(source.path):
            where = f"{source.path} line {line}"
            _check(result, where, option)
            target, task = describe(result)
            _same_target(found, target, where)
            concurrency = _concurrency(result)
            _same_prompts(prompts, concurrency, result["input_lens"], where)
            repeat = repeats.setdefault((label, concurrency), 0)
            repeats[label, concurrency] += 1
            paced = _rate(result) != math.inf
            head = {"task": task, "method": label, "concurrency": concurrency, "repeat": repeat}
            found.rows += _rows(result, head, timed=not paced or concurrency == 1)
            found.results.setdefault(label, []).append(_totals(result))
            found.notes += [PACED] if paced and concurrency > 1 else []
            found.notes += [WHOLE] if concurrency > 1 else []
    found.notes = list(dict.fromkeys(found.notes))
    if not any(row["method"] == BASELINE for row in found.rows):
        found.notes.append("without --baseline there is no speedup")
    found.rows.sort(
        key=lambda row: (row["concurrency"], row["repeat"], row["block"], row["method"] != BASELINE)
    )
    return found


def _check(result: Result, where: str, option: str) -> None:
    missing = [name for name in ARRAYS if not isinstance(result.get(name), list)]
    if missing:
        raise SpecbenchError(
            f"{where} holds totals only ({', '.join(missing)} missing): no request can be read from it",
            f"run the benchmark again with {option}",
        )
    count = len(result["output_lens"])
    for name in (*ARRAYS, "errors", "latencies", "generated_texts"):
        values = result.get(name)
        if values is not None and (not isinstance(values, list) or len(values) != count):
            raise SpecbenchError(f"{where}: {name} is not a list of {count} requests", "restore the file")
    numbers = [result.get("duration"), *result["input_lens"], *result["output_lens"], *result["ttfts"]]
    gaps = [gap for itl in result["itls"] for gap in (itl if isinstance(itl, list) else [None])]
    if not count or not all(_is_number(value) for value in (*numbers, *gaps)):
        raise SpecbenchError(f"{where} holds something that is not a number", "restore the file")


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    )


def _rate(result: Result) -> float:
    """Requests a second; infinite where all were sent at once."""
    rate = result.get("request_rate")
    if rate is None:
        return math.inf
    try:
        return float(rate)
    except (TypeError, ValueError):
        return math.nan  # `trace`: the moments come from a file


def _concurrency(result: Result) -> int:
    """Requests at a time: as limited, else all that were sent."""
    limit = result.get("max_concurrency")
    return int(limit) if limit else max(1, len(result["output_lens"]))


def _rows(result: Result, head: Row, timed: bool) -> Iterator[Row]:
    alone = head["concurrency"] == 1
    errors = result.get("errors") or [""] * len(result["output_lens"])
    texts = result.get("generated_texts") or [None] * len(errors)
    for i, tokens in enumerate(result["output_lens"]):
        first, seconds = float(result["ttfts"][i]), _latency(result, i)
        batch_s = seconds if alone else float(result["duration"])
        row = head | {
            "question": str(i),
            "category": None,
            "turn": 0,
            "batch_size": 1,
            "block": i if alone else 0,
            "order": 0 if head["method"] == BASELINE else 1,
            "state": None,
            "prompt_tokens": int(result["input_lens"][i]),
            "output_tokens": int(tokens),
            "text": texts[i],
            "batch_s": batch_s if timed else None,
            "prefill_s": first,
            "decode_s": seconds - first if alone else None,
            "total_s": seconds,
        }
        if errors[i] or not tokens:
            row |= {"finish": "error", "error": str(errors[i] or "no output")}
        else:
            row["arrivals"] = _arrivals(first, result["itls"][i], int(tokens))
        yield row


def _arrivals(first: float, gaps: Sequence[float], tokens: int) -> dict[str, list[Any]]:
    """A request's events as in `Trial.arrivals`."""
    ends = [round(end, 6) for end in accumulate(gaps, initial=first)]
    return {"at_s": ends, "tokens": [1 if len(ends) == tokens else None] * len(ends)}


def _latency(result: Result, i: int) -> float:
    """A request's seconds to its last token: as recorded, else the first token's and the gaps after it."""
    latencies = result.get("latencies")
    if latencies is not None and _is_number(latencies[i]) and latencies[i] >= result["ttfts"][i]:
        return float(latencies[i])
    return float(result["ttfts"][i]) + math.fsum(result["itls"][i])


def _same_prompts(known: dict[int, tuple[str, list[int]]], at: int, lengths: list[int], where: str) -> None:
    """The n-th request must be the same in all files of a concurrency, as far as its length tells."""
    first, before = known.setdefault(at, (where, lengths))
    if before != lengths:
        raise SpecbenchError(
            f"{where} has other prompts than {first}: their lengths differ",
            "use the same dataset, --seed and number of prompts for all files",
        )


def _same_target(found: Imported, target: dict[str, Any], where: str) -> None:
    if target and found.target and target != found.target:
        names = f"{found.target.get('name')} and {target.get('name')}"
        raise SpecbenchError(
            f"{where} is of another target: {names}", "import each target's files by themselves"
        )
    found.target = found.target or target


def _totals(result: Result) -> dict[str, Any]:
    """The result's single values: what the tool itself worked out."""
    return {
        name: value for name, value in result.items() if value is None or isinstance(value, str | int | float)
    }


def target_named(path: Any) -> dict[str, Any]:
    """A target by the model's name; a local path by its last part."""
    if not path:
        return {}
    text = str(path)
    return {"name": Path(text).name if text.startswith(("/", ".")) else text}
