"""Whether a model's passes can be captured, as far as that is known beforehand, and how a model is compiled."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch

from specbench.models.long_rope import depends_on_text

OFF = "--graphs off"
MOST_COMPILATIONS = 64  # of a model: one for each set of taps and of layers skipped


def uncapturable(model: Any, device: torch.device, experts: int) -> str | None:
    """Why no pass can be a CUDA graph, as far as it is known before one is tried."""
    if device.type != "cuda":
        return f"a {device.type} has none"
    if spread(model):
        return "it is spread over several devices"
    if depends_on_text(model):
        return "its rotary frequencies depend on the length of the text"
    if experts and experts_implementation(model) == "eager":
        return "its experts are called one by one, as the data says"
    return None


def group_experts(model: Any) -> None:
    """Experts as one grouped product: calling those that were chosen, one by one, reads the device."""
    if experts_implementation(model) == "eager":
        with contextlib.suppress(ValueError, ImportError):  # where it cannot be, graphs say so
            model.set_experts_implementation("grouped_mm")


def experts_implementation(model: Any) -> str | None:
    """transformers' name for how a mixture's experts are computed."""
    return getattr(model.config.get_text_config(decoder=True), "_experts_implementation", None)


def spread(model: Any) -> bool:
    """Whether its layers are on several devices."""
    return len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1


def compiled(model: torch.nn.Module) -> Any:
    """`model` compiled when it first runs, for any number of columns and slots (and once for a single column)."""
    import torch._dynamo

    torch._dynamo.config.skip_nnmodule_hook_guards = False  # taps are hooks, which come and go
    torch._dynamo.config.recompile_limit = MOST_COMPILATIONS
    return torch.compile(model, dynamic=True)


def compilations() -> int:
    """How often something was compiled in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # imported by the first one
    return 0 if dynamo is None else dynamo.counters["stats"]["unique_graphs"]
