"""`k=auto` against every fixed k: decode speed on Spec-Bench questions with SmolLM2, interleaved.

    python tests/benchmarks/k_auto.py QUESTIONS.jsonl [--limit 40] [--family prompt-lookup] [--threads 1] [--cpu-time]

Each question is answered by every k in turn, on the next one in reverse. Prints for each family of methods tokens a
second of decoding and their share of the best fixed k's, and the costs `auto` chose by. `--cpu-time` counts the
process's CPU time instead of the wall's, for a machine that is not quiet (with one thread the two are the same).
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from time import process_time

import torch

from specbench.build import make, open_target
from specbench.config import RunConfig
from specbench.conversation import render
from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Request
from specbench.decoding.rehearsal import adaptive_parts, length_of, rehearse
from specbench.measure.clock import Clock, HostStamps
from specbench.prompts import load_tasks, take_round_robin
from specbench.spec import parse_spec

TARGET = "smollm2-135m"
FAMILIES = {
    "prompt-lookup": ("prompt-lookup:k={}", (1, 2, 4, 8, 12, "auto")),
    "self-speculation": ("self-speculation:k={}", (1, 2, 4, 8, "auto")),
    "draft-model": (f"draft-model:draft={TARGET},k={{}}", (2, 4, 8, "auto")),
}


class CpuStamps(HostStamps):
    """The process's CPU time."""

    now = staticmethod(process_time)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("questions")
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--family", choices=FAMILIES, action="append")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true")
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(given.threads)
    config = RunConfig(target=TARGET, tasks=(given.questions,), methods=(), threads=given.threads)
    target = open_target(config, print)
    (task,) = load_tasks(config.tasks, limit=given.limit)
    prompts = [
        render(question, 0, [], target.tokenizer, {}, vocab_size=target.vocab_size, seed=0, avoid=target.stop)
        for question in take_round_robin(task.questions, given.limit)
    ]

    def clock(device: object) -> Clock:
        return Clock(device, CpuStamps() if given.cpu_time else None)

    for family in given.family or FAMILIES:
        pattern, lengths = FAMILIES[family]
        methods = {
            k: DraftVerify(target, make(parse_spec(pattern.format(k)), target, config)) for k in lengths
        }
        for part in adaptive_parts(methods["auto"].drafter):
            costs = length_of(part).costs[1] = rehearse(target, part, 1, clock=clock)
            print(
                family, "costs, ms:", {k: round(seconds * 1e3, 1) for k, seconds in costs.items()}, flush=True
            )
        seconds: dict[object, float] = defaultdict(float)
        tokens: dict[object, int] = defaultdict(int)
        depths: dict[object, list[int]] = defaultdict(list)
        for number, prompt in enumerate(prompts):
            for k in lengths if number % 2 else lengths[::-1]:
                request = Request([prompt], given.new, target.stop)
                methods[k].prepare(request)
                watch = clock(target.device)
                watch.start()
                rounds = list(methods[k].generate(request, watch))
                seconds[k] += watch.stop().decode_s
                tokens[k] += sum(len(one.tokens[0]) for one in rounds) - 1
                depths[k] += [one.depth[0] for one in rounds[1:] if one.depth[0]]
        best = max(tokens[k] / seconds[k] for k in lengths if k != "auto")
        for k in lengths:
            speed = tokens[k] / seconds[k]
            mean = sum(depths[k]) / max(len(depths[k]), 1)
            print(
                f"{family:16} k={k!s:4} {speed:6.2f} tokens/s  {speed / best:6.1%} of the best  mean draft {mean:.1f}"
            )


if __name__ == "__main__":
    main()
