"""Renderings of a summary: what they say, that they fit, and that text from models and files stays text."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import sys
from pathlib import Path

import pytest
import typer
from report_run import hostile
from rich.console import Console
from trial_factory import FakeRun, block, blocks, spread
from typer.testing import CliRunner

from specbench.analysis.setting import Setting
from specbench.analysis.summary import FIELDS, summarise
from specbench.cli import report as command
from specbench.errors import SpecbenchError
from specbench.report import FORMATS, words
from specbench.report.markdown import escape
from specbench.report.provenance import command_line
from specbench.report.terminal import render
from specbench.store import RunStore, Trial

NASTY = "<script>alert(1)</script>|`x`](javascript:alert(1))\n# head"
TASKS = ("chat", "code", "qa")


def manifest(**fields: object) -> dict:
    return {"name": "run", "target": {"name": "tiny"}, "argv": ["specbench", "run"]} | fields


def small() -> FakeRun:
    """Three tasks, two questions each, one method twice as fast."""
    methods = {
        "vanilla": {},
        "fast": {"seconds": 5.0, "batch_s": 5.25, "accepted": [1] * 5, "lossless": True},
    }
    trials = [
        t
        for i, task in enumerate(TASKS)
        for q in range(2)
        for t in block(f"q{q}", 2 * i + q, methods, task=task)
    ]
    for t in trials:
        t.agreement = (
            {"same": True, "first_difference": None, "logit_gap": None} if t.method == "fast" else None
        )
    return FakeRun(trials, manifest())


def printed(trials: list[Trial], width: int, **fields: object) -> str:
    out = io.StringIO()
    console = Console(width=width, file=out, force_terminal=False)
    console.print(render(summarise([FakeRun(trials, manifest(**fields))]), width))
    return out.getvalue()


def markdown(trials: list[Trial], **fields: object) -> str:
    run = FakeRun(trials, manifest(**fields))
    return FORMATS["md"].render(summarise([run]), [run])


def test_formats_are_found_by_file() -> None:
    assert set(FORMATS) >= {"csv", "html", "json", "md", "parquet", "svg", "trials-csv"}
    folder = Path(sys.modules["specbench.report"].__file__ or "").parent
    assert {path.stem for path in folder.glob("*.py")} >= {"csv", "json", "markdown"}


def test_the_same_summary_gives_the_same_bytes() -> None:
    for form in FORMATS.values():
        first = form.render(summarise([small()]), [small()])
        shuffled = small()
        shuffled.trials.reverse()
        assert form.render(summarise([shuffled]), [shuffled]) == first


def test_json_is_the_summary() -> None:
    summary = summarise([small()])
    assert json.loads(FORMATS["json"].render(summary, [])) == summary


def test_csv_has_a_line_a_row_and_flat_columns() -> None:
    summary = summarise([small()])
    rows = list(csv.DictReader(io.StringIO(FORMATS["csv"].render(summary, []))))
    assert len(rows) == len(summary["rows"]) == 8
    fast = next(row for row in rows if row["method"] == "fast" and row["task"] == "overall")
    assert float(fast["speedup"]) == pytest.approx(2.0)
    assert fast["acceptance_by_position"] == "1.0 0.0 0.0 0.0"
    assert fast["accepted_histogram"] == "0 30"
    assert fast["lossless"] == "true"
    assert fast["roofline_limit"] == ""
    assert fast["target"] == "tiny"
    assert {"speedup_low", "speedup_high", "round_s_p99", "tau_low"} < set(fast)


@pytest.mark.parametrize(
    "text",
    [
        *("=1+1", "+1", "-1", "@sum", "\tx", "\rx", " =1", "＝1", "\x1b[31m", "a\x1b"),
        *("\u00a0=1", "\u200b=1", "\ufeff=1", "\u3000 \u2060+1", "\u00ad@x"),
    ],
)
def test_csv_texts_are_no_formulas(text: str) -> None:
    summary = summarise([FakeRun(block("q1", 0, {"vanilla": {}}, task=text), manifest())])
    rows = list(csv.DictReader(io.StringIO(FORMATS["csv"].render(summary, []), newline="")))
    hidden = text.replace("\r", " ").replace("\t", " ").replace("\x1b", "\\x1b")
    assert rows[0]["task"] == ("" if "\x1b" in text else "'") + hidden


def test_csv_numbers_stay_numbers() -> None:
    trials = blocks(1, {"vanilla": {"memory": {"peak_bytes": 9}}, "fast": {"memory": {"peak_bytes": 4}}})
    rows = list(csv.DictReader(io.StringIO(FORMATS["csv"].render(summarise([FakeRun(trials)]), []))))
    assert rows[-1]["memory_overhead_bytes"] == "-5"


def test_markdown_escapes_all_text() -> None:
    trials = block("q1", 0, {"vanilla": {}, NASTY: {}}, task=NASTY, category=NASTY)
    trials += block("q2", 1, {"vanilla": {}, NASTY: {}}, task=NASTY, category="other")
    trials[1].excluded = NASTY
    text = markdown(
        trials,
        name=NASTY,
        target={"name": NASTY, "notes": [NASTY]},
        machine={"cpu": {"model": NASTY}},
        config={NASTY: NASTY},
        git={"commit": NASTY},
        argv=["specbench", "```", NASTY],
    )
    body, _, command_block = text.rpartition("\n````\nspecbench")
    assert command_block.endswith("\n````\n")
    assert "javascript" in body
    assert "<script" not in body
    assert "](" not in body.replace("\\](", "")
    assert not re.search(r"(?<!\\)`", body)
    assert "\n# head" not in body
    tables = re.findall(r"(?:^\|.*\n)+", body, flags=re.MULTILINE)
    assert len(tables) >= 6
    for found in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in found.splitlines()}) == 1, found


def test_markdown_escape_keeps_intervals_readable_but_no_links() -> None:
    assert escape("1.12x [1.05, 1.19]") == "1.12x [1.05, 1.19]"
    assert escape("[1.05, 1.19](x)") == "\\[1.05, 1.19\\](x)"
    assert escape("[1.05, 1.19]: x") == "\\[1.05, 1.19\\]: x"
    assert escape("a|b\n<i>") == "a\\|b &lt;i&gt;"


def test_markdown_links_nothing_by_itself() -> None:
    """GitHub links bare addresses, and calls people and issues, in rendered text: only a character between helps."""
    gap = "&#8203;"
    assert escape("https://a.b HTTP://x ftp://x") == f"https:{gap}//a.b HTTP:{gap}//x ftp:{gap}//x"
    assert escape("www.a.b (WWW.x) _www.a") == f"www{gap}.a.b (WWW{gap}.x) \\_www{gap}.a"
    assert escape("@everyone _@org/team") == f"@{gap}everyone \\_@{gap}org/team"
    assert escape("me@a.org mailto:me@a.org") == f"me@{gap}a.org mailto:me@{gap}a.org"
    assert escape("me@a_b.org") == f"me@{gap}a\\_b.org"
    assert escape("fix #12") == f"fix \\#{gap}12"
    for ours in ("smollm2-135m@q4\\_1", "2026-01-01T00:00:00", "k=3 @ 2.90x: a//b", "C\\# 3"):
        assert escape(ours.replace("\\", "")) == ours


def test_markdown_says_the_verdict_first() -> None:
    lines = markdown(small().trials).splitlines()
    assert lines[2].startswith(
        "- fast makes tiny 2.00x faster end to end [2.00, 2.00] over 3 tasks; output identical"
    )
    assert lines[2].endswith("on 6 of 6.")  # no task has an interval, so none is the best
    text = "\n".join(lines)
    for part in (
        "bonus included",
        "How to read",
        "specbench run",
        "Warnings",
        "few-prompts",
        "What to do: --limit 5",
    ):
        assert part in text


def test_markdown_verdicts_of_several_runs_name_theirs() -> None:
    runs = [small(), small()]
    runs[1].manifest["name"] = "other|run"
    text = FORMATS["md"].render(summarise(runs), runs)
    assert isinstance(text, str)
    first, second = text.splitlines()[2:4]
    assert first.startswith("- run: fast makes tiny 2.00x faster")
    assert second.startswith("- other\\|run: fast makes tiny 2.00x faster")


@pytest.mark.parametrize(
    ("speed", "said"),
    [
        ({"low": 1.1, "point": 1.2, "high": 1.3}, "m makes tiny 1.20x faster end to end [1.10, 1.30]"),
        ({"low": 0.9, "point": 1.2, "high": 1.3}, "no clear difference to tiny: 1.20x"),
        ({"low": 0.7, "point": 0.8, "high": 0.9}, "m makes tiny slower: 0.80x"),
        (
            {"low": None, "point": 1.2, "high": None},
            "m reads 1.20x end to end on tiny, from too few questions to say more",
        ),
        ({"low": None, "point": None, "high": None}, "m has no speedup on tiny"),
    ],
)
def test_verdicts(speed: dict, said: str) -> None:
    row = {"method": "m", "task": "overall", "speedup": speed, "compared": 0, "lossless": None, "failed": 0}
    row |= {"request_rate": None}
    section = words.Section({"target": "tiny"}, Setting(1), [row])
    assert said in words.verdict(row, section)


def test_verdict_of_a_lossy_method_says_so() -> None:
    row = summarise([small()])["rows"][-1] | {"lossless": False, "identical": 4}
    section = words.Section({"target": "tiny"}, Setting(1), [row])
    assert "not lossless: output identical on 4 of 6" in words.verdict(row, section)
    assert words.output(row) == "lossy 4/6"


def test_terminal_at_100_columns_shows_what_matters() -> None:
    text = printed(small().trials, 100)
    assert max(map(len, text.splitlines())) <= 100
    assert "2.00x [2.00, 2.00]" in text
    for part in (
        "tiny",
        "τ tokens/",
        "included",
        "accept.",
        "tok/s",
        "6/6",
        "all 3 tasks",
        "speedup by task",
    ):
        assert part in text, part
    assert "2.00x n=2" in text
    assert text.count("fewer than 5 questions") == 1


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_terminal_fits_its_width_with_long_names_and_many_methods(width: int) -> None:
    names = ["vanilla", *(f"cascade:first=(prompt-lookup:k={i}),then=(eagle3:depth={i})" for i in range(10))]
    methods = {name: {"seconds": 10.0 if name == "vanilla" else 5.0} for name in names}
    trials = [t for i in range(6) for t in block(f"q{i}", i, methods, task=f"task-{i % 2}")]
    text = printed(trials, width)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("1.91x [1.91, 1.91]") == 10
    assert text.count("1.91x n=3") == 20


def test_a_narrow_terminal_drops_the_least_important_columns() -> None:
    trials = small().trials
    for t in trials:
        t.spans = {"draft": 1.0, "verify": 3.0, "accept": 0.5, "other": 0.5}
    assert "share" in printed(trials, 160)
    narrow = printed(trials, 62)
    assert "share" not in narrow
    assert "tok/s" not in narrow
    assert "2.00x [2.00, 2.00]" in narrow
    assert "τ tokens/" in narrow


def test_terminal_prints_markup_as_text_and_warnings_with_cures() -> None:
    trials = blocks(6, {"vanilla": {}, "vanilla-again": {"seconds": 20.0}}, task="[red]x[/red]")
    text = printed(trials, 100, target={"name": "random:[b]t[/b]"})
    assert "[red]x[/red]" in text
    assert "random:[b]t[/b], RANDOM WEIGHTS, timing only" in text
    assert "warning: vanilla against itself reads 0.51x" in text
    assert "stop other work" in text
    both = [t for i in range(2) for t in block("q", i, {"vanilla": {}, "[b]m[/b]": {}}, task=f"[i]t{i}[/i]")]
    text = printed(both, 100)
    assert text.count("[b]m[/b]") == 2
    assert text.count("[i]t0[/i]") == 2  # the table and the note


def test_categories_stand_under_their_task_once_they_say_something() -> None:
    trials = []
    for number in range(6):
        category = "qa" if number < 5 else "math"
        trials += block(f"q{number}", number, {"vanilla": {}, "fast": {}}, task="spec", category=category)
    lines = [line.split("  ")[0:2] for line in printed(trials, 100).splitlines()]
    assert ["spec", ""] in lines
    assert ["", "qa"] in lines
    assert ["", "math"] not in lines, "one question has no interval"
    assert "spec / math" in markdown(trials)


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"json", "parquet"}))
def test_no_format_prints_hidden_characters(name: str) -> None:
    """An escape sequence rewrites a terminal, a direction override the line around it. Data files keep them."""
    one = hostile()
    text = FORMATS[name].render(summarise([one]), [one])
    assert isinstance(text, str)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    assert "\\u202e" in text
    assert text.encode()


def test_json_holds_any_text() -> None:
    one = hostile()
    summary = summarise([one])
    text = FORMATS["json"].render(summary, [one])
    assert isinstance(text, str)
    assert json.loads(text.encode()) == summary


def test_terminal_prints_hidden_characters_as_text() -> None:
    one = hostile()
    out = io.StringIO()
    Console(width=120, file=out, force_terminal=False).print(render(summarise([one]), 120))
    assert "\x1b" not in out.getvalue()
    assert "\u202e" not in out.getvalue()
    out.getvalue().encode()


def test_nothing_measured() -> None:
    assert "nothing was measured" in printed([], 80)
    assert "Nothing was measured." in markdown([])
    assert FORMATS["csv"].render(summarise([FakeRun([])]), []) == ""


def test_batches_have_sections_of_their_own() -> None:
    trials = blocks(2, {"vanilla": {}, "fast": {}})
    trials += [Trial.from_json(t.to_json() | {"batch_size": 4}) for t in trials]
    assert "tiny, batch size 4" in printed(trials, 100)
    assert "(batch size 4)." in markdown(trials)


def test_numbers() -> None:
    assert [words.size(v) for v in (None, 0, 512, 1536, 3 << 30)] == [
        "–",
        "0 B",
        "512 B",
        "1.5 KiB",
        "3.0 GiB",
    ]
    assert words.size(200 << 20, signed=True) == "+200 MiB"
    assert words.size(-(2 << 20), signed=True) == "-2.0 MiB"
    assert [words.seconds(v) for v in (None, 0.0123, 2.5)] == ["–", "12.3 ms", "2.50 s"]
    assert (words.percent(None), words.percent(0.125, 1), words.number(1234.5, 1)) == (
        "–",
        "12.5%",
        "1,234.5",
    )


def test_command_line_is_ready_for_a_shell() -> None:
    assert command_line(["/x/bin/specbench", "run", "--task", "a b"]) == "specbench run --task 'a b'"
    assert command_line(["specbench", "\x1b[31m"]) == "specbench '\\x1b[31m'"


def test_the_command_to_reproduce_measures_again() -> None:
    """Under its old name it would resume the run, and measure nothing."""
    argv = [
        "specbench",
        "run",
        "--name",
        "old",
        "--limit",
        "5",
        "--fresh",
        "--name=x",
        "--output",
        "o",
        "--seed",
        "1",
    ]
    assert command_line(argv) == "specbench run --limit 5 --seed 1"
    assert "specbench run --limit 5 --seed 1" in markdown(small().trials, argv=argv)


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    """The command, in a folder whose results/ hold the runs `a` and, written later, `b`."""
    for age, name in enumerate(("b", "a")):
        store = RunStore(tmp_path / "results" / name)
        store.write_manifest(manifest(name=name))
        store.append(spread([4, 5, 6, 7, 8]))
        os.utime(store.path / "manifest.json", (1e9 - age, 1e9 - age))
    monkeypatch.chdir(tmp_path)
    made = typer.Typer()
    made.callback()(lambda: None)
    command.register(made)
    return made


def test_report_writes_each_format_and_prints_where(app: typer.Typer, tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app,
        ["report", "a", "--format", "json", "--format", "csv", "--format", "md", "--output", str(tmp_path)],
    )
    assert done.exit_code == 0, done.output
    written = [tmp_path / "a" / f"report.{suffix}" for suffix in ("json", "csv", "md")]
    assert done.output.split() == [str(path) for path in written]
    assert tuple(json.loads(written[0].read_text())["rows"][0]) == FIELDS
    assert "fast makes tiny" in written[2].read_text()


def test_report_defaults_to_html_of_the_newest_run(app: typer.Typer, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report"])
    assert done.output.strip() == str(Path("reports") / "b" / "report.html")
    assert (tmp_path / "reports" / "b" / "report.html").exists()


@pytest.mark.parametrize(("kind", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_figures_are_written_on_request(app: typer.Typer, tmp_path: Path, kind: str, begins: bytes) -> None:
    options = ["report", "a", "--format", "md", "--figures", kind, "--output", str(tmp_path)]
    assert CliRunner().invoke(app, options).exit_code == 0
    written = {path.name: path.read_bytes() for path in (tmp_path / "a" / "figures").iterdir()}
    assert {f"speedup.{kind}", f"tokens-per-round.{kind}", f"acceptance.{kind}"} <= set(written)
    assert all(content.startswith(begins) for content in written.values())
    assert CliRunner().invoke(app, options).exit_code == 0
    assert all(
        (tmp_path / "a" / "figures" / name).read_bytes() == content for name, content in written.items()
    )


def test_report_to_standard_output_and_of_several_runs(app: typer.Typer, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", "a", "b", "--format", "json", "--output", "-"])
    assert [run["name"] for run in json.loads(done.output)["runs"]] == ["a", "b"]
    done = CliRunner().invoke(app, ["report", "a", "b", "--format", "md", "--output", str(tmp_path)])
    assert (tmp_path / "a+1" / "report.md").exists()
    twice = CliRunner().invoke(app, ["report", "a", "a", "--format", "json", "--output", "-"])
    assert [run["name"] for run in json.loads(twice.output)["runs"]] == ["a"]


def test_markdown_shows_tasks_first_and_folds_their_categories_away() -> None:
    kinds = [("qa", None), ("chat", "humanities"), ("chat", "stem")]
    trials = [
        t
        for number, (task, category) in enumerate(kinds)
        for t in block(f"q{number}", number, {"vanilla": {}, "fast": {}}, task=task, category=category)
    ]
    text = markdown(trials)
    fold = text.index("<details><summary>By category</summary>\n\n")
    assert text.index("| chat | ") < text.index("| chat | fast | ") < fold
    folded = text[fold : text.index("</details>", fold)]
    said = 2 + 2 * 2  # speedups, and the numbers of each method
    assert text.count("chat / ") == folded.count("chat / ") == said
    alone = markdown([t for t in trials if t.task == "chat"])
    assert "by task" not in alone  # that is what the overall table says
    assert "| chat / stem | fast | " in alone


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--format", "pdf"], "--format pdf: no such format"),
        (["--figures", "gif"], "--figures gif: no such format"),
        (["--figures", "png", "--output", "-"], "one --format"),
        (["nowhere"], "there is no run 'nowhere'"),
        (["--format", "md", "--format", "csv", "--output", "-"], "one --format"),
        (["--output", "/proc/nowhere"], "cannot write"),
    ],
)
def test_bad_input_is_one_error_with_a_hint(app: typer.Typer, options: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["report", "a", *options])
    assert isinstance(done.exception, SpecbenchError)
    assert said in done.exception.message
    assert done.exception.hint


@pytest.mark.parametrize("name", ["../../etc", "a/b", ".hidden", "name with blanks", ".."])
def test_a_report_folder_stays_in_its_place(name: str) -> None:
    assert Path("reports", command.folder_name([name])).resolve().parent == Path("reports").resolve()


def test_best_and_worst_are_of_tasks_that_are_known_well_enough() -> None:
    def part(task: str, low: float, point: float, high: float, clusters: int = 20) -> dict:
        estimate = {"low": low, "point": point, "high": high}
        known = {"method": "fast", "task": task, "category": None, "batch_size": 1}
        return known | {"speedup": estimate, "clusters": clusters}

    parts = [part("chat", 1.4, 1.5, 1.6), part("code", 1.2, 1.3, 1.4)]
    unsure = [part("structured", 1.13, 1.78, 4.37), part("math", 0.9, 1.0, 1.1, clusters=7)]
    section = words.Section({"target": "tiny"}, Setting(1), parts + unsure)
    said = words.extremes({"method": "fast"}, section)
    assert said == "best on chat 1.50x [1.40, 1.60], worst on code 1.30x [1.20, 1.40]"
    assert words.extremes({"method": "fast"}, words.Section({}, Setting(1), unsure)) is None
