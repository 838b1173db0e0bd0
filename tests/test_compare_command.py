"""`specbench compare` from the command line: exit codes, formats, files; and that text stays text."""

from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from run_folder import run, trials, write_run
from tiny_folder import specbench

from specbench.analysis.compare import compare
from specbench.report.ci import github_action_benchmark, junit
from specbench.report.comparison import change, headline, markdown, terminal
from specbench.store import Trial

NASTY = "<script>alert(1)</script>|`x`](javascript:alert(1))\n# head\x1b[31m\u202e"


def without(method: str, **fields: Any) -> list[Trial]:
    """Both methods and a third, `steady`, without one of them."""
    given = trials(**fields)
    steady = [replace(t, method="steady") for t in given if t.method == "fast"]
    return [t for t in [*given, *steady] if t.method != method]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare") / "results"
    write_run(folder / "base", trials(memory={"peak_bytes": 1000}))
    write_run(folder / "same", trials(memory={"peak_bytes": 1000}))
    write_run(folder / "slow", trials(slower=1.25, memory={"peak_bytes": 1200}))
    write_run(folder / "away", trials(), machine_fingerprint="m2")
    write_run(folder / "other", trials(), target__dtype="bfloat16")
    write_run(folder / "reference" / "kept", trials())
    write_run(folder / "lost", without("fast", memory={"peak_bytes": 1000}))
    write_run(folder / "both", trials())
    write_run(folder / "reference" / "both", trials(slower=1.25))
    return folder


def call(results: Path, *words: Any) -> Any:
    return specbench("compare", *words, "--results", results)


def test_exit_codes(results: Path) -> None:
    assert call(results, "base", "same").code == 0
    assert call(results, "base", "slow").code == 1
    assert call(results, "base", "slow", "--fail-below", 0.5).code == 0
    assert call(results, "base", "slow", "--metric", "tau").code == 0
    assert call(results, "base", "slow", "--metric", "memory").code == 1
    assert call(results, "base", "slow", "--metric", "memory", "--fail-above", 1.3).code == 0
    assert call(results, "base", results / "slow").code == 1


def with_ids(ids: list[int], **last: list[int]) -> list[Trial]:
    """Trials that put out `ids`, the last one of a method something else."""
    given = [replace(trial, output_ids=list(ids)) for trial in trials(questions=3)]
    for method, other in last.items():
        max((t for t in given if t.method == method), key=lambda t: t.block).output_ids = other
    return given


def test_identical_outputs(tmp_path: Path) -> None:
    """A wrong token somewhere leaves every metric as it is: `--identical` finds it."""
    half = {"target__dtype": "bfloat16"}
    write_run(tmp_path / "eager", with_ids([5, 6, 7]))
    write_run(tmp_path / "same", with_ids([5, 6, 7]))
    write_run(tmp_path / "wrong", with_ids([5, 6, 7], fast=[5, 8, 7]))
    write_run(tmp_path / "short", with_ids([5, 6, 7], vanilla=[5, 6]))
    write_run(tmp_path / "half", with_ids([5, 6, 7]), **half)
    write_run(tmp_path / "half-wrong", with_ids([5, 6, 7], fast=[5, 8, 7]), **half)
    where = "code q2 turn 0 at token"
    for base, new, code, said in (
        ("eager", "same", 0, "12 of 12 greedy outputs are identical"),
        (
            "eager",
            "wrong",
            1,
            f"11 of 12 greedy outputs are identical; the first that differs: fast, {where} 1, 6 in",
        ),
        ("eager", "short", 1, f"vanilla, {where} 2, 7 in BASE, an end in NEW"),
        ("half", "half-wrong", 0, "11 of 12"),
    ):
        found = call(tmp_path, base, new, "--identical")
        assert (found.code, said in found.out) == (code, True), found.out
        assert call(tmp_path, base, new).code == 0
    found = call(tmp_path, "eager", "wrong", "--identical", "--json")
    assert found.code == 1
    assert "11 of 12" in found.err
    assert json.loads(found.out)["identical"] == {
        "compared": 12,
        "identical": 11,
        "first_difference": {
            "method": "fast", "task": "code", "question": "q2", "turn": 0, "token": 1, "base": 6, "new": 8
        },
        "failure": True,
    }  # fmt: skip


def test_outputs_that_cannot_be_identical_are_refused(tmp_path: Path) -> None:
    hot = {"config__temperature": 0.7}
    longer = {"config__max_new_tokens": 96}
    for name, given, changed in (
        ("plain", with_ids([5]), {}),
        ("unknown", with_ids([]), {}),
        ("hot", with_ids([5]), hot),
        ("hot2", with_ids([5]), hot),
        ("longer", with_ids([5]), longer),
    ):
        write_run(tmp_path / name, given, **changed)
    for base, new, said in (
        ("hot", "hot2", "only greedy outputs can be identical"),
        ("plain", "longer", "outputs of other lengths are not identical: chat 48 and 96"),
        ("plain", "unknown", "the runs share no output of a prompt"),
    ):
        found = call(tmp_path, base, new, "--identical")
        assert found.code == 2
        assert said in found.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("base", "other"), "different targets: dtype float32 and bfloat16"),
        (("base", "away", "--metric", "tokens_per_s"), "tokens_per_s cannot be compared across machines"),
        (("base", "nowhere"), "there is no run 'nowhere'"),
        (("base", "same", "--metric", "speed"), "--metric speed: no such metric"),
        (("base", "same", "--format", "pdf"), "--format pdf: no such format"),
        (("base", "same", "--fail-below", "x"), "--fail-below x is not a ratio"),
        (("base", "same", "--fail-below", "nan"), "--fail-below nan is not a ratio"),
        (("base", "same", "--fail-below", "1.2"), "is above 1"),
        (("base", "same", "--fail-below", "memory=0.9"), "not a metric of this comparison"),
        (("base", "same", "--fail-below", "tokens_per_s=0.9"), "not a metric of this comparison"),
        (("base", "same", "--fail-above", "1.2"), "--fail-above is memory's limit"),
        (("base", "same", "--output", "x"), "more --output than --format"),
        (("base", "same", "--format", "md", "--json"), "two formats go to standard output"),
    ],
)
def test_refusals_are_two_lines(results: Path, words: tuple[str, ...], said: str) -> None:
    result = call(results, *words)
    assert result.code == 2
    assert said in result.err
    assert len(result.err.strip().splitlines()) == 2
    assert result.out == ""


def test_nothing_in_common(results: Path, tmp_path: Path) -> None:
    lone = write_run(tmp_path / "lone", trials(tasks=("qa",)))
    result = call(results, "base", lone)
    assert result.code == 2
    assert "share nothing that could be compared" in result.err


def test_limits_of_each_metric(results: Path) -> None:
    given = ("--fail-below", "tau=0.9", "--fail-below", "0.7", "--json")
    found = json.loads(call(results, "base", "slow", *given).out)
    assert found["limits"] == {"speedup": 0.7, "tau": 0.9}


def test_a_bare_limit_never_loosens_tau(results: Path) -> None:
    def limits(*given: Any) -> dict[str, float]:
        return json.loads(call(results, "base", "slow", *given, "--json").out)["limits"]

    assert limits("--fail-below", 0.9) == {"speedup": 0.9, "tau": 0.98}
    assert limits("--fail-below", 0.99) == {"speedup": 0.99, "tau": 0.99}
    assert limits("--fail-below", "tau=0.9") == {"speedup": 0.95, "tau": 0.9}
    alone = call(results, "base", "slow", "--metric", "tau", "--fail-below", 0.9)
    assert alone.code == 2
    assert "--fail-below tau=0.9" in alone.err


def test_a_lost_method_is_counted_and_strict_fails(results: Path, tmp_path: Path) -> None:
    base = write_run(tmp_path / "base", without(""))
    lenient = call(results, base, "lost")
    assert lenient.code == 0
    last = lenient.out.strip().splitlines()[-1]
    assert last == "2 no change; by task: 4 no change; 1 method not compared"
    case = ET.fromstring(call(results, base, "lost", "--format", "junit").out).find(
        ".//testcase[@name='fast']"
    )
    assert case is not None
    assert (case[0].tag, case[0].get("message")) == ("skipped", "fast: only in BASE")

    strict = call(results, base, "lost", "--strict")
    assert strict.code == 1
    assert strict.out.strip().splitlines()[-1].startswith("2 regressed, 2 no change")
    root = ET.fromstring(call(results, base, "lost", "--strict", "--overall", "--format", "junit").out)
    assert (root.get("failures"), root.get("skipped")) == ("2", "0")
    assert call(results, "lost", base, "--strict").code == 0  # a method more is no loss
    assert "--strict" in specbench("compare", "--help").out


def test_strict_leaves_a_check_of_the_machine_out(results: Path, tmp_path: Path) -> None:
    again = [replace(t, method="vanilla-again") for t in trials() if t.method == "vanilla"]
    base = write_run(tmp_path / "base", [*trials(), *again])
    assert call(results, base, "same", "--strict").code == 0


def test_a_baseline_is_found_by_name(results: Path) -> None:
    assert call(results, "kept", "same").code == 0
    assert call(results, results / "reference" / "kept", "same").code == 0


def test_as_base_a_baseline_comes_before_a_run_of_that_name(results: Path) -> None:
    found = json.loads(call(results, "both", "both", "--json").out)
    paths = [found[side]["path"] for side in ("base", "new")]
    assert paths == [str(results / "reference" / "both"), str(results / "both")]


def test_the_table(results: Path) -> None:
    out = call(results, "base", "slow").out
    assert "fast" in out
    assert "-20.0%" in out
    assert "regressed" in out
    assert out.strip().splitlines()[-1].startswith("1 regressed, 1 no change")
    assert "rows of tasks show no change" in out
    assert "on chat" not in out
    everything = call(results, "base", "slow", "--all").out
    assert len(everything.splitlines()) > len(out.splitlines())
    overall = json.loads(call(results, "base", "slow", "--overall", "--json").out)
    assert {row["task"] for row in overall["rows"]} == {"overall"}


def test_formats_into_files_and_one_to_standard_output(results: Path, tmp_path: Path) -> None:
    files = {
        "md": "-",
        "junit": tmp_path / "x" / "junit.xml",
        "github-action-benchmark": tmp_path / "bench.json",
    }
    words = [word for form, file in files.items() for word in ("--format", form, "--output", file)]
    result = call(results, "base", "slow", *words)
    assert result.code == 1
    assert result.out.startswith("## slow against base: 1 regressed")
    assert ET.parse(tmp_path / "x" / "junit.xml").getroot().get("failures") == "3"
    assert json.loads((tmp_path / "bench.json").read_text())[0]["unit"] == "x"


def test_json_is_one_document(results: Path) -> None:
    result = call(results, "base", "away", "--json")
    found = json.loads(result.out)
    assert found["schema"] == 1
    assert found["same_machine"] is False
    assert found["base"]["path"] == str(results / "base")
    assert found["rows"][0].keys() >= {
        "metric",
        "method",
        "task",
        "base",
        "new",
        "change",
        "limit",
        "verdict",
    }


def test_the_same_bytes_each_time(results: Path) -> None:
    for form in ("md", "json", "junit", "github-action-benchmark"):
        assert len({call(results, "base", "slow", "--format", form).out for _ in range(2)}) == 1


# -- what the formats say ------------------------------------------------------------------------------------


def nasty() -> dict[str, Any]:
    """A comparison all of whose names are hostile."""

    def side(slower: float) -> Any:
        given = trials(tasks=("chat",), slower=slower)
        for t in given:
            t.task = NASTY
            t.method = NASTY if t.method == "fast" else t.method
        return run(given, name=NASTY, target__name=NASTY, versions={NASTY: str(slower)})

    return compare(side(1), side(2))


def test_markdown_stays_text() -> None:
    text = markdown(nasty())
    assert "<script" not in text
    assert not re.search(r"(?<!\\)\]\(javascript", text)
    assert "\x1b" not in text
    assert "\n# head" not in text
    assert len([line for line in text.splitlines() if line.startswith("## ")]) == 1


def test_terminal_stays_text() -> None:
    console = Console(file=io.StringIO(), width=400, force_terminal=False)
    console.print(terminal(nasty(), every=True))
    assert "\x1b" not in console.file.getvalue()  # type: ignore[attr-defined]


def test_junit_stays_xml() -> None:
    root = ET.fromstring(junit(nasty()))
    cases = root.findall(".//testcase")
    assert len(cases) == int(root.get("tests", 0)) == 4
    assert "<script>alert(1)</script>" in (cases[0].get("name") or "")
    for element in root.iter():
        assert not re.search("[\n\x1b\u202e]", "".join(element.attrib.values()))
    text = github_action_benchmark(nasty())
    assert "\u202e" not in text
    assert all("\n" not in entry["name"] + entry["extra"] for entry in json.loads(text))


def test_junit_has_a_case_a_row() -> None:
    found = compare(run(), run(trials(questions=3, slower=2)))
    root = ET.fromstring(junit(found))
    suite = root[0]
    assert suite.get("tests") == str(len(found["rows"])) == "6"
    verdicts = [row["verdict"] for row in found["rows"]]
    assert verdicts.count("ambiguous") == int(suite.get("skipped", 0)) == 4  # of three questions a task
    assert verdicts.count("regressed") == int(suite.get("failures", 0)) == 1
    assert suite.get("errors") == "0"
    kinds = [case[0].tag for case in suite.iter("testcase")]
    assert sorted(set(kinds)) == ["failure", "skipped", "system-out"]


def test_github_action_benchmark_has_its_fields() -> None:
    found = compare(
        run(trials(memory={"peak_bytes": 9})), run(trials(memory={"peak_bytes": 9})), ("speedup", "memory")
    )
    entries = json.loads(github_action_benchmark(found))
    assert len(entries) == 3  # chat, code, overall; memory is not bigger-is-better
    for entry in entries:
        assert entry.keys() == {"name", "unit", "value", "range", "extra"}
        assert isinstance(entry["value"], float)
        assert entry["range"].startswith("± ")
    assert {entry["name"] for entry in entries} == {
        "fast speedup on chat",
        "fast speedup on code",
        "fast speedup overall",
    }


def test_nothing_is_no_change_below_zero(results: Path) -> None:
    row = {"change": {"low": 0.99999, "point": 1.0, "high": 1.00001}}
    assert change(row) == "0.0% [0.0%, 0.0%]"
    given = [write_run(results / f"chat{i}", trials(tasks=("chat",))) for i in range(2)]
    assert "1 row of tasks shows no change or rests on" in call(results, *given, "--metric", "tau").out


def test_the_headline_counts_overall_rows_apart() -> None:
    assert headline(compare(run(), run())) == "2 no change; by task: 4 no change"
