"""Where a model goes and in which numbers: device, dtype, attention, checked against what exists here."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from specbench.errors import SpecbenchError

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
ATTENTIONS = ("auto", "sdpa", "eager")
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential", "none")  # accelerate's, and none


def pick_device(name: str) -> torch.device:
    """The torch device of `auto`, `cpu`, `cuda`, `cuda:N` or `mps`; auto = cuda if there is one, else cpu."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith(("GPU-", "MIG-")):
        raise SpecbenchError(
            f"--device {name} is a UUID, and devices are numbered here",
            f"set CUDA_VISIBLE_DEVICES={name} and use --device cuda",
        )
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise SpecbenchError(f"unknown device {name!r}", "use auto, cpu, cuda, cuda:N or mps") from error
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise SpecbenchError(
                f"no device {name!r} here ({count} CUDA devices)",
                "use --device cpu, or run `specbench doctor`",
            )
    elif device.type == "mps":
        if not torch.backends.mps.is_available():
            raise SpecbenchError("no MPS device here", "use --device cpu")
    elif device.type != "cpu":
        raise SpecbenchError(f"unknown device {name!r}", "use auto, cpu, cuda, cuda:N or mps")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype | None:
    """The dtype asked for; `auto` is float32 on a CPU and None (= the checkpoint's own) elsewhere."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else None
    if name not in DTYPES:
        raise SpecbenchError(f"unknown dtype {name!r}", f"use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def check_options(attn: str, device_map: str) -> None:
    """Refuse what cannot work, before anything is downloaded. Raises SpecbenchError."""
    if attn.startswith("flash"):
        raise SpecbenchError(
            f"--attn {attn}: flash attention takes no tree masks, so drafts cannot be verified with it",
            "use --attn sdpa (the default) or eager",
        )
    if attn not in ATTENTIONS:
        raise SpecbenchError(f"unknown attention {attn!r}", f"use {', '.join(ATTENTIONS)}")
    if device_map not in DEVICE_MAPS:
        raise SpecbenchError(f"unknown --device-map {device_map!r}", f"use {', '.join(DEVICE_MAPS)}")
    if device_map != "none" and importlib.util.find_spec("accelerate") is None:
        raise SpecbenchError(
            f"--device-map {device_map} needs accelerate", 'pip install "specbench-llm[device-map]"'
        )


def pick_attention(name: str, model_class: Any) -> str:
    """`sdpa` unless asked otherwise or the architecture has only eager attention (gpt-oss)."""
    supports_sdpa = getattr(model_class, "_supports_sdpa", True)
    if name == "auto":
        return "sdpa" if supports_sdpa else "eager"
    if name == "sdpa" and not supports_sdpa:
        raise SpecbenchError(
            f"{model_class.__name__} has no sdpa attention", "use --attn eager, or leave it at auto"
        )
    return name
