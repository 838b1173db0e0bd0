"""The one error a user sees: what is wrong, and what to do about it."""

from __future__ import annotations


class SpecbenchError(Exception):
    """Something the user can act on. Printed as two lines, never as a traceback; exit code 2.

    Args:
        message: one line saying what is wrong, with the offending value.
        hint: one line saying what to do.
    """

    exit_code = 2

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class GateError(SpecbenchError):
    """A measurement was made and failed a gate: a regression, a lossless method that differs. Exit code 1."""

    exit_code = 1


def first_line(error: BaseException) -> str:
    """Another's exception as one line: its kind and the first line of what it says."""
    text = str(error).strip() or "no message"
    return f"{type(error).__name__}: {text.splitlines()[0]}"
