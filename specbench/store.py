"""Results on disk: a folder a run, `manifest.json` and `trials.jsonl` (design §7).

A block's rows are written together and synced once, so that a killed run loses at most the block in flight.
Readers accept every older schema version and drop a half-written last block with a warning.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.errors import SpecbenchError
from specbench.schema import SCHEMA, Key, Trial
from specbench.schema import Rounds as Rounds  # what a trial holds, for those who make or read one
from specbench.trial_file import read_trials

MANIFEST, TRIALS = "manifest.json", "trials.jsonl"
WHOLE_PASSES, INTERLEAVED = "whole passes", "interleaved"  # a manifest's `schedule`
REFERENCE = "reference"  # the folder under results/ whose runs are committed: baselines


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
    trials, fault = read_trials(path / TRIALS)
    warnings = [f"{TRIALS}: the last line {fault} and is left out"] if fault else []
    # Imported files need not hold all methods of a block; nothing was cut off there.
    whole_blocks = trials if "imported" in manifest else drop_incomplete(trials, manifest)
    if len(whole_blocks) < len(trials):
        warnings.append(f"{TRIALS}: the last block was not finished and is left out")
    return Run(path, manifest, whole_blocks, warnings)


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
