"""A metric over several runs: a series a method, of runs that measured the same thing and no others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specbench.analysis.comparable import IDENTITY, SAMPLING
from specbench.analysis.extract import run_extract
from specbench.analysis.intervals import Estimate
from specbench.analysis.run_names import run_names
from specbench.analysis.setting import AXES
from specbench.analysis.summary import BASELINE, OVERALL, summarise

if TYPE_CHECKING:
    from specbench.analysis.summary import RunData


@dataclass(frozen=True)
class Tracked:
    """A field of the overall row that is worth a history; `absolute` ones depend on the machine."""

    field: str
    unit: str
    absolute: bool


TRACKED = {
    "speedup": Tracked("speedup", "x", absolute=False),
    "decode_speedup": Tracked("decode_speedup", "x", absolute=False),
    "tau": Tracked("tau", "tokens/round", absolute=False),
    "acceptance_rate": Tracked("acceptance_rate", "", absolute=False),
    "tokens_per_s": Tracked("tokens_per_s", "tokens/s", absolute=True),
    "ttft_s": Tracked("ttft_s", "s", absolute=True),
    "tpot_s": Tracked("tpot_s", "s", absolute=True),
    "memory": Tracked("peak_bytes", "bytes", absolute=True),
}


def history(runs: Sequence[RunData], metric: str) -> dict[str, Any]:
    """{metric, unit, groups[]}; a group: {target, dtype, engine, workload, machine, series[]}; a series: {method,
    batch_size, concurrency, request_rate, points[]}; a point: {run, start, commit, dirty, engine_version, machine,
    prompts, low, point, high}, oldest first.

    A group holds the runs of one target (name, precision, revision, hashes), one engine of whatever version, one
    workload (task files, number of questions, sampling, limits) and, for a metric that depends on it, one machine;
    else `machine` is None.
    """
    tracked = TRACKED[metric]
    groups: dict[str, dict[str, Any]] = {}
    named = zip(run_names(runs), runs, strict=True)
    for name, run in sorted(named, key=lambda each: str(each[1].manifest.get("start") or "")):
        extract = run_extract(run.manifest, name)
        for row in summarise([run])["rows"]:
            estimate = _estimate(row[tracked.field])
            known = row["task"] == OVERALL and estimate["point"] is not None
            if known and (tracked.absolute or row["method"] != BASELINE):  # vanilla's ratios are 1
                key = _key(run.manifest, extract, tracked.absolute)
                group = groups.setdefault(key, _group(run.manifest, extract, tracked.absolute))
                _series(group, row)["points"].append(_point(extract, row, estimate))
    return {"metric": metric, "unit": tracked.unit, "groups": list(groups.values())}


def _estimate(value: Any) -> Estimate:
    return value if isinstance(value, dict) else {"low": None, "point": value, "high": None}


def _key(manifest: Mapping[str, Any], extract: Mapping[str, Any], absolute: bool) -> str:
    """What the runs of a group have in common, in full."""
    target = manifest.get("target")
    config = manifest.get("config") or {}
    tasks = [task for task in manifest.get("tasks") or [] if isinstance(task, Mapping)]
    parts = [
        [target.get(name) for name in IDENTITY] if isinstance(target, Mapping) else target,
        sorted([str(task.get(name)) for name in ("name", "sha256", "questions")] for task in tasks),
        [config.get(name) for name in (*SAMPLING, "max_new_tokens", "template_args")],
        extract["engine"]["name"],
        manifest.get("machine_fingerprint") if absolute else None,
    ]
    return json.dumps(parts, sort_keys=True, default=str)


def _group(manifest: Mapping[str, Any], extract: Mapping[str, Any], absolute: bool) -> dict[str, Any]:
    return {
        "target": extract["target"],
        "dtype": (extract.get("target_details") or {}).get("dtype"),
        "engine": extract["engine"]["name"],
        "workload": _workload(manifest),
        "machine": (extract["machine"] or "unknown machine") if absolute else None,
        "series": [],
    }


def _workload(manifest: Mapping[str, Any]) -> str:
    """`chat (5), code (5); at most 48 new tokens; temperature 0`."""
    config = manifest.get("config") or {}
    tasks = (task for task in manifest.get("tasks") or [] if isinstance(task, Mapping))
    parts = [", ".join(f"{task.get('name')} ({task.get('questions')})" for task in tasks) or "unknown tasks"]
    if config.get("max_new_tokens"):
        parts.append(f"at most {config['max_new_tokens']} new tokens")
    if config.get("temperature") is not None:
        parts.append(f"temperature {config['temperature']:g}")
    return "; ".join(parts)


def _series(group: dict[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    head = {name: row[name] for name in ("method", *AXES)}
    for series in group["series"]:
        if all(series[name] == value for name, value in head.items()):
            return series
    group["series"].append(head | {"points": []})
    return group["series"][-1]


def _point(extract: Mapping[str, Any], row: Mapping[str, Any], estimate: Estimate) -> dict[str, Any]:
    git = extract.get("git") or {}
    return {
        "run": extract["name"],
        "start": extract.get("start"),
        "commit": git.get("commit"),
        "dirty": git.get("dirty"),
        "engine_version": extract["engine"]["version"],
        "machine": extract.get("machine"),
        "prompts": row["prompts"],
        **estimate,
    }
