"""What is wrong with the facts `checks` gathered, and what to do about it.

A new rule is a generator of problems and its entry in `RULES`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from specbench.measure.checks import NEEDED, Facts

MEMORY_NEEDED = 1e9
"""Bytes below which not even the embedded default's target fits."""

MEMORY_WANTED, DISK_WANTED = 2e9, 2e9
GPU_IN_USE = 2e9
"""Bytes in use on a GPU, before we put anything there, above which somebody else is at work on it."""


@dataclass(frozen=True)
class Problem:
    """One line of what is wrong and one of what to do. Fatal: no run can work. Failed: a self-check did not pass."""

    what: str
    advice: str
    fatal: bool = False
    failed: bool = False


def problems(facts: Facts) -> list[Problem]:
    """What is wrong, the fatal first."""
    rules = INSTALL_RULES if facts["broken"] else (*INSTALL_RULES, *RULES)
    found = [problem for rule in rules for problem in rule(facts)]
    return sorted(found, key=lambda problem: not problem.fatal)


def _install_rules(facts: Facts) -> Iterator[Problem]:
    for line in facts["broken"]:
        yield Problem(f"cannot import {line}", "install specbench-llm again, in a fresh environment", True)
    for line in facts["unmet"]:
        name = line.split()[0]
        needed = name in NEEDED
        yield Problem(line, f"pip install -U specbench-llm, or install {name} as said", needed)


def _noise_rules(facts: Facts) -> Iterator[Problem]:
    quiet = facts["quiet"]
    cores, threads = quiet["cores"], quiet["threads"]
    free = max(0, cores - threads)
    if quiet["busy_cores"] is not None and quiet["busy_cores"] > free + 0.25:
        yield Problem(
            f"other processes keep {quiet['busy_cores']:.1f} of {cores} cores busy: timings will be noisy",
            "stop them, or use fewer threads (--threads); contended blocks are marked and repeated once",
        )
    elif quiet["load"] is not None and quiet["load"] > free + 0.75:
        yield Problem(
            f"load {quiet['load']:.1f} on {cores} cores: timings may be noisy",
            "wait until it falls (it is the mean of the last minute), or use fewer threads (--threads)",
        )
    if threads > cores:
        yield Problem(
            f"torch uses {threads} threads on {cores} usable cores: they will wait for each other",
            f"use --threads {cores}, or set OMP_NUM_THREADS={cores}",
        )
    governor = facts["machine"]["cpu"]["governor"]
    if governor in ("powersave", "conservative", "ondemand"):
        yield Problem(
            f"the processor's governor is {governor!r}: its clock changes while we measure",
            "set it to performance (cpupower frequency-set -g performance)",
        )


def _memory_rules(facts: Facts) -> Iterator[Problem]:
    available = facts["memory"]["available_bytes"]
    if available < MEMORY_WANTED:
        yield Problem(
            f"only {available / 1e9:.1f} GB of memory are free",
            "close other programs, or choose a smaller --target or a narrower --dtype",
            available < MEMORY_NEEDED,
        )


def _folder_rules(facts: Facts) -> Iterator[Problem]:
    for name, variable in (("specbench", "SPECBENCH_CACHE"), ("hugging_face", "HF_HOME")):
        folder = facts["folders"][name]
        if not folder["writable"]:
            yield Problem(
                f"the cache folder {folder['path']} cannot be written", f"set {variable} to one that can"
            )
        if folder["free_bytes"] is not None and folder["free_bytes"] < DISK_WANTED:
            yield Problem(
                f"only {folder['free_bytes'] / 1e9:.1f} GB are free for {folder['path']}",
                f"free some space, or set {variable} to a larger disk",
            )


def _hub_rules(facts: Facts) -> Iterator[Problem]:
    found = facts["hub"]
    if found["reachable"] is False:
        yield Problem(
            f"the Hub ({found['endpoint']}) does not answer: models cannot be downloaded",
            "use a local folder, a GGUF file, a cached model or random:ALIAS as --target; see HTTPS_PROXY",
        )


def _gpu_rules(facts: Facts) -> Iterator[Problem]:
    gpu = facts["gpu"]
    if gpu["driver_gpus"] and not gpu["torch_gpus"]:
        yield Problem(
            f"the driver has {gpu['driver_gpus']} GPU(s), torch sees none",
            "install a CUDA build of torch that this driver supports, and look at CUDA_VISIBLE_DEVICES",
        )
    if gpu["torch_gpus"] and not gpu["nvml"]:
        yield Problem(
            f"NVML does not work ({gpu['why_not']})", "energy, clocks and temperature will be empty"
        )
    for line in gpu["warnings"]:
        yield Problem(line, "a newer driver may give them; everything else is measured")
    for number, now in enumerate(gpu["now"]):
        yield from _busy_gpu(number, now)


def _busy_gpu(number: int, now: Facts | None) -> Iterator[Problem]:
    if now is None:
        return
    if (now["used_bytes"] or 0) > GPU_IN_USE:
        yield Problem(
            f"cuda:{number} has {now['used_bytes'] / 1e9:.1f} GB in use: another process may disturb timings",
            "choose another GPU (CUDA_VISIBLE_DEVICES), or stop what runs there",
        )
    if now["throttle_reasons"]:
        yield Problem(
            f"cuda:{number} is slowed down now: {', '.join(now['throttle_reasons'])}",
            "let it cool, look at its power limit; throttled blocks are marked and repeated once",
        )


def _clock_rules(facts: Facts) -> Iterator[Problem]:
    yield from _not_made("clocks", facts)
    for device, check in _checks(facts["clocks"]):
        if not check["agrees"]:
            yield Problem(
                f"{device}: event spans differ by {check['difference']:.1%} from the host's clock over "
                f"{check['host_s'] * 1e3:.0f} ms",
                "something else uses the GPU or this process's cores: times of rounds cannot be trusted",
                failed=True,
            )


def _graph_rules(facts: Facts) -> Iterator[Problem]:
    yield from _not_made("graphs", facts)
    for device, check in _checks(facts["graphs"]):
        lacking = [model for model, shapes in check["shapes"].items() if not shapes]
        if check["eager"] is not None or lacking:
            yield Problem(
                f"{device}: no CUDA graphs ({check['eager'] or f'none was made of the {lacking[0]}'})",
                "vanilla and methods run without them alike, more slowly than they could",
                failed=True,
            )
        elif not check["passed"]:
            yield Problem(
                f"{device}: CUDA graphs in {check['dtype']} say something else than plain passes",
                "run with --graphs off, and report this with the output of `specbench doctor --json`",
                failed=True,
            )


def _quantisation_rules(facts: Facts) -> Iterator[Problem]:
    found = facts["quantisation"]
    for scheme, wrong in found["failed"].items():
        yield Problem(
            f"{found['device']}: a layer quantised to {scheme} does not work: {wrong}",
            "quantise to something else here, or install a torchao made for this torch",
            failed=True,
        )


def _not_made(section: str, facts: Facts) -> Iterator[Problem]:
    for device, found in facts[section].items():
        if isinstance(found, str):
            yield Problem(
                f"{device}: the self-check of {section} could not be made: {found}",
                "stop what else uses this GPU (nvidia-smi names it), or choose another (CUDA_VISIBLE_DEVICES)",
                failed=True,
            )


def _checks(section: Facts) -> Iterator[tuple[str, Facts]]:
    """Each check that was made, with its device."""
    for device, found in section.items():
        for check in found if isinstance(found, list) else ():
            yield device, check


INSTALL_RULES = (_install_rules,)
RULES = (
    _noise_rules,
    _memory_rules,
    _folder_rules,
    _hub_rules,
    _gpu_rules,
    _clock_rules,
    _graph_rules,
    _quantisation_rules,
)
