"""Results on disk: what is written is read back, whole blocks only."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from specbench.errors import SpecbenchError
from specbench.store import Rounds, RunStore, Trial, by_key, default_name, find_runs, list_runs, read_run

METHODS = [{"label": "vanilla", "batches": True}, {"label": "m", "batches": True}]
ALONE = [*METHODS, {"label": "hf", "batches": False}]


def row(question: str, method: str, block: int = 0, **fields: Any) -> Trial:
    known = {"task": "chat", "category": None, "turn": 0, "batch_size": 1, "repeat": 0, "batch": question}
    return Trial(question=question, method=method, block=block, **(known | fields))


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    made = RunStore(tmp_path / "run")
    made.write_manifest({"name": "run", "methods": METHODS})
    return made


def test_rows_come_back_as_they_were(store: RunStore) -> None:
    rounds = Rounds([1, 2], [1, 2], [0, 2], [1, 3], [0.1, 0.2], None, [0.3, 0.30000000000000004])
    rows = [
        row(
            "q1", "vanilla", rounds=rounds, text="€ \u2028 \n\r 汉", output_ids=[1, 2], spans={"draft": 1e-9}
        ),
        row("q1", "m", error="RuntimeError: x", finish="error", agreement={"same": True}),
    ]
    store.append(rows)
    assert read_run(store.path).trials == rows
    assert (store.path / "trials.jsonl").read_bytes().count(b"\n") == 2


def test_the_manifest_is_replaced_whole(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SpecbenchError, match="No space left"):
        store.write_manifest({"name": "changed"})
    assert read_run(store.path).manifest["name"] == "run"


def test_older_rows_and_unknown_fields_are_read(store: RunStore) -> None:
    old = {
        "task": "t",
        "question": "q",
        "category": "c",
        "turn": 0,
        "method": "m",
        "batch_size": 1,
        "repeat": 0,
    }
    line = json.dumps(old | {"colour": "red", "rounds": {"drafted": [1], "heat": [2]}})
    (store.path / "trials.jsonl").write_text(line + "\n")
    (store.path / "manifest.json").write_text("{}")
    (trial,) = read_run(store.path).trials
    assert trial.rounds == Rounds(drafted=[1])
    assert trial.attempt == 0


OLD = b'"task": "t", "question": "q", "category": "c", "turn": 0, "method": "m", "batch_size": 1, "repeat": 0'


@pytest.mark.parametrize(
    ("written", "name", "value"),
    [
        (b'"batch_s": Infinity', "batch_s", math.inf),
        (b'"text": "\\ud800"', "text", "\ud800"),
        (b'"text": "\xff"', "text", "\ufffd"),
        (b'"seed\xff": "\xff", "load": 2', "load", 2),
        (b'"output_ids": [7, -1]', "output_ids", [7, -1]),
        (b'"output_ids": [7, 123456789012345678901]', "output_ids", [7, 123456789012345678901]),
        (b'"block": "x"', "block", "x"),  # what it means is the reader's business
        (b'"state": null', "state", None),
    ],
)
def test_odd_lines_are_read(store: RunStore, written: bytes, name: str, value: object) -> None:
    (store.path / "trials.jsonl").write_bytes(b"{%s, %s}\n" % (OLD, written))
    (store.path / "manifest.json").write_text("{}")
    (trial,) = read_run(store.path).trials
    assert getattr(trial, name) == value


@pytest.mark.parametrize("broken", [b"{", b"[]", b"{}", b"[" * 100_000, b"{%s, }" % OLD])
def test_a_broken_line_is_refused_but_for_the_last(store: RunStore, broken: bytes) -> None:
    file = store.path / "trials.jsonl"
    file.write_bytes(b"%s\n{%s}\n" % (broken, OLD))
    with pytest.raises(SpecbenchError, match="line 1 is not a trial"):
        read_run(store.path)
    file.write_bytes(b"%s\n" % broken)
    assert read_run(store.path).trials == []
    assert len(read_run(store.path).warnings) == 1


def test_equal_names_and_tokens_are_one_object(store: RunStore) -> None:
    store.append([row("q1", m, block, output_ids=[70_000]) for block in (0, 1) for m in ("vanilla", "m")])
    one, *others = read_run(store.path).trials
    assert len({id(trial.output_ids[0]) for trial in [one, *others]}) == 1
    assert one.method is others[1].method


def test_a_newer_schema_is_refused(store: RunStore) -> None:
    (store.path / "manifest.json").write_text('{"schema": 2}')
    with pytest.raises(SpecbenchError, match="newer specbench"):
        read_run(store.path)


@pytest.mark.parametrize("manifest", ["", "{", "[]"])
def test_a_damaged_manifest_is_refused(store: RunStore, manifest: str) -> None:
    (store.path / "manifest.json").write_text(manifest)
    with pytest.raises(SpecbenchError):
        read_run(store.path)


# -- the last block ------------------------------------------------------------------------------------------

ONE = [row("q1", "vanilla"), row("q1", "m")]
TWICE = [
    *(row("q1", m, 1, excluded="contended") for m in ("vanilla", "m")),
    *(row("q1", m, 1, attempt=1) for m in ("vanilla", "m")),
]
BATCH = [
    row("q2", "vanilla", 1, batch_size=2, batch="q1+q2", error="empty prompt"),  # refused ones come first
    row("q2", "m", 1, batch_size=2, batch="q1+q2", error="empty prompt"),
    row("q1", "vanilla", 1, batch_size=2, batch="q1+q2"),
    row("q1", "m", 1, batch_size=2, batch="q1+q2"),
]
PLUS = [row("a+b", m, 1, batch="a+b") for m in ("vanilla", "m")]


@pytest.mark.parametrize("last", [TWICE, BATCH, PLUS], ids=["twice", "batch", "plus"])
def test_a_last_block_counts_only_whole(store: RunStore, last: list[Trial]) -> None:
    store.append([*ONE, *last])
    assert read_run(store.path).trials == [*ONE, *last]
    file = store.path / "trials.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    for kept in range(len(last)):
        file.write_bytes(b"".join(lines[: 2 + kept]))
        run = read_run(store.path)
        assert run.trials == ONE, kept
        assert len(run.warnings) == (kept > 0)
        assert store.resume() == run
        assert file.read_bytes() == b"".join(lines[:2])
        assert read_run(store.path).warnings == []


def test_one_method_alone_at_a_batch_size(tmp_path: Path) -> None:
    """Where only vanilla fits the batch size, its first row is not the whole block."""
    store = RunStore(tmp_path / "run")
    store.write_manifest({"methods": [METHODS[0], ALONE[2]]})
    rows = [row(q, "vanilla", batch_size=2, batch="q1+q2") for q in ("q1", "q2")]
    store.append(rows[:1])
    assert store.resume().trials == []
    store.append(rows)
    assert read_run(store.path).trials == rows


def test_methods_that_do_not_batch_are_not_missed(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "run")
    store.write_manifest({"methods": ALONE})
    rows = [row("q1", m, 0, batch_size=4, batch="q1") for m in ("vanilla", "m")]
    store.append(rows)
    assert read_run(store.path).trials == rows
    store.append([row("q1", m, 1) for m in ("vanilla", "m")])
    assert read_run(store.path).trials == rows  # at batch size 1 it is


def test_by_key_takes_the_one_that_counts() -> None:
    assert list(by_key(TWICE).values()) == TWICE[2:]


# -- folders -------------------------------------------------------------------------------------------------


def test_moving_aside(store: RunStore) -> None:
    assert RunStore(store.path.with_name("none")).move_aside() is None
    assert store.move_aside() == store.path.with_name("run.old1")
    store.write_manifest({})
    assert store.move_aside() == store.path.with_name("run.old2")
    assert not store.path.exists()


def test_runs_are_found_by_name_or_path_newest_last(tmp_path: Path) -> None:
    for number, name in enumerate(("b", "a", "c")):
        RunStore(tmp_path / name).write_manifest({"name": name})
        os.utime(tmp_path / name / "manifest.json", (number, number))
    (tmp_path / "no run").mkdir()
    assert [path.name for path in list_runs(tmp_path)] == ["b", "a", "c"]
    assert find_runs(tmp_path) == [tmp_path / "c"]
    assert find_runs(tmp_path, ["a", str(tmp_path / "b")]) == [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(SpecbenchError, match="no run 'x'"):
        find_runs(tmp_path, ["x"])
    with pytest.raises(SpecbenchError, match="there is no run in"):
        find_runs(tmp_path / "nowhere")


def test_checking_a_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    RunStore(tmp_path / "results" / "run").check_writable()
    assert list((tmp_path / "results").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(SpecbenchError, match="cannot write to"):
        RunStore(tmp_path / "file" / "run").check_writable()


def test_default_names_are_safe_folder_names() -> None:
    assert default_name("org/Model 7B:x").endswith("-Model-7B-x")
    assert default_name("/tmp/tiny/").count("/") == 0
