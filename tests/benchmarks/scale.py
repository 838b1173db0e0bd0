"""Seconds and memory of reading and summarising a big run: `python tests/benchmarks/scale.py [TRIALS] [FOLDER]`.

Writes a simulated run (10 methods, 480 questions, as many repeats as TRIALS needs, 48 rounds a trial on average)
into FOLDER, which is kept and used again, then reads and summarises it in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

QUESTIONS, METHODS = 480, 10


def write(folder: Path, count: int) -> None:
    """A run of `count` trials, about."""
    from simulator import PAIR, SPREAD, simulate, trials

    from specbench.store import MANIFEST, TRIALS

    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(1)
    once = trials(simulate(QUESTIONS, generator, SPREAD))
    plain, fast = ([t for t in once if t.method == method] for method in PAIR)
    labels = ["vanilla", *(f"method-{number}" for number in range(1, METHODS))]
    with (folder / TRIALS).open("w") as file:
        for repeat in range(max(1, count // (QUESTIONS * METHODS))):
            for question, pair in enumerate(zip(plain, fast, strict=True)):
                for order, label in enumerate(labels):
                    trial = replace(
                        pair[order > 0],
                        method=label,
                        order=order,
                        repeat=repeat,
                        block=repeat * QUESTIONS + question,
                        task=f"task-{question % 8}",
                        category=f"category-{question % 16}",
                        output_ids=generator.integers(0, 128_000, pair[0].output_tokens).tolist(),
                        text="word " * pair[0].output_tokens,
                        cpu_s=1.0,
                        load=1.0,
                        memory={"weights_bytes": 10**9, "kv_bytes": 10**6, "peak_bytes": 2 * 10**9},
                        agreement=None if order == 0 else {"same": True, "first_difference": None, "logit_gap": None},
                    )  # fmt: skip
                    file.write(json.dumps(trial.to_json()) + "\n")
    (folder / MANIFEST).write_text(json.dumps(manifest()))


def manifest() -> dict[str, Any]:
    """With what the floors of the passes are worked out from, as a real run has it."""
    from specbench.analysis.roofline import Architecture

    target = Architecture(
        layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256, tied=False,
        windows=((None, 32),), cached=2048, attended=8192, dense_parameters=8 * 10**9, dense_bytes=16 * 10**9,
    )  # fmt: skip
    speed = {"device": "simulated", "copy_gb_s": 900.0, "read_gb_s": 900.0, "matmul_tflop_s": 300.0}
    facts = {"architecture": target.to_json(), "speed": speed}
    return {"schema": 1, "name": "scale", "target": {"name": "simulated"}, "roofline": facts}


def peak_bytes() -> int:
    """Most memory this process ever held; `ru_maxrss` would tell of the process that started it too."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def measure(folder: Path) -> None:
    """Print what reading and summarising take."""
    from specbench.analysis.summary import summarise
    from specbench.store import read_run

    def report(what: str, since: tuple[float, float]) -> None:
        peak = peak_bytes() / 2**30
        wall, cpu = time.perf_counter() - since[0], time.process_time() - since[1]
        print(f"{what:10} {wall:6.1f} s  processor {cpu:6.1f} s  peak so far {peak:.2f} GiB", flush=True)

    before = peak_bytes()
    start = time.perf_counter(), time.process_time()
    run = read_run(folder)
    report("read", start)
    print(f"           {len(run.trials)} trials, {sum(len(t.rounds.emitted) for t in run.trials)} rounds")
    start = time.perf_counter(), time.process_time()
    summary = summarise([run])
    report("summarise", start)
    print(f"           {len(summary['rows'])} rows, {len(summary['warnings'])} warnings")
    print(f"           {(peak_bytes() - before) / len(run.trials):,.0f} bytes a trial")


def main(arguments: list[str]) -> None:
    count = int(arguments[0]) if arguments else 100_000
    with tempfile.TemporaryDirectory() as spare:
        folder = Path(arguments[1] if len(arguments) > 1 else spare) / f"scale-{count}"
        if not folder.exists():
            write(folder, count)
        size = sum(file.stat().st_size for file in folder.iterdir()) / 2**20
        print(f"{folder}: {size:.0f} MiB")
        subprocess.run([sys.executable, __file__, "--measure", str(folder)], check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(Path(sys.argv[2]))
    else:
        main(sys.argv[1:])
