"""The HTML report in a browser: it asks for nothing, harms nobody, sorts, filters, opens questions, fits a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Page, browser
from report_run import BASE, EVIL, OTHER, hostile, run

from specbench.analysis.summary import summarise
from specbench.report import FORMATS

ALL = "#all1"
QUESTIONS = "#question-list > table > tbody > tr:not(.detail)"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The report of a run with 60 questions, and of one in which every text means harm."""
    folder = tmp_path_factory.mktemp("pages")
    found = {}
    for name, one in (("page", run(questions=20)), ("hostile", hostile())):
        found[name] = folder / f"{name}.html"
        text = FORMATS["html"].render(summarise([one]), [one])
        assert isinstance(text, str)
        found[name].write_text(text, encoding="utf-8")
    return found


@pytest.fixture
def page(tab: Page, files: dict[str, Path]) -> Iterator[Page]:
    """The report, just opened. Whatever a test does, the page has asked for nothing and complained of nothing."""
    tab.open(files["page"])
    yield tab
    assert tab.complaints() == []
    assert tab.requested() == [files["page"].as_uri()]


def column(page: Page, table: str, number: int) -> list[str]:
    """The cells of a column that can be seen, counted from 1."""
    return page.texts(f"{table} > tbody > tr:not(.detail) > :nth-child({number})")


# -- what it must not do -------------------------------------------------------------------------------------


def test_a_policy_stands_behind_that(tab: Page, files: dict[str, Path]) -> None:
    tab.open(files["page"])
    tab.js(
        "const s = document.createElement('script'); s.textContent = 'window.harmed = 1'; document.body.append(s);"
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.harmed=1\">');"
    )
    blocked = tab.js("return fetch('http://127.0.0.1:9/').then(() => 'asked', () => 'refused')")
    assert blocked == "refused"
    assert tab.js("return window.harmed ?? null") is None
    assert any("Content Security Policy" in complaint for complaint in tab.complaints())


def test_harmful_text_stays_text(tab: Page, files: dict[str, Path]) -> None:
    tab.open(files["hostile"])
    for number in range(1, 4):
        tab.click(f"{QUESTIONS}:nth-child({number}) button")
        tab.click(f"{QUESTIONS}:nth-child({number}) button")
    tab.click(f"{QUESTIONS}:nth-child(1) button")
    assert EVIL in tab.texts(".texts p")[0]
    assert EVIL in tab.texts("h1")[0]
    assert tab.js("return window.harmed ?? null") is None
    assert tab.js("return document.images.length + document.querySelectorAll('script').length") == 2
    assert tab.complaints() == []
    assert tab.requested() == [files["hostile"].as_uri()]


# -- tables --------------------------------------------------------------------------------------------------


def test_a_heading_sorts_its_column_and_says_so(page: Page) -> None:
    heading = "#overall1 thead th:nth-child(3)"
    page.click(f"{heading} button")
    assert page.js(f"return document.querySelector('{heading}').ariaSort") == "descending"
    descending = column(page, "#overall1", 3)
    assert [float(cell.split("x")[0]) for cell in descending] == sorted(
        (float(cell.split("x")[0]) for cell in descending), reverse=True
    )
    page.click(f"{heading} button")
    assert page.js(f"return document.querySelector('{heading}').ariaSort") == "ascending"
    assert column(page, "#overall1", 3) == descending[::-1]
    page.click("#overall1 thead th:nth-child(1) button")
    assert column(page, "#overall1", 1) == ["fast:k=3", "fast:k=5", "slow:k=3", "vanilla"]
    sorts = page.js("return [...document.querySelectorAll('#overall1 th[aria-sort]')].map((e) => e.ariaSort)")
    assert sorts.count("none") == len(sorts) - 1


def test_numbers_with_units_sort_by_size_and_the_unknown_come_last(page: Page) -> None:
    titles = [text.split("\xa0")[0] for text in page.texts("#overall1 thead th")]
    place = next(i for i, title in enumerate(titles, 1) if title.startswith("memory"))
    page.click(f"#overall1 thead th:nth-child({place}) button")
    assert column(page, "#overall1", place) == ["+286 MiB", "+191 MiB", "+95 MiB", "0 B"]
    place = next(i for i, title in enumerate(titles, 1) if title.startswith("acceptance"))
    for _ in range(2):
        page.click(f"#overall1 thead th:nth-child({place}) button")
        assert column(page, "#overall1", place)[-1] == "–"


def test_sorting_with_the_keyboard(page: Page) -> None:
    page.js("document.querySelector('#overall1 thead button').focus()")
    page.press("Enter")
    assert column(page, "#overall1", 1)[0] == "fast:k=3"
    page.press("Tab")
    page.press(" ")
    assert page.js("return document.querySelectorAll('#overall1 th')[1].ariaSort") == "descending"


def test_filters_of_every_number(page: Page) -> None:
    form = "form[data-table=all1]"
    assert page.texts(f"{form} output") == ["16 of 40 rows"]
    page.choose(f"{form} [name=column0]", "code")
    assert column(page, ALL, 1) == ["code"] * 4
    page.choose(f"{form} [name=categories]", True)
    assert set(column(page, ALL, 1)) == {"code", "code / code-even", "code / code-odd"}
    page.choose(f"{form} [name=column1]", "fast:k=5")
    assert column(page, ALL, 2) == ["fast:k=5"] * 3
    page.choose(f"{form} [name=find]", "ODD")
    assert column(page, ALL, 1) == ["code / code-odd"]
    assert page.texts(f"{form} output") == ["1 of 40 rows"]


def test_groups_of_columns(page: Page) -> None:
    def shown() -> list[str]:
        return [text.split("\xa0")[0] for text in page.texts(f"{ALL} thead th")]

    assert shown()[:4] == ["task", "method", "prompts", "speedup (end to end)"]
    assert "TTFT" not in shown()
    show = "form[data-table=all1] [name=show]"
    options = page.js(f"return [...document.querySelector('{show}').options].map((o) => [o.text, o.value])")
    page.choose(show, dict(options)["Rates and latency"])
    assert shown()[:5] == ["task", "method", "prompts", "tok/s", "TTFT"]
    page.choose(show, "")
    assert len(shown()) > 25


# -- questions -----------------------------------------------------------------------------------------------


def test_questions_filter_by_task_text_and_difference(page: Page) -> None:
    assert page.texts("#question-filters output") == ["60 of 60 questions"]
    assert len(page.texts(QUESTIONS)) == 50
    page.click("#more")
    assert len(page.texts(QUESTIONS)) == 60
    page.choose("#question-filters [name=task]", "1")
    assert page.texts("#question-filters output") == ["20 of 60 questions"]
    page.choose("#question-filters [name=differing]", True)
    assert page.texts("#question-filters output") == ["0 of 60 questions"], "slow never differs"
    page.choose(
        "#question-filters [name=method]",
        page.js("return document.querySelector('#question-filters [name=method]').options[2].value"),
    )
    assert page.texts("#question-filters output") == ["7 of 60 questions"]
    page.choose("#question-filters [name=find]", "CAT SLEEPS")
    assert page.texts("#question-filters output") == ["7 of 60 questions"]
    page.choose("#question-filters [name=find]", "code-12")
    assert [text.split("\t")[0] for text in page.texts(QUESTIONS)] == [
        "▸ code-12"
    ] or "code-12" in page.texts(QUESTIONS)[0]
    assert "differs at token 3, logit gap 0.25" in page.texts(QUESTIONS)[0]


def test_a_question_opens_with_the_keyboard_and_marks_the_first_difference(page: Page) -> None:
    page.choose(
        "#question-filters [name=method]",
        page.js("return document.querySelector('#question-filters [name=method]').options[2].value"),
    )
    page.js(f"document.querySelector('{QUESTIONS} button').focus()")
    page.press("Enter")
    assert page.js(f"return document.querySelector('{QUESTIONS} button').ariaExpanded") == "true"
    assert page.texts(".texts h4") == ["vanilla", "fast:k=5"]
    assert page.texts(".texts p") == [BASE, OTHER]
    assert page.texts(".texts mark") == [
        BASE.removeprefix("The quick brown "),
        OTHER.removeprefix("The quick brown "),
    ]
    numbers = page.texts(".detail-box tbody tr")
    assert [line.split("\t")[0].strip() for line in numbers] == [
        "vanilla",
        "slow:k=3",
        "fast:k=3",
        "fast:k=5",
    ]
    assert "500.0 ms" in numbers[0]
    assert "10.50 s" in numbers[0]
    page.press("Enter")
    assert page.texts(".detail-box") == []


def test_equal_texts_stand_once(page: Page) -> None:
    page.click(f"{QUESTIONS} button")
    assert page.texts(".texts p") == [BASE]
    assert page.texts(".texts h4") == ["vanilla and slow:k=3, the same text"]


def test_questions_sort(page: Page) -> None:
    page.click("#question-list thead th:nth-child(3) button")
    assert [int(text) for text in column(page, "#question-list > table", 3)[:4]] == [39, 39, 39, 38]
    page.click("#question-list thead th:nth-child(1) button")
    assert column(page, "#question-list > table", 1)[2].endswith("chat-2"), "which stands before chat-10"


# -- every reader --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["page", "hostile"])
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_nothing_is_wider_than_the_window(tab: Page, files: dict[str, Path], name: str, width: int) -> None:
    tab.open(files[name], width=width)
    tab.click(f"{QUESTIONS} button")
    tab.js("for (const d of document.querySelectorAll('details')) d.open = true")
    assert tab.js("return document.documentElement.scrollWidth") == width
    wide = tab.js(
        "return [...document.querySelectorAll('main *')].filter((e) => !e.closest('.scroll') "
        "&& !e.closest('pre') "
        "&& e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 80))"
    )
    assert wide == []


CONTRASTS = """
const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
const linear = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const light = (c) => { const [r, g, b] = c.map(linear); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const behind = (e) => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
  if (c.length < 4 || c[3] > 0) return c.slice(0, 3); } return [255, 255, 255]; };
const found = {};
for (const e of document.querySelectorAll('body *')) {
  const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  if (!own || !e.getClientRects().length) continue;
  const style = getComputedStyle(e), text = rgb(e.closest('svg') ? style.fill : style.color).slice(0, 3);
  const [a, b] = [light(text), light(behind(e))].sort((x, y) => y - x);
  found[e.tagName + '.' + (e.getAttribute('class') ?? '')] = Math.round(100 * (a + 0.05) / (b + 0.05)) / 100;
}
return found
"""


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_in_light_and_dark(tab: Page, files: dict[str, Path], dark: bool) -> None:
    tab.open(files["page"], dark=dark)
    page_colour = tab.js("return getComputedStyle(document.body).backgroundColor")
    assert (page_colour == "rgb(13, 17, 23)") == dark
    found: dict[str, Any] = tab.js(CONTRASTS)
    assert len(found) > 20
    assert any(name.startswith("text.") for name in found), "figures too"
    assert {name: ratio for name, ratio in found.items() if ratio < 4.5} == {}


def test_on_paper_all_is_open_and_nothing_is_to_click(tab: Page, files: dict[str, Path]) -> None:
    tab.open(files["page"], media="print")
    tab.js("dispatchEvent(new Event('beforeprint'))")
    assert tab.js("return document.querySelectorAll('details:not([open])').length") == 0
    assert tab.texts("nav, form, #question-list, #more") == []
    assert len(column(tab, ALL, 1)) == 40, "with the categories"
    tab.js("dispatchEvent(new Event('afterprint'))")
    assert tab.js("return document.querySelectorAll('details:not([open])').length") > 3


def test_without_scripts_the_tables_and_figures_are_there(tab: Page, files: dict[str, Path]) -> None:
    tab.open(files["page"], script=False)
    tab.send("Emulation.setScriptExecutionDisabled", value=False)
    assert len(column(tab, ALL, 1)) == 40
    assert len(tab.texts("figure h4")) == 8
    assert tab.texts("form") == []
    assert "needs JavaScript" in tab.texts("#questions")[0]


def test_the_keyboard_reaches_everything_in_order(page: Page) -> None:
    reached = []
    for _ in range(300):
        page.press("Tab")
        at = page.js(
            "const e = document.activeElement; return [[...document.querySelectorAll('*')].indexOf(e), "
            "e.tagName, e.innerText?.slice(0, 20) ?? '', getComputedStyle(e).outlineStyle]"
        )
        if at[1] in ("BODY", "HTML"):
            break
        reached.append(at)
    places = [place for place, *_ in reached]
    assert places == sorted(places)
    assert reached[0][2] == "Skip to the verdict"
    assert {"A", "BUTTON", "SELECT", "INPUT", "SUMMARY", "DIV"} <= {tag for _, tag, *_ in reached}
    assert "none" not in {outline for *_, outline in reached}, "the focus can always be seen"
