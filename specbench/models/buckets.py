"""The sizes that passes are rounded up to, so that few different ones come up."""

from __future__ import annotations

SLOTS = 64  # attention reads the slots in use, rounded up to this many, or to an eighth of a long context


def round_up(slots: int) -> int:
    """`slots` rounded up to a whole bucket: of 64 up to 1024, of 128 up to 2048, and so on."""
    bucket = max(SLOTS, 1 << max((slots - 1).bit_length() - 4, 0))
    return -(-slots // bucket) * bucket


def buckets(shortest: int, longest: int, most: int) -> list[int]:
    """What passes over contexts of `shortest` to `longest` tokens read: whole buckets, at most `most` slots."""
    found = [min(round_up(shortest + 1), most)]
    while found[-1] < min(round_up(longest + 1), most):
        found.append(min(round_up(found[-1] + 1), most))
    return found


def bucket_of(width: int) -> int:
    """Columns of the pass that takes `width`: 1, 2, 4, 8…"""
    return 1 << (width - 1).bit_length()
