"""The report as one self-contained page: no request leaves it, and all text in it is text.

The page is `page/report.html` (Jinja, escaping everything), with its style and its scripts beside it. A
content security policy in the page forbids every request and every script but ours, by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import shlex
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.analysis.definitions import DEFINITIONS
from specbench.analysis.setting import in_words
from specbench.report import break_even, engines, figures, provenance, tables, words
from specbench.report.base import Format, Row, Summary
from specbench.report.columns import COLUMNS, GROUPS, definitions, known
from specbench.report.figures import Scene, style
from specbench.report.plain import plain, visible
from specbench.report.questions import Packed, pack
from specbench.report.words import Section

if TYPE_CHECKING:
    from jinja2 import Environment

PAGE = Path(__file__).parent / "page"
SCRIPTS = ("tables.js", "questions.js")
LARGEST = 1_990_000  # bytes of the page: a mail takes it, a browser opens it at once
FIGURES = 600_000  # of them for figures; those of later sections are left out beyond it
MANIFESTS = 120_000  # of them for the runs' manifests, at most half of it for one
QUESTIONS = 300_000  # of them kept for questions, at the cost of rows of the largest tables


def render(summary: Summary, runs: Sequence[Any] = ()) -> str:
    """The page."""
    scenes = list(figures.scenes(summary, runs)) if runs else []
    several = len(summary["runs"]) > 1
    found = list(words.sections(summary))
    sections = [_section(section, several) for section in found]
    for shown, drawn in zip(sections, _drawn(scenes), strict=False):
        shown |= drawn
    manifests = [run.manifest for run in runs] or [None] * len(summary["runs"])
    context = {
        "name": ", ".join(run["name"] for run in summary["runs"]),
        "targets": list(dict.fromkeys(run.get("target") or "unknown target" for run in summary["runs"])),
        "sections": sections,
        "engines": [
            {
                "title": found.title,
                "table": tables.engines(found),
                "notes": found.notes,
                "figures": _of_engines(found, number),
            }
            for number, found in enumerate(engines.tables(summary), 1)
        ],
        "break_even": list(break_even.sentences(summary)),
        "warnings": _warnings(summary["warnings"]),
        "runs": [
            _run(run, manifest, MANIFESTS // max(2, len(manifests)))
            for run, manifest in zip(summary["runs"], manifests, strict=True)
        ],
        "definitions": list(_definitions(summary["rows"])),
        "unknown": words.NONE,
    }
    room = LARGEST - _without_questions(context, found, LARGEST - (QUESTIONS if scenes else 0))
    packed = pack(scenes, [section["title"] for section in sections], max(room, 0))
    return _page(context, packed)


def _without_questions(context: dict[str, Any], found: Sequence[Section], room: int) -> int:
    """Give each section its largest table, of as many rows as `room` bytes allow in all; bytes of the page then."""
    size = 0
    for down_to in tables.PLACES:
        for shown, section in zip(context["sections"], found, strict=True):
            shown["everything"] = tables.everything(section, down_to)
            shown["left_out"] = tables.left_out(section, down_to)
        size = len(_page(context, Packed("", 1, 1, 0)).encode())
        if size <= room:
            break
    return size


def _page(context: dict[str, Any], packed: Packed) -> str:
    from markupsafe import Markup

    script = "\n".join(_asset(name) for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assets = {"style": Markup(_asset("style.css")), "script": Markup(script), "digest": digest}  # noqa: S704 - ours
    return _environment().get_template("report.html").render(**context, **assets, packed=packed)


@lru_cache
def _asset(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8").strip()


@lru_cache
def _environment() -> Environment:
    """Everything is escaped, and hidden characters are made visible, unless it is Markup."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(PAGE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: plain(value) if type(value) is str else value,
    )
    environment.filters["sentence"] = words.sentence
    return environment


def _preformatted(text: str) -> Any:
    """Text whose lines are kept."""
    from markupsafe import escape

    return escape(visible(text))


# -- sections --------------------------------------------------------------------------------------------------


def _section(section: Section, several: bool) -> dict[str, Any]:
    swatches = _swatches(section)
    name = section.run["name"]
    return {
        "name": name,
        "command": shlex.join(["specbench", "report", name]),
        "short": ", ".join(
            [name, *in_words(section.load.fields())] if several else section.setting or [name]
        ),
        "title": section.title,
        "setting": section.setting,
        "facts": list(_section_facts(section)),
        "verdicts": list(_verdicts(section, swatches)),
        "overall": tables.overall(section),
        "matrix": tables.matrix(section) if len(section.tasks) > 1 else None,
        "tasks": section.tasks,
        "methods": [row["method"] for row in section.overall],
        "swatches": swatches,
        "figures": [],
        "undrawn": False,
    }


def _swatches(section: Section) -> dict[str, str]:
    """Method -> the CSS variable of its colour in the figures."""
    looks = style.looks([row["method"] for row in section.overall])
    return {method: style.VARIABLES[look.colour] for method, look in looks.items()}


def _section_facts(section: Section) -> Iterator[tuple[str, str]]:
    """What the reader must know before any number: where, what, how much."""
    base = next((row for row in section.overall if row["method"] == words.BASELINE), None)
    details = section.run.get("target_details") or {}
    prompts = max((row["prompts"] for row in section.overall), default=0)
    engine = section.run.get("engine") or {}
    yield "engine", " ".join(str(engine[key]) for key in ("name", "version") if engine.get(key)) or words.NONE
    yield "machine", section.run.get("machine") or words.NONE
    yield (
        "weights",
        ", ".join(dict.fromkeys(str(v) for k in ("dtype", "quantization") if (v := details.get(k))))
        or words.NONE,
    )
    yield "measured", f"{prompts} prompts, {section.where}"
    if base is not None:
        yield (
            "vanilla",
            f"{words.number(base['tokens_per_s'], 1)} tok/s, TTFT {words.seconds(base['ttft_s'])}",
        )
    yield "when", str(section.run.get("start") or words.NONE).partition("T")[0]


# -- warnings and verdicts -----------------------------------------------------------------------------------


def _warnings(warnings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of a run that say the same of several methods and have one cure stand together."""
    found: dict[tuple[str, ...], list[str]] = {}
    for warning in warnings:
        found.setdefault((warning["code"], warning["run"], warning["cure"]), []).append(warning["message"])
    return [
        {"code": code, "run": run, "cure": cure, "messages": messages, "count": len(messages)}
        for (code, run, cure), messages in found.items()
    ]


def _verdicts(section: Section, swatches: dict[str, str]) -> Iterator[dict[str, Any]]:
    """The fastest first."""
    rows = [row for row in section.overall if row["method"] != words.BASELINE]
    rows.sort(key=lambda row: -(row["speedup"]["point"] or 0))
    scale = _scale(rows)
    for row in rows:
        yield {
            "method": row["method"],
            "swatch": swatches[row["method"]],
            "sentence": f"{words.verdict(row, section)}.",
            "extremes": words.extremes(row, section),
            "experts": words.experts(row, section),
            "speedup": words.times(row["speedup"]["point"]),
            "effect": words.effect(row),
            "strip": {name: _at(row["speedup"][name], scale) for name in ("low", "point", "high")},
            "one": _at(1.0, scale),
            "output": words.output(row),
            "differs": bool(row["compared"]) and row["identical"] != row["compared"],
        }


def _scale(rows: Sequence[Row]) -> tuple[float, float]:
    """Logarithms of the smallest and the largest speedup, and 1 in between."""
    values = [v for row in rows for v in row["speedup"].values() if v]
    low, high = min([*values, 0.9]), max([*values, 1.1])
    return math.log(low) - 0.05, math.log(high) + 0.05


def _at(value: float | None, scale: tuple[float, float]) -> str | None:
    """A place on the scale in percent."""
    return None if not value else f"{100 * (math.log(value) - scale[0]) / (scale[1] - scale[0]):.1f}"


# -- figures -------------------------------------------------------------------------------------------------


def _drawn(scenes: Sequence[Scene]) -> Iterator[dict[str, Any]]:
    """The figures of each scene, until one takes more room than is left for figures; whether any are missing."""
    left = FIGURES
    for number, scene in enumerate(scenes, 1):
        found: list[dict[str, Any]] = []
        with style.styled():
            for drawn in figures.draw(scene) if left > 0 else ():
                figure = _figure(drawn, f"s{number}")
                left -= len(figure["svg"])
                if left < 0:
                    break
                found.append(figure)
        yield {"figures": found, "undrawn": left <= 0}


def _of_engines(table: engines.EngineTable, number: int) -> list[dict[str, Any]]:
    with style.styled():
        return [_figure(drawn, f"e{number}") for drawn in figures.draw_engines(table)]


def _figure(drawn: figures.Drawn, part: str) -> dict[str, Any]:
    from markupsafe import Markup

    drawing, name = drawn.drawing, f"{part}-{drawn.drawing.name}"
    svg = style.inline_svg(drawn.figure, name, drawing.title, drawn.said)
    return {
        "name": name,
        "title": drawing.title,
        "caption": drawing.caption,
        "said": drawn.said,
        "svg": Markup(svg),  # noqa: S704 - from ElementTree, which escapes
    }


# -- where it comes from -------------------------------------------------------------------------------------


def _run(run: dict[str, Any], manifest: dict[str, Any] | None, room: int) -> dict[str, Any]:
    """What the page says of a run; of its manifest the first `room` characters."""
    text = json.dumps(manifest, indent=2, ensure_ascii=False, default=str) if manifest else ""
    if len(text) > room:
        text = text[:room] + "\n… cut here; the whole is in manifest.json"
    return {
        "name": run["name"],
        "facts": list(provenance.facts(run)),
        "command": _preformatted(provenance.command_line(run["argv"])) if run.get("argv") else None,
        "manifest": _preformatted(text),
    }


def _definitions(rows: Sequence[Row]) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """(group, (title, field, meaning) of each field in it)."""
    columns = known(COLUMNS, rows)
    for group, title in GROUPS.items():
        if found := list(definitions(column for column in columns if column.group == group)):
            yield title, found
    shown = {column.root for column in columns}
    rest = [(field, "", text.replace("`", "")) for field, text in DEFINITIONS.items() if field not in shown]
    yield "Other fields of report.csv and report.json", rest


FORMAT = Format("html", "report.html", render)
