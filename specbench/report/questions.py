"""The report's drill-down: every question with each method's text, counts and times, packed small for a page.

The packed data is JSON, deflated and in base64. Equal texts are stored once, and those of one question side by
side, so that deflate finds what they share.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specbench.report.plain import plain, visible
from specbench.report.words import BASELINE

if TYPE_CHECKING:
    from specbench.report.figures import Scene
    from specbench.store import Trial

CUTS = (2000, 1000, 500, 250, 100, 0)  # characters of a text that are kept after its first difference
LEVEL = 6


@dataclass(frozen=True)
class Packed:
    """The data as it stands in the page, and what of the run is in it.

    Args:
        data: base64 of deflated JSON.
        kept: questions in it.
        total: questions measured.
        cut: characters kept of each text beyond its first difference; None where texts are whole.
    """

    data: str
    kept: int
    total: int
    cut: int | None


class _Index:
    """Values by number, each stored once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._places: dict[Any, int] = {}

    def __call__(self, value: Any) -> int:
        place = self._places.setdefault(value, len(self.values))
        if place == len(self.values):
            self.values.append(value)
        return place


@dataclass
class _Data:
    """What the page's script reads; see `questions.js` for the order of the fields."""

    sections: list[str] = field(default_factory=list)
    methods: _Index = field(default_factory=_Index)
    tasks: _Index = field(default_factory=_Index)
    categories: _Index = field(default_factory=_Index)
    texts: _Index = field(default_factory=_Index)
    needed: dict[int, int] = field(default_factory=dict)  # text -> characters up to its last first difference
    questions: list[list[Any]] = field(default_factory=list)

    @property
    def longest(self) -> int:
        """Most characters that a text has behind its last first difference."""
        tails = (len(text) - self.needed.get(number, 0) for number, text in enumerate(self.texts.values))
        return max(tails, default=0)

    def json(self, cut: int | None, count: int) -> bytes:
        questions = self.questions[:count]
        used = sorted({row[1] for question in questions for row in question[-1] if row[1] is not None})
        place = {text: number for number, text in enumerate(used)}
        found = {
            "sections": self.sections,
            "methods": [plain(method) for method in self.methods.values],
            "tasks": [plain(task) for task in self.tasks.values],
            "categories": [None if c is None else plain(c) for c in self.categories.values],
            "texts": [self._text(text, cut) for text in used],
            "questions": [
                [*head, [[row[0], place.get(row[1]), *row[2:]] for row in rows]] for *head, rows in questions
            ],
        }
        return json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode()

    def _text(self, number: int, cut: int | None) -> str:
        text: str = self.texts.values[number]
        end = len(text) if cut is None else self.needed.get(number, 0) + cut
        return visible(text[:end]) + ("…" if end < len(text) else "")


def pack(scenes: Sequence[Scene], titles: Sequence[str], room: int) -> Packed:
    """Pack the scenes' trials into at most `room` bytes: texts are cut as far as that takes, and only then are
    questions left out, the last ones first."""
    data = _Data(sections=[plain(title) for title in titles])
    for number, scene in enumerate(scenes):
        for trials in _by_question(scene.trials):
            data.questions.append(_question(data, number, trials))
    total = len(data.questions)
    for cut in (None, *(cut for cut in CUTS if cut < data.longest)):
        packed = _pack(data, cut, total)
        if len(packed) <= room:
            return Packed(packed, total, total, cut)
    count = total
    while count and len(packed) > room:
        count //= 2
        packed = _pack(data, 0, count)
    return Packed(packed, count, total, 0)


def _pack(data: _Data, cut: int | None, count: int) -> str:
    return base64.b64encode(zlib.compress(data.json(cut, count), LEVEL)).decode()


def _by_question(trials: Sequence[Trial]) -> list[list[Trial]]:
    """The trials of each (task, question, turn, repeat), as they came; the last attempt of each method."""
    found: dict[tuple[Any, ...], dict[str, Trial]] = {}
    for trial in trials:
        found.setdefault((trial.task, trial.question, trial.turn, trial.repeat), {})[trial.method] = trial
    return [list(methods.values()) for methods in found.values()]


def _question(data: _Data, section: int, trials: list[Trial]) -> list[Any]:
    first = trials[0]
    base = next((trial for trial in trials if trial.method == BASELINE), None)
    trials = sorted(trials, key=lambda trial: trial.method != BASELINE)
    return [
        section,
        data.tasks(first.task),
        data.categories(first.category),
        plain(first.question),
        first.turn + 1,
        first.repeat + 1,
        first.prompt_tokens,
        [_row(data, trial, base) for trial in trials],
    ]


def _row(data: _Data, trial: Trial, base: Trial | None) -> list[Any]:
    agreement = trial.agreement or {}
    own, theirs = trial.text, None if base is None else base.text
    if own is not None and theirs is not None and own != theirs:
        shared = _shared(own, theirs)
        for place in (data.texts(own), data.texts(theirs)):
            data.needed[place] = max(shared, data.needed.get(place, 0))
    accepted = [count for count in trial.rounds.accepted or () if count is not None]
    return [
        data.methods(trial.method),
        None if own is None else data.texts(own),
        trial.output_tokens,
        trial.rounds.total,
        sum(accepted),
        _milliseconds(trial.prefill_s),
        _milliseconds(trial.decode_s),
        None if agreement.get("same") is None else int(agreement["same"]),
        agreement.get("first_difference"),
        _rounded(agreement.get("logit_gap"), 2),
        trial.finish,
    ]


def _shared(a: str, b: str) -> int:
    """How many characters two texts have in common before they part."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _milliseconds(seconds: float | None) -> float | int | None:
    return None if seconds is None else _rounded(seconds * 1e3, 4)


def _rounded(value: float | None, digits: int) -> float | int | None:
    """To so many significant digits, as short as JSON can write it."""
    if value is None:
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() else short
