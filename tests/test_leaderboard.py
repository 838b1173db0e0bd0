"""The leaderboard: what stands in one table, what is bold, and that names stay text."""

from __future__ import annotations

import re
from typing import Any

from run_folder import run, trials

from specbench.analysis.summary import summarise
from specbench.report import FORMATS

NASTY = "<script>|`x`](javascript:alert(1))\n# head"


def board(*runs: Any) -> str:
    text = FORMATS["leaderboard"].render(summarise(runs), runs)
    assert isinstance(text, str)
    return text


def named(label: str, name: str, slower: float = 1.0, **changed: Any) -> Any:
    given = trials(slower=slower)
    for t in given:
        t.method = label if t.method == "fast" else t.method
    return run(given, name=name, **changed)


def lines(text: str) -> dict[str, list[str]]:
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows if not row[0].startswith(":")}


def test_methods_by_tasks_with_intervals() -> None:
    rows = lines(board(named("eagle", "a"), named("medusa", "b", slower=1.5)))
    assert list(rows) == ["method", "eagle", "medusa", "vanilla"]  # the fastest first
    assert rows["method"][:3] == ["chat", "code", "overall"]
    assert re.fullmatch(r"\*\*\d\.\d\dx \[\d\.\d\d, \d\.\d\d\]\*\*", rows["eagle"][2])
    assert re.fullmatch(r"\d\.\d\dx \[\d\.\d\d, \d\.\d\d\]", rows["medusa"][2])
    assert rows["vanilla"][2] == "1.00x"
    assert rows["eagle"][3].startswith("3.00")


def test_bold_only_where_the_interval_is_clear() -> None:
    assert "**" not in board(named("eagle", "a"), named("medusa", "b", slower=1.001))
    assert "**" not in board(named("slow", "a", slower=4))  # best, but slower than vanilla
    assert "**" in board(
        named("oracle:rate=0.9", "a"), named("medusa", "b", slower=1.5)
    )  # oracle does not compete
    assert "**" in board(named("eagle", "a"), named("eagle", "b", slower=1.001))  # no rival of itself


def test_nothing_is_bold_that_is_hardly_known() -> None:
    summary = summarise([named("eagle", "a")])
    row = next(r for r in summary["rows"] if r["method"] == "eagle" and r["task"] == "chat")

    def bold() -> bool:
        text = FORMATS["leaderboard"].render(summary, ())
        assert isinstance(text, str)
        return "**" in lines(text)["eagle"][0]

    assert bold()
    row["speedup"] = {"low": 1.13, "point": 1.78, "high": 4.37}
    assert not bold()
    row["speedup"] = {"low": 1.7, "point": 1.78, "high": 1.9}
    assert bold()
    row["clusters"] = 7  # of however many prompts that were in flight together
    assert not bold()


def test_runs_are_named_where_they_share_a_method() -> None:
    assert {"eagle (a)", "eagle (b)"} < lines(
        board(named("eagle", "a"), named("eagle", "b", slower=1.2))
    ).keys()


def test_targets_machines_and_settings_stand_apart() -> None:
    text = board(
        named("eagle", "a"),
        named("eagle", "b", target__dtype="bfloat16"),
        named("eagle", "c", machine={"cpu": {"model": "other"}}),
        named("eagle", "d", config__max_new_tokens=9),
    )
    assert text.count("## ") == 4
    assert "eagle (" not in text


def test_engines_stand_apart() -> None:
    text = board(
        named("eagle", "a"),
        named("eagle", "b", engine={"name": "vllm", "version": "0.9.1", "attached": False}),
        named("eagle", "c", engine={"name": "vllm", "version": "0.8.5", "attached": True}),
        named("eagle", "d", versions={"specbench-llm": "9.9"}),  # our own loop is one engine
    )
    assert text.count("## ") == 3
    assert "specbench/native, CPU" in text
    assert "vllm 0.9.1, CPU" in text
    assert {"eagle (a)", "eagle (d)"} < lines(text).keys()


def test_names_stay_text() -> None:
    text = board(named(NASTY, NASTY, target__name=NASTY))
    assert "<script" not in text
    assert "\n# head" not in text
    assert not re.search(r"(?<!\\)\]\(javascript", text)


def test_nothing_measured() -> None:
    assert "Nothing was measured" in board(run([]))
