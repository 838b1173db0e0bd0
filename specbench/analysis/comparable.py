"""Whether two runs may be compared, and what besides the code under test differs between them.

Refused: another target (name, dtype, quantisation, revision, size, file hashes), another sampling, and
absolute numbers across machines. Said, but compared: other task files or templates (then nothing is paired),
other lengths, versions, commits, kernels, drafters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specbench.analysis.caution import warning
from specbench.analysis.extract import identity, is_random, machine_line, temperature
from specbench.errors import SpecbenchError

Manifest = Mapping[str, Any]

IDENTITY = ("name", "dtype", "quantization", "revision", "parameters", "files")
PRECISION = ("dtype", "quantization")
SAMPLING = ("temperature", "top_p", "top_k", "ignore_eos")
GREEDY_IGNORES = ("top_p", "top_k")
# Settings that shift the numbers without making them another quantity; the rest is the workload, said apart.
SETTINGS = ("dtype", "device", "device_map", "attn", "threads", "warmup", "repeats", "engine", "draft")
SHOWN = 3


def check(base: Manifest, new: Manifest, absolute: Sequence[str]) -> None:
    """Refuse runs of which no ratio means anything.

    Args:
        absolute: the metrics asked for that depend on the machine.

    Raises:
        SpecbenchError: another target, another sampling, or `absolute` across machines.
    """
    found = list(_target_differences(base.get("target"), new.get("target")))
    if found:
        raise SpecbenchError(
            f"the runs have different targets: {'; '.join(found)}",
            "a comparison needs the same weights at the same precision on both sides",
        )
    found = sampling_differences(base, new)
    if found:
        raise SpecbenchError(
            f"the runs sample differently: {'; '.join(found)}",
            "run one of them again with the other's options",
        )
    if absolute and not same_machine(base, new):
        raise SpecbenchError(
            f"{' and '.join(absolute)} cannot be compared across machines: {_machines(base, new)}",
            "use --metric speedup or tau, or run both on one machine",
        )


def same_machine(base: Manifest, new: Manifest) -> bool:
    """Whether both were made on the same kind of machine; False where either does not say."""
    mine, theirs = base.get("machine_fingerprint"), new.get("machine_fingerprint")
    return mine is not None and mine == theirs


def other_prompts(base: Manifest, new: Manifest) -> set[str]:
    """The tasks of both runs whose prompts are known to differ: another file, template, or random seed."""
    before, after = _tasks(base), _tasks(new)
    shared = set(before) & set(after)
    if _template(base) != _template(new) or (is_random(base) and base.get("seed") != new.get("seed")):
        return shared
    return {name for name in shared if _differ(before[name].get("sha256"), after[name].get("sha256"))}


def other_model(base: Manifest, new: Manifest) -> list[str]:
    """What shows that two targets are different weights, in whatever format and precision they are run."""
    return list(_target_differences(base.get("target"), new.get("target"), of_engines=True))


def cautions(base: Manifest, new: Manifest, name: str) -> list[dict[str, Any]]:
    """Warnings, named after the new run: what makes the comparison mean less than it seems."""
    found = []
    others = sorted(other_prompts(base, new))
    if _template(base) != _template(new):
        message, cure = "the chat templates differ, and so do all prompts", "use the same --template-arg"
        found.append(warning("prompts", f"{message}: nothing is paired", cure, name))
    elif others:
        message = f"the prompts differ, so they are compared unpaired: {', '.join(others)}"
        found.append(warning("prompts", message, "use the same task files (and seed) for both runs", name))
    lengths = length_differences(base, new)
    if lengths:
        message = f"the limit of new tokens differs: {', '.join(lengths)}"
        found.append(
            warning("lengths", message, "use the same --max-new-tokens: speedup depends on it", name)
        )
    if not same_machine(base, new):
        message = f"the machines differ ({_machines(base, new)}): τ carries over, speedup only roughly"
        found.append(warning("machine", message, "gate speedup on one machine, or widely", name))
    if temperature(base) is None or temperature(new) is None:
        message = "the sampling temperature of a run is unknown"
        found.append(warning("sampling", message, "make sure that both used the same", name))
    return found


def changes(base: Manifest, new: Manifest) -> list[dict[str, str | None]]:
    """What else changed, as {what, base, new}: settings, commit, versions, driver, kernels, drafters."""
    before, after = dict(_facts(base)), dict(_facts(new))
    return [
        {"what": what, "base": before.get(what), "new": after.get(what)}
        for what in dict.fromkeys([*before, *after])
        if before.get(what) != after.get(what)
    ]


def _target_differences(base: Any, new: Any, of_engines: bool = False) -> Iterator[str]:
    """`of_engines`: each of them has its own format and precision, and counts parameters by that."""
    if not isinstance(base, Mapping) or not isinstance(new, Mapping):
        if not base or base != new:
            yield f"{identity(base) or 'unknown'} and {identity(new) or 'unknown'}"
        return
    if not identity(base) or not identity(new):
        yield "the target of a run is unknown"
    for key in IDENTITY:
        mine, theirs = base.get(key), new.get(key)
        if of_engines and key in (*PRECISION, "parameters"):
            continue
        if key == "files":
            yield from _file_differences(mine or {}, theirs or {}, shared_only=of_engines)
        elif key == "quantization" and (mine or "none") != (theirs or "none"):
            yield f"{key} {mine or 'none'} and {theirs or 'none'}"
        elif key != "quantization" and _differ(mine, theirs):
            yield f"{key} {mine} and {theirs}"


def _file_differences(base: Mapping[str, Any], new: Mapping[str, Any], shared_only: bool) -> Iterator[str]:
    if not base or not new:
        return
    names = set(base) & set(new) if shared_only else {*base, *new}
    other = [name for name in sorted(names) if base.get(name) != new.get(name)]
    if other:
        more = f" and {len(other) - SHOWN} more" if len(other) > SHOWN else ""
        yield f"hash of {', '.join(other[:SHOWN])}{more}"


def sampling_differences(base: Manifest, new: Manifest) -> list[str]:
    """Which options of sampling differ, each with both values."""
    return list(_sampling_differences(_config(base), _config(new)))


def _sampling_differences(base: Manifest, new: Manifest) -> Iterator[str]:
    greedy = base.get("temperature") == new.get("temperature") == 0
    for key in SAMPLING:
        if _differ(base.get(key), new.get(key)) and not (greedy and key in GREEDY_IGNORES):
            yield f"{key} {base.get(key)} and {new.get(key)}"


def length_differences(base: Manifest, new: Manifest) -> list[str]:
    """The tasks of both whose limit of new tokens differs, each with both limits."""
    return sorted(_length_differences(base, new))


def _length_differences(base: Manifest, new: Manifest) -> Iterator[str]:
    before, after = _tasks(base), _tasks(new)
    for name in set(before) & set(after):
        mine, theirs = (
            _config(run).get("max_new_tokens") or task.get("max_new_tokens")
            for run, task in ((base, before[name]), (new, after[name]))
        )
        if _differ(mine, theirs):
            yield f"{name} {mine} and {theirs}"


def _facts(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Everything that `changes` looks at, in the order in which it is listed."""
    git, config = manifest.get("git") or {}, _config(manifest)
    if git.get("commit"):
        yield "specbench commit", str(git["commit"])[:12] + (" (with changes)" if git.get("dirty") else "")
    if config.get("temperature"):
        yield "seed", str(manifest.get("seed"))
    for key in SETTINGS:
        if config.get(key) is not None:
            yield f"--{key.replace('_', '-')}", str(config[key])
    for package, version in sorted((manifest.get("versions") or {}).items()):
        yield package, str(version)
    for gpu in (manifest.get("machine") or {}).get("gpus") or []:
        if isinstance(gpu, Mapping) and gpu.get("driver"):
            yield "GPU driver", str(gpu["driver"])
    kernels = manifest.get("kernel_choices")
    for part, choice in kernels.items() if isinstance(kernels, Mapping) else ():
        yield f"{part} kernels", choice if isinstance(choice, str) else _summary(choice)
    for label, drafter in sorted((manifest.get("drafters") or {}).items()):
        yield f"drafter of {label}", _drafter(drafter)


def _summary(choice: Any) -> str:
    """Kernel choices by shape as one short text: each kernel and for how many shapes it was taken."""
    leaves: list[str] = []

    def collect(value: Any) -> None:
        if isinstance(value, Mapping):
            for inner in value.values():
                collect(inner)
        else:
            leaves.append(str(value))

    collect(choice)
    return ", ".join(f"{name} x{leaves.count(name)}" for name in sorted(set(leaves))) or "none"


def _drafter(drafter: Any) -> str:
    """A drafter's name with its revision, or the hash of its first file."""
    name = identity(drafter) or "unknown"
    if not isinstance(drafter, Mapping):
        return name
    files = drafter.get("files") or {}
    mark = drafter.get("revision") or next((str(files[key]) for key in sorted(files)), "")
    return f"{name} ({mark[:12]})" if mark else name


def _machines(base: Manifest, new: Manifest) -> str:
    return " and ".join(machine_line(run.get("machine")) or "unknown" for run in (base, new))


def _template(manifest: Manifest) -> tuple[Any, Any]:
    return manifest.get("chat_template"), _config(manifest).get("template_args") or None


def _tasks(manifest: Manifest) -> dict[str, Mapping[str, Any]]:
    return {str(task.get("name")): task for task in manifest.get("tasks") or [] if isinstance(task, Mapping)}


def _config(manifest: Manifest) -> Mapping[str, Any]:
    return manifest.get("config") or {}


def _differ(mine: Any, theirs: Any) -> bool:
    """Whether two known values differ; what either does not say is no difference."""
    return mine is not None and theirs is not None and mine != theirs
