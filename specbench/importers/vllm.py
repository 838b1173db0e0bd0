"""Results of `vllm bench serve --save-result --save-detailed` (vllm-project/vllm, `vllm/benchmarks/serve.py`).

One JSON object a benchmark (with `--append-result` one a line): `model_id`, `max_concurrency` (null: no limit),
`request_rate` (a number, or "inf"), `duration`, the arrays over requests of `serving`, in newer versions
`latencies`, and `spec_decode_*`, the server's counters over the whole benchmark, which stay in the manifest: they
cannot be given to requests. `output_lens` holds the server's own counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specbench.importers import serving
from specbench.importers.base import Imported, Importer, Source


def read(sources: Sequence[Source], temperature: float | None) -> Imported:
    return serving.read(sources, temperature, "--save-detailed", _describe)


def _describe(result: dict[str, Any]) -> tuple[dict[str, Any], str]:
    return serving.target_named(result.get("model_id")), str(result.get("dataset_name") or "requests")


FORMAT = Importer("vllm", "vllm bench serve", serving.UNKNOWN, read)
