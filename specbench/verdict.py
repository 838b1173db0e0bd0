"""What a finished run must not be passed off as: see the exit codes of design §8."""

from __future__ import annotations

from collections import Counter

from specbench.errors import GateError, SpecbenchError
from specbench.models.packed import MIXES
from specbench.store import Run
from specbench.trial import is_bug


def refuse_bugs(run: Run) -> None:
    """Raise GateError if a lossless method differs from vanilla where float32 leaves no doubt."""
    target = run.manifest["target"]
    wrong = [trial for trial in run.trials if is_bug(trial, target.get("dtype", ""))]
    if not wrong or target.get("quantization") == MIXES:
        return
    first = wrong[0]
    found = first.agreement or {}
    gap = found["logit_gap"]
    how = "one output ends there" if gap is None else f"logit gap {gap:.3g}"
    raise GateError(
        f"{first.method} is said to be lossless but differs from vanilla in float32: {first.task} "
        f"{first.question} turn {first.turn} at token {found['first_difference']}, {how} ({len(wrong)} trials)",
        "this is a bug in the method or in specbench: please report it with the run's folder",
    )


def refuse_gaps(run: Run, ended: str) -> None:
    """Raise SpecbenchError if there is a method of which nothing was measured."""
    measured = {trial.method for trial in run.trials if trial.error is None and trial.excluded is None}
    missing = [method["label"] for method in run.manifest["methods"] if method["label"] not in measured]
    if not missing:
        return
    errors = Counter(trial.error for trial in run.trials if trial.error and trial.method in missing)
    why = errors.most_common(1)[0][0] if errors else "no block was finished"
    cure = (
        "mend the cause and run again" if ended == "complete" else "give the run more time, or other prompts"
    )
    raise SpecbenchError(f"nothing was measured of {', '.join(missing)}: {why}", cure)
