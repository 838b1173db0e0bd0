"""The costs by which `k=auto` chooses: measured once a machine, kept beside the kernel choices, in the manifest.

Kept, because what is chosen by them decides what a sampled run draws: same machine, same costs, same tokens. Not kept
if other processes disturbed the measurement: that would spoil every later run.
"""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specbench.build import Named
from specbench.config import RunConfig
from specbench.decoding.draft import Drafter
from specbench.decoding.draft_length import Costs
from specbench.decoding.loop import DraftVerify
from specbench.decoding.rehearsal import adaptive_parts, length_of, rehearse
from specbench.measure.machine import cpu_facts
from specbench.models.kept import DISTURBED, kept, measured

if TYPE_CHECKING:
    from specbench.models.target import Target


def learn_costs(
    methods: Iterable[Named],
    target: Target,
    config: RunConfig,
    folder: Path,
    notify: Callable[[str], None] = lambda line: None,
) -> None:
    """Tell every drafter with `k=auto` what its rounds cost, at each batch size of the run.

    Args:
        folder: where costs are kept, a file for each drafter and batch size.
        notify: told before a method's costs are measured, and if they could not be kept.
    """
    for named in methods:
        if isinstance(named.method, DraftVerify):
            parts = list(adaptive_parts(named.method.drafter))
            _learn(named.label, parts, target, config, folder, notify)
            named.method.draft_costs = {
                f"{type(part).__name__} {number}": _to_json(length_of(part).costs)
                for number, part in enumerate(parts)
            }


def _learn(
    label: str,
    parts: list[Drafter],
    target: Target,
    config: RunConfig,
    folder: Path,
    notify: Callable[[str], None],
) -> None:
    """The costs of one method's drafters: those that are kept, and the rest measured now."""
    stem = f"draft-costs-{_key(target, [label, [part.draft_identity() for part in parts], repr(config.sampling)])}"
    missing: list[tuple[Path, Drafter, int]] = []
    for (number, part), rows in product(enumerate(parts), config.batch_sizes):
        file = folder / f"{stem}-{number}-{rows}.json"
        costs = _known(kept(file))
        if costs is None:
            missing.append((file, part, rows))
        else:
            _tell(part, rows, costs)
    if not missing:
        return
    sizes = ", ".join(map(str, sorted({rows for _, _, rows in missing})))
    notify(
        f"measuring what drafts of {label} cost here at batch size {sizes}, once; "
        f"delete {folder / stem}-*.json to measure again…"
    )
    threads = 1 if target.device.type == "cuda" else torch.get_num_threads()
    all_quiet = True
    for file, part, rows in missing:
        found, quiet = measured(file, partial(rehearse, target, part, rows, config.sampling), threads)
        _tell(part, rows, found)
        all_quiet &= quiet
    if not all_quiet:
        notify(DISTURBED)


def _tell(part: Drafter, rows: int, costs: dict[int, float]) -> None:
    if costs:  # else the context has no room for any length
        length_of(part).costs[rows] = costs


def _to_json(costs: Mapping[int, Costs]) -> dict[str, dict[str, float]]:
    """Seconds of a round by batch size and tokens proposed, as the manifest has them."""
    return {str(rows): {str(k): seconds for k, seconds in one.items()} for rows, one in costs.items()}


def _known(found: Any) -> dict[int, float] | None:
    """Costs as they were kept; None for anything else. An empty table is known, too: there was no room."""
    try:
        costs = {int(k): float(seconds) for k, seconds in found.items()}
    except (AttributeError, TypeError, ValueError):
        return None
    return costs if all(k > 0 and 0 < seconds < math.inf for k, seconds in costs.items()) else None


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
