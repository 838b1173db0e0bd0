"""What `specbench doctor` looks at. `advice` judges it.

A new check is one section function and its entry in `SECTIONS`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specbench.errors import first_line
from specbench.measure import nvml
from specbench.measure.bandwidth import measure_bandwidth
from specbench.measure.cpu import busy_now, load_average, usable_cpus
from specbench.measure.machine import describe, fingerprint, versions

Facts = dict[str, Any]

NEEDED = ("torch", "transformers", "safetensors", "tokenizers", "huggingface_hub", "psutil")
HUB_SECONDS = 2.0


def gather() -> Facts:
    """All facts of this machine, JSON-ready; it takes some seconds, more of them with a GPU to check. If a needed
    package cannot be imported, every section is null.
    """
    broken = broken_imports()
    facts: Facts = {"schema": 1, "versions": versions(), "unmet": unmet_requirements(), "broken": broken}
    for name, section in SECTIONS.items():
        facts[name] = None if broken else section()
    facts["fingerprint"] = None if broken else fingerprint(facts["machine"])
    return facts


def unmet_requirements(distribution: str = "specbench-llm") -> list[str]:
    """Requirements of specbench that what is installed does not meet, as "name wanted, installed"."""
    from packaging.requirements import Requirement

    try:
        lines = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    unmet = []
    for wanted in map(Requirement, lines):
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            unmet.append(f"{wanted.name} is not installed, {wanted} is needed")
            continue
        if not wanted.specifier.contains(installed, prereleases=True):
            unmet.append(f"{wanted.name} {installed} is installed, {wanted} is needed")
    return unmet


def broken_imports(names: tuple[str, ...] = NEEDED) -> list[str]:
    """The needed packages that cannot be imported, each with the reason."""
    broken = []
    for name in names:
        try:
            importlib.import_module(name)
        except (ImportError, OSError, RuntimeError) as error:  # OSError: a shared library does not load
            broken.append(f"{name}: {error}")
    return broken


def quietness() -> Facts:
    """Load average, and the cores that others keep busy during half a second of our own silence."""
    import torch

    load = load_average()  # before anything of ours adds to it
    return {
        "load": load,
        "busy_cores": busy_now(0.5),
        "cores": len(usable_cpus()),
        "threads": torch.get_num_threads(),
    }


def memory() -> Facts:
    import psutil

    found = psutil.virtual_memory()
    return {"total_bytes": found.total, "available_bytes": found.available}


def folders() -> Facts:
    """The cache folders and the room in them."""
    from huggingface_hub import constants

    from specbench.models.gguf import cache_folder

    return {"specbench": _folder(cache_folder()), "hugging_face": _folder(Path(constants.HF_HUB_CACHE))}


def hub() -> Facts:
    """Whether the Hugging Face Hub answers within two seconds. Not tried (null) with HF_HUB_OFFLINE."""
    from huggingface_hub import constants

    offline = bool(constants.HF_HUB_OFFLINE)
    reachable = None if offline else _answers(constants.ENDPOINT, HUB_SECONDS)
    return {"endpoint": constants.ENDPOINT, "offline": offline, "reachable": reachable}


def gpu_state(lib: Any = None) -> Facts:
    """What the driver says, and what each GPU that torch sees is doing now."""
    import torch

    lib = lib or nvml.load()
    why = "nvidia-ml-py is not installed" if lib is None else nvml.ask(lib, "nvmlInit")[1]
    count = None if why else nvml.ask(lib, "nvmlDeviceGetCount")[0]
    warnings: list[str] = []
    now = []
    if torch.cuda.is_available() and why is None:
        for number in range(torch.cuda.device_count()):
            gpu = nvml.open_gpu(f"cuda:{number}", lib, warn=warnings.append)
            now.append(None if gpu is None else _gpu_now(gpu))
    return {
        "nvml": why is None,
        "why_not": why,
        "driver_gpus": count,
        "torch_gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "now": now,
        "warnings": warnings,
    }


def bandwidth() -> Facts:
    """Measured memory bandwidth of the processor and of the first GPU; None where the buffers did not fit."""
    import torch

    measured: Facts = {}
    for device in ("cpu", *(["cuda:0"] if torch.cuda.is_available() else [])):
        try:
            measured[device] = measure_bandwidth(device).to_json()
        except RuntimeError:
            measured[device] = None
    return measured


def clocks() -> Facts:
    """Event spans of the first GPU against the host's clock: see `_of_gpu`."""
    from specbench.measure.clock_check import check_cuda_clock

    return _of_gpu(check_cuda_clock)


def graphs() -> Facts:
    """CUDA graphs against plain passes on the first GPU, and how often a round waits for it: see `_of_gpu`."""
    from specbench.graph_check import check_graphs

    return _of_gpu(check_graphs)


def _of_gpu(check: Callable[[str], Sequence[Any]]) -> Facts:
    """What a self-check of the first GPU found; in words why it could not be made; null without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return {"cuda:0": None}
    try:
        return {"cuda:0": [one.to_json() for one in check("cuda:0")]}
    except RuntimeError as error:  # out of memory, and whatever else the driver says
        return {"cuda:0": first_line(error)}


def quantisation() -> Facts:
    """What a model can be quantised to on the device that a run would take: scheme -> why not, null if it can; and
    `failed`: scheme -> what is wrong with a layer that was quantised so.
    """
    from specbench.models import quantize
    from specbench.models.placement import pick_device
    from specbench.quantise_check import check_scheme

    device = pick_device("auto")
    why_not = {scheme: quantize.unavailable(scheme, device) for scheme in quantize.SCHEMES}
    found = {scheme: check_scheme(scheme, device) for scheme, reason in why_not.items() if reason is None}
    return {
        "torchao": quantize.library()[0],
        "device": device.type,
        "schemes": why_not,
        "failed": {scheme: wrong for scheme, wrong in found.items() if wrong is not None},
    }


SECTIONS: dict[str, Callable[[], Facts]] = {
    "quiet": quietness,  # first: the others make noise
    "machine": describe,
    "memory": memory,
    "gpu": gpu_state,
    "folders": folders,
    "hub": hub,
    "bandwidth": bandwidth,
    "clocks": clocks,
    "graphs": graphs,
    "quantisation": quantisation,
}


def _gpu_now(gpu: nvml.Gpu) -> Facts:
    facts, now = gpu.facts(), gpu.sample()
    return {
        "used_bytes": now.used_bytes,
        "total_bytes": facts["memory_bytes"],
        "power_w": now.power_w,
        "sm_mhz": now.sm_mhz,
        "temperature_c": now.temperature_c,
        "throttle_reasons": None if now.reasons is None else list(now.reasons),
    }


def _folder(path: Path) -> Facts:
    """A folder that may not exist yet: judged by the nearest one above it that does."""
    existing = next((p for p in (path, *path.parents) if p.is_dir()), Path("/"))
    try:
        free: int | None = shutil.disk_usage(existing).free
    except OSError:
        free = None
    return {"path": str(path), "writable": os.access(existing, os.W_OK), "free_bytes": free}


def _answers(address: str, seconds: float) -> bool:
    """Whether a server answers at all; a name look-up that hangs is left behind."""
    from huggingface_hub.utils import get_session

    answered = threading.Event()

    def ask() -> None:
        try:
            get_session().head(address, timeout=seconds)
            answered.set()
        except Exception:  # noqa: BLE001, S110 - every failure means the same: it does not answer
            pass

    threading.Thread(target=ask, daemon=True).start()
    return answered.wait(seconds + 0.5)
