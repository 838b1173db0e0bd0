"""Results on disk: what is written is read back, whole blocks only."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specbench import trial_file
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
    rounds = Rounds([1, 2], [1, 2], [0, 2], [1, 3], draft_s=[0.1, 0.2], round_s=[0.3, 0.30000000000000004])
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
    line = json.dumps(old | {"colour": "red", "rounds": {"emitted": [1], "heat": [2]}})
    (store.path / "trials.jsonl").write_text(line + "\n")
    (store.path / "manifest.json").write_text("{}")
    (trial,) = read_run(store.path).trials
    assert trial.rounds == Rounds(emitted=[1])
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
        (b'"state": null', "state", None),
    ],
)
def test_odd_lines_are_read(store: RunStore, written: bytes, name: str, value: object) -> None:
    (store.path / "trials.jsonl").write_bytes(b"{%s, %s}\n" % (OLD, written))
    (store.path / "manifest.json").write_text("{}")
    (trial,) = read_run(store.path).trials
    assert getattr(trial, name) == value


ROUNDS: dict[str, Any] = {"emitted": [1, 2], "accepted": [0, 1], "drafted": [1, 1], "depth": [1, 1]}
NO_TRIALS: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": None}, "batch_size cannot be null"),
    ({"batch_size": 0}, "batch_size cannot be 0"),
    ({"concurrency": 0.5}, "concurrency cannot be 0.5"),
    ({"turn": "0"}, 'turn cannot be "0"'),
    ({"turn": True}, "turn cannot be true"),
    ({"block": -1}, "block cannot be -1"),
    ({"prompt_tokens": 2**31}, "prompt_tokens cannot be 2147483648"),
    ({"output_tokens": None}, "output_tokens cannot be null"),
    ({"total_s": "1"}, 'total_s cannot be "1"'),
    ({"decode_s": -2.0}, "decode_s cannot be -2.0"),
    ({"request_rate": "inf"}, 'request_rate cannot be "inf"'),
    ({"request_rate": math.nan}, "request_rate cannot be nan"),
    ({"question": 5}, "question cannot be 5"),
    ({"method": 3}, "method cannot be 3"),
    ({"category": 4}, "category cannot be 4"),
    ({"excluded": 1}, "excluded cannot be 1"),
    ({"error": 404}, "error cannot be 404"),
    ({"output_ids": None}, "output_ids cannot be null"),
    ({"output_ids": [1, "a"]}, 'output_ids cannot be [1, "a"]'),
    ({"output_ids": [2**63]}, "output_ids do not fit 64 bits"),
    ({"spans": {"draft": "1"}}, 'spans cannot be {"draft": "1"}'),
    ({"memory": [1]}, "memory cannot be [1]"),
    ({"memory": {"kv_bytes": 10**30}}, "memory does not fit 64 bits"),
    ({"agreement": "x"}, 'agreement cannot be "x"'),
    ({"agreement": {}}, "agreement cannot be {}"),
    ({"agreement": {"same": "yes"}}, 'agreement cannot be {"same": "yes"}'),
    ({"nvml": {"joules": "9"}}, 'nvml cannot be {"joules": "9"}'),
    ({"nvml": {"throttle_reasons": [1]}}, 'nvml cannot be {"throttle_reasons": [1]}'),
    ({"acceptance": {"source": 3}}, 'acceptance cannot be {"source": 3}'),
    ({"arrivals": {"at_s": [0.5]}}, 'arrivals cannot be {"at_s": [0.5]}'),
    ({"arrivals": {"at_s": ["x"], "tokens": [1]}}, "arrivals cannot be"),
    ({"arrivals": {"at_s": [0, 1, 2], "tokens": [1]}}, "arrivals has columns of unequal length"),
    ({"rounds": None}, "rounds cannot be null"),
    ({"rounds": [1]}, "rounds cannot be [1]"),
    ({"rounds": {"emitted": None}}, "rounds.emitted cannot be null"),
    ({"rounds": ROUNDS | {"emitted": [None, 2]}}, "rounds.emitted cannot be [null, 2]"),
    ({"rounds": ROUNDS | {"drafted": [None, 3]}}, "rounds.drafted cannot be [null, 3]"),
    ({"rounds": ROUNDS | {"round_s": [1.0, "2"]}}, 'rounds.round_s cannot be [1.0, "2"]'),
    ({"rounds": ROUNDS | {"emitted": [1, 2, 3]}}, "rounds.drafted has 2 entries, rounds.emitted 3"),
    ({"rounds": ROUNDS | {"accepted": [0, -1]}}, "rounds.accepted holds what is no count"),
    ({"rounds": ROUNDS | {"emitted": [1, 2**31 - 1]}}, "rounds.emitted holds what is no count"),
    ({"rounds": ROUNDS | {"count": [0, 1]}}, "rounds.count holds what is no count"),
]


@pytest.mark.parametrize("installed", [True, False], ids=["msgspec", "json"])
@pytest.mark.parametrize(("changed", "said"), NO_TRIALS, ids=[said for _, said in NO_TRIALS])
def test_other_types_are_refused(
    store: RunStore, changed: dict[str, Any], said: str, installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With msgspec and without, and whatever else is odd in the line."""
    if not installed:
        monkeypatch.setattr(trial_file, "_decode", None)
    first, second = (row("q1", m, rounds=Rounds(**ROUNDS)).to_json() for m in ("vanilla", "m"))
    file = store.path / "trials.jsonl"
    for odd in ({}, {"load": math.inf}):
        file.write_text(f"{json.dumps(first | changed | odd)}\n{json.dumps(second)}\n")
        with pytest.raises(SpecbenchError) as caught:
            read_run(store.path)
        assert f"{file} line 1 is not a trial: {said}" in caught.value.message
        assert "\n" not in caught.value.message
    file.write_text(f"{json.dumps(first)}\n{json.dumps(second | changed)}\n")
    fault, _ = read_run(store.path).warnings
    assert f"the last line is not a trial ({said}" in fault


def test_a_whole_row_passes_without_msgspec_too(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    given = row(
        *("q1", "vanilla"),
        rounds=Rounds(**ROUNDS, round_s=[1, 0.5]),
        concurrency=2,
        request_rate=0.5,
        spans={"draft": 0},
        memory={"kv_bytes": 1, "peak_bytes": None},
        nvml={"joules": 2, "throttle_reasons": ["power"], "other": {}},
        agreement={"same": None, "first_difference": 3, "logit_gap": 1, "same_text": True},
        acceptance={"source": "response", "scope": None, "steps": [[1, 0]]},
        arrivals={"at_s": [0, 0.5], "tokens": [1, None]},
    )
    store.append([given, replace(given, method="m")])
    with_msgspec = read_run(store.path).trials
    monkeypatch.setattr(trial_file, "_decode", None)
    assert read_run(store.path).trials == with_msgspec == [given, replace(given, method="m")]


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
