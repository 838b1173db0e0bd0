"""What a reader of the results must know of a run: extracts of its manifest, whatever version wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

IDENTITY = ("name", "identity", "alias", "hub_id", "id", "path")
DETAILS = ("source", "hub_id", "revision", "dtype", "quantization", "parameters", "bytes", "notes")
OURS = "specbench/native"  # the engine that is none: specbench's own loop
PASSED = ("argv", "seed", "git", "versions", "start", "end")


def run_extract(manifest: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The `runs[]` entry: name, target, engine, machine in one line, start and end, config, how to reproduce."""
    target = manifest.get("target")
    return {
        "name": name,
        "target": identity(target),
        "target_details": _details(target),
        "drafters": _drafters(manifest.get("drafters")),
        "random_weights": is_random(manifest),
        "experts": _experts(manifest),
        "engine": _engine(manifest),
        "machine": machine_line(manifest.get("machine")),
        "config": dict(manifest.get("config") or {}),
        **{key: manifest.get(key) for key in PASSED},
    }


def identity(model: Any) -> str | None:
    """The name under which a model is compared: `smollm2-135m@q4_1`."""
    if isinstance(model, Mapping):
        return next((str(model[key]) for key in IDENTITY if model.get(key)), None)
    return str(model) if model else None


def is_random(manifest: Mapping[str, Any]) -> bool:
    """Whether the target's weights are random: times are real, its text and acceptance mean nothing."""
    target = manifest.get("target")
    source = target.get("source") if isinstance(target, Mapping) else None
    return source == "random" or (identity(target) or "").startswith("random:")


def temperature(manifest: Mapping[str, Any]) -> float | None:
    """The sampling temperature of the run, None where the manifest does not say; 0 is greedy."""
    value = (manifest.get("config") or {}).get("temperature")
    return float(value) if isinstance(value, int | float) else None


def _engine(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """{name, version, attached} of what generated; our own loop is one among them."""
    engine, imported = manifest.get("engine"), manifest.get("imported")
    if isinstance(engine, Mapping):
        return {key: engine.get(key) for key in ("name", "version", "attached")}
    if isinstance(imported, Mapping):
        return {"name": f"imported {imported.get('format')}", "version": None, "attached": None}
    version = (manifest.get("versions") or {}).get("specbench-llm")
    return {"name": OURS, "version": version, "attached": False}


def machine_line(machine: Any) -> str | None:
    """Accelerators, processor, memory and system in one line, of what the description holds."""
    if not isinstance(machine, Mapping):
        return str(machine) if machine else None
    parts = [*_accelerators(machine), _processor(machine), _memory(machine), _platform(machine)]
    return ", ".join(part for part in parts if part) or None


def _experts(manifest: Mapping[str, Any]) -> int | None:
    """Routed experts a layer of the target; None for a dense one, and where the manifest does not say."""
    return ((manifest.get("roofline") or {}).get("architecture") or {}).get("experts") or None


def _details(model: Any) -> dict[str, Any]:
    return {key: model.get(key) for key in DETAILS} if isinstance(model, Mapping) else {}


def drafter_line(drafter: Any) -> str | None:
    """A drafter's name, and what it was taken as."""
    name, notes = identity(drafter), drafter.get("notes") if isinstance(drafter, Mapping) else None
    return f"{name} ({'; '.join(map(str, notes))})" if name and notes else name


def _drafters(drafters: Any) -> dict[str, str]:
    """Method label -> the line of its drafter."""
    named = drafters.items() if isinstance(drafters, Mapping) else ()
    return {str(label): line for label, drafter in named if (line := drafter_line(drafter))}


def _accelerators(machine: Mapping[str, Any]) -> list[str]:
    names = [str(_of(gpu, "name") or gpu) for gpu in machine.get("gpus") or []]
    return [f"{names.count(n)} x {n}" if names.count(n) > 1 else n for n in dict.fromkeys(names)]


def _processor(machine: Mapping[str, Any]) -> str | None:
    cpu = machine.get("cpu")
    name = _of(cpu, "model") if isinstance(cpu, Mapping) else cpu
    cores = _of(cpu, "cores_usable", "cores_logical", "cores")
    if not name:
        return f"{cores} cores" if cores else None
    return f"{name} ({cores} cores)" if cores else str(name)


def _memory(machine: Mapping[str, Any]) -> str | None:
    total = machine.get("memory_bytes")
    return f"{total / 2**30:.0f} GiB" if isinstance(total, int | float) else None


def _platform(machine: Mapping[str, Any]) -> str | None:
    system = _of(machine, "os")
    return str(system) if system else None


def _of(mapping: Any, *keys: str) -> Any:
    if not isinstance(mapping, Mapping):
        return None
    return next((mapping[key] for key in keys if mapping.get(key)), None)
