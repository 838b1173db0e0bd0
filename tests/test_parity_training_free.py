"""`tests/parity.py` on the folders of lookahead, token recycling and REST: as golden, and differences are found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import parity
import pytest

OFFICIAL = Path(__file__).resolve().parents[2] / "shared" / "parity"
FOLDERS = [
    folder
    for folder in sorted(OFFICIAL.glob("*"))
    if folder.name.startswith(("lookahead", "rest", "token-recycling"))
]
LOOKAHEAD, REST, RECYCLING = OFFICIAL / "lookahead-n5w7g7", OFFICIAL / "rest", OFFICIAL / "token-recycling"

pytestmark = pytest.mark.skipif(not FOLDERS, reason="the official golden folders are not here")
Change = Callable[[dict[str, Any]], Any]


def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = parity.main([str(folder)])
    return code, capsys.readouterr().out


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_official_folders(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = run(folder, capsys)
    assert code == 0, line
    golden = json.loads((folder / "golden.json").read_text())
    rounds = sum(map(len, golden["rounds"])) + sum(map(len, golden.get("warm_rounds", [])))
    assert f"ok: {rounds} rounds of " in line, "no round was skipped"


def first(golden: dict[str, Any], wanted: Callable[[dict[str, Any]], Any], rounds: str = "rounds") -> Any:
    return next(one for rounds in golden[rounds] for one in rounds if wanted(one))


def other(numbers: list[int]) -> None:
    numbers[-1] = (numbers[-1] + 1) % 60


CHANGES: dict[str, tuple[Path, Change, str]] = {
    "window": (LOOKAHEAD, lambda g: other(first(g, lambda one: len(one["window"]) > 2)["window"][1]), "window["),
    "guess": (LOOKAHEAD, lambda g: other(first(g, lambda one: one["guesses"])["guesses"][0]), "guesses: "),
    "accepted": (LOOKAHEAD, lambda g: first(g, lambda one: one["accepted"]).update(accepted=0), "accepted: "),
    "root": (LOOKAHEAD, lambda g: g["rounds"][1][3].update(last_token=63), "last_token: "),
    "table": (RECYCLING, lambda g: other(g["rounds"][1][5]["draft_tokens"]), "rounds draft_tokens[79]: "),
    "warm": (RECYCLING, lambda g: other(g["warm_rounds"][1][5]["draft_tokens"]), "warm_rounds draft_tokens[79]"),
    "shape": (RECYCLING, lambda g: other(g["parents"]), "parents[79]: "),
    "path": (REST, lambda g: first(g, lambda one: one["real_match"])["paths"].pop(), "nodes: "),
    "sometimes": (REST, lambda g: first(g, lambda one: one["real_match"])["paths_sometimes"].append([1]), "nodes: "),
    "nothing": (REST, lambda g: first(g, lambda one: one["real_match"]).update(real_match=False), "draft_tokens"),
    "search": (REST, lambda g: g["search_cases"][1]["node_paths"].pop(), "prompt 1, nodes: "),
    "output": (REST, lambda g: other(g["vanilla"][0]), "vanilla["),
}  # fmt: skip


@pytest.mark.parametrize(("folder", "change", "line"), CHANGES.values(), ids=CHANGES)
def test_a_difference_is_found(
    folder: Path, change: Change, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in folder.rglob("*.*"):
        (tmp_path / file.relative_to(folder)).parent.mkdir(exist_ok=True)
        (tmp_path / file.relative_to(folder)).write_bytes(file.read_bytes())
    golden = json.loads((folder / "golden.json").read_text())
    change(golden)
    (tmp_path / "golden.json").write_text(json.dumps(golden))
    code, out = run(tmp_path, capsys)
    assert code == 1
    assert "DIFFERS: " in out
    assert line in out
