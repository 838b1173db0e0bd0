"""Results on disk: a folder a run, `manifest.json` and `trials.jsonl` (design §7).

A block's rows are written together and synced once, so that a killed run loses at most the block in flight.
Readers accept every older schema version and drop a half-written last block with a warning.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import sys
import tempfile
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from specbench.errors import SpecbenchError

try:
    import msgspec
except ImportError:  # a checkout that is not installed (scripts/gpu.sh): reading takes four times as long
    msgspec = None  # type: ignore[assignment]

SCHEMA = 1
MANIFEST, TRIALS = "manifest.json", "trials.jsonl"
TIMES = ("draft_s", "verify_s", "round_s")  # of a round
Key = tuple[str, str, int, str, int, int, int, float]
WHOLE_PASSES, INTERLEAVED = "whole passes", "interleaved"  # a manifest's `schedule`
REFERENCE = "reference"  # the folder under results/ whose runs are committed: baselines


@dataclass(slots=True)
class Rounds:
    """The rounds of one trial after its prefill, as columns of equal length. A column is None where unknown.

    Times are kept as arrays, whatever they are given as: a run holds millions, and a list takes four times as much.

    An engine that does not tell its rounds apart has one entry for all of them: `count` says how many rounds an
    entry stands for and `with_draft` how many of those had a draft; its `round_s` is their mean. None: one each.

    `experts`, of a mixture of experts: how many different ones the verify pass woke (all rows of its batch together),
    the mean over the MoE layers. `probes`: nodes that rode in the verify pass without being candidates, where a
    method sends such.
    """

    drafted: list[int] | None = field(default_factory=list)
    depth: list[int] | None = field(default_factory=list)
    accepted: list[int] | None = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    count: list[int] | None = None
    with_draft: list[int] | None = None
    draft_s: Sequence[float] | None = None
    verify_s: Sequence[float] | None = None
    round_s: Sequence[float] | None = None
    experts: list[float] | None = None
    probes: list[int] | None = None

    def __post_init__(self) -> None:
        for name in TIMES:
            column = getattr(self, name)
            setattr(self, name, None if column is None else array("d", column))

    @property
    def total(self) -> int:
        """How many rounds the entries stand for."""
        return len(self.emitted) if self.count is None else sum(self.count)


@dataclass(slots=True)
class Trial:
    """One request: one line of `trials.jsonl`. Field names are the schema; unknown is None.

    `batch_s` is the whole batch's seconds, end to end, and repeats on each row of the batch. `spans` are the
    batch's too. A failed trial has `error` set, `finish` "error", and takes its block out of its method's
    estimates. `excluded` holds the reason a first attempt was not counted ("contended", "throttled", "captured");
    `contended` says that a trial, counted or not, got clearly less than its share of the machine.

    Of engines: `concurrency` requests were in flight, or `request_rate` a second were sent; `sent_s` is when this one
    was, in seconds after the first of its block; `acceptance` is the engine's own account
    (`specbench.engines.record.Acceptance`); `arrivals` has the seconds since the request was sent and the tokens
    (None: not told) of each event that bore some; `retries` counts attempts before this one. `agreement` of an
    engine's answer has `same_text` beside `same`, which is by token ids where there are some.
    """

    task: str
    question: str
    category: str | None
    turn: int
    method: str
    batch_size: int
    repeat: int
    block: int = 0
    batch: str = ""
    order: int = 0
    attempt: int = 0
    concurrency: int | None = None
    request_rate: float | None = None
    state: str | None = "cold"
    prompt_tokens: int = 0
    output_tokens: int = 0
    output_ids: list[int] = field(default_factory=list)
    text: str | None = None
    finish: str | None = None
    batch_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    total_s: float | None = None
    sent_s: float | None = None
    spans: dict[str, float] | None = None
    rounds: Rounds = field(default_factory=Rounds)
    cpu_s: float | None = None
    load: float | None = None
    memory: dict[str, int | None] | None = None
    nvml: dict[str, Any] | None = None
    agreement: dict[str, Any] | None = None
    acceptance: dict[str, Any] | None = None
    arrivals: dict[str, list[Any]] | None = None
    retries: int | None = None
    lossless: bool | None = None
    contended: bool | None = None
    excluded: str | None = None
    error: str | None = None
    schema: int = SCHEMA

    @property
    def key(self) -> Key:
        """What makes a row one row: (task, question, turn, method, batch size, repeat), and an engine's load."""
        load = (self.concurrency or 0, self.request_rate or 0.0)
        return (self.task, self.question, self.turn, self.method, self.batch_size, self.repeat, *load)

    def to_json(self) -> dict[str, Any]:
        row = asdict(self)
        row["rounds"] |= {name: list(column) for name in TIMES if (column := row["rounds"][name]) is not None}
        return row

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Trial:
        """A trial from a line of any schema version up to ours; unknown fields are ignored."""
        values = {name: value for name, value in row.items() if name in _TRIAL}
        columns = row.get("rounds") or {}
        values["rounds"] = Rounds(**{name: column for name, column in columns.items() if name in _ROUNDS})
        return cls(**values)


_NAMES = ("task", "question", "category", "method", "batch", "state", "finish", "excluded")
_TRIAL, _ROUNDS = (frozenset(f.name for f in fields(cls)) for cls in (Trial, Rounds))
_IDS = list(range(2**18))  # more than vocabularies have: one object a token, however often it occurs
_decode = None if msgspec is None else msgspec.json.Decoder(Trial).decode


@dataclass(frozen=True)
class Run:
    """A run read back: its folder, manifest, trials, and what was wrong with the files."""

    path: Path
    manifest: dict[str, Any]
    trials: list[Trial]
    warnings: list[str]


class RunStore:
    """The folder of a run that is being measured."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def exists(self) -> bool:
        """Whether there is a run to go on with.

        Raises:
            SpecbenchError: rows without their manifest, which nobody may add to.
        """
        if (self.path / MANIFEST).is_file():
            return True
        if (self.path / TRIALS).exists():
            raise SpecbenchError(
                f"{self.path} holds {TRIALS} but no {MANIFEST}",
                "restore it, choose another --name, or --fresh to move the folder aside",
            )
        return False

    def check_writable(self) -> None:
        """Find out before anything is loaded whether results can be kept.

        Raises:
            SpecbenchError: the folder cannot be made, or nothing can be written into it.
        """
        with _writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path if self.path.is_dir() else self.path.parent):
                pass

    def move_aside(self) -> Path | None:
        """Make room for a fresh run of the same name; returns where the old folder went."""
        if not self.path.exists():
            return None
        for number in range(1, 10_000):
            aside = self.path.with_name(f"{self.path.name}.old{number}")
            if not aside.exists():
                with _writing(self.path):
                    self.path.rename(aside)
                return aside
        raise SpecbenchError(
            f"{self.path} was moved aside too often", "delete old runs or choose another --name"
        )

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        """Replace the manifest as a whole: a reader sees the old one or the new one."""
        with _writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            draft = self.path / f".{MANIFEST}.new"
            with draft.open("w", encoding="utf-8") as file:
                json.dump({"schema": SCHEMA, **manifest}, file, indent=2, ensure_ascii=False)
                file.write("\n")
                _sync(file)
            draft.replace(self.path / MANIFEST)

    def append(self, rows: Sequence[Trial]) -> None:
        """Write the rows of one block and wait until they are on disk."""
        text = "".join(json.dumps(row.to_json(), ensure_ascii=False) + "\n" for row in rows)
        with _writing(self.path), (self.path / TRIALS).open("a", encoding="utf-8") as file:
            file.write(text)
            _sync(file)

    def resume(self) -> Run:
        """Read the run back and cut a half-written last block off the file: appending goes on after it.

        What stays is not written again: a resumed run keeps its first rows to the byte.
        """
        run = read_run(self.path)
        if run.warnings:
            with _writing(self.path), (self.path / TRIALS).open("rb+") as file:
                whole = itertools.islice(file, len(run.trials))
                file.truncate(sum(map(len, whole)))
                _sync(file)
        return run


def drop_incomplete(trials: Sequence[Trial], manifest: dict[str, Any]) -> list[Trial]:
    """`trials` without a last block that lacks rows: of a question, or of one of the manifest's `methods`.

    In whole passes a block is of one method. A first attempt that was excluded is not whole without the second one.
    """
    if not trials:
        return []
    rows = list(itertools.takewhile(lambda trial: trial.block == trials[-1].block, reversed(trials)))
    questions = dict.fromkeys(row.question for row in rows)
    counted = {(row.question, row.method) for row in rows if row.excluded is None}
    if manifest.get("schedule") == WHOLE_PASSES:
        wanted = [rows[0].method]
    else:
        known = manifest.get("methods", [])
        wanted = [m["label"] for m in known if rows[0].batch_size == 1 or m.get("batches", True)]
    batch = rows[0].batch  # the ids of its questions, joined; the refused ones are written first
    all_asked = not batch or len("+".join(questions)) == len(batch)
    if all_asked and all((question, method) in counted for question in questions for method in wanted):
        return list(trials)
    return list(trials[: len(trials) - len(rows)])


def read_run(path: Path) -> Run:
    """A run from its folder. A broken last line (a run that was killed) is dropped with a warning.

    Raises:
        SpecbenchError: no run there, a newer schema, or a broken line that is not the last one.
    """
    manifest = _read_manifest(path)
    trials, cut = _read_trials(path / TRIALS)
    warnings = [f"{TRIALS}: the last line was cut short and is left out"] if cut else []
    # Imported files need not hold all methods of a block; nothing was cut off there.
    whole_blocks = trials if "imported" in manifest else drop_incomplete(trials, manifest)
    if len(whole_blocks) < len(trials):
        warnings.append(f"{TRIALS}: the last block was not finished and is left out")
    return Run(path, manifest, whole_blocks, warnings)


def _read_trials(file: Path) -> tuple[list[Trial], bool]:
    """The trials of a file, and whether its last line is not a whole one."""
    if not file.is_file():
        return [], False
    trials: list[Trial] = []
    with file.open("rb") as lines, _no_garbage():
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return trials, True
            try:
                trials.append(_shared(_trial(line)))
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                if next(lines, None) is None:
                    return trials, True
                raise SpecbenchError(
                    f"{file} line {number} is not a trial: {error}", "restore the file, or remove that line"
                ) from error
    return trials, False


def _trial(line: bytes) -> Trial:
    """The trial of a line. What msgspec takes exception to, `json` may read: NaN, half a surrogate pair, bytes that
    are not UTF-8, a column of a type that an older or another program wrote."""
    if _decode is not None:
        with contextlib.suppress(ValueError, RecursionError):
            return _decode(line)
    return Trial.from_json(json.loads(line.decode(errors="replace")))


def _shared(trial: Trial) -> Trial:
    """The trial, with one object a name and a token, however many trials hold it."""
    for name in _NAMES:
        if isinstance(value := getattr(trial, name), str):
            setattr(trial, name, sys.intern(value))
    ids = trial.output_ids
    if ids and min(ids) >= 0 and max(ids) < len(_IDS):
        trial.output_ids = list(map(_IDS.__getitem__, ids))
    return trial


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """Millions of objects are made here and none is garbage: looking for some would double the time, now and
    whenever the collector comes round again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecbenchError(
            f"{path} is not a run: it has no {MANIFEST}", "see `specbench ls runs`"
        ) from error
    except ValueError as error:
        raise SpecbenchError(f"{path / MANIFEST} is not JSON: {error}", "restore it, or run again") from error
    if not isinstance(manifest, dict) or manifest.get("schema", 0) > SCHEMA:
        raise SpecbenchError(f"{path} was written by a newer specbench", "upgrade specbench")
    return manifest


def find_runs(results: Path, names: Sequence[str] = ()) -> list[Path]:
    """The folders of the runs `names` (a run or baseline under `results`, or a path); without names the newest.

    Raises:
        SpecbenchError: no such run, or no run at all.
    """
    if not names:
        runs = list_runs(results)
        if not runs:
            raise SpecbenchError(f"there is no run in {results}", "measure one first: specbench run")
        return runs[-1:]
    found = []
    for name in names:
        candidates = [results / name, results / REFERENCE / name, Path(name)]
        path = next((c for c in candidates if (c / MANIFEST).is_file()), None)
        if path is None:
            raise SpecbenchError(
                f"there is no run {name!r} in {results}",
                "see `specbench ls runs` and `specbench baseline show`",
            )
        found.append(path)
    return found


def find_baseline(results: Path, name: str) -> Path | None:
    """The folder of a saved baseline, by its name or a path; None where there is none."""
    candidates = [results / REFERENCE / name, Path(name)]
    return next((c for c in candidates if (c / MANIFEST).is_file()), None)


def list_runs(results: Path) -> list[Path]:
    """All run folders under `results`, oldest first."""
    if not results.is_dir():
        return []
    folders = [path for path in results.iterdir() if (path / MANIFEST).is_file()]
    return sorted(folders, key=lambda path: ((path / MANIFEST).stat().st_mtime, path.name))


def default_name(target: str) -> str:
    """Date, time and target: the name of a run that was given none."""
    safe = "".join(c if c.isalnum() or c in "-_.@" else "-" for c in target.rsplit("/", 1)[-1])
    return time.strftime("%Y%m%d-%H%M%S-") + safe


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SpecbenchError(
            f"cannot write to {path}: {error.strerror or error}",
            f"free space or choose another --output; --name {path.name} goes on from what is measured",
        ) from error


def by_key(trials: Iterable[Trial]) -> dict[Key, Trial]:
    """The trial that counts for each key: the last one that is not excluded."""
    return {trial.key: trial for trial in trials if trial.excluded is None}
