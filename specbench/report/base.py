"""What a report format is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Summary = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Format:
    """A rendering of a summary into one file.

    Args:
        name: as spelled in `--format NAME`.
        filename: of the file written into the report's folder.
        render: (summary, runs) to the file's text, or its bytes. `runs` are the summarised runs with their
            trials, for formats that show more than the summary; what stands in a table comes from the summary
            alone.
    """

    name: str
    filename: str
    render: Callable[[Summary, Sequence[Any]], str | bytes]
