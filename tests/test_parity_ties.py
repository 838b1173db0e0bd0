"""`tests/parity.py`: ties are told from mistakes, what was cut off is found, typical acceptance is compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import parity_typical
import pytest
import torch
from parity_fixture import Fixture, read
from parity_made import NEW, OFFICIAL, VOCAB, Change, changed, medusa_folder, run
from parity_record import Difference, Mine
from parity_scores import SCORES, NodeScores, Scores, overheard
from parity_typical import check_typical
from parity_whole import check_whole


@pytest.fixture(scope="module")
def medusa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return medusa_folder(tmp_path_factory.mktemp("parity") / "medusa")


# -- ties ----------------------------------------------------------------------------------------------------


def drafted(follow: bool) -> Mine:
    scores = torch.zeros(3, VOCAB)
    scores[1, 8] = 1e-5
    scores[2, 9] = 1e-3
    return Mine(0, [1, 2, 3], [-1, 0, 1], scores=NodeScores(scores, follow))


def test_a_tie_is_where_the_draft_scores_both_tokens_alike() -> None:
    mine = drafted(follow=False)
    assert mine.tied_with([1, 8, 3])
    assert not mine.tied_with([1, 2, 9])
    assert not mine.tied_with([1, 8, 9]), "a tie excuses nothing else"
    assert not mine.tied_with([1, 2, 3]), "nothing differs"
    assert not mine.tied_with([1, 8]), "another shape"
    assert not Mine(0, [1, 2, 3], [-1, 0, 1]).tied_with([1, 8, 3]), "unknown scores are no tie"


def test_below_a_tie_scores_that_follow_the_text_say_nothing() -> None:
    assert drafted(follow=True).tied_with([1, 8, 9])
    assert not drafted(follow=True).tied_with([1, 2, 9])


def test_the_scores_are_what_each_node_was_chosen_by(medusa: Path) -> None:
    fixture = read(medusa)
    with torch.no_grad():
        rounds = fixture.run(fixture.drafter(), fixture.golden["prompts"], NEW, frozenset()).rounds
    for mine in (mine for row in rounds for mine in row.values() if mine.tokens):
        assert mine.scores is not None
        for node, token in enumerate(mine.tokens):
            row, siblings = (
                mine.scores.rows[node],
                [n for n, p in enumerate(mine.parents) if p == mine.parents[node]],
            )
            assert token == int(row.argsort(descending=True)[siblings.index(node)])


def all_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token scores the same."""
    rows = lambda tree, outputs: torch.zeros(len(outputs[0]), tree.width, VOCAB)  # noqa: E731
    monkeypatch.setitem(SCORES, "medusa", Scores("heads", rows, follow=False))


def swap_node(golden: dict[str, Any]) -> None:
    tokens = golden["rounds"][1][2]["draft_tokens"]
    tokens[4], tokens[5] = tokens[5], tokens[4]


@pytest.mark.parametrize("tied", [True, False])
def test_ties_are_let_pass(
    medusa: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tied: bool,
) -> None:
    if tied:
        all_alike(monkeypatch)
    code, lines = run(changed(medusa, tmp_path, swap_node), capsys=capsys)
    if tied:
        assert (code, "1 of them differ at ties" in lines[0]) == (0, True), lines
    else:
        assert (code, "round 2, draft_tokens[4]" in lines[0]) == (1, True), lines


def cut_otherwise(folder: Path, wrong: bool) -> Change:
    """In one round the golden draft lacks the token that ours has accepted: the text is cut into other rounds."""

    def change(golden: dict[str, Any]) -> None:
        rounds = golden["rounds"]
        number, index = next(
            (p, i) for p in (0, 1) for i, one in enumerate(rounds[p]) if one["accepted"] == 1
        )
        cut = rounds[number][index]
        out = 1 + sum(one["accepted"] + 1 for one in rounds[number][:index])
        text = golden["prompts"][number] + golden["outputs"][number][:out]
        fixture = read(folder)
        with torch.no_grad():
            fresh = fixture.run(fixture.drafter(), [text], 8, frozenset()).rounds[0][1]
        right = cut["draft_tokens"][cut["accepted_nodes"][0]]
        assert fresh.root == right
        tokens = [(token + 1) % VOCAB if token == right else token for token in cut["draft_tokens"]]
        missed = {"draft_tokens": tokens, "accepted": 0, "accepted_nodes": [], "next_token": right}
        names = ("root", "accepted", "accepted_nodes", "next_token")
        after = {"draft_tokens": fresh.tokens, **{name: getattr(fresh, name) for name in names}}
        after["next_token"] = -1 if wrong else fresh.next_token
        emitted = cut["accepted"] - after["accepted"]
        assert emitted == 1, "what follows begins where ours does"
        rounds[number][index : index + 1] = [cut | missed, after]

    return change


@pytest.mark.parametrize("wrong", [True, False])
def test_rounds_after_a_tie_are_compared_all_the_same(
    medusa: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    wrong: bool,
) -> None:
    all_alike(monkeypatch)
    code, lines = run(changed(medusa, tmp_path, cut_otherwise(medusa, wrong)), capsys=capsys)
    if wrong:
        assert (code, "next_token: ours " in lines[0]) == (1, True), lines
    else:
        assert (code, "1 of them differ at ties" in lines[0]) == (0, True), lines


def test_two_may_overhear_the_same() -> None:
    class Net:
        def logits(self) -> int:
            return 1

    net = Net()
    with overheard(net, "logits") as outer:
        with overheard(net, "logits") as inner:
            net.logits()
        net.logits()
    assert (len(outer), len(inner), "logits" in vars(net)) == (2, 1, False)


# -- what was cut off ----------------------------------------------------------------------------------------


def pop(*path: Any) -> Change:
    def change(golden: dict[str, Any]) -> None:
        found: Any = golden
        for name in path:
            found = found[name]
        found.pop()

    return change


CUTS: dict[str, tuple[Change, str]] = {
    "last round": (pop("rounds", 1), "prompt 1, rounds (cut off?): ours "),
    "a round in between": (lambda golden: golden["rounds"][0].pop(3), "prompt 0, round 3, "),
    "all rounds": (lambda golden: golden["rounds"][0].clear(), "prompt 0, rounds (cut off?): ours "),
    "rounds of a prompt": (pop("rounds"), "prompt 1, rounds: ours 2 prompts, golden 1"),
    "vanilla of a prompt": (pop("vanilla"), "prompt 1, vanilla: ours 2 prompts, golden 1"),
    "rounds and outputs": (
        lambda golden: (golden["rounds"][1].clear(), golden["outputs"][1].clear()),
        "prompt 1, outputs, trimmed (at 0): ours 0 values",
    ),
    "outputs altogether": (
        lambda golden: (
            (golden["rounds"][1].clear(), golden.update(outputs=[golden["outputs"][0], []]))
            and golden["outputs_trimmed"][1].clear()
        ),
        "prompt 1, outputs_trimmed (at 0): ours ",
    ),
    "an output that is not ours": (
        lambda golden: golden["outputs"][1].__setitem__(-1, -1),
        "prompt 1, outputs",
    ),
}


@pytest.mark.parametrize(("change", "line"), CUTS.values(), ids=CUTS)
def test_what_was_cut_off_is_found(
    medusa: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Change, line: str
) -> None:
    code, lines = run(changed(medusa, tmp_path, change), capsys=capsys)
    assert code == 1
    assert lines[0].startswith(f"changed: DIFFERS: {line}"), lines


# The official code stops DFlash by the token after the last round, and begins token recycling inside the prompt.
CUT_ENDS = [
    *(
        (name, "rounds")
        for name in ("dflash-b16-l3-defaultids", "eagle3-t24-d4-k6-fullvocab", "prompt-lookup", "rest")
    ),
    *(("token-recycling", name) for name in ("rounds", "warm_rounds")),
    *(("suffix-decoding", name) for name in ("rounds", "warm_rounds")),
    ("sam-decoding-tr", "rounds"),
    ("lookahead-n5w7g7", "rounds"),
    ("medusa1-mcsim63", "typical_rounds"),
]


@pytest.mark.parametrize(("name", "rounds"), CUT_ENDS)
def test_the_last_round_of_every_official_prompt_is_missed(name: str, rounds: str) -> None:
    file = OFFICIAL / name / "golden.json"
    if not file.is_file():
        pytest.skip(f"{file} is not here")
    golden = json.loads(file.read_text(encoding="utf-8"))
    method = next(
        method for method in ("prompt-lookup", "token-recycling", name.split("-")[0]) if method in name
    )
    fixture = Fixture(file.parent, golden, method, None, None, {})  # type: ignore[arg-type]
    check_whole(fixture)
    for number, one in enumerate(golden[rounds]):
        last = one.pop()
        with pytest.raises(Difference, match=f"prompt {number}, {rounds}"):
            check_whole(fixture)
        one.append(last)


# -- typical acceptance --------------------------------------------------------------------------------------

TYPICAL = OFFICIAL / "medusa1-mcsim63"


def in_typical_round(name: str, value: Any) -> Change:
    return lambda golden: golden["typical_rounds"][2][1].__setitem__(name, value)


TYPICAL_CHANGES: dict[str, tuple[Change, str]] = {
    "root": (in_typical_round("root", -1), "prompt 2, round 1, typical root: ours "),
    "nodes": (in_typical_round("accepted_nodes", [62]), "prompt 2, round 1, typical accepted_nodes"),
    "outputs": (
        lambda golden: golden["typical_outputs"][0].__setitem__(-1, -1),
        "prompt 0, typical_outputs[43]: ours ",
    ),
    "temperature": (lambda golden: golden["settings"]["typical"].update(temperature=3.0), "prompt "),
    "case": (
        lambda golden: golden["typical_cases"][5].update(accepted_nodes=[1], accept_length=1),
        "prompt 5, typical case: ours ",
    ),
}


@pytest.mark.skipif(not TYPICAL.is_dir(), reason="the official golden folders are not here")
@pytest.mark.parametrize(("change", "line"), TYPICAL_CHANGES.values(), ids=TYPICAL_CHANGES)
def test_typical_differences_are_found(change: Change, line: str) -> None:
    fixture = read(TYPICAL)
    change(fixture.golden)
    with torch.no_grad(), pytest.raises(Difference) as caught:
        check_typical(fixture)
    assert str(caught.value).startswith(line)


@pytest.mark.skipif(not TYPICAL.is_dir(), reason="the official golden folders are not here")
@pytest.mark.parametrize("close", [True, False])
def test_a_typical_decision_within_float_noise_may_differ(
    monkeypatch: pytest.MonkeyPatch, close: bool
) -> None:
    """The rounds after it are compared from the golden text."""
    fixture = read(TYPICAL)
    golden = fixture.golden
    for name in ("prompts", "typical_outputs", "typical_rounds"):
        golden[name] = golden[name][:1]
    del golden["typical_cases"]
    (rounds,) = golden["typical_rounds"]
    rounds[2]["accepted_nodes"] = [62] * rounds[2]["accepted"]
    near = iter([0.0] if close else [])
    monkeypatch.setattr(parity_typical, "_decision_gap", lambda *_: next(near, 1.0))
    with torch.no_grad():
        if close:
            assert "1 of them decided by float noise" in check_typical(fixture)
            near = iter([0.0])
            rounds[4]["root"] = -1
        with pytest.raises(Difference, match=f"round {4 if close else 2}, typical"):
            check_typical(fixture)
