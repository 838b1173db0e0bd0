"""The summary object itself (design §7), as one JSON document."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from specbench.report.base import Format, Summary


def render(summary: Summary, runs: Sequence[Any] = ()) -> str:
    """The summary, indented; unknown values are null, never NaN."""
    text = json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n"
    return re.sub("[\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)  # no file can hold these


FORMAT = Format("json", "report.json", render)
