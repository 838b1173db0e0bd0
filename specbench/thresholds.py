"""What a reading must reach to count, for those who measure and those who analyse alike."""

from __future__ import annotations

NEAR_TIE = 1e-3
"""A gap of the target's top two logits up to this is a tie that rounding decides."""

RANKED_WIDTH, RANKED_QUESTIONS = 0.30, 8
"""An interval whose half width is a larger share of its point, or which rests on fewer questions, ranks nothing."""

THROTTLED = frozenset({"hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"})
"""Reasons of NVML that make a trial worthless. A power cap is listed, but it is how a busy GPU normally runs."""

LAPS = 4
"""Questions of a block for each request that is to be in flight: with fewer, its end, where they thin out, weighs."""

MIN_CLUSTERS = 5
"""Fewer questions say nothing about other questions: no interval."""
