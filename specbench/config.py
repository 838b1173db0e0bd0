"""What a run measures, in full: the effective config, written to the manifest and reusable as `--config`."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from specbench.decoding.sampling import Sampling
from specbench.errors import SpecbenchError

EMBEDDED_TARGET = "smollm2-135m"
EMBEDDED_METHODS = ("prompt-lookup", "hf-generate")
EMBEDDED_BATCH_METHODS = ("prompt-lookup",)  # transformers' own generate runs at batch size 1 only
EMBEDDED_NEW_TOKENS = 48
GRAPHS = ("auto", "off")
NATIVE = "native"  # the engine that is none: specbench's own loop


@dataclass(frozen=True)
class RunConfig:
    """One run. Two runs with equal configs measure the same thing; `limit` 0 means all questions."""

    target: str
    methods: tuple[str, ...]
    tasks: tuple[str, ...]
    draft: str | None = None
    limit: int = 0
    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    ignore_eos: bool = False
    batch_sizes: tuple[int, ...] = (1,)
    repeats: int = 1
    warmup: int = 1
    dtype: str = "auto"
    device: str = "auto"
    device_map: str = "none"
    attn: str = "auto"
    threads: int | None = None
    quantize: str = "none"
    graphs: str = "auto"
    compile: bool = False
    revision: str | None = None
    trust_remote_code: bool = False
    template_args: Mapping[str, Any] | None = None
    text: bool = True
    engine: str = NATIVE
    url: str | None = None
    baseline_url: str | None = None
    co_resident: bool = False
    concurrency: tuple[int, ...] = ()
    request_rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for good, what, hint in (
            (
                self.limit >= 0,
                f"--limit {self.limit} is negative",
                "give the number of questions a task, 0 for all",
            ),
            (
                self.max_new_tokens is None or self.max_new_tokens >= 1,
                f"--max-new-tokens {self.max_new_tokens} leaves nothing to measure",
                "give at least 1",
            ),
            (
                0 <= self.temperature < float("inf"),
                f"--temperature {self.temperature} is not a number from 0 up",
                "give 0 for greedy, or more",
            ),
            (0 < self.top_p <= 1, f"--top-p {self.top_p} is not in (0, 1]", "give 1 to switch it off"),
            (self.top_k >= 0, f"--top-k {self.top_k} is negative", "give 0 to switch it off"),
            (
                bool(self.batch_sizes) and min(self.batch_sizes) >= 1,
                f"--batch-size {','.join(map(str, self.batch_sizes))} is not a list of whole numbers above 0",
                "write e.g. --batch-size 1,4,16",
            ),
            (self.repeats >= 1, f"--repeats {self.repeats} leaves nothing to measure", "give at least 1"),
            (self.warmup >= 0, f"--warmup {self.warmup} is negative", "give the number of warm-up blocks"),
            (
                self.threads is None or self.threads >= 1,
                f"--threads {self.threads} is not possible",
                "give 1 or more",
            ),
            (
                min(self.concurrency, default=1) >= 1,
                f"--concurrency {','.join(map(str, self.concurrency))} is not a list of whole numbers above 0",
                "write e.g. --concurrency 1,4,16",
            ),
            (
                min(self.request_rates, default=1.0) > 0,
                f"--request-rate {','.join(map(str, self.request_rates))} is not a list of numbers above 0",
                "write e.g. --request-rate 0.5,2,8 (requests a second)",
            ),
            (
                self.graphs in GRAPHS,
                f"--graphs {self.graphs} is neither {' nor '.join(GRAPHS)}",
                "auto captures CUDA graphs wherever that can be",
            ),
            (bool(self.tasks), "there is no task to measure", "give --task NAME, see `specbench ls tasks`"),
        ):
            if not good:
                raise SpecbenchError(what, hint)

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p)

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """`name: theirs -> ours` for each setting that differs from a manifest's config."""
        ours = self.to_json()
        return [
            f"{name}: {other.get(name)} -> {value}"
            for name, value in ours.items()
            if value != other.get(name, value)
        ]


def read_config(path: Path) -> dict[str, Any]:
    """Settings from a JSON file: an effective config, or a manifest that holds one.

    Raises:
        SpecbenchError: unreadable, or a setting that does not exist.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecbenchError(f"cannot read --config {path}: {error.strerror}", "give a JSON file") from error
    except ValueError as error:
        raise SpecbenchError(f"--config {path} is not JSON: {error}", "use a run's manifest.json") from error
    data = data.get("config", data) if isinstance(data, dict) else None
    if not isinstance(data, dict):
        raise SpecbenchError(f"--config {path} is not a JSON object", "use a run's manifest.json")
    known = {f.name: f for f in fields(RunConfig)}
    unknown = sorted(data.keys() - known.keys())
    if unknown:
        raise SpecbenchError(
            f"--config {path} has unknown settings: {', '.join(unknown)}",
            f"known are {', '.join(sorted(known))}",
        )
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    kinds = typing.get_type_hints(RunConfig)
    wrong = sorted(name for name, value in settings.items() if not _is_a(value, kinds[name]))
    if wrong:
        shown = ", ".join(f"{name}={json.dumps(data[name])}" for name in wrong)
        raise SpecbenchError(
            f"--config {path} has settings of the wrong kind: {shown}", "use a run's manifest.json"
        )
    return settings


def _is_a(value: Any, kind: Any) -> bool:
    """Whether a value read from JSON is of a field's annotated kind; 1 is a float, true no number."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return any(_is_a(value, one) for one in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(_is_a(one, arguments[0]) for one in value)
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
    return isinstance(value, origin or kind)
