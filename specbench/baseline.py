"""A baseline: a run's folder without what no comparison needs, small enough to commit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specbench.errors import SpecbenchError
from specbench.store import MANIFEST, TRIALS, Run, Trial

LEFT_OUT = ("output_ids", "text", "nvml", "load", "cpu_s")
SAMPLED = ("joules", "throttle_reasons")  # what a summary uses of `nvml`
ROUND_TIMES = ("draft_s", "verify_s", "round_s")


def save_baseline(run: Run, folder: Path, replace: bool = False) -> None:
    """Write `run` into `folder` as `read_run` reads it; the same run gives the same bytes.

    Left out are texts, token ids, samples of the machine, and the time of each round (the spans hold their
    sums): a summary of the baseline has all fields but those made of them.

    Raises:
        SpecbenchError: nothing was measured, the folder is there and not to be replaced, or cannot be written.
    """
    if not any(trial.error is None for trial in run.trials):
        raise SpecbenchError(f"{run.path} holds no measured trial", "measure it first: specbench run")
    if folder.resolve() == run.path.resolve():
        raise SpecbenchError(
            f"{folder} is the run itself", "give another name with --as, or folder with --to"
        )
    if folder.exists() and not replace:
        raise SpecbenchError(f"there is a baseline {folder}", "give another --as, or --replace it")
    manifest = {**run.manifest, "name": folder.name, "baseline_of": run.manifest.get("name") or run.path.name}
    lines = (json.dumps(_stripped(trial), ensure_ascii=False, separators=(",", ":")) for trial in run.trials)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / TRIALS).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
        text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
        (folder / MANIFEST).write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise SpecbenchError(
            f"cannot write {folder}: {error.strerror or error}", "give a writable folder with --to"
        ) from error


def _stripped(trial: Trial) -> dict[str, Any]:
    """The trial's row: what is left out or unknown is not in it at all."""
    row = {
        name: value for name, value in trial.to_json().items() if name not in LEFT_OUT and value is not None
    }
    sampled = {name: value for name, value in (trial.nvml or {}).items() if name in SAMPLED and value}
    if sampled:
        row["nvml"] = sampled
    rounds = row["rounds"].items()
    dropped = ROUND_TIMES if trial.spans else ()  # the spans hold their sums
    row["rounds"] = {name: value for name, value in rounds if name not in dropped and value is not None}
    return row | {"category": trial.category}
