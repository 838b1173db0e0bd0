"""What a big run takes of the memory: `tests/benchmarks/scale.py`, scaled down."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCALE = Path(__file__).parent / "benchmarks" / "scale.py"
TRIALS = 24_000
MOST = 15_000  # bytes a trial, what any run takes included: 100,000 trials, with Python itself, stay under 1.5 GB


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_reading_and_summarising_holds_little_a_trial(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCALE, str(TRIALS), str(tmp_path)], capture_output=True, text=True, check=True
    )
    *_, last = done.stdout.splitlines()
    number, *unit = last.split()
    assert unit == ["bytes", "a", "trial"]
    assert int(number.replace(",", "")) < MOST
