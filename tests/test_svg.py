"""The picture of the table: well-formed, calls nobody, and takes hostile text as text."""

from __future__ import annotations

from xml.etree import ElementTree

from test_report import NASTY, manifest, small
from trial_factory import FakeRun, blocks

from specbench.analysis.summary import summarise
from specbench.report import FORMATS


def test_the_picture_shows_the_table() -> None:
    svg = FORMATS["svg"].render(summarise([small()]), [small()])
    words = " ".join("".join(ElementTree.fromstring(svg).itertext()).split())
    assert "vanilla" in words
    assert "fast" in words
    assert "2.00x" in words


def test_the_picture_calls_nobody_and_runs_nothing() -> None:
    trials = blocks(2, {"vanilla": {}, NASTY: {"seconds": 5.0}})
    svg = FORMATS["svg"].render(summarise([FakeRun(trials, manifest(name=NASTY))]), [])
    assert "font-face" not in svg
    assert "url(http" not in svg
    names = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(svg).iter()}
    assert "script" not in names
    assert "a" not in names
