"""The HTML report of 10 methods on 480 prompts, texts of about 1,000 characters: seconds and bytes.

    python tests/benchmarks/report.py [SHARE OF DIFFERING OUTPUTS]

It must take under 5 s and 2 MB, whatever the share (0.3 where none is given; 1 is sampling).
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from trial_factory import FakeRun, trial

from specbench.analysis.summary import summarise
from specbench.report import FORMATS

ROOT = Path(__file__).parents[2]
METHODS, QUESTIONS, CHARACTERS, ROUNDS = 10, 480, 1000, 100


def main() -> None:
    share = float(sys.argv[1]) if len(sys.argv) > 1 else 0.3
    run = made(share)
    began = time.perf_counter()
    summary = summarise([run])
    summarised = time.perf_counter()
    page = FORMATS["html"].render(summary, [run])
    seconds = time.perf_counter() - summarised
    print(f"summary {summarised - began:.2f} s, page {seconds:.2f} s, {len(page.encode()):,} bytes")  # type: ignore[union-attr]


def made(share: float) -> FakeRun:
    """Words of the bundled tasks in random order; the rest of a differing output is drawn anew."""
    draw = random.Random(0)
    lines = [
        line for file in sorted((ROOT / "tasks").glob("*.jsonl")) for line in file.read_text().splitlines()
    ]
    words = " ".join(turn for line in lines for turn in json.loads(line)["turns"]).split()
    trials = []
    for question in range(QUESTIONS):
        text = draw.choices(words, k=CHARACTERS // 6)
        for order in range(METHODS + 1):
            differs = order > 0 and draw.random() < share
            at = draw.randrange(len(text)) if differs else len(text)
            trials.append(
                trial(
                    f"q{question}",
                    f"method-{order}" if order else "vanilla",
                    task=f"task-{question % 6}",
                    block=question,
                    order=order,
                    text=" ".join([*text[:at], *draw.choices(words, k=len(text) - at)]),
                    seconds=draw.uniform(1, 2),
                    accepted=[draw.randrange(4) if order else 0 for _ in range(ROUNDS)],
                    agreement={
                        "same": not differs,
                        "first_difference": at if differs else None,
                        "logit_gap": 0.1,
                    },
                    memory={"peak_bytes": 10**9 + order * 10**7},
                    spans={"draft": 0.1, "verify": 0.8, "accept": 0.05, "other": 0.05},
                )
            )
    return FakeRun(trials, {"name": "big", "target": {"name": "target"}, "argv": ["specbench", "run"]})


if __name__ == "__main__":
    main()
