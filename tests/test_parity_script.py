"""`tests/parity.py`: what is as golden passes, and each thing that is not is found and named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity_fixture import Fixture, read
from parity_made import (
    NEW,
    OFFICIAL,
    STOP,
    Change,
    blank,
    changed,
    fill,
    medusa_folder,
    run,
    save_target,
    write,
)
from parity_record import NotAFixture, Run


@pytest.fixture(scope="module")
def medusa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return medusa_folder(tmp_path_factory.mktemp("parity") / "medusa")


@pytest.fixture(scope="module")
def lookup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parity") / "lookup"
    save_target(folder / "target")
    golden = blank("prompt-lookup")
    ids = [5, 4, 5, 9, 1, 7, 7, 9, 1, 7]
    golden["cases"] = [{"input_ids": ids, "original": [[3, 1, [7]], [2, 2, [7, 9]], [3, 10, []]]}]
    write(folder, golden)
    fill(folder)
    return folder


def test_what_is_as_golden_passes(medusa: Path, lookup: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = run(medusa, lookup, capsys=capsys)
    assert code == 0, lines
    rounds = [sum(map(len, json.loads((f / "golden.json").read_text())["rounds"])) for f in (medusa, lookup)]
    assert lines == [
        f"medusa: ok: {rounds[0]} rounds of 2 prompts",
        f"lookup: ok: {rounds[1]} rounds of 2 prompts, 3 proposals",
    ]


def swap_node(golden: dict[str, Any]) -> None:
    tokens = golden["rounds"][1][2]["draft_tokens"]
    tokens[4], tokens[5] = tokens[5], tokens[4]


def set_in_round(name: str, value: Any) -> Change:
    return lambda golden: golden["rounds"][1][2].__setitem__(name, value)


def change_output(name: str) -> Change:
    def change(golden: dict[str, Any]) -> None:
        golden[name][0][3] += 1

    return change


CHANGES: dict[str, tuple[Change, str]] = {
    "token": (swap_node, "prompt 1, round 2, draft_tokens[4]: ours "),
    "root": (set_in_round("root", -5), "prompt 1, round 2, root: ours "),
    "accepted": (set_in_round("accepted", 63), "prompt 1, round 2, accepted: ours "),
    "path": (set_in_round("accepted_nodes", [60]), "prompt 1, round 2, accepted_nodes"),
    "next": (set_in_round("next_token", -1), "prompt 1, round 2, next_token: ours "),
    "parents": (
        lambda golden: golden["parents"].__setitem__(20, 3),
        "prompt 0, round 0, parents[20]: ours 1, golden 3",
    ),
    "vanilla": (change_output("vanilla"), "prompt 0, vanilla[3]: ours "),
    "outputs": (change_output("outputs_trimmed"), "prompt 0, outputs_trimmed[3]: ours "),
    "rounds": (
        lambda golden: (
            golden["rounds"][1][2].__setitem__("accepted", 0)
            or golden["rounds"][1][1].__setitem__("accepted", 63)
        ),
        "prompt 1, round 1, accepted: ours ",
    ),
}


@pytest.mark.parametrize(("change", "line"), CHANGES.values(), ids=CHANGES)
def test_every_difference_is_found(
    medusa: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Change, line: str
) -> None:
    folder = changed(medusa, tmp_path, change)
    code, lines = run(folder, medusa, capsys=capsys)
    assert code == 1
    assert lines[0].startswith(f"changed: DIFFERS: {line}"), lines
    assert lines[1].startswith("medusa: ok"), "the other folders are checked all the same"


def test_prompt_lookup_differences(lookup: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafted = json.loads((lookup / "golden.json").read_text())["rounds"]
    prompt, index = next((p, i) for p in (0, 1) for i, r in enumerate(drafted[p]) if r["draft_tokens"])
    changes: list[tuple[Change, str]] = [
        (
            lambda g: g["rounds"][prompt][index]["draft_tokens"].reverse(),
            f"prompt {prompt}, round {index}, draft",
        ),
        (
            lambda g: g["rounds"][prompt][index].update(accepted=9),
            f"prompt {prompt}, round {index}, accepted",
        ),
        (
            lambda g: g["cases"][0]["original"][1].__setitem__(2, [7, 8]),
            "prompt 0, case ngram=2 k=2[1]: ours 9",
        ),
    ]
    for number, (change, line) in enumerate(changes):
        place = tmp_path / str(number)
        place.mkdir()
        code, lines = run(changed(lookup, place, change), capsys=capsys)
        assert code == 1
        assert lines[0].startswith(f"changed: DIFFERS: {line}"), lines


def test_the_fake_token_of_spec_bench_is_not_held_against_ours(
    lookup: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nothing matches it forwards token 100 and counts it; and it drafts from the bare prompt as well."""

    def change(golden: dict[str, Any]) -> None:
        for rounds, prompt in zip(golden["rounds"], golden["prompts"], strict=True):
            for one in rounds:
                one["real_draft"] = bool(one["draft_tokens"])
                one["accepted"] += not one["draft_tokens"]
            rounds.insert(
                0, {"context_len": len(prompt), "draft_tokens": [], "real_draft": False, "accepted": 0}
            )

    code, lines = run(changed(lookup, tmp_path, change), capsys=capsys)
    # Whether the bare prompt has a match is the only thing that may differ from what was inserted.
    assert code == 0 or "round 0, draft_tokens" in lines[0], lines


def test_a_batch_that_differs_is_found(
    medusa: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Fixture.run

    def mixed_up(self: Fixture, drafter: Any, prompts: list[list[int]], limit: int, stop: Any) -> Run:
        found = plain(self, drafter, prompts, limit, stop)
        assert (limit, stop) == (NEW, {STOP}) if len(prompts) > 1 else limit >= NEW
        return Run(found.emitted[::-1], found.rounds[::-1])

    monkeypatch.setattr(Fixture, "run", mixed_up)
    code, lines = run(medusa, capsys=capsys)
    assert (code, "prompt 0, output in a batch[0]: ours " in lines[0]) == (1, True), lines


# -- tensors -------------------------------------------------------------------------------------------------


def test_first_draft_logits(medusa: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with torch.no_grad():
        fixture = read(medusa)
        drafter, prompt = fixture.drafter(), fixture.golden["prompts"][1]
        seen: list[torch.Tensor] = []
        plain = drafter.heads.logits
        object.__setattr__(drafter.heads, "logits", lambda *a, **k: seen.append(plain(*a, **k)) or seen[-1])
        fixture.run(drafter, [prompt], NEW, frozenset())
    logits = seen[0][0].numpy()
    folder = changed(medusa, tmp_path, lambda golden: None)
    np.savez(folder / "tensors.npz", round0_medusa_logits=logits)
    code, lines = run(folder, capsys=capsys)
    assert code == 0, lines
    assert "first draft logits to " in lines[0]
    logits[0, 3] += 1e-3 * max(1.0, float(np.abs(logits).max()))
    np.savez(folder / "tensors.npz", round0_medusa_logits=logits)
    code, lines = run(folder, capsys=capsys)
    assert code == 1
    assert "prompt 1, round 0, round0_medusa_logits (largest difference): ours " in lines[0]


# -- what is no fixture --------------------------------------------------------------------------------------


def without(key: str) -> Change:
    return lambda golden: golden.pop(key)


NO_FIXTURES: dict[str, tuple[Change, str]] = {
    "method": (lambda golden: golden.update(method="unheard-of"), "method 'unheard-of' is not checked here"),
    "prompts": (without("prompts"), "golden.json has no prompts"),
    "settings": (lambda golden: golden.update(method="eagle-2"), "no setting 'total_token'"),
}


@pytest.mark.parametrize(("change", "line"), NO_FIXTURES.values(), ids=NO_FIXTURES)
def test_no_fixture(
    medusa: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Change, line: str
) -> None:
    code, lines = run(changed(medusa, tmp_path, change), capsys=capsys)
    assert code == 2
    assert lines[0].startswith("changed: not checked: ")
    assert line in lines[0]


def test_folders_that_cannot_be_opened(
    medusa: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = run(tmp_path, capsys=capsys)
    assert (code, "golden.json cannot be read" in lines[0]) == (2, True)
    folder = changed(medusa, tmp_path, lambda golden: None)
    (folder / "draft").unlink()
    (folder / "draft").mkdir()
    code, lines = run(folder, capsys=capsys)
    assert (code, "has no config.json" in lines[0]) == (2, True)
    with pytest.raises(NotAFixture):
        read(tmp_path)
    assert run(capsys=capsys)[0] == 2


def test_a_method_that_breaks_is_not_as_golden(
    medusa: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from specbench.spec import find_method

    def broken(*_: object) -> None:
        raise RuntimeError("shapes\nand more")

    monkeypatch.setattr(find_method("medusa"), "propose", broken)
    code, lines = run(medusa, capsys=capsys)
    assert (code, lines) == (1, ["medusa: BREAKS: RuntimeError: shapes"])


def test_it_runs_as_a_script_from_anywhere(tmp_path: Path) -> None:
    script = Path(__file__).with_name("parity.py")
    done = subprocess.run(
        [sys.executable, script, "none"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (2, "none: not checked: golden.json cannot be read: "
        "[Errno 2] No such file or directory: 'none/golden.json'\n")  # fmt: skip


# -- the official folders ------------------------------------------------------------------------------------

FOLDERS = [
    f
    for f in sorted(OFFICIAL.glob("*"))
    if f.name.split("-")[0].rstrip("123") in ("eagle", "medusa", "hydra", "dflash")
]


@pytest.mark.skipif(not FOLDERS, reason="the official golden folders are not here")
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_official_folders(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = run(folder, capsys=capsys)
    assert code == 0, lines
    rounds = sum(map(len, json.loads((folder / "golden.json").read_text())["rounds"]))
    assert f"ok: {rounds} rounds of " in lines[0], "no round was skipped"
    assert "first draft logits to " in lines[0]
