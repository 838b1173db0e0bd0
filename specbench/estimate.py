"""About how long a run will take, before anything is loaded: reading all weights once a token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.config import RunConfig
from specbench.models import registry
from specbench.models.packed import BYTES_A_WEIGHT, NONE

if TYPE_CHECKING:
    from specbench.plan import Block


def estimate(config: RunConfig, blocks: Sequence[Block], methods: int) -> dict[str, Any]:
    """`{seconds, bandwidth_gb_s, text}`; seconds is None where only loading tells the target's size.

    A floor for vanilla on every method: prefill and overhead add to it, speculation takes from it.

    Raises:
        SpecbenchError: the target is an alias that does not exist.
    """
    import torch

    from specbench.measure.bandwidth import measure_bandwidth

    on_gpu = config.device.startswith("cuda") or (config.device == "auto" and torch.cuda.is_available())
    size = _weight_bytes(config, on_gpu)
    if size is None:
        text = "unknown: the target's size is not known before it is loaded"
        return {"seconds": None, "bandwidth_gb_s": None, "text": text}
    speed = measure_bandwidth("cuda" if on_gpu else "cpu").read_gb_s
    passes = sum(block.max_new_tokens for block in blocks)
    seconds = passes * methods * size / (speed * 1e9)
    why = f"weights of {size / 1e9:.1f} GB read at {speed:.0f} GB/s once a token; a floor"
    text = f"about {_spoken(seconds)} ({why})"
    return {"seconds": seconds, "bandwidth_gb_s": speed, "text": text}


def _weight_bytes(config: RunConfig, on_gpu: bool) -> float | None:
    entry = registry.entry_for(config.target)
    dtype = config.dtype if config.dtype != "auto" else ("bfloat16" if on_gpu else "float32")
    if entry is not None:
        kind = dtype if config.quantize == NONE else config.quantize
        return entry.parameters * BYTES_A_WEIGHT.get(kind, 4)
    path = Path(config.target).expanduser()
    if path.is_dir() and config.quantize == NONE:
        stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        return float(stored) if stored else None
    if "/" not in config.target and not path.exists():
        registry.find(config.target.removeprefix(registry.RANDOM_PREFIX))
    return None


def _spoken(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
