"""Spec-Bench's answer files (hemingkx/Spec-Bench, commit fd2c1cd, `evaluation/eval.py` and `evaluation/speed.py`).

A line a question: {question_id, category, model_id, tstamp, choices[{index, turns[], decoding_steps[],
new_tokens[], wall_time[], accept_lengths[]}]}; before commit 9262209 `decoding_steps` was called `idxs`.
`wall_time` is a turn's seconds with its prefill; `accept_lengths` has one entry a pass of the target, the tokens
that it appended, over all turns of the question, the first token and the bonus tokens included.

So `tau` of the imported run is Spec-Bench's "#Mean accepted tokens", and `spec_bench_speedup` its speedup:
except that `speed.py` counts the baseline's tokens anew from its stripped text, without EOS. There a baseline of
n tokens counts as n-1, and every speedup is n/(n-1) too high; here `new_tokens` counts on both sides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specbench.errors import SpecbenchError
from specbench.importers.base import BASELINE, Imported, Importer, Row, Source, objects, refuse_again

# `mt_bench_list` of speed.py: categories that its tables show as one task.
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
FAILED = "ERROR"  # what eval.py writes instead of an answer, beside the numbers of the turn before
TEMPERATURE = re.compile(r"temp(?:erature)?-?(\d+(?:\.\d+)?)")
BASELINE_ID = re.compile(r"-(?:vanilla|baseline)\b")
DTYPE = re.compile(r"bfloat16|float16|float32|float64")
UNKNOWN = (
    *(
        "prompt tokens",
        "prefill and decode apart",
        "drafted tokens",
        "time in draft and verify",
        "memory",
        "energy",
    ),
    *("token ids", "machine", "versions", "hash of the weights"),
)


def read(sources: Sequence[Source], temperature: float | None) -> Imported:
    """The trials of all files: a row a turn, a repeat a choice. A label that comes again adds repeats."""
    files = [(source, _answers(source.path)) for source in sources]
    base = next((answers for source, answers in files if source.label == BASELINE), None)
    target = _target(base[0][1] if base else files[0][1][0][1])
    ids = [str(answers[0][1].get("model_id", "")) for _, answers in files]
    temperature = temperature if temperature is not None else _number(TEMPERATURE, ids)
    rows: list[Row] = []
    repeats: dict[str, int] = {}
    for source, answers in files:
        label = source.label or _label(answers[0][1], target.get("name"), source.path)
        refuse_again(source, label, repeats)
        first = repeats.get(label, 0)
        for line, answer in answers:
            rows += _rows(answer, f"{source.path} line {line}", label, first)
        repeats[label] = 1 + max(row["repeat"] for row in rows if row["method"] == label)
    _number_blocks(rows)
    notes = [] if base else ["without --baseline there is no speedup"]
    if temperature == 0:
        _compare_texts(rows)
        notes.append("outputs are compared as text")
    moments = [answer["tstamp"] for _, answers in files for _, answer in answers if answer.get("tstamp")]
    edges = [_moment(edge(moments)) if moments else None for edge in (min, max)]
    return Imported(rows, target, {"temperature": temperature}, notes, start=edges[0], end=edges[1])


def _answers(path: Path) -> list[tuple[int, dict[str, Any]]]:
    answers = list(objects(path))
    for line, answer in answers:
        if not {"question_id", "category", "choices"} <= answer.keys():
            raise SpecbenchError(
                f"{path} line {line} is not an answer of Spec-Bench: question_id, category or choices is missing",
                "give a file from its data/…/model_answer folder",
            )
    return answers


def _rows(answer: dict[str, Any], where: str, label: str, first_repeat: int) -> list[Row]:
    try:
        return [
            row | {"repeat": first_repeat + number}
            for number, choice in enumerate(answer["choices"])
            for row in _turns(answer, choice, label)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise SpecbenchError(
            f"{where} is not an answer of Spec-Bench: {type(error).__name__} {error}",
            "each choice needs turns, new_tokens and wall_time of one length",
        ) from error


def _turns(answer: dict[str, Any], choice: dict[str, Any], label: str) -> list[Row]:
    turns, tokens, seconds = choice["turns"], choice["new_tokens"], choice["wall_time"]
    category = str(answer["category"])
    rounds = split(choice.get("accept_lengths") or [], choice.get("decoding_steps"), tokens)
    rows = []
    for turn, (text, count, time) in enumerate(zip(turns, tokens, seconds, strict=True)):
        row = {
            "task": "mt_bench" if category in MT_BENCH else category,
            "question": str(answer["question_id"]),
            "category": category if category in MT_BENCH else None,
            "turn": turn,
            "method": label,
            "batch_size": 1,
            "state": None,
            "output_tokens": int(count),
            "text": str(text),
            "batch_s": float(time),
            "total_s": float(time),
            "rounds": {"emitted": rounds[turn]},
        }
        if text == FAILED:
            row |= {"finish": "error", "error": "Spec-Bench recorded ERROR; the numbers are another turn's"}
        rows.append(row)
    return rows


def split(lengths: Sequence[int], steps: Sequence[int] | None, tokens: Sequence[int]) -> list[list[int]]:
    """The passes of each turn, of the passes of all turns: by the turns' steps, else by their tokens.

    Every pass is in one of them, whatever the counts say, so that their mean stays the file's.
    """
    lengths = [int(length) for length in lengths]
    if steps is not None and sum(map(int, steps)) == len(lengths) and len(steps) == len(tokens):
        ends = [sum(map(int, steps[: turn + 1])) for turn in range(len(tokens))]
    else:
        ends, emitted, passes = [], 0, 0
        for turn in range(len(tokens)):
            wanted = sum(map(int, tokens[: turn + 1]))
            while passes < len(lengths) and emitted < wanted:
                emitted += lengths[passes]
                passes += 1
            ends.append(passes)
        ends[-1:] = [len(lengths)] if ends else []
    return [lengths[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _number_blocks(rows: list[Row]) -> None:
    """A block a question, turn and repeat, as in a run; vanilla is the first of its block."""
    blocks: dict[tuple[Any, ...], int] = {}
    orders: dict[int, int] = {}
    rows.sort(key=lambda row: (row["repeat"], row["method"] != BASELINE))  # stable: files keep their order
    for row in rows:
        key = (row["repeat"], row["task"], row["question"], row["turn"])
        row["block"] = blocks.setdefault(key, len(blocks))
        row["order"] = orders.get(row["block"], 0)
        orders[row["block"]] = row["order"] + 1
    rows.sort(key=lambda row: (row["block"], row["order"]))


def _compare_texts(rows: list[Row]) -> None:
    """Whether each text is vanilla's; the rest of the agreement needs token ids."""
    texts = {row["block"]: row for row in rows if row["method"] == BASELINE}
    for row in rows:
        base = texts.get(row["block"])
        if row["method"] != BASELINE and base and not row.get("error") and not base.get("error"):
            same = row["text"] == base["text"]
            row["agreement"] = {"same": same, "first_difference": None, "logit_gap": None}


def _target(answer: dict[str, Any]) -> dict[str, Any]:
    """Name and precision, from the baseline's id `vicuna-7b-v1.3-vanilla-float16-temp-0.0`; a method's hides it."""
    model = str(answer.get("model_id") or "")
    name, *rest = BASELINE_ID.split(model, maxsplit=1)
    dtype = DTYPE.search(model)
    return ({"name": name} if name and rest else {}) | ({"dtype": dtype[0]} if dtype else {})


def _label(answer: dict[str, Any], target: str | None, path: Path) -> str:
    """What the model's id says beyond the target: `eagle3-float16`."""
    model = str(answer.get("model_id") or path.stem)
    return (model.removeprefix(f"{target}-") if target else model) or model


def _number(pattern: re.Pattern[str], texts: Sequence[str]) -> float | None:
    found = {float(match[1]) for text in texts if (match := pattern.search(text))}
    return found.pop() if len(found) == 1 else None


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


FORMAT = Importer("spec-bench", "Spec-Bench answer files", UNKNOWN, read)
