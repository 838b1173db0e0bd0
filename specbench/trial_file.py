"""`trials.jsonl` read back, line by line: nothing of another type than the schema's gets past here.

msgspec reads and checks a line at once. What it takes exception to is read by `json`, which knows more (NaN, half a
surrogate pair, bytes that are not UTF-8), and checked by the same annotations.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypedDict, Union, get_args, get_origin, get_type_hints, is_typeddict

from specbench.errors import SpecbenchError
from specbench.schema import Rounds, Trial

try:
    import msgspec
except ImportError:  # a checkout that is not installed (scripts/gpu.sh): reading takes several times as long
    msgspec = None  # type: ignore[assignment]


class _Same(TypedDict):
    same: bool | None


class _Agreement(_Same, total=False):
    first_difference: int | None
    logit_gap: float | None
    same_text: bool | None


class _Acceptance(TypedDict, total=False):
    accepted: int | None
    drafted: int | None
    verify_steps: int | None
    target_steps: int | None
    per_position: list[int] | None
    source: str | None
    scope: str | None


class _Arrivals(TypedDict):
    at_s: list[float]
    tokens: list[int | None]


class _Nvml(TypedDict, total=False):
    joules: float | None
    power_w: float | None
    sm_mhz_mean: float | None
    sm_mhz_min: float | None
    temperature_c: float | None
    throttle_reasons: list[str] | None


_PARTS = {"agreement": _Agreement, "acceptance": _Acceptance, "arrivals": _Arrivals, "nvml": _Nvml}
_NAMES = ("task", "question", "category", "method", "batch", "state", "finish", "excluded")
_COUNTS = ("turn", "repeat", "block", "order", "attempt", "prompt_tokens", "output_tokens", "retries")
_AT_LEAST_ONE = ("batch_size", "concurrency")
_SECONDS = ("batch_s", "prefill_s", "decode_s", "total_s")
_OF_ROUNDS = ("drafted", "depth", "accepted", "emitted", "with_draft", "probes")
_ALL_OF_ROUNDS = tuple(f.name for f in fields(Rounds))
_REQUIRED = tuple(f.name for f in fields(Trial) if f.default is MISSING and f.default_factory is MISSING)
SHOWN = 60  # characters of a value that is refused
_LARGEST = 2**31 - 1  # of a count: the columns of `analysis.frame` have 32 bits
_DEEPEST = 2**20  # of a round's counts, of which histograms are made: more than a context has tokens
_INT64 = range(-(2**63), 2**63)
_IDS = list(range(2**18))  # more than vocabularies have: one object a token, however often it occurs
_decode = None if msgspec is None else msgspec.json.Decoder(Trial).decode


def read_trials(file: Path) -> tuple[list[Trial], str | None]:
    """The trials of a file, and what is wrong with its last line, if it is not a whole one.

    Raises:
        SpecbenchError: a line before the last is not a trial.
    """
    if not file.is_file():
        return [], None
    trials: list[Trial] = []
    with file.open("rb") as lines, _no_garbage():
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return trials, "was cut short"
            try:
                trials.append(_trial(line))
            except (ValueError, RecursionError) as error:
                if next(lines, None) is None:
                    return trials, f"is not a trial ({error})"
                raise SpecbenchError(
                    f"{file} line {number} is not a trial: {error}", "restore the file, or remove that line"
                ) from error
    return trials, None


def _trial(line: bytes) -> Trial:
    """The trial of a line, every field of the schema's type."""
    if _decode is not None:
        with contextlib.suppress(ValueError, RecursionError):
            return _shared(_sound(_decode(line)))
    return trial_of(json.loads(line.decode(errors="replace")))


def trial_of(row: Any) -> Trial:
    """The trial of a parsed line.

    Raises:
        ValueError: a field is missing or of another type than the schema's.
    """
    if not isinstance(row, dict):
        raise ValueError("it is not a JSON object")
    missing = [name for name in _REQUIRED if name not in row]
    if missing:
        raise ValueError(f"it has no {', '.join(missing)}")
    _check(row, Trial)
    _check(row.get("rounds", {}), Rounds, "rounds.")
    return _shared(_sound(Trial.from_json(row)))


def _check(row: dict[str, Any], schema: Any, where: str = "") -> None:
    """Refuse a value of another type than the schema's annotation.

    Raises:
        ValueError: naming the field.
    """
    for name, kind in _hints(schema).items():
        if name in row and not _fits(row[name], kind):
            raise ValueError(f"{where}{name} cannot be {_shown(row[name])}")


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value of JSON is of a type: `list[int | None]`, `dict[str, float] | None`, a TypedDict."""
    if kind is Any or type(value) in _plain(kind):
        return True
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if origin in (list, Sequence):
        return isinstance(value, list) and _all_fit(value, parts[0])
    if origin is dict:
        return isinstance(value, dict) and _all_fit(value.values(), parts[1])
    if kind is Rounds:
        return isinstance(value, dict)
    if is_typeddict(kind):
        known = isinstance(value, dict) and kind.__required_keys__ <= value.keys()
        return known and all(_fits(value[n], part) for n, part in _hints(kind).items() if n in value)
    return False


def _all_fit(values: Any, kind: Any) -> bool:
    return _plain(kind).issuperset(map(type, values)) or all(_fits(value, kind) for value in values)


@cache
def _plain(kind: Any) -> frozenset[Any]:
    """The types of a value without parts that fit."""
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    found = {part for part in parts if part in (bool, int, float, str, NoneType)}
    return frozenset(found | {int} if float in found else found)


@cache
def _hints(schema: Any) -> dict[str, Any]:
    return get_type_hints(schema)


def _shown(value: Any) -> str:
    return json.dumps(value)[:SHOWN]


def _sound(trial: Trial) -> Trial:
    """The trial, unless its values are of the right types and still cannot be.

    Raises:
        ValueError: naming the field.
    """
    for name, kind in _PARTS.items():
        if (part := getattr(trial, name)) is not None and not _fits(part, kind):
            raise ValueError(f"{name} cannot be {_shown(part)}")
    for names, least in ((_COUNTS, 0), (_AT_LEAST_ONE, 1)):
        for name in names:
            if (value := getattr(trial, name)) is not None and not least <= value <= _LARGEST:
                raise ValueError(f"{name} cannot be {value}")
    for name in _SECONDS:
        if (value := getattr(trial, name)) is not None and value < 0:
            raise ValueError(f"{name} cannot be {value}")
    if trial.request_rate is not None and not 0 < trial.request_rate < math.inf:
        raise ValueError(f"request_rate cannot be {trial.request_rate}")
    if any(value is not None and value not in _INT64 for value in (trial.memory or {}).values()):
        raise ValueError("memory does not fit 64 bits")
    if trial.arrivals is not None and len(trial.arrivals["at_s"]) != len(trial.arrivals["tokens"]):
        raise ValueError("arrivals has columns of unequal length")
    _sound_rounds(trial.rounds)
    return trial


def _sound_rounds(rounds: Rounds) -> None:
    """Columns are as long as `emitted`, or empty where a writer left them out."""
    for name in _ALL_OF_ROUNDS:
        column = getattr(rounds, name)
        if column and len(column) != len(rounds.emitted):
            raise ValueError(f"rounds.{name} has {len(column)} entries, rounds.emitted {len(rounds.emitted)}")
    for names, least in ((_OF_ROUNDS, 0), (("count",), 1)):
        for name in names:
            values = set(getattr(rounds, name) or ())  # few: a set is quicker than two looks at millions
            if values and not (least <= min(values) and max(values) <= _DEEPEST):
                raise ValueError(f"rounds.{name} holds what is no count")


def _shared(trial: Trial) -> Trial:
    """The trial, with one object a name and a token, however many trials hold it.

    Raises:
        ValueError: a token that does not fit 64 bits.
    """
    for name in _NAMES:
        if (value := getattr(trial, name)) is not None:
            setattr(trial, name, sys.intern(value))
    if ids := trial.output_ids:
        least, largest = min(ids), max(ids)
        if least >= 0 and largest < len(_IDS):
            trial.output_ids = list(map(_IDS.__getitem__, ids))
        elif least not in _INT64 or largest not in _INT64:
            raise ValueError("output_ids do not fit 64 bits")
    return trial


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """Millions of objects are made here and none is garbage: looking for some would double the time, now and
    whenever the collector comes round again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
