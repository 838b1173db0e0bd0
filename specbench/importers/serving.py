"""What the load generators of vLLM and SGLang share: results as arrays over requests.

Both write `input_lens`, `output_lens`, `ttfts`, `itls` (seconds between chunks), `generated_texts`, `errors`, one
entry a request, beside totals. Requests of two files are the same prompts where the files were made with one
seed, which their `input_lens` must bear out.

With one request at a time a request is a batch of its own. With more, the whole file is one batch whose seconds
are the file's `duration`: tokens/s is then the tool's own output throughput, and there is one ratio and no
interval. A request rate is a load like it: as the arrivals, not the engine, then set the throughput, a speedup counts
the requests' own seconds. Where the rate is unknown, there are no seconds to compare.

The events of a request are its first chunk and those that the gaps lead to. Where there are as many as tokens, each
is a token (SGLang's tool divides the wait for a chunk evenly among its tokens); elsewhere the tokens of a chunk are
not told.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from specbench.errors import SpecbenchError
from specbench.importers.base import BASELINE, Imported, Row, Source, objects, refuse_again

ARRAYS = ("input_lens", "output_lens", "ttfts", "itls")
UNKNOWN = (
    *("tokens per round", "time in draft and verify", "memory", "energy", "token ids", "machine"),
    "hash of the weights",
)
PACED = "at a request rate the arrivals set the throughput: a speedup there is of the requests' own seconds"
TRACED = "the moments of sending come from a file: they set the throughput, so it has no speedup"
WHOLE = "with concurrency or a rate the whole file is one batch: one ratio, no interval; one failed request spoils it"
Result = dict[str, Any]


class Load(NamedTuple):
    """How the requests of a file were sent."""

    concurrency: int | None  # most in flight; None where only their rate limits them
    request_rate: float | None  # a second; None for a closed loop, and where it is unknown
    timed: bool = True  # whether its seconds mean anything beside another file's

    @property
    def alone(self) -> bool:
        """Whether there was one request at a time."""
        return self.concurrency == 1 and self.request_rate is None

    @property
    def note(self) -> str | None:
        if not self.timed:
            return TRACED
        return None if self.request_rate is None else PACED


def read(
    sources: Sequence[Source],
    temperature: float | None,
    option: str,
    describe: Callable[[Result], tuple[dict[str, Any], str]],
) -> Imported:
    """The trials of all files, with a repeat for each time a label comes again at one load.

    Args:
        option: of the tool, which makes it write the arrays.
        describe: a result's target (name) and task.
    """
    found = Imported([], config={"temperature": temperature})
    repeats: Counter[tuple[Any, ...]] = Counter()
    prompts: dict[Load, tuple[str, list[int]]] = {}
    for source in sources:
        label = source.label or source.path.stem
        refuse_again(source, label, found.results)
        for line, result in objects(source.path):
            where = f"{source.path} line {line}"
            _check(result, where, option)
            target, task = describe(result)
            _same_target(found, target, where)
            load = _load(result)
            _same_prompts(prompts, load, result["input_lens"], where)
            place = (label, load.concurrency, load.request_rate)
            found.rows += _rows(result, load, {"task": task, "method": label, "repeat": repeats[place]})
            repeats[place] += 1
            found.results.setdefault(label, []).append(_totals(result))
            found.notes += [load.note] if load.note else []
            found.notes += [] if load.alone else [WHOLE]
    found.notes = list(dict.fromkeys(found.notes))
    if not any(row["method"] == BASELINE for row in found.rows):
        found.notes.append("without --baseline there is no speedup")
    found.rows.sort(key=_place)
    return found


def _place(row: Row) -> tuple[Any, ...]:
    load = (row["request_rate"] or 0, row["concurrency"] or 0)
    return (*load, row["repeat"], row["block"], row["method"] != BASELINE)


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
    numbers = [
        result.get("duration"),
        result.get("max_concurrency") or 0,
        *result["input_lens"],
        *result["output_lens"],
        *result["ttfts"],
    ]
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


def _load(result: Result) -> Load:
    """A closed loop of as many as the limit, else of all that were sent, or a rate, which a limit may hold back.

    One request at a time is that at whatever rate: each has its own seconds.
    """
    rate, limit = _rate(result), int(result.get("max_concurrency") or 0)
    at_once = limit or len(result["output_lens"])
    if limit == 1 or rate == math.inf:
        return Load(at_once, None)
    if not 0 < rate < math.inf:
        return Load(at_once, None, timed=at_once == 1)
    return Load(limit or None, rate)


def _rows(result: Result, load: Load, head: Row) -> Iterator[Row]:
    alone = load.alone
    errors = result.get("errors") or [""] * len(result["output_lens"])
    texts = result.get("generated_texts") or [None] * len(errors)
    for i, tokens in enumerate(result["output_lens"]):
        first, seconds = float(result["ttfts"][i]), _latency(result, i)
        batch_s = seconds if alone else float(result["duration"])
        row = head | {
            "concurrency": load.concurrency,
            "request_rate": load.request_rate,
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
            "batch_s": batch_s if load.timed else None,
            "prefill_s": first,
            "decode_s": seconds - first,
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


def _same_prompts(known: dict[Load, tuple[str, list[int]]], at: Load, lengths: list[int], where: str) -> None:
    """The n-th request must be the same in all files of a load, as far as its length tells."""
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
