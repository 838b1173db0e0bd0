"""Which runs of different engines stand in one table: the same weights, prompts and sampling, each its own engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specbench.analysis import comparable
from specbench.analysis.caution import Caution, warning
from specbench.analysis.extract import identity, machine_line, run_extract

Manifest = Mapping[str, Any]
Runs = Mapping[str, Manifest]  # by name


def tables(runs: Runs) -> tuple[list[dict[str, Any]], list[Caution]]:
    """`engines[]` of a summary, and warnings of runs of one target that cannot stand in one table.

    An entry: `{target, tasks[], runs[] (names), machines[], notes[]}`, of two engines or more. `machines` are
    `{machine (in one line), runs[]}`: absolute numbers are of one of them. `notes` say what else differs, in
    sentences without a full stop.
    """
    groups: list[dict[str, Manifest]] = []
    warnings: list[Caution] = []
    for name, manifest in runs.items():
        apart = []
        for group in groups:
            first, reference = next(iter(group.items()))
            reasons = _apart(reference, manifest)
            if not reasons:
                group[name] = manifest
                break
            if _engine(reference) != _engine(manifest) and not comparable.other_model(reference, manifest):
                apart.append(_warning(name, first, reasons))
        else:
            groups.append({name: manifest})
            warnings += apart
    return [_entry(group) for group in groups if len(set(map(_engine, group.values()))) > 1], warnings


def _apart(base: Manifest, new: Manifest) -> list[str]:
    """Why two runs do not stand in one table."""
    found = comparable.other_model(base, new) + comparable.sampling_differences(base, new)
    before, after = _tasks(base), _tasks(new)
    if set(before) != set(after):
        found.append(f"tasks {', '.join(before)} and {', '.join(after)}")
    prompts = sorted(comparable.other_prompts(base, new))
    if prompts:
        found.append(f"other prompts of {', '.join(prompts)}")
    return found


def _warning(name: str, first: str, reasons: Sequence[str]) -> Caution:
    message = f"another engine on the same target as {first}, but in no table with it: {'; '.join(reasons)}"
    return warning("engines", message, "run it with the other's tasks, template and sampling", name)


def _entry(group: Runs) -> dict[str, Any]:
    reference = next(iter(group.values()))
    return {
        "target": identity(reference.get("target")),
        "tasks": _tasks(reference),
        "runs": list(group),
        "machines": _machines(group),
        "notes": list(_notes(group)),
    }


def _machines(group: Runs) -> list[dict[str, Any]]:
    """The machines, in order, each with its runs; one that does not say which it is stands alone."""
    found: list[tuple[Manifest, list[str]]] = []
    for name, manifest in group.items():
        runs = next((runs for other, runs in found if comparable.same_machine(other, manifest)), None)
        if runs is None:
            found.append((manifest, [name]))
        else:
            runs.append(name)
    return [{"machine": machine_line(manifest.get("machine")), "runs": runs} for manifest, runs in found]


def _notes(group: Runs) -> Iterator[str]:
    (first, reference), *others = group.items()
    precisions = {name: _precision(manifest) for name, manifest in group.items()}
    if len(set(precisions.values())) > 1:
        listed = ", ".join(f"{name} {text}" for name, text in precisions.items())
        yield f"the weights are run at different precisions: {listed}"
    for name, manifest in others:
        lengths = comparable.length_differences(reference, manifest)
        if lengths:
            yield f"the limit of new tokens differs between {first} and {name}: {', '.join(lengths)}"
        if _questions(reference) != _questions(manifest):
            yield f"{first} and {name} measured different numbers of questions"


def _precision(manifest: Manifest) -> str:
    target = manifest.get("target")
    known = [target.get(key) for key in comparable.PRECISION] if isinstance(target, Mapping) else []
    found = dict.fromkeys(
        "the engine's choice" if value == "auto" else str(value) for value in known if value
    )
    return " ".join(found) or "unknown"


def _tasks(manifest: Manifest) -> list[str]:
    return sorted(str(task.get("name")) for task in manifest.get("tasks") or [] if isinstance(task, Mapping))


def _questions(manifest: Manifest) -> dict[str, Any]:
    return {str(task.get("name")): task.get("questions") for task in manifest.get("tasks") or []}


def _engine(manifest: Manifest) -> str:
    return str(run_extract(manifest, "")["engine"]["name"])
