"""Tasks by reference: a bundled name, a file of questions, or a dataset of the Hugging Face Hub.

Also the one import for callers: what belongs to questions and conversations is re-exported here.
"""

from __future__ import annotations

import difflib
import gzip
import hashlib
import json
import os
import re
import tomllib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import chain
from pathlib import Path
from typing import Any

from specbench.conversation import (
    check_prompt,
    parse_template_args,
    random_ids,
    render,
    stop_ids,
    template_note,
)
from specbench.errors import SpecbenchError
from specbench.hub_datasets import load_hub_task
from specbench.hub_presets import PRESETS
from specbench.questions import (
    DEFAULT_MAX_NEW_TOKENS,
    Layout,
    Question,
    Row,
    RowError,
    Task,
    build_questions,
    detect_layout,
    take_round_robin,
)

__all__ = [
    "PRESETS",
    "Question",
    "Task",
    "TaskInfo",
    "bundled",
    "bundled_names",
    "check_prompt",
    "load_task",
    "load_tasks",
    "parse_template_args",
    "random_ids",
    "render",
    "stop_ids",
    "take_round_robin",
    "template_note",
]

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")


@dataclass(frozen=True)
class TaskInfo:
    """What `specbench ls tasks` says of a bundled task. `turns` is the most a question has."""

    name: str
    description: str
    rows: int
    turns: int
    max_new_tokens: int
    licence: str
    categories: tuple[str, ...]


def load_tasks(refs: Sequence[str], *, limit: int | None = None) -> list[Task]:
    """Several tasks. Two of one name are refused: results are kept by task name."""
    tasks: dict[str, Task] = {}
    for ref in refs:
        task = load_task(ref, limit=limit)
        if task.name in tasks:
            raise SpecbenchError(
                f"two tasks are called {task.name!r}: {tasks[task.name].source} and {task.source}",
                "name a task once; rename one of two files",
            )
        tasks[task.name] = task
    return list(tasks.values())


def load_task(ref: str, *, limit: int | None = None) -> Task:
    """The task `ref` names.

    Args:
        ref: a bundled task's name; FILE.jsonl, FILE.json or either with .gz, in Spec-Bench's format,
            HumanEval's, or with one column of prompts; or `hf:ID[:config[:split]][:key=value,…]`.
        limit: questions to take, round-robin over the categories. None takes all, in file order.

    Raises:
        SpecbenchError: an unknown name, or data that cannot be used (the file and the line are named).
    """
    if limit is not None and limit < 1:
        raise SpecbenchError(f"--limit {limit} leaves no questions", "give --limit 1 or more")
    if ref.startswith("hf:"):
        task = load_hub_task(ref, limit=limit)
    elif ref in bundled_names():
        task = _bundled_task(ref)
    elif _names_a_file(ref):
        task = _file_task(Path(ref).expanduser())
    else:
        raise _unknown_task(ref)
    return task if limit is None else replace(task, questions=take_round_robin(task.questions, limit))


def bundled_names() -> list[str]:
    """The names of the bundled tasks: a JSONL and a TOML each."""
    found = {entry.name for entry in _data().iterdir()}
    return sorted(name[:-5] for name in found if name.endswith(".toml") and f"{name[:-5]}.jsonl" in found)


def bundled() -> list[TaskInfo]:
    """The bundled tasks, for a listing."""
    return [_info(_bundled_task(name)) for name in bundled_names()]


def _data() -> Traversable:
    return files("specbench.tasks")


def _info(task: Task) -> TaskInfo:
    return TaskInfo(
        name=task.name,
        description=task.description,
        rows=len(task.questions),
        turns=task.turns,
        max_new_tokens=task.max_new_tokens,
        licence=task.licence,
        categories=task.categories,
    )


def _bundled_task(name: str) -> Task:
    meta = tomllib.loads((_data() / f"{name}.toml").read_text("utf-8"))
    file = f"{name}.jsonl"
    text, digest = _read_text(_data() / file, file)
    layout = Layout("turns", category=meta.get("category_field", "category"))
    return Task(
        name=name,
        description=meta["description"],
        licence=meta["licence"],
        max_new_tokens=meta["max_new_tokens"],
        questions=build_questions(_jsonl_rows(text, file), layout, name, file),
        sha256=digest,
        source=f"bundled:{name}",
    )


def _file_task(path: Path) -> Task:
    source, name = str(path), _file_task_name(path)
    text, digest = _read_text(path, source)
    is_lines = path.name.endswith((".jsonl", ".jsonl.gz"))
    rows = _jsonl_rows(text, source) if is_lines else _json_rows(text, source)
    first = next(rows, None)
    layout = _layout_of(first, source)
    questions = build_questions(chain([first] if first else [], rows), layout, name, source)
    return Task(
        name=name,
        description=f"questions of {path.name}",
        licence="unknown",
        max_new_tokens=DEFAULT_MAX_NEW_TOKENS,
        questions=questions,
        sha256=digest,
        source=source,
        template=layout.spelled,
    )


def _layout_of(first: tuple[str, Row] | None, source: str) -> Layout:
    if first is None:
        raise SpecbenchError(f"{source} has no rows", "give a file with at least one question")
    where, row = first
    try:
        return detect_layout(row)
    except RowError as error:
        raise SpecbenchError(
            f"{source}, {where}: {error}", 'name the column with the prompt "prompt", or write "turns": [...]'
        ) from error


def _names_a_file(ref: str) -> bool:
    return ref.endswith(SUFFIXES) or os.path.exists(ref)


def _file_task_name(path: Path) -> str:
    """The stem in lower case; the folder's name where the stem says nothing (spec_bench/question.jsonl)."""
    stem = path.name.partition(".json")[0]
    if stem in ("question", "questions"):
        stem = path.resolve().parent.name or stem
    return re.sub(r"[^a-z0-9_.-]+", "_", stem.lower()) or "task"


def _read_text(file: Traversable, source: str) -> tuple[str, str]:
    """A file's text, unpacked, and the SHA-256 of its bytes on disk."""
    if not file.name.endswith(SUFFIXES):
        raise SpecbenchError(f"{source} is not a task file", f"a task file ends in {', '.join(SUFFIXES)}")
    try:
        data = file.read_bytes()
    except OSError as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise SpecbenchError(f"{source}: {reason}", "check the path given to --task") from error
    content = _unpack(data, source) if file.name.endswith(".gz") else data
    try:
        return content.decode("utf-8-sig"), hashlib.sha256(data).hexdigest()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise SpecbenchError(f"{source}, line {line}: not UTF-8", "save the file as UTF-8") from error


def _unpack(data: bytes, source: str) -> bytes:
    try:
        return gzip.decompress(data)
    except (EOFError, OSError, zlib.error) as error:
        raise SpecbenchError(
            f"{source}: a damaged or truncated gzip file ({error})", "fetch or pack the file again"
        ) from error


def _jsonl_rows(text: str, source: str) -> Iterator[tuple[str, Row]]:
    """Lines end at "\\n" only: `splitlines` would cut a string at U+2028."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"line {number}"
            yield where, _object(_parse(line, source, where), source, where)


def _json_rows(text: str, source: str) -> Iterator[tuple[str, Row]]:
    if not text.strip():
        return
    rows = _parse(text, source, None)
    if not isinstance(rows, list):
        raise SpecbenchError(f"{source}: not a list of rows", "a .json task is a list of objects")
    for number, row in enumerate(rows, 1):
        yield f"row {number}", _object(row, source, f"row {number}")


def _object(value: Any, source: str, where: str) -> Row:
    if isinstance(value, dict):
        return value
    raise SpecbenchError(f"{source}, {where}: not a JSON object", "write one object {…} a row")


def _parse(text: str, source: str, where: str | None) -> Any:
    """JSON, with an error that names the line; `where` is None for a text of several lines."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = where or f"line {error.lineno}"
        raise SpecbenchError(
            f"{source}, {where}: not JSON ({error.msg}, column {error.colno})", "mend that row or take it out"
        ) from error
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, lists nested as deep
        place = f"{source}, {where}" if where else source
        raise SpecbenchError(f"{place}: not readable as JSON ({error})", "take that row out") from error


def _unknown_task(ref: str) -> SpecbenchError:
    known = {name: name for name in bundled_names()} | {name: f"hf:{name}" for name in PRESETS}
    close = [known[name] for name in difflib.get_close_matches(ref.lower(), known, n=3, cutoff=0.5)]
    if re.fullmatch(r"[\w.-]+/[\w.:-]+", ref):
        close = [f"hf:{ref}"]
    guess = f"did you mean {' or '.join(close)}? " if close else ""
    return SpecbenchError(f"unknown task {ref!r}", f"{guess}`specbench ls tasks` lists the tasks")
