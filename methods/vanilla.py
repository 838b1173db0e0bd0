"""Plain autoregressive decoding: the baseline every method is compared with."""

from __future__ import annotations

from specbench.decoding.draft import Drafter


class Vanilla(Drafter):
    """Proposes nothing, so that every round is one target pass and one token."""
