"""What a run's manifest says: who and what was measured, where and with what, and when (design §7)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.build import PUBLISHED
from specbench.config import RunConfig
from specbench.errors import SpecbenchError
from specbench.measure import machine
from specbench.questions import shared_prefix

if TYPE_CHECKING:
    from specbench.build import Named
    from specbench.models.target import Target
    from specbench.questions import Task
    from specbench.serving.model import EngineTarget

# What must not change between two starts of one run, and what to say if it has.
FIXED = {
    "machine_fingerprint": "was begun on another machine",
    "target": "was begun with other weights",
    "drafters": "was begun with another drafter",
    "tasks": "was begun with other task files",
    "kernel_choices": "was begun with other kernels",
    "plugins": "was begun with another version of a method's file",
}


def describe(
    name: str,
    argv: Sequence[str],
    config: RunConfig,
    tasks: Sequence[Task],
    target: Target | EngineTarget,
    methods: Sequence[Named],
    notify: Callable[[str], None],
) -> dict[str, Any]:
    """The manifest of a run that begins now."""
    here = machine.describe(target.device)
    return {
        "name": name,
        "argv": ["specbench", *argv],
        "config": config.to_json(),
        "seed": config.seed,
        "target": target.identity.to_json(),
        "drafters": {n.label: found for n in methods if (found := n.drafter())},
        "methods": [named.to_json() for named in methods],
        "plugins": plugins([named.label for named in methods]),
        "tasks": [task.identity() for task in tasks],
        "shared_prefix": {task.name: shared_prefix(task.questions) for task in tasks},
        "chat_template": template_hash(target.tokenizer),
        "machine": here,
        "machine_fingerprint": machine.fingerprint(here),
        "versions": machine.versions(),
        "git": machine.git_state(),
        "kernel_choices": target.kernels,
        "roofline": roofline(target, notify),
        "start": now(),
        "end": None,
        "status": "running",
    }


def resumed(
    manifest: dict[str, Any], before: dict[str, Any], notify: Callable[[str], None]
) -> dict[str, Any]:
    """The manifest of a run that goes on: its first start, and the starts since.

    Raises:
        SpecbenchError: something is not as it was, so that old and new rows would not belong together.
    """
    ours = json.loads(json.dumps(manifest))
    for what, why in FIXED.items():
        if what in before and _of_weights(before[what]) != _of_weights(ours[what]):
            raise SpecbenchError(
                f"run {manifest['name']} {why}: one run is one {what.replace('_', ' ')}",
                "choose another --name, or --fresh to move it aside",
            )
    if before.get("versions") != ours["versions"]:
        notify("package versions have changed since this run was begun: see its manifest")
    if before.get("git") != ours["git"]:
        notify("specbench's own code has changed since this run was begun: see `git` in its manifest")
    if _draft_costs(before) != _draft_costs(ours):
        notify("what drafts cost was measured anew since this run was begun: k=auto may choose otherwise")
    kept = ("versions", "git")
    starts = [
        *before.get("resumed", []),
        {"at": manifest["start"], **{name: manifest[name] for name in kept}},
    ]
    earlier = ("start", *kept, "graphs", "attention")
    first: dict[str, Any] = {name: before[name] for name in earlier if name in before}
    return {**manifest, **first, "resumed": starts}


def captured(
    manifest: dict[str, Any], graphs: list[dict[str, Any]], attention: dict[str, dict[str, list[int]]]
) -> dict[str, Any]:
    """What a manifest says of `graphs` (`models.passes.facts`) and `attention` (`models.attention_choice`), with what
    this start has made and used."""
    by_model = {fact["model"]: fact for fact in graphs}
    for fact in manifest.get("graphs", []):
        now = by_model.setdefault(fact["model"], fact)
        now["shapes"] = sorted(
            {*now["shapes"], *fact["shapes"]}, key=lambda s: [int(n) for n in s.split("x")]
        )
    said: dict[str, dict[str, list[int]]] = {}
    for earlier in (manifest.get("attention", {}), attention):
        for kind, by_name in earlier.items():
            for name, slots in by_name.items():
                known = said.setdefault(kind, {}).get(name, [])
                said[kind][name] = sorted({*known, *slots})
    return {"graphs": [by_model[model] for model in sorted(by_model)], "attention": said}


def _draft_costs(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each method, what `k=auto` chooses by; older manifests have none."""
    return [method.get("draft_costs") or {} for method in manifest.get("methods", [])]


def _of_weights(part: Any) -> Any:
    """A part of a manifest without what the registry says of its drafters, which may be edited between starts."""
    if not isinstance(part, dict):
        return part
    return {key: _of_weights(value) for key, value in part.items() if key not in PUBLISHED}


def roofline(target: Target | EngineTarget, notify: Callable[[str], None]) -> dict[str, Any] | None:
    """What the limits of a run are computed from: the target's architecture, and the speed of the device.

    None for an engine's target, whose passes are not ours.
    """
    import torch

    from specbench.measure.speed import device_speed
    from specbench.models.architecture import architecture
    from specbench.models.gguf import cache_folder
    from specbench.models.quantize import in_float8
    from specbench.models.target import Target

    if not isinstance(target, Target):
        return None
    numbers = torch.float8_e4m3fn if in_float8(target.model) else target.dtype
    speed = device_speed(target.device, numbers, cache_folder(), notify)
    return {
        "architecture": architecture(target).to_json(),
        "speed": None if speed is None else speed.to_json(),
    }


def plugins(labels: Sequence[str]) -> dict[str, str]:
    """sha256 of every method file that the labels name (`./file.py::Class`), by its path."""
    paths = {path for label in labels for path in re.findall(r"([^=(,]+)::", label)}
    return {path: hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest() for path in sorted(paths)}


def template_hash(tokenizer: Any) -> str | None:
    """sha256 of the chat template, None where there is none."""
    template = getattr(tokenizer, "chat_template", None)
    return hashlib.sha256(str(template).encode()).hexdigest() if template else None


def now() -> str:
    """The moment, as manifests write it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
