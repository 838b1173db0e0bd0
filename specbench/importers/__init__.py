"""Results of other benchmarks as runs: one file a format, found by its name.

A format's module holds `FORMAT = Importer(...)`. What a format cannot tell stays None in the trials and is named
in the manifest (`imported.unknown`, and a note of the target).
"""

from __future__ import annotations

import importlib

from specbench.importers.base import Importer, Source

__all__ = ["FORMATS", "Importer", "Source"]

FORMATS: dict[str, Importer] = {
    found.name: found
    for name in ("spec_bench", "vllm", "sglang")
    for found in [importlib.import_module(f"{__name__}.{name}").FORMAT]
}
