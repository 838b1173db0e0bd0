"""The leaderboard: what stands in one table, what is bold, and that names stay text."""

from __future__ import annotations

import re
from typing import Any

from run_folder import run, trials

from specbench.analysis.summary import summarise
from specbench.report import FORMATS

LIMITS = "Overall, what limits it:"
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
    """Of the tables of speedups: the label -> the other cells."""
    return {row[0]: row[1:] for row in cells(re.sub(f"{LIMITS}\n\n(\\|.*\n)+", "", text))}


def limits(text: str) -> dict[str, dict[str, str]]:
    """Of the table below it: the label -> cell by heading."""
    heads, *rows = cells(text.partition(LIMITS)[2])
    return {row[0]: dict(zip(heads, row, strict=True)) for row in rows}


def cells(text: str) -> list[list[str]]:
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [row for row in rows if not row[0].startswith(":")]


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
        named("eagle", "b", target__revision="def"),
        named("eagle", "c", machine={"cpu": {"model": "other"}}),
        named("eagle", "d", config__max_new_tokens=9),
    )
    assert text.count("## ") == 4
    assert "eagle (" not in text


def quantised(name: str, scheme: str, size: int, slower: float = 1.0) -> Any:
    config = {"temperature": 0.0, "max_new_tokens": 48, "quantize": scheme}
    own = {} if scheme == "none" else {"target__name": f"tiny@{scheme}", "target__quantization": scheme}
    return named("eagle", name, slower, config=config, target__bytes=size, **own)


def test_precisions_of_one_target_stand_in_one_table() -> None:
    text = board(
        quantised("t-none", "none", 4 << 20),
        quantised("t-int8", "int8", 1536, 1.01),
        quantised("t-int4", "int4", 900),
    )
    assert text.count("## ") == 1
    assert "## tiny, abc\n" in text
    heads, *rows = cells(text.partition(LIMITS)[0])
    found = {(row[0], row[1]): dict(zip(heads, row, strict=True)) for row in rows}
    precisions = {"float32": "4.0 MiB", "float32, int8": "1.5 KiB", "float32, int4": "900 B"}
    assert found.keys() == {(method, each) for method in ("eagle", "vanilla") for each in precisions}
    for precision, size in precisions.items():
        assert found["eagle", precision]["target's weights"] == size
        assert found["eagle", precision]["τ"].startswith("3.00")
        assert found["vanilla", precision]["overall"] == "1.00x"
        assert found["eagle", precision]["overall"].startswith("**")


def test_precisions_do_not_compete() -> None:
    """Each has its own vanilla, so that the lesser speedup may be the faster method."""
    slower = named("medusa", "b", 1.01, config={"max_new_tokens": 48, "temperature": 0.0, "quantize": "int8"})
    assert board(named("eagle", "a"), slower).count("| **") == 6, "both, on two tasks and overall"


def test_one_precision_stands_in_the_title() -> None:
    text = board(quantised("a", "int8", 9))
    assert "## tiny, abc, float32, int8\n" in text
    assert "precision |" not in text
    gguf = board(
        named("eagle", "a", target__name="tiny@q4_1", target__quantization="q4_1"), named("eagle", "b")
    )
    assert gguf.count("## ") == 2, "another file of weights is another target"


def test_what_limits_a_method_stands_where_it_is_known() -> None:
    summary = summarise([named("eagle", "a")])
    known = {"experts": 3.25, "joules_per_token": 1.5, "roofline_share": 0.42}
    for row in summary["rows"]:
        if (row["method"], row["task"]) == ("eagle", "overall"):
            row |= known | {"other_share": None}
        else:
            row |= dict.fromkeys(known) | {"other_share": None}
    text = FORMATS["leaderboard"].render(summary, ())
    assert isinstance(text, str)
    found = limits(text)
    assert found["eagle"]["experts woken a pass"] == "3.2"
    assert found["eagle"]["J/token"] == "1.50"
    assert found["eagle"]["share of roofline"] == "42%"
    assert found["vanilla"]["J/token"] == "–"
    assert {"verify inflation", "measured against predicted"} < found["eagle"].keys()
    assert "other share" not in text
    assert "- J/token: Σ joules" in text
    for row in summary["rows"]:
        row |= dict.fromkeys((*known, "verify_inflation", "predicted_residual"))
    assert LIMITS not in str(FORMATS["leaderboard"].render(summary, ()))


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
