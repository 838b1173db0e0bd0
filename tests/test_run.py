"""`specbench run` on a tiny model, as a user would: what is measured and what lies on disk then."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tiny_folder import Workplace, specbench, write_task

METHODS = ("--method", "vanilla", "--method", "prompt-lookup:k=3,ngram=1", "--method", "hf-generate")
ROW = {
    "schema", "block", "batch", "batch_s", "order", "task", "question", "category", "turn", "method",
    "repeat", "batch_size", "concurrency", "state", "prompt_tokens", "output_tokens", "output_ids",
    "text", "finish", "prefill_s", "decode_s", "total_s", "spans", "rounds", "cpu_s", "load", "memory",
    "nvml", "agreement", "excluded", "error",
}  # fmt: skip
MANIFEST = {
    "schema", "name", "argv", "config", "seed", "target", "drafters", "methods", "tasks", "chat_template",
    "git", "versions", "machine", "kernel_choices", "start", "end", "status",
}  # fmt: skip
COUNTS = ("drafted", "depth", "accepted", "emitted")
TIMES = ("draft_s", "verify_s", "round_s")


@pytest.fixture(scope="module")
def place(make_place: Any) -> Workplace:
    return make_place("run")


@pytest.fixture(scope="module")
def run(place: Workplace) -> Workplace:
    """One run with everything in it: three methods, two turns, two batch sizes."""
    result = place.run(*METHODS, "--batch-size", "1,2", "--json", name="whole")
    assert result.code == 0, result.err
    (place.path / "out.json").write_text(result.out)
    return place


def batch(rows: list[dict[str, Any]], size: int = 1) -> list[dict[str, Any]]:
    return [row for row in rows if row["batch_size"] == size]


def test_manifest(run: Workplace) -> None:
    manifest = run.manifest("whole")
    assert manifest.keys() >= MANIFEST
    assert manifest["status"] == "complete"
    assert manifest["start"] <= manifest["end"]
    assert manifest["argv"][:2] == ["specbench", "run"]
    assert manifest["config"]["methods"] == ["vanilla", "prompt-lookup:k=3,ngram=1", "hf-generate"]
    target = manifest["target"]
    assert target["dtype"] == "float32"
    assert target["parameters"] > 0
    assert len(target["files"]["model.safetensors"]) >= 32
    assert [task["name"] for task in manifest["tasks"]] == ["work"]
    assert len(manifest["tasks"][0]["sha256"]) == 64
    assert len(manifest["chat_template"]) == 64
    assert {"commit", "dirty"} <= manifest["git"].keys()
    assert {"torch", "transformers", "python"} <= manifest["versions"].keys()


def test_every_row_has_the_fields_of_the_schema(run: Workplace) -> None:
    rows = run.rows("whole")
    assert len(batch(rows)) == 4 * 4  # four requests (one question has two turns), four methods
    assert len(batch(rows, 2)) == 4 * 3  # hf-generate runs at batch size 1 only
    for row in rows:
        assert row.keys() >= ROW
        assert row["schema"] == 1
        assert row["error"] is row["excluded"] is None
        assert row["state"] == "cold"
        assert row["output_tokens"] == len(row["output_ids"]) <= 12
        assert row["finish"] == ("eos" if row["output_ids"][-1] == 2 else "length")
        assert row["text"] is not None
        assert row["memory"]["weights_bytes"] > 0
        assert row["memory"]["graph_bytes"] is None, "no GPU: unknown, and not 0"
        assert row["cpu_s"] > 0


def test_rounds_add_up(run: Workplace) -> None:
    for row in run.rows("whole"):
        rounds = row["rounds"]
        length = len(rounds["emitted"])
        assert {len(rounds[name]) for name in COUNTS} == {length}
        assert {len(rounds[name]) for name in TIMES if rounds[name] is not None} == {length}
        assert sum(rounds["emitted"]) == row["output_tokens"] - 1
        pairs = list(zip(rounds["emitted"], rounds["accepted"], strict=True))
        assert all(emitted == accepted + 1 for emitted, accepted in pairs[:-1])
        assert all(emitted in (accepted, accepted + 1) for emitted, accepted in pairs[-1:])
        assert all(a <= d for a, d in zip(rounds["accepted"], rounds["depth"], strict=True))


def test_time_adds_up(run: Workplace) -> None:
    for row in run.rows("whole"):
        assert row["batch_s"] >= row["total_s"] == pytest.approx(row["prefill_s"] + row["decode_s"])
        if row["method"] == "hf-generate":
            assert row["spans"] is None  # what happens inside `generate` is not known
            continue
        assert set(row["spans"]) == {"draft", "verify", "accept", "other"}
        assert sum(row["spans"].values()) >= row["decode_s"] * (1 - 1e-6)
        assert row["spans"]["other"] >= 0


def test_blocks_alternate_in_order(run: Workplace) -> None:
    blocks: dict[int, dict[int, str]] = defaultdict(dict)
    for row in run.rows("whole"):
        blocks[row["block"]][row["order"]] = row["method"]
    labels = ["vanilla", "vanilla-again", "prompt-lookup:k=3,ngram=1", "hf-generate"]
    ahead = []
    for number, methods in blocks.items():
        fitting = labels if number < 4 else labels[:-1]
        measured = [methods[order] for order in range(len(fitting))]
        assert measured in (fitting, fitting[::-1])
        ahead.append(measured == fitting)
    assert ahead[0]
    assert abs(2 * sum(ahead) - len(ahead)) <= 1


def test_a_row_that_stops_early_has_its_own_time(run: Workplace) -> None:
    for row in run.rows("whole"):
        rounds = row["rounds"]
        assert row["total_s"] == pytest.approx(row["prefill_s"] + row["decode_s"])
        assert row["total_s"] <= row["batch_s"] * (1 + 1e-9)
        assert sum(rounds["round_s"]) <= row["decode_s"] * (1 + 1e-9)


def test_outputs_agree_and_turns_go_on_from_vanillas_answer(run: Workplace) -> None:
    rows = run.rows("whole")
    assert all(row["agreement"]["same"] for row in rows if row["method"] != "vanilla")
    assert all(row["agreement"] is None for row in rows if row["method"] == "vanilla")
    prompts: dict[Any, set[int]] = defaultdict(set)
    for row in rows:
        prompts[row["question"], row["turn"], row["batch_size"]].add(row["prompt_tokens"])
    assert all(len(lengths) == 1 for lengths in prompts.values())
    (first,) = prompts["q1", 0, 1]
    (second,) = prompts["q1", 1, 1]
    answer = next(row["text"] for row in rows if (row["question"], row["turn"]) == ("q1", 0))
    assert second == first + len(answer) + 1 + 2 + len(
        "and more\n"
    )  # newline, two role tokens, the next turn


def test_json_is_one_document_and_nothing_else(run: Workplace) -> None:
    summary = json.loads((run.path / "out.json").read_text())
    assert summary["schema"] == 1
    labels = [row["method"] for row in summary["rows"] if row["task"] == "overall" and row["batch_size"] == 1]
    assert labels[0] == "vanilla"
    assert set(labels) == {"vanilla", "vanilla-again", "prompt-lookup:k=3,ngram=1", "hf-generate"}
    again = next(
        row for row in summary["rows"] if row["method"] == "vanilla-again" and row["task"] == "overall"
    )
    assert again["identical"] == again["compared"] == again["trials"]


def test_the_report_is_printed_last(place: Workplace) -> None:
    result = place.run("--method", "prompt-lookup", "--limit", 1, "--quiet", name="report")
    assert result.code == 0
    last = result.out.splitlines()[-1]
    assert last.startswith("report: ")
    assert Path(last.removeprefix("report: ")).is_file()
    assert "warming up" not in result.err


def test_without_quiet_progress_goes_to_standard_error(place: Workplace) -> None:
    result = place.run("--method", "prompt-lookup", "--limit", 1, name="loud")
    assert "blocks to measure" in result.err
    assert "blocks to measure" not in result.out


def test_no_text(place: Workplace) -> None:
    assert place.run("--method", "prompt-lookup", "--no-text", name="bare").code == 0
    rows = place.rows("bare")
    assert {row["text"] for row in rows} == {None}
    assert {row["turn"] for row in rows} == {0, 1}


def test_repeats_and_limit(place: Workplace) -> None:
    assert place.run("--method", "prompt-lookup", "--limit", 2, "--repeats", 2, name="twice").code == 0
    rows = place.rows("twice")
    assert {row["question"] for row in rows} == {"q1", "q2"}
    assert len({(r["question"], r["turn"], r["method"], r["repeat"]) for r in rows}) == len(rows) == 3 * 2 * 2
    assert {row["repeat"] for row in rows} == {0, 1}


def test_sampling_depends_on_the_seed_only(place: Workplace) -> None:
    def tokens(name: str, seed: int) -> list[list[int]]:
        sampled = ("--temperature", 1, "--top-k", 20, "--seed", seed)
        assert (
            place.run("--method", "prompt-lookup", "--method", "hf-generate", *sampled, name=name).code == 0
        )
        return [row["output_ids"] for row in place.rows(name)]

    first = tokens("seed0", 0)
    assert tokens("seed0-again", 0) == first
    assert tokens("seed1", 1) != first
    assert all(row["agreement"] is None for row in place.rows("seed0"))


def test_default_methods_leave_out_what_does_not_batch(place: Workplace) -> None:
    assert place.run("--batch-size", 2, "--limit", 2, name="batched").code == 0
    assert {row["method"] for row in place.rows("batched")} == {"vanilla", "prompt-lookup"}


def test_vanilla_alone_is_measured_twice(place: Workplace) -> None:
    assert place.run("--method", "vanilla", "--limit", 1, name="alone").code == 0
    assert {row["method"] for row in place.rows("alone")} == {"vanilla", "vanilla-again"}


def test_the_target_as_its_own_draft_is_accepted_whole(place: Workplace) -> None:
    spec = f"draft-model:draft={place.target},k=3"
    assert place.run("--method", spec, "--ignore-eos", name="self").code == 0
    for row in (row for row in place.rows("self") if row["method"] == spec):
        assert row["rounds"]["accepted"] == row["rounds"]["drafted"]
        assert row["output_tokens"] == 12
    assert place.manifest("self")["drafters"][spec]["files"]


def test_config_from_a_manifest_is_the_same_config(place: Workplace) -> None:
    options = ("--method", "prompt-lookup:k=2", "--limit", 1, "--seed", 7, "--ignore-eos", "--no-text")
    assert place.run(*options, "--template-arg", "note=1", name="first").code == 0
    manifest = place.results / "first" / "manifest.json"
    again = specbench(
        "run", "--config", manifest, "--output", place.results, "--name", "second", "--reports", place.path
    )
    assert again.code == 0, again.err
    assert place.manifest("second")["config"] == place.manifest("first")["config"]
    changed = specbench(
        *("run", "--config", manifest, "--seed", 8, "--output", place.results, "--name", "third"),
        *("--reports", place.path),
    )
    assert changed.code == 0
    assert place.manifest("third")["config"] == place.manifest("first")["config"] | {"seed": 8}


def test_categories_and_ids_reach_the_rows(place: Workplace, tmp_path: Path) -> None:
    rows = [{"question_id": 7, "category": c, "turns": ["abc"]} for c in "x"] + [
        {"question_id": 8, "category": "y", "turns": ["def"]}
    ]
    task = write_task(tmp_path / "Named Task.jsonl", rows)
    assert place.run("--task", task, "--method", "prompt-lookup", name="categories").code == 0
    found = {(row["task"], row["question"], row["category"]) for row in place.rows("categories")}
    assert found == {("named_task", "7", "x"), ("named_task", "8", "y")}


def test_graphs_are_counted_after_each_trial_and_the_most_is_shown(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = count(1)
    monkeypatch.setattr("specbench.decoding.loop.DraftVerify.graph_bytes", lambda self: 1000 * next(held))
    result = place.run("--method", "prompt-lookup", "--json", name="graphs")
    assert result.code == 0, result.err
    for row in json.loads(result.out)["rows"]:
        own = [trial for trial in place.rows("graphs") if trial["method"] == row["method"]]
        readings = [trial["memory"]["graph_bytes"] for trial in own]
        assert len(set(readings)) == len(readings) > 1, "each trial has one of its own"
        if row["task"] == "overall":
            counted = [trial["memory"]["graph_bytes"] for trial in own if trial["excluded"] is None]
            assert row["graph_bytes"] == max(counted)
