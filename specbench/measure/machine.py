"""What a run was made on and with: the manifest's `machine`, `versions` and `git` (design §7).

Enough to judge and repeat a measurement, and nothing that tells whose machine it was: no host, user or path.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from specbench.measure.cpu import usable_cpus
from specbench.measure.nvml import open_gpu

PACKAGES = (
    "specbench-llm",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "gguf",
    "numpy",
    "scipy",
    "pandas",
    "accelerate",
    "datasets",
    "triton",
    "torchao",
    "bitsandbytes",
    "nvidia-ml-py",
)

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "OMP_DYNAMIC",
    "GOMP_SPINCOUNT",
    "GOMP_CPU_AFFINITY",
    "KMP_BLOCKTIME",
    "KMP_AFFINITY",
    "MKL_NUM_THREADS",
    "MKL_DYNAMIC",
    "CUDA_LAUNCH_BLOCKING",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)
"""Environment variables that change timings; those that are set go into the manifest."""


def describe(device: Any = "cpu") -> dict[str, Any]:
    """The machine as a manifest holds it; memory in bytes, clocks in MHz. Unknown is None."""
    return {
        "device": str(device),
        "cpu": cpu_facts(),
        "memory_bytes": _memory_bytes(),
        "os": platform.system(),
        "kernel": platform.release(),
        "arch": platform.machine(),
        "python": platform.python_version(),
        "gpus": gpu_facts(),
        "torch": torch_facts(),
        "environment": {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
    }


def cpu_facts(proc: Path = Path("/proc"), sys_cpu: Path = Path("/sys/devices/system/cpu")) -> dict[str, Any]:
    """The processor: model, cores (physical, logical, and those this process may use), clocks, governor."""
    import psutil

    try:
        clock = psutil.cpu_freq()
    except (OSError, NotImplementedError, AttributeError, RuntimeError):
        clock = None
    return {
        "model": _cpu_model(proc),
        "cores_physical": psutil.cpu_count(logical=False),
        "cores_logical": psutil.cpu_count(),
        "cores_usable": len(usable_cpus()),
        "max_mhz": clock.max if clock and clock.max else None,
        "governor": _line(sys_cpu / "cpu0" / "cpufreq" / "scaling_governor"),
    }


def gpu_facts() -> list[dict[str, Any]]:
    """The CUDA devices torch sees, in torch's order, with what NVML adds (driver, clocks, power limit)."""
    import torch

    if not torch.cuda.is_available():
        return []
    return [_gpu(torch, number) for number in range(torch.cuda.device_count())]


def torch_facts() -> dict[str, Any]:
    """How torch was built and how many threads it uses now."""
    import torch

    built = torch.__config__.show()
    return {
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkl": _found(r"Math Kernel Library Version ([\w.]+)", built),
        "onednn": _found(r"MKL-DNN v([\w.]+)", built),
        "openmp": torch.backends.openmp.is_available(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,
    }


def versions() -> dict[str, str]:
    """Versions of Python and of those `PACKAGES` that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_state(path: Path | str | None = None) -> dict[str, Any] | None:
    """`{commit, dirty}` of the checkout a folder belongs to; None outside one, or where it is ignored.

    Args:
        path: the folder; None takes the one specbench runs from. A package installed into a virtual
            environment that lies in somebody's checkout is no part of it.
    """
    folder = Path(path) if path is not None else Path(__file__).resolve().parent
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit or _git(folder, "check-ignore", "-q", ".") is not None:
        return None
    status = _git(folder, "status", "--porcelain")
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def fingerprint(machine: dict[str, Any]) -> str:
    """Twelve hex digits, equal for runs made on the same kind of machine: processor, memory, GPUs, system.

    Versions of software and settings such as threads do not enter.
    """
    cpu = machine.get("cpu") or {}
    identity = {
        "cpu": [cpu.get(key) for key in ("model", "cores_physical", "cores_logical", "cores_usable")],
        "memory_gib": _gib(machine.get("memory_bytes")),
        "gpus": [[gpu.get("name"), _gib(gpu.get("memory_bytes"))] for gpu in machine.get("gpus") or []],
        "system": [machine.get("os"), machine.get("arch")],
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


def _gpu(torch: Any, number: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(number)
    seen = open_gpu(f"cuda:{number}")
    facts = {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
    }
    return facts | {k: v for k, v in (seen.facts() if seen else {}).items() if k not in facts}


def _cpu_model(proc: Path) -> str | None:
    try:
        for line in (proc / "cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        return platform.processor() or None
    return platform.processor() or None


def _memory_bytes() -> int | None:
    import psutil

    return psutil.virtual_memory().total


def _line(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


def _found(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match.group(1) if match else None


def _gib(size: int | None) -> int | None:
    return None if size is None else round(size / 2**30)


def _git(folder: Path, *args: str) -> str | None:
    """What git prints, or None if it fails, is missing or takes longer than five seconds."""
    command = ["git", "-C", str(folder), "--no-optional-locks", *args]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()
