"""The HTML report as a file: one page that calls nobody, says the verdict first, and takes all text as text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections import Counter
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_run import BASE, EVIL, OTHER, hostile, run
from tiny_folder import Workplace
from trial_factory import FakeRun, blocks
from trial_factory import trial as trial_of

from specbench.analysis.summary import summarise
from specbench.report import FORMATS, figures
from specbench.report.figures import style
from specbench.report.questions import pack
from specbench.store import Trial

ASKS = ("src", "data", "action", "formaction", "poster", "srcset", "background", "ping", "manifest")


class Elements(HTMLParser):
    """All tags with their attributes, and the text outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.inside: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.inside:
            del self.inside[len(self.inside) - 1 - self.inside[::-1].index(tag) :]

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.inside):
            self.text += data


def page(*runs: FakeRun) -> str:
    text = FORMATS["html"].render(summarise(runs), runs)
    assert isinstance(text, str)
    return text


@cache
def usual() -> str:
    """The page of the usual run: drawing takes a while."""
    return page(run())


@cache
def batched() -> str:
    """The page of a run at batch sizes 1 and 4; at 4 all methods are slower than vanilla."""
    one = run(questions=2)
    for t in list(one.trials):
        slow = {"batch_s": 90.0} if t.method != "vanilla" else {}
        one.trials.append(Trial.from_json(t.to_json() | {"batch_size": 4} | slow))
    return page(one)


def data_of(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">"([^"<]*)"</script>', html)
    assert found
    return unpack(found[1])


def unpack(packed: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(packed)))
    return data


def packed(one: FakeRun, room: int = 10**7) -> Any:
    return pack(list(figures.scenes(summarise([one]), [one])), ["title"], room)


def test_the_page_asks_for_nothing() -> None:
    html = usual()
    elements = Elements(html)
    assert not {"link", "iframe", "object", "embed", "img", "base"} & {tag for tag, _ in elements.tags}
    for tag, attributes in elements.tags:
        assert not set(ASKS) & set(attributes), (tag, attributes)
        assert (attributes.get("href") or "#").startswith("#")
        assert not [name for name in attributes if name.startswith("on")]
    assert "@import" not in html
    assert set(re.findall(r"url\(([^)]*)\)", html)) <= set(re.findall(r"url\((#[^)]*)\)", html))


def test_only_our_script_may_run() -> None:
    html = usual()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    script = re.search(r"<script>(.*?)</script>", html, re.DOTALL)
    assert policy
    assert script
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert "default-src 'none'" in policy[1]
    assert f"script-src 'sha256-{digest}'" in policy[1]


def test_all_text_is_text() -> None:
    html = page(hostile())
    elements = Elements(html)
    tags = Counter(tag for tag, _ in elements.tags)
    assert tags["script"] == 2
    assert tags["img"] == tags["a"] - len(re.findall('<a (class="skip" )?href="#', html)) == 0
    assert elements.text.count(EVIL) > 20
    assert "\x1b" not in html
    assert "\u202e" not in html
    assert "\\x1b[31mred\\u202e" in elements.text
    html.encode()  # a lone surrogate would raise
    texts = data_of(html)["texts"]
    assert all(EVIL in text and "\u202e" not in text for text in texts)


def test_the_verdict_stands_before_all_tables_the_fastest_method_first() -> None:
    text = " ".join(Elements(usual()).text.split())
    verdict = text.index("fast:k=5 makes tiny")
    assert verdict < text.index("fast:k=3 makes tiny") < text.index("slow:k=3 makes tiny slower: 0.7")
    assert text.index("slow:k=3 makes tiny slower") < text.index("Overall: all 3 tasks")
    assert "output identical on 12 of 18" in text
    assert "Best on" not in text  # six questions a task name none


def test_warnings_of_a_kind_stand_together_with_their_cure() -> None:
    text = " ".join(Elements(usual()).text.split())
    assert "What to do: run with --dtype float32" in text


def test_ids_are_unique_with_several_parts() -> None:
    html = batched()
    ids = Counter(attributes["id"] for _, attributes in Elements(html).tags if "id" in attributes)
    assert max(ids.values()) == 1
    used = set(re.findall(r"url\(#([^)]*)\)", html)) | set(re.findall(r'href="#([^"]+)"', html))
    assert used <= set(ids)
    assert "tiny, batch size 4" in html


@pytest.mark.parametrize(
    "trials", [[], blocks(1, {"vanilla": {}}), blocks(1, {"vanilla": {}, "m": {"error": "boom"}})]
)
def test_a_page_of_little(trials: list[Trial]) -> None:
    html = page(FakeRun(trials))
    assert ("Nothing was measured" in html) == (not trials)


def names(html: str) -> set[str]:
    """Of the figures of the first part."""
    return set(re.findall(r'id="s1-([a-z-]+)-title"', html))


def test_figures_that_have_nothing_to_show_are_left_out() -> None:
    everything = {"speedup", "tokens-per-round", "acceptance", "time-in-a-round", "k-sweep", "memory"}
    assert names(usual()) == everything | {"run-order", "inter-token"}
    bare = run({"m": 2.0})
    for one in bare.trials:
        one.memory, one.spans, one.rounds.draft_s, one.rounds.verify_s = None, None, None, None
    assert names(page(bare)) == {"speedup", "tokens-per-round", "acceptance", "run-order", "inter-token"}
    assert names(page(FakeRun(blocks(3, {"vanilla": {}})))) <= {"inter-token", "time-in-a-round"}


def test_speedup_against_load_is_drawn_once() -> None:
    assert 'id="s1-load-title"' in batched()
    assert 'id="s2-load-title"' not in batched()
    assert "load-title" not in usual()


def test_every_figure_says_in_words_what_it_shows() -> None:
    html = usual()
    for name in ("speedup", "tokens-per-round", "acceptance", "time-in-a-round", "k-sweep", "memory"):
        assert re.search(rf'<desc id="s1-{name}-desc">[^<]*fast', html), name


def test_a_figure_takes_its_colours_from_the_page_and_names_as_they_are() -> None:
    one = run({"a<b>&$x_1$\\frac{": 2.0})
    (scene,) = figures.scenes(summarise([one]), [one])
    with style.styled():
        svgs = [style.inline_svg(d.figure, d.drawing.name, "t", d.said) for d in figures.draw(scene)]
    assert all("a&lt;b&gt;&amp;$x_1$\\frac{" in svg for svg in svgs)
    assert all("var(--ink)" in svg and not re.search("#[0-9a-f]{6}", svg) for svg in svgs)


def test_methods_keep_their_colour_and_vanilla_is_grey() -> None:
    names = ["vanilla", *(f"m{i}" for i in range(11)), "vanilla-again"]
    looks = style.looks(names)
    assert looks["vanilla"].colour == looks["vanilla-again"].colour == style.GREY
    assert len({(look.colour, look.marker) for look in looks.values()}) == 12
    long = [f"cascade:first=(prompt-lookup:k={i}),then=(eagle3:depth=5)" for i in range(3)]
    labels = [look.label for look in style.looks(long).values()]
    assert len(set(labels)) == 3
    assert max(map(len, labels)) <= style.LABEL + 4


def test_questions_hold_each_text_once() -> None:
    data = unpack(packed(run()).data)
    assert sorted(data["texts"]) == sorted([BASE, OTHER])
    assert data["methods"] == ["vanilla", "slow:k=3", "fast:k=3", "fast:k=5"]
    assert len(data["questions"]) == 18
    section, task, category, name, turn, repeat, prompt, rows = data["questions"][3]
    assert (section, data["tasks"][task], data["categories"][category]) == (0, "chat", "chat-odd")
    assert (name, turn, repeat, prompt, len(rows)) == ("chat-3", 1, 1, 23, 4)
    last = rows[-1]
    assert data["texts"][last[1]] == OTHER
    assert last[2:7] == [11, 5, 5, 500, 4240]
    assert last[7:] == [0, 3, 0.25, "length"]


def test_texts_are_cut_behind_their_first_difference_when_room_is_short() -> None:
    one = run({"m": 2.0})
    for number, trial in enumerate(one.trials):
        noise = "".join(hashlib.sha512(f"{number} {i}".encode()).hexdigest() for i in range(20))
        trial.text = "the same " * 300 + noise
    whole = packed(one)
    assert whole.cut is None
    cut = packed(one, len(whole.data) // 2)
    assert cut.cut is not None
    assert cut.kept == cut.total == 18
    assert len(cut.data) <= len(whole.data) // 2
    texts = unpack(cut.data)["texts"]
    assert all(0 <= len(text) - 2700 - cut.cut - 1 < 5 and text.endswith("…") for text in texts)


def test_questions_are_left_out_when_even_that_is_too_much() -> None:
    some = packed(run(), 500)
    assert some.cut == 0
    assert 0 < some.kept < some.total
    assert len(some.data) <= 500
    assert len(unpack(some.data)["questions"]) == some.kept


def test_a_run_without_texts_still_has_its_questions() -> None:
    one = run()
    for trial in one.trials:
        trial.text = None
    assert unpack(packed(one).data)["texts"] == []
    assert "Questions" in page(one)


def test_excluded_and_failed_trials_are_no_answers() -> None:
    one = run()
    one.trials[1].excluded = "contended"
    one.trials[2].error = "boom"
    rows = unpack(packed(one).data)["questions"][0][-1]
    assert [row[0] for row in rows] == [0, 1]  # vanilla and the last method, numbered as they come


def test_the_page_without_trials_has_the_tables() -> None:
    one = run()
    html = FORMATS["html"].render(summarise([one]), [])
    assert isinstance(html, str)
    assert "Overall: all 3 tasks" in html
    assert "<figure" not in html


def test_break_even_is_said_once_a_method() -> None:
    text = " ".join(Elements(batched()).text.split())
    assert re.search(
        r"fast:k=5 pays up to a batch size of about [1-4]\.\d+.*? \(speedup at 1: 2\.\d\dx.*?, 4: 0\.\d\dx.*?\)\.",
        text,
    )
    assert "slow:k=3 pays at no batch size measured" in text


def test_the_page_keeps_its_size_whatever_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbench.report.html.FIGURES", 0)  # they take long, and have their own room
    one = run(questions=40)
    for number, trial in enumerate(one.trials):
        trial.text = "".join(hashlib.sha512(f"{number} {i}".encode()).hexdigest() for i in range(10))
    whole = page(one)
    tables = len(whole) - len(packed(one).data)
    monkeypatch.setattr("specbench.report.html.LARGEST", tables + 20_000)
    small = page(one)
    assert len(small.encode()) <= tables + 21_000 < len(whole.encode())
    assert re.search(r"texts end \d+ characters after their first difference", " ".join(small.split()))


def a_sweep() -> FakeRun:
    """Four batch sizes of three tasks, each task of two categories."""
    one = run(questions=4)
    for size in (2, 4, 8):
        one.trials += [replace(t, batch_size=size) for t in one.trials if t.batch_size == 1]
    return one


def rows_of(html: str, table: str) -> list[str]:
    body = html[html.index(f'<table id="{table}"') :].partition("<tbody>")[2].partition("</tbody>")[0]
    return re.findall(r'<tr[^>]*>\s*<th scope="row"><span>(.*?)</span>', body)


@pytest.mark.parametrize(("down_to", "room"), [("categories", 0), ("tasks", 25_000), ("overall", 105_000)])
def test_large_tables_make_room_for_questions(
    monkeypatch: pytest.MonkeyPatch, down_to: str, room: int
) -> None:
    """First categories, then tasks go to the CSV; the drill-down keeps its room."""
    monkeypatch.setattr("specbench.report.html.FIGURES", 0)
    monkeypatch.setattr("specbench.report.html.QUESTIONS", 4_000)
    one = a_sweep()
    full = len(page(one).encode())
    largest = full + 4_000 - room
    monkeypatch.setattr("specbench.report.html.LARGEST", largest)
    html = page(one)
    assert len(html.encode()) <= largest
    places = {"categories": 1 + 3 + 6, "tasks": 1 + 3, "overall": 1}[down_to]
    assert len(set(rows_of(html, "all4"))) == places
    said = " ".join(Elements(html).text.split())
    assert ("specbench report page --format csv" in said) == (down_to != "categories")
    assert len(data_of(html)["questions"]) > 0
    assert "The first 0 of" not in said


@pytest.mark.filterwarnings("error")
def test_events_that_came_in_one_piece_have_no_time_between_them() -> None:
    arrived = {"at_s": [0.5, 0.5, 0.5, 0.5], "tokens": [1, 1, 1, 1]}
    rows = [trial_of(f"q{number}", arrivals=arrived) for number in range(4)]
    one = FakeRun(rows, {"name": "r", "target": {"name": "tiny", "dtype": "float32"}})
    (scene,) = figures.scenes(summarise([one]), [one])
    with style.styled():
        assert "inter-token" not in {drawn.drawing.name for drawn in figures.draw(scene)}


def test_figures_that_are_left_out_come_from_a_command_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    one = a_sweep()
    one.manifest["name"] = "my run"
    monkeypatch.setattr("specbench.report.html.FIGURES", 60_000)
    html = page(one)
    assert "specbench report &#39;my run&#39; --figures svg" in html
    drawn = sum(len(svg) for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL))
    assert 0 < drawn <= 60_000
    assert "--figures" not in usual()


def test_manifests_of_many_runs_share_their_room() -> None:
    runs = [run(questions=1, name=f"r{n}", notes="x" * 100_000) for n in range(4)]
    summary = summarise(runs)
    for one in runs:
        one.trials.clear()
    html: Any = FORMATS["html"].render(summary, runs)
    assert html.count("cut here; the whole is in manifest.json") == 4
    assert html.count("x") < 130_000


def test_a_run_writes_the_page_and_says_where(fresh: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbench.session.RUN_REPORTS", ("md", "html"))
    result = fresh.run("--method", "prompt-lookup", "--limit", 2)
    assert result.code == 0, result.err
    told = Path(result.out.splitlines()[-1].removeprefix("report: "))
    assert told == fresh.path / "reports" / "r" / "report.html"
    assert "prompt-lookup" in told.read_text(encoding="utf-8")
    assert told.with_name("report.md").is_file()
