"""The costs by which `k=auto` chooses: measured once a machine, kept beside the kernel choices, in the manifest.

Kept, because what is chosen by them decides what a sampled run draws: same machine, same costs, same tokens.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specbench.build import Named
from specbench.config import RunConfig
from specbench.decoding.draft import Drafter
from specbench.decoding.loop import DraftVerify
from specbench.decoding.rehearsal import adaptive_parts, length_of, rehearse
from specbench.measure.machine import cpu_facts
from specbench.models.kept import keep, kept

if TYPE_CHECKING:
    from specbench.models.target import Target


def learn_costs(
    methods: Iterable[Named],
    target: Target,
    config: RunConfig,
    folder: Path,
    notify: Callable[[str], None] = lambda line: None,
) -> None:
    """Tell every drafter with `k=auto` what its rounds cost, at each batch size of the run."""
    for named in methods:
        if isinstance(named.method, DraftVerify):
            named.method.draft_costs = {
                f"{type(part).__name__} {number}": _of_part(
                    part, number, named, target, config, folder, notify
                )
                for number, part in enumerate(adaptive_parts(named.method.drafter))
            }


def _of_part(
    part: Drafter,
    number: int,
    named: Named,
    target: Target,
    config: RunConfig,
    folder: Path,
    notify: Callable[[str], None],
) -> dict[str, dict[str, float]]:
    """Seconds of a round by batch size and tokens proposed, as the manifest has them."""
    length = length_of(part)
    for rows in config.batch_sizes:
        facts = [named.label, number, part.draft_identity(), rows, repr(config.sampling)]
        file = folder / f"draft-costs-{_key(target, facts)}.json"
        costs = _known(kept(file))
        if costs is None:
            notify(f"measuring what drafts of {named.label} cost here, once…")
            costs = rehearse(target, part, rows, config.sampling)
            keep(file, costs)
        if costs:
            length.costs[rows] = costs
    return {
        str(rows): {str(k): seconds for k, seconds in costs.items()} for rows, costs in length.costs.items()
    }


def _known(found: Any) -> dict[int, float] | None:
    """Costs as they were kept; None for anything else."""
    try:
        return {int(k): float(seconds) for k, seconds in found.items()} or None
    except (AttributeError, TypeError, ValueError):
        return None


def _key(target: Target, facts: list[Any]) -> str:
    """What costs depend on: the machine and its threads, torch, the target as it is computed, and `facts`."""
    on_gpu = target.device.type == "cuda"
    here = [
        torch.cuda.get_device_name(target.device) if on_gpu else cpu_facts().get("model"),
        platform.machine(),
        str(target.device),
        torch.get_num_threads(),
        torch.__version__,
    ]
    identity = None if target.identity is None else target.identity.to_json()
    computed = [identity, str(target.dtype), target.config._attn_implementation, target.kernel_choices]
    return hashlib.sha256(repr([here, computed, facts]).encode()).hexdigest()[:16]
