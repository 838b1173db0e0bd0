"""Warnings of a whole run, and of runs that stand in one summary: files, machine, prompts, templates."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from specbench.analysis import steadiness
from specbench.analysis.caution import Caution, listed, measure_again, setting, warning
from specbench.analysis.extract import identity, is_random, machine_line
from specbench.analysis.setting import AXES, part_filled
from specbench.analysis.sizes import in_bytes

DRIFTED = 0.02  # of vanilla's pace over a run: less is not worth a line
LEFT = 0.005  # of a drift in a speedup: more is worth another
LONG_PREFIX, LARGE_PREFIX = 400, 0.25  # characters shared with another prompt, and their share of a prompt
INSTRUCT = re.compile(r"(?i)(?<![a-z])(instruct|chat|it|sft|dpo|rlhf|vicuna)(?![a-z])")

Manifest = Mapping[str, Any]


def run_warnings(
    manifest: Manifest, run: str, rows: pd.DataFrame, told: Sequence[str], baseline: str
) -> list[Caution]:
    """Warnings of a run.

    Args:
        rows: of its trials, with `answered`: whether their batch, or another attempt at it, counts.
        told: what the reader of its files said.
    """
    found = [
        warning("store", text, "the rest of the run was read; run it again to resume", run) for text in told
    ]
    return [
        *found,
        *_random_weights(manifest, run),
        *_disturbed_speed(manifest, run),
        *_excluded(rows, run),
        *_counted_though(rows, run, "contended", "something else used the processor the second time too: close it"),
        *_counted_though(rows, run, "throttled", "let it cool, or lock its clocks below what it can hold"),
        *_drift(rows, run, baseline),
        *_part_filled(rows, run),
        *_shared_prefix(manifest, run),
        *_no_template(manifest, run),
    ]  # fmt: skip


def between_runs(manifests: Mapping[str, Manifest]) -> list[Caution]:
    """Warnings of runs, by name, that do not belong side by side; each is compared with the first."""
    (first, reference), *others = manifests.items() or [("", {})]
    found: list[Caution] = []
    for run, manifest in others:
        found += _other_machine(run, manifest, first, reference)
        found += _other_precision(run, manifest, first, reference)
        found += _other_template(run, manifest, first, reference)
    return found


def _random_weights(manifest: Manifest, run: str) -> Iterable[Caution]:
    if is_random(manifest):
        message = (
            "the target's weights are random: times are real, text and acceptance mean nothing (timing only)"
        )
        cure = "use oracle:rate=R to set the acceptance, or a target with trained weights"
        yield warning("random-weights", message, cure, run)


def _disturbed_speed(manifest: Manifest, run: str) -> Iterable[Caution]:
    speed = (manifest.get("roofline") or {}).get("speed") or {}
    if speed.get("disturbed"):
        message = "the device was busy when its speed was measured: floors of passes and shares of them are too high"
        cure = f"`{measure_again(manifest)}` on a quiet machine, and run again; times and speedups are not affected"
        yield warning("disturbed-speed", message, cure, run)


def _excluded(rows: pd.DataFrame, run: str) -> Iterable[Caution]:
    marked = rows[rows["excluded"].notna()]
    for reason, group in marked.groupby("excluded", sort=True, observed=True):
        message = f"{len(group)} trials are marked {reason} and not counted (blocks are repeated once, whole)"
        lost = group[~group["answered"]]
        if len(lost):
            message += f"; {len(lost)} of them have no good second attempt"
        cure = {
            "contended": "something else used the processor: close it, or give fewer --threads",
            "throttled": "the clock was lowered: let it cool, or lock the clocks (see `specbench doctor`)",
            "captured": "a CUDA graph or compiled code was made meanwhile: nothing to do, or --warmup 2",
        }.get(str(reason), "see `specbench doctor`")
        yield warning("excluded", message, cure, run)


def _counted_though(rows: pd.DataFrame, run: str, what: str, cure: str) -> Iterable[Caution]:
    counted = rows[rows["used"]]
    disturbed = int(counted[what].sum())
    if disturbed:
        message = f"{disturbed} of the {len(counted)} trials that count were {what}"
        yield warning(what, message, f"{cure} and run again with --fresh", run)


def _drift(rows: pd.DataFrame, run: str, baseline: str) -> Iterable[Caution]:
    for _, group in rows.groupby(list(AXES)):
        found = steadiness.drift(group[group["method"] == baseline])
        if found is None or not found.is_certain or abs(found.point) < DRIFTED:
            continue
        where = setting(group.iloc[0].to_dict())
        message = (
            f"{baseline}'s rounds became {abs(found.point):.1%} {'slower' if found.point > 0 else 'faster'} from "
            f"the first block to the last [{found.low:+.1%}, {found.high:+.1%}]{where}"
        )
        left = steadiness.left_in_speedups(found, group, baseline)
        if left > LEFT:
            cure = f"the methods did not take turns evenly: about {left:.1%} of it is in the speedups; measure again"
        else:
            cure = (
                f"the methods take turns in alternating order, which leaves at most {max(left, 1e-4):.2%} of it "
                "in the speedups; for steady tokens/s lock the clocks or raise --warmup"
            )
        yield warning("order-drift", message, cure, run)


def _part_filled(rows: pd.DataFrame, run: str) -> Iterable[Caution]:
    """Batches planned with too few prompts. A prompt that failed has its row, and is none that was missing."""
    for size in sorted({*rows["batch_size"].tolist()} - {1}):
        held = rows[rows["batch_size"] == size].groupby(["turn", "pair"])["question"].nunique()
        part = held[held < size]
        if len(part):
            first_turn = 0 in part.index.get_level_values("turn")
            yield warning("part-filled", *part_filled(len(part), len(held), size, first_turn), run)


def _shared_prefix(manifest: Manifest, run: str) -> Iterable[Caution]:
    """Manifests hold, by task, the median characters of a prompt and of its beginning that another one shares."""
    long = [
        f"{task} ({lengths['shared_chars']:,} of {lengths['prompt_chars']:,})"
        for task, lengths in (manifest.get("shared_prefix") or {}).items()
        if lengths["shared_chars"] >= max(LONG_PREFIX, LARGE_PREFIX * lengths["prompt_chars"])
    ]
    if long:
        message = f"prompts share a long beginning with another one, characters in the median: {listed(long)}"
        cure = (
            "a server's prefix cache and methods that learn between prompts find it there already: TTFT and they "
            "read too well; use prompts that begin differently, or ask after the text instead of before it"
        )
        yield warning("shared-prefix", message, cure, run)


def _no_template(manifest: Manifest, run: str) -> Iterable[Caution]:
    if is_random(manifest) or "chat_template" not in manifest or manifest["chat_template"]:
        return
    target = manifest.get("target")
    known = (
        [str(target.get(key) or "") for key in ("name", "hub_id", "ref")] if isinstance(target, dict) else []
    )
    name = next((name for name in known if INSTRUCT.search(name)), None)
    if name is not None:
        message = f"{name} answers chats by its name, and took its prompts without a chat template"
        cure = "take a checkpoint whose tokenizer has its template: drafters are trained on it, and lose τ without"
        yield warning("template", message, cure, run)


def _other_machine(run: str, manifest: Manifest, first: str, reference: Manifest) -> Iterable[Caution]:
    mine, theirs = _machine(manifest), _machine(reference)
    if mine is not None and theirs is not None and mine != theirs:
        here, there = machine_line(manifest.get("machine")), machine_line(reference.get("machine"))
        message = f"measured on another machine than {first}: {here or mine}, not {there or theirs}"
        cure = (
            "compare τ and acceptance; speedups depend on the machine, and seconds and tokens/s say nothing"
        )
        yield warning("machines", message, cure, run)


def _other_precision(run: str, manifest: Manifest, first: str, reference: Manifest) -> Iterable[Caution]:
    """Of one target's runs: its weights quantised otherwise, or computed with in another dtype."""
    mine, theirs = manifest.get("target"), reference.get("target")
    if not isinstance(mine, dict) or not isinstance(theirs, dict) or mine.get("ref") != theirs.get("ref"):
        return
    if (mine.get("files") or {}) != (theirs.get("files") or {}) or _precision(mine) == _precision(theirs):
        return
    message = (
        f"another target than in {first}: the same weights, {_precision(mine)}, not {_precision(theirs)}"
    )
    cure = (
        f"`specbench report {shlex.join([first, run])} --format leaderboard` sets speedup, τ and bytes side by side; "
        "do not compare outputs or tokens/s: each speedup is over its own run's vanilla"
    )
    yield warning("precision", message, cure, run)


def _precision(target: Mapping[str, Any]) -> str:
    size = target.get("bytes")
    stored = [] if size is None else [in_bytes(size)]
    # An engine that runs packed weights has no dtype but their own.
    said = dict.fromkeys([target.get("quantization") or "unquantised", str(target.get("dtype"))])
    return ", ".join([*said, *stored])


def _machine(manifest: Manifest) -> str | None:
    return manifest.get("machine_fingerprint") or machine_line(manifest.get("machine"))


def _other_template(run: str, manifest: Manifest, first: str, reference: Manifest) -> Iterable[Caution]:
    """Of one target's runs: another chat template, or other values given to it."""
    if identity(manifest.get("target")) != identity(reference.get("target")):
        return
    if not all("chat_template" in m for m in (manifest, reference)) or _template(manifest) == _template(
        reference
    ):
        return
    message = f"prompts were made with another chat template, or other --template-arg, than in {first}"
    cure = "drafters are trained for one template and mode of thinking: measure both with the same one"
    yield warning("template", message, cure, run)


def _template(manifest: Manifest) -> tuple[Any, Any]:
    return manifest["chat_template"], (manifest.get("config") or {}).get("template_args") or None
