"""The terminal's table as a picture, for a README or a slide."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI

from specbench.report.base import Format, Summary
from specbench.report.plain import plain
from specbench.report.terminal import render as table

WIDTH = 104  # columns


def render(summary: Summary, runs: Sequence[Any] = ()) -> str:
    """One SVG, without the web fonts rich would load: a picture must not call home."""
    console = Console(width=WIDTH, record=True, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(table(summary, WIDTH))
    names = plain(", ".join(run["name"] for run in summary["runs"]))
    svg = console.export_svg(title=f"specbench: {names}", theme=DIMMED_MONOKAI, unique_id="specbench")
    return re.sub(r"@font-face\s*\{[^}]*\}\s*", "", svg) + "\n"


FORMAT = Format("svg", "report.svg", render)
