"""Results of `python -m sglang.bench_serving --output-details` (sgl-project/sglang,
`python/sglang/benchmark/serving.py`, before that `python/sglang/bench_serving.py`).

JSON lines, one object a benchmark: `dataset_name`, `max_concurrency`, `request_rate` (a number, Infinity, or
"trace"), `duration`, `accept_length` (the server's mean since its cache was last flushed, kept in the manifest),
`server_info` with the server's `model_path`, and the arrays over requests of `serving`. There are no latencies: a
request's is its first token's time and the gaps after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specbench.importers import serving
from specbench.importers.base import Imported, Importer, Source


def read(sources: Sequence[Source], temperature: float | None) -> Imported:
    return serving.read(sources, temperature, "--output-details", _describe)


def _describe(result: dict[str, Any]) -> tuple[dict[str, Any], str]:
    server = result.get("server_info")
    path = server.get("model_path") if isinstance(server, dict) else None
    return serving.target_named(path), str(result.get("dataset_name") or "requests")


FORMAT = Importer("sglang", "sglang.bench_serving", serving.UNKNOWN, read)
