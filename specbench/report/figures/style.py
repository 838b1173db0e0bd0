"""How figures look, and how a matplotlib figure becomes an SVG inside a page or a file of its own.

Colours are Okabe and Ito's (safe for colour-blind readers); a method keeps its colour and its marker in every
figure. The page maps the colours below to CSS variables, so that one SVG suits light and dark.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from specbench.report.plain import plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, LINE, GRID, CARD, GREY = "#1b1f24", "#8c959f", "#d8dee4", "#ffffff", "#6e7781"
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", INK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
VARIABLES = {INK: "ink", LINE: "line", GRID: "grid", CARD: "card", GREY: "grey"} | {
    colour: f"m{number}" for number, colour in enumerate(PALETTE[:-1])
}
DASHED = (0, (4, 3))
WIDTH = 6.2  # inches; 72 SVG units each
LABEL = 34  # characters of a method's label before its middle is left out

RC: Any = {
    "svg.fonttype": "none",  # text stays text: small, themed by the page, and found by its search
    "svg.hashsalt": "specbench",
    "text.parse_math": False,  # a name with a $ is a name
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 8.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.edgecolor": LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "legend.frameon": False,
    "hatch.linewidth": 0.7,
}

SVG = "{http://www.w3.org/2000/svg}"
XLINK = "{http://www.w3.org/1999/xlink}"


@dataclass(frozen=True)
class Look:
    """A method's colour, marker and short label, the same in every figure."""

    colour: str
    marker: str
    label: str


def looks(methods: list[str]) -> dict[str, Look]:
    """Of the methods of a run, in order; vanilla and vanilla-again are grey."""
    shorts = dict(zip(methods, shortened(methods), strict=True))
    others = [method for method in methods if not method.startswith("vanilla")]
    found = {
        method: Look(PALETTE[i % len(PALETTE)], MARKERS[i % len(MARKERS)], shorts[method])
        for i, method in enumerate(others)
    }
    return {method: found.get(method, Look(GREY, "d", shorts[method])) for method in methods}


def shortened(labels: Sequence[str]) -> list[str]:
    """Labels in one line that fit a legend or an axis and still differ from each other."""
    found: list[str] = []
    for label in map(plain, labels):
        half = (LABEL - 1) // 2
        short = label if len(label) <= LABEL else f"{label[:half]}…{label[-half:]}"
        found.append(short if short not in found else f"{short} ({len(found) + 1})")
    return found


def new_figure(height: float, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure and its axes. No pyplot: no state outlives the figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(1, columns, **options)


@contextmanager
def styled() -> Iterator[None]:
    """Matplotlib as it comes, whatever the user's own settings, in our style; inside it figures are made."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the reader's fonts will have it
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(RC)
        yield


def legend(figure: Figure, axes: Any, columns: int = 6) -> None:
    """One legend above the figure, which grows by it, where there is more than one thing to tell apart."""
    handles, labels = axes.get_legend_handles_labels()
    longest = max(map(len, labels), default=0)
    if len(labels) > 1:
        fitting = max(1, min(columns, len(labels), 84 // (longest + 6)))
        width, height = figure.get_size_inches()
        figure.set_size_inches(width, height + 0.19 * math.ceil(len(labels) / fitting))
        figure.legend(handles, labels, loc="outside upper left", ncols=fitting, handlelength=1.8)


def png(figure: Figure) -> bytes:
    return _saved(figure, "png", dpi=200)


def svg(figure: Figure) -> bytes:
    """A file of its own, on white."""
    return _saved(figure, "svg", metadata={"Date": None})


def inline_svg(figure: Figure, name: str, title: str, description: str) -> str:
    """An SVG element for a page: colours as CSS variables, text in the page's font, a title and a description."""
    text = _saved(figure, "svg", metadata={"Date": None}, transparent=True).decode()
    root = ElementTree.fromstring(text)  # noqa: S314 - matplotlib wrote it, and it escapes
    used = set(re.findall(r"url\(#([^)]+)\)", text)) | set(re.findall(r'href="#([^"]+)"', text))
    _tidy(root, used, name)
    for tag, words in (("desc", description), ("title", title)):
        element = ElementTree.Element(f"{SVG}{tag}", {"id": f"{name}-{tag}"})
        element.text = plain(words)
        root.insert(0, element)
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.attrib |= {"role": "img", "aria-labelledby": f"{name}-title {name}-desc"}
    ElementTree.register_namespace("", SVG.strip("{}"))
    out = ElementTree.tostring(root, encoding="unicode")
    return out.replace(' xmlns="http://www.w3.org/2000/svg"', "", 1)


def _saved(figure: Figure, form: str, **options: Any) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format=form, **options)
    return out.getvalue()


def _tidy(parent: ElementTree.Element, used: set[str], name: str) -> None:
    """Drop what a page does not need and what two figures on it would both claim; shorten the rest."""
    for child in list(parent):
        if child.tag in (f"{SVG}metadata", f"{SVG}style") or not child.tag.startswith(SVG):
            parent.remove(child)
            continue
        _tidy(child, used, name)
        if child.tag in (f"{SVG}g", f"{SVG}defs") and len(child) == 0:
            parent.remove(child)
    parent.text = parent.text if parent.text and parent.text.strip() else None
    parent.tail = None
    for key, value in list(parent.attrib.items()):
        del parent.attrib[key]
        if key == "id" and value not in used:
            continue
        if key == "transform" and value.startswith("rotate(-0 "):
            continue
        if key in ("fill", "stroke"):  # of a hatch; variables work in a style only
            key, value = "style", f"{key}: {value}"
        parent.set("href" if key == f"{XLINK}href" else key, _short_value(key, value, name))


def _short_value(key: str, value: str, name: str) -> str:
    if key == "id":
        return f"{name}-{value}"
    value = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", value)
    value = value.replace("#", f"#{name}-", 1) if value.startswith("#") and "href" in key else value
    if key == "style":
        value = re.sub(r"font-family: [^;]*(; )?", "", value)
        return re.sub(r"#[0-9a-f]{6}", lambda match: _variable(match[0]), value)
    if key in ("d", "x", "y", "transform", "width", "height"):
        value = re.sub(r"-?\d+\.\d+", lambda match: f"{float(match[0]):.2f}".rstrip("0").rstrip("."), value)
        value = " ".join(value.split())
    return value


def _variable(colour: str) -> str:
    return f"var(--{VARIABLES[colour]})" if colour in VARIABLES else colour
