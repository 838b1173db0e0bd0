"""Renderings of a summary: terminal table, HTML, Markdown, CSV, JSON, pictures; of its trials: CSV, Parquet.

A format is one file here that holds `FORMAT = Format(...)`; nothing else names it. The same summary gives the
same bytes. All text from models, files and the command line is escaped by the format that prints it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

from specbench.report.base import Format

__all__ = ["FORMATS", "Format"]


def _found() -> Iterator[Format]:
    for module in pkgutil.iter_modules(__path__):
        found = getattr(importlib.import_module(f"{__name__}.{module.name}"), "FORMAT", None)
        if isinstance(found, Format):
            yield found


FORMATS: dict[str, Format] = {found.name: found for found in _found()}
