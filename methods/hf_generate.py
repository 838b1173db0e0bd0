"""Greedy or sampled decoding by transformers' own `generate`: how fast vanilla is elsewhere."""

from __future__ import annotations

from specbench.decoding.reference import Reference


class HFGenerate(Reference):
    """transformers' `generate`, no speculation; a reference for vanilla."""
