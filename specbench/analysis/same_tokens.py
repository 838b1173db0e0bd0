"""Whether two runs put out the same tokens, method by method and prompt by prompt: `compare --identical`.

Greedy outputs in float32 must be the same, whatever kernels, graphs or machine made them. In a narrower dtype another
order of a sum decides near-ties, so that there the share is told and nothing fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specbench.analysis import comparable
from specbench.analysis.extract import temperature
from specbench.errors import SpecbenchError

if TYPE_CHECKING:
    from specbench.analysis.summary import RunData
    from specbench.store import Trial

EXACT = "float32"
Key = tuple[Any, ...]


def same_tokens(base: RunData, new: RunData) -> dict[str, Any]:
    """The outputs of prompts that both runs measured: plain JSON values.

    `compared` outputs, of which `identical` are; `first_difference` {method, task, question, turn, token (counted
    from 0), base, new} of the first that is not, with both ids there (None: that output has ended), or None; and
    whether this is a `failure`.

    Raises:
        SpecbenchError: the runs sample, end elsewhere, or share no output.
    """
    _check(base, new)
    before, after = _outputs(base), _outputs(new)
    others = comparable.other_prompts(base.manifest, new.manifest)
    shared = [key for key in before if key in after and before[key].task not in others]
    if not shared:
        raise SpecbenchError(
            "the runs share no output of a prompt",
            "compare runs of the same methods on the same questions, with the same seed",
        )
    different = [key for key in shared if before[key].output_ids != after[key].output_ids]
    exact = all((run.manifest.get("target") or {}).get("dtype") == EXACT for run in (base, new))
    return {
        "compared": len(shared),
        "identical": len(shared) - len(different),
        "first_difference": _difference(before[different[0]], after[different[0]]) if different else None,
        "failure": exact and bool(different),
    }


def sentence(found: dict[str, Any]) -> str:
    """One line of what `same_tokens` found."""
    said = f"{found['identical']} of {found['compared']} greedy outputs are identical"
    first = found["first_difference"]
    if first is None:
        return said
    words = ["an end" if first[side] is None else str(first[side]) for side in ("base", "new")]
    where = f"{first['method']}, {first['task']} {first['question']} turn {first['turn']}"
    return f"{said}; the first that differs: {where} at token {first['token']}, {words[0]} in BASE, {words[1]} in NEW"


def _check(base: RunData, new: RunData) -> None:
    for run in (base, new):
        if temperature(run.manifest) != 0:
            raise SpecbenchError(
                "only greedy outputs can be identical", "leave --identical out, or run at --temperature 0"
            )
    if lengths := comparable.length_differences(base.manifest, new.manifest):
        raise SpecbenchError(
            f"outputs of other lengths are not identical: {', '.join(lengths)}",
            "use the same --max-new-tokens",
        )


def _outputs(run: RunData) -> dict[Key, Trial]:
    """What was put out as ids: of some engines no ids are known."""
    counted = (trial for trial in run.trials if trial.error is None and trial.excluded is None)
    return {_key(trial): trial for trial in counted if trial.output_ids}


def _key(t: Trial) -> Key:
    """What was asked of whom."""
    setting = t.batch_size, t.concurrency, t.request_rate
    return t.method, t.task, t.question, t.turn, t.repeat, *setting, t.prompt_tokens


def _difference(base: Trial, new: Trial) -> dict[str, Any]:
    one, other = base.output_ids, new.output_ids
    pairs = enumerate(zip(one, other, strict=False))
    place = next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
    where = {"method": base.method, "task": base.task, "question": base.question, "turn": base.turn}
    return {**where, "token": place, "base": _at(one, place), "new": _at(other, place)}


def _at(ids: Sequence[int], place: int) -> int | None:
    return ids[place] if place < len(ids) else None
