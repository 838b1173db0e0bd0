"""Text from models, files and command lines, made safe to print anywhere: what is hidden in it becomes visible.

Every format escapes its own markup; what no format may print as it is stands here: control characters (an
escape sequence would recolour or rewrite a terminal), characters that turn the reading direction of the line
around them ("Trojan Source"), and lone surrogates, which no file can hold.
"""

from __future__ import annotations

import re
from typing import Any

BLANKS = re.compile(r"[\t\n\v\f\r\x85\u2028\u2029]+")
# C0, DEL, C1; embeddings, overrides and isolates of the bidirectional algorithm; lone surrogates.
HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: Any) -> str:
    """One line of text without hidden characters: `a\\nb` reads `a b`, an escape character `\\x1b`."""
    return visible(BLANKS.sub(" ", str(text)))


def visible(text: str) -> str:
    """The text, its lines and tabs kept, hidden characters written as in a Python string: `\\u202e`."""
    return HIDDEN.sub(_code, text)


def _code(match: re.Match[str]) -> str:
    number = ord(match[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"
