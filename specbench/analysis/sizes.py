"""Bytes as every sentence and table prints them."""

from __future__ import annotations

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def in_bytes(value: float, signed: bool = False) -> str:
    """`1.2 GiB`, in powers of 1024; with a sign where it is a difference."""
    scaled, unit = float(value), 0
    while abs(scaled) >= 1024 and unit < len(UNITS) - 1:
        scaled, unit = scaled / 1024, unit + 1
    digits = 1 if unit and abs(scaled) < 10 else 0
    return f"{scaled:{'+' if signed and value else ''}.{digits}f} {UNITS[unit]}"
