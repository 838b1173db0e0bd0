"""Warnings as data: what makes a summary's numbers mean less than they seem, each with its cure.

Those of a method, and what all of them are made with; those of a run or between runs are in `run_caution`.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specbench.analysis.extract import is_random, temperature
from specbench.analysis.intervals import MIN_CLUSTERS, half_width
from specbench.analysis.open_loop import PILING
from specbench.analysis.setting import in_words
from specbench.thresholds import LAPS, RANKED_WIDTH

Caution = dict[str, Any]

WIDE, WANTED = 0.10, 0.05  # half widths: what is called wide, what to narrow it to
LEANING = 0.003  # of the speedup: more bias than this is told of (where it is known: above its own error)
SAME_LOW, SAME_HIGH = 0.97, 1.03  # vanilla against itself
ABOVE = 1.03  # tolerance of a speedup above tau that has no interval
BELOW_FLOOR = 1.05  # tolerance of passes faster than their floor
PUBLISHED_SHARE = 0.75  # of a drafter's published tau: less than this points at its loading, not at the task
OUTLIERS, OUTLYING_SHARE = 3, 0.05  # trials, and share of them, above which outliers are warned of
SHOWN = 5  # names listed before "and N more"


@dataclass(frozen=True)
class Overall:
    """One method's overall row, with what its warnings need beside it."""

    row: dict[str, Any]
    parts: list[dict[str, Any]]  # its task rows
    needed: int | None  # clusters that would narrow its interval to ±WANTED
    together: int  # the most requests of a batch or block
    vanilla_tokens: int  # of the batches both measured
    method_tokens: int


def warning(code: str, message: str, cure: str, run: str, method: str | None = None) -> Caution:
    return {"code": code, "message": message, "cure": cure, "run": run, "method": method}


def method_warnings(overall: Overall, manifest: dict[str, Any]) -> list[Caution]:
    """Warnings of one method at one setting."""
    row = overall.row
    timed = (_failed, _above_tau, _wide, _outliers, _vanilla_again)
    checks = (*timed, _differs, _queue, _short_block, _short)
    found = [w for check in checks for w in check(overall)]
    found += _below_floor(overall, manifest)
    if temperature(manifest) == 0:
        found += _token_totals(overall, "imported" in manifest)
    found += _below_published(overall, manifest)
    suffix = setting(row)
    return [w | {"message": f"{w['message']}{suffix}"} for w in found] if suffix else found


def few_prompts(rows: Sequence[dict[str, Any]], run: str) -> list[Caution]:
    """One warning for all of the run's rows that have a speedup but too few questions for its interval."""
    few = [r for r in rows if r["speedup"]["point"] is not None and r["speedup"]["low"] is None]
    tasks = list(dict.fromkeys(r["task"] for r in few if r["category"] is None))
    if not tasks:
        return []
    message = f"fewer than {MIN_CLUSTERS} questions, so no interval: {listed(tasks)}"
    cure = f"--limit {MIN_CLUSTERS} or more (20 give a useful interval)"
    if any(map(in_words, few)):
        cure += "; what is in flight together, a batch or a block of requests, counts as one question"
    return [warning("few-prompts", message, cure, run)]


def measure_again(manifest: Mapping[str, Any]) -> str:
    """The command that measures anew the speed that a run's floors rest on: of its dtype and number of threads."""
    config, speed = manifest.get("config") or {}, (manifest.get("roofline") or {}).get("speed") or {}
    dtype = str(speed.get("dtype"))
    words = ["--target", config.get("target") or "TARGET", "--tau", "2", "--again"]
    words += ["--dtype", "fp8" if dtype.startswith("float8") else dtype]
    if speed.get("threads"):
        words += ["--device", "cpu", "--threads", str(speed["threads"])]
    elif config.get("device", "auto") != "auto":
        words += ["--device", config["device"]]
    return f"specbench roofline {shlex.join(words)}"


def setting(row: Mapping[Any, Any]) -> str:
    """` (batch size 4, concurrency 8)`, empty for one request at a time."""
    parts = in_words(row)
    return f" ({', '.join(parts)})" if parts else ""


def _failed(overall: Overall) -> Iterable[Caution]:
    row = overall.row
    if row["failed"]:
        left_out = "their blocks are not counted"
        if (row["concurrency"] or 1) > 1 or row["request_rate"]:
            left_out += " in throughput and speedup"
        message = f"{row['method']}: {row['failed']} of {row['trials']} trials failed; {left_out}"
        cure = "see `error` in trials.jsonl"
        yield warning("failed", message, cure, row["run"], row["method"])


def _above_tau(overall: Overall) -> Iterable[Caution]:
    row = overall.row
    if row["method"] in ("vanilla", "vanilla-again") or row["request_rate"]:
        return  # at a rate a faster server has less in flight at once, which makes its rounds shorter too
    where = [part["task"] for part in [*overall.parts, row] if _is_above_tau(part)]
    if where:
        what = "tokens per round" if row["batch_size"] == 1 else "tokens per pass over vanilla's"
        message = f"{row['method']}: decode speedup above {what}, beyond any drafter: {listed(where)}"
        cure = "vanilla was slowed (contention, another code path): measure vanilla-again beside it"
        yield warning("speedup-above-tau", message, cure, row["run"], row["method"])


def _below_floor(overall: Overall, manifest: Mapping[str, Any]) -> Iterable[Caution]:
    row = overall.row
    share = row["roofline_share"]
    if share is not None and share > BELOW_FLOOR:
        message = (
            f"{row['method']}: its passes took {1 / share:.0%} of their floor, the least that they can take"
        )
        cure = (
            f"the device was busy when its speed was measured (`{measure_again(manifest)}` on a quiet one, and "
            "run again), or the target is so small that the processor's caches hold it"
        )
        yield warning("below-floor", message, cure, row["run"], row["method"])


def _below_published(overall: Overall, manifest: dict[str, Any]) -> Iterable[Caution]:
    """A drafter loaded wrongly drafts badly without any error: only what others measured with it shows that."""
    row = overall.row
    drafter = (manifest.get("drafters") or {}).get(row["method"])
    drafter = drafter if isinstance(drafter, dict) else {}
    published = drafter.get("expected_tau")
    tau = row["tau"]["point"]
    if published is None or tau is None or is_random(manifest):
        return
    # A draft of depth k emits at most k + 1 tokens, whatever was published for longer ones.
    reachable = min(published, len(row["acceptance_by_position"] or ()) + 1)
    if tau < PUBLISHED_SHARE * reachable:
        source = drafter.get("tau_source") or "source unknown"
        message = f"{row['method']}: τ {tau:.1f}, published {published:.1f} ({source}): check template and checkpoint"
        cure = (
            "a wrong chat template, thinking mode or checkpoint setting lowers τ without any error; "
            "`specbench inspect` shows what the draft is; another task or temperature lowers it too"
        )
        yield warning("tau-below-published", message, cure, row["run"], row["method"])


def _is_above_tau(row: dict[str, Any]) -> bool:
    speedup, gain = row["decode_speedup"], row["pass_gain"]
    if speedup["point"] is None or gain is None:
        return False
    if speedup["low"] is not None:
        return bool(speedup["low"] > gain * (1 + 1e-9))
    return bool(speedup["point"] > gain * ABOVE)


def _wide(overall: Overall) -> Iterable[Caution]:
    """In one line: the overall interval, the tasks whose own is too wide to rank them, and the point's bias."""
    row = overall.row
    width = half_width(row["speedup"]) or 0.0
    tasks = [part["task"] for part in overall.parts if (half_width(part["speedup"]) or 0.0) > RANKED_WIDTH]
    leaning = row["speedup_bias"] or 0.0
    unit = "batches" if in_words(row) else "questions"
    said, cures = [], []
    if width > WIDE:
        said.append(f"the speedup is known to ±{width:.0%} only, from {row['clusters']} {unit}")
        cures.append(f"about {overall.needed} {unit} in all narrow it to ±{WANTED:.0%} (raise --limit)")
    if tasks and len(overall.parts) > 1:  # one task alone is what the overall row says
        said.append(f"too wide to rank (above ±{RANKED_WIDTH:.0%}) on {listed(tasks)}")
        cures.append(f"raise --limit: 20 {unit} a task give a useful interval")
    code = "wide-interval" if said else "biased"
    if abs(leaning) > LEANING:
        enough = math.ceil(row["clusters"] * abs(leaning) / LEANING)
        said.append(f"a ratio of {row['clusters']} {unit} itself leans by about {leaning:+.1%}")
        cures.append(f"about {enough} {unit} in all bring that under {LEANING:.1%} (raise --limit)")
    if said:
        message = f"{row['method']}: {'; '.join(said)}"
        yield warning(code, message, cures[0], row["run"], row["method"])


def _outliers(overall: Overall) -> Iterable[Caution]:
    row = overall.row
    counted = row["trials"] - row["failed"] - row["excluded"]
    if row["outliers"] > max(OUTLIERS, OUTLYING_SHARE * counted):
        message = f"{row['method']}: the rounds of {row['outliers']} of {counted} trials took unusually long or short"
        cure = "they are counted; stop other work on the machine and run again, or add --repeats"
        yield warning("outliers", message, cure, row["run"], row["method"])


def _vanilla_again(overall: Overall) -> Iterable[Caution]:
    row = overall.row
    point = row["speedup"]["point"]
    if row["method"] == "vanilla-again" and point is not None and not SAME_LOW <= point <= SAME_HIGH:
        message = (
            f"vanilla against itself reads {point:.2f}x, not 1.00x: no ratio of this run is better than that"
        )
        cure = "the machine was not quiet: stop other work and run again, with more prompts"
        yield warning("vanilla-again", message, cure, row["run"], row["method"])


def _differs(overall: Overall) -> Iterable[Caution]:
    row = overall.row
    differ = (row["compared"] or 0) - (row["identical"] or 0)
    if not row["lossless"] or not differ:
        return
    ties = row["near_ties"] or 0
    message = f"{row['method']} is lossless but {differ} of {row['compared']} outputs differ from vanilla's"
    if ties == differ:
        message += ": all at near-ties of the target's top two logits, decided by rounding"
        cure = "--dtype float32 makes near-ties rare"
    elif row["concurrency"] or row["request_rate"]:  # of an engine, whose logits are not at hand
        message += " in the same engine"
        cure = "measure vanilla-again: what differs there too is the shape of batches, not speculation"
    else:
        message += f"; {differ - ties} of them not at a known near-tie: a bug in the method or a coarse dtype"
        cure = "run with --dtype float32: what still differs there is a bug"
    yield warning("output-differs", message, cure, row["run"], row["method"])


def _queue(overall: Overall) -> Iterable[Caution]:
    """An open loop whose server did not keep up: what is measured there is the queue."""
    row = overall.row
    growth = row["queue_growth"]
    if growth is not None and growth >= PILING:
        message = (
            f"{row['method']} did not keep up: unanswered requests rose by {growth:.2f} with each one sent"
        )
        cure = "its latency depends on how long one measures; give a lower --request-rate, or --concurrency"
        yield warning("queue", message, cure, row["run"], row["method"])


def _short_block(overall: Overall) -> Iterable[Caution]:
    """An open loop whose blocks end before the rate has set what is in flight. (One with a queue is said to have.)"""
    row = overall.row
    if not row["request_rate"] or row["latency_s"] is None or (row["queue_growth"] or 0.0) >= PILING:
        return
    flying = row["request_rate"] * row["latency_s"]
    if overall.together < LAPS * flying:
        message = (
            f"{row['method']}: the rate was not reached for long: at {row['latency_s']:.2g} s a request it puts "
            f"{flying:.0f} in flight, and a block of {overall.together} requests is mostly its beginning and end"
        )
        cure = (
            "whether the server keeps up is open, and requests/s are too low: a lower --request-rate or fewer "
            f"--max-new-tokens, until a block holds {LAPS} times what is in flight; --concurrency N for N in flight"
        )
        yield warning("short-block", message, cure, row["run"], row["method"])


def _short(overall: Overall) -> Iterable[Caution]:
    """A concurrency that was never reached, said once."""
    row, wanted = overall.row, overall.row["concurrency"] or 1
    where = [part["task"] for part in overall.parts if not part["failed"] and part["prompts"] < wanted]
    if where and row["method"] == "vanilla":
        message = f"{wanted} requests were never in flight: fewer questions than that in {listed(where)}"
        cure = f"a higher --limit: {LAPS} questions for each request in flight fill most of a block"
        yield warning("concurrency", message, cure, row["run"])


def _token_totals(overall: Overall, imported: bool) -> Iterable[Caution]:
    row, mine, base = overall.row, overall.method_tokens, overall.vanilla_tokens
    if mine != base:
        message = f"{row['method']}: {mine:,} output tokens, vanilla {base:,}; times are compared per token"
        cure = "outputs differ: --dtype float32 for equal ones, or --ignore-eos for equal lengths"
        if imported:
            cure = (
                "outputs differ: have that benchmark ignore the end of sequence, if it can, for equal lengths"
            )
        yield warning("token-totals", message, cure, row["run"], row["method"])


def listed(names: Sequence[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
