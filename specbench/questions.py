"""What a task is made of, and how a row of any of the known formats becomes a question."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from os.path import commonprefix
from statistics import median
from string import Formatter
from typing import Any

from specbench.errors import SpecbenchError

Row = Mapping[str, Any]

ID_COLUMNS = ("question_id", "task_id", "id")
PROMPT_COLUMNS = ("prompt", "question", "instruction", "text", "messages", "conversations")
DEFAULT_MAX_NEW_TOKENS = 256  # of tasks that name none
ALPACA_TEMPLATE = "{instruction}\n\n{input}"
USER_ROLES = ("user", "human")


@dataclass(frozen=True)
class Question:
    """One conversation to be had: its user turns. A blank turn is kept; it ends as a recorded trial error."""

    id: str
    task: str
    category: str | None
    turns: tuple[str, ...]
    reference: Any = None

    @property
    def usable(self) -> bool:
        """Whether there is a first turn to ask."""
        return bool(self.turns[0].strip())


@dataclass(frozen=True)
class Task:
    """A named set of questions.

    `sha256` is that of the file as it lies on disk (what `sha256sum FILE` prints), whatever the limit; of a
    Hub dataset, that of the questions fetched. `template` says how a row became a prompt (None: rows hold
    `turns`). `notes` are for the user to read once.
    """

    name: str
    description: str
    licence: str
    max_new_tokens: int
    questions: tuple[Question, ...]
    sha256: str
    source: str
    template: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def categories(self) -> tuple[str, ...]:
        """The categories of its questions, in order of first appearance."""
        return tuple(dict.fromkeys(q.category for q in self.questions if q.category is not None))

    @property
    def turns(self) -> int:
        """The most turns a question has."""
        return max(len(q.turns) for q in self.questions)

    def identity(self) -> dict[str, Any]:
        """What the manifest keeps of a task."""
        return {
            "name": self.name,
            "source": self.source,
            "sha256": self.sha256,
            "template": self.template,
            "licence": self.licence,
            "max_new_tokens": self.max_new_tokens,
            "questions": len(self.questions),
        }


@dataclass(frozen=True)
class Layout:
    """Where a row keeps its question: in one column (a text, a list of turns, or a list of messages), or in
    several that `template`, a format string over the row's columns, puts together."""

    column: str = ""
    template: str | None = None
    category: str | None = "category"
    ids: tuple[str, ...] = ID_COLUMNS

    @property
    def spelled(self) -> str | None:
        """The template as the manifest records it."""
        if self.template is None and self.column == "turns":
            return None
        return self.template or f"{{{self.column}}}"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns without which a row has no prompt."""
        if self.template is None:
            return (self.column,)
        names = (name for _, name, _, _ in Formatter().parse(self.template) if name)
        return tuple(dict.fromkeys(name.partition("[")[0] for name in names))


class RowError(ValueError):
    """What is wrong with a row; whoever reads the rows adds where it stands."""


def detect_layout(row: Row) -> Layout:
    """The layout of a file, from its first row: Spec-Bench's `turns`, else the one known prompt column.

    HumanEval's `prompt` is taken raw, with no instruction around it: a chat target sees the code as the
    user's message, a base model continues it, and what is measured is the file as published.
    """
    if "turns" in row:
        return Layout("turns")
    found = [column for column in PROMPT_COLUMNS if column in row]
    if len(found) > 1:
        raise RowError(f"several columns may hold the prompt ({', '.join(found)}) and there is no 'turns'")
    if not found:
        raise RowError(f"no 'turns' and none of {', '.join(PROMPT_COLUMNS)}; it has: {_names(row)}")
    if found == ["instruction"] and "input" in row:
        return Layout(template=ALPACA_TEMPLATE)
    return Layout(found[0])


def build_questions(
    rows: Iterable[tuple[str, Row]], layout: Layout, task: str, source: str
) -> tuple[Question, ...]:
    """The questions of `rows`, pairs of where a row stands ("line 3") and the row.

    Raises:
        SpecbenchError: naming `source` and where, for a row that is no question or repeats an id; or when no
            row has anything to ask.
    """
    first_seen: dict[str, str] = {}
    questions = []
    for number, (where, row) in enumerate(rows, 1):
        try:
            question = question_from_row(row, layout, task, number)
            if question.id in first_seen:
                raise RowError(f"question id {question.id!r} was already used in {first_seen[question.id]}")
        except RowError as error:
            raise SpecbenchError(
                f"{source}, {where}: {error}",
                'a row looks like {"question_id": 1, "category": "qa", "turns": ["What is …?"]}',
            ) from error
        first_seen[question.id] = where
        questions.append(question)
    if not questions:
        raise SpecbenchError(f"{source} has no rows", "give a task with at least one question")
    if not any(question.usable for question in questions):
        raise SpecbenchError(f"{source}: every prompt is empty", "give a task with at least one prompt")
    return tuple(questions)


def question_from_row(row: Row, layout: Layout, task: str, number: int) -> Question:
    """One question; `number` is its id where the row has none. Raises RowError."""
    turns: tuple[str, ...]
    if layout.template is not None:
        turns = (_fill(layout.template, row),)
    elif layout.column in row:
        turns = _turns(row[layout.column], layout.column)
    else:
        raise RowError(f"no {layout.column!r}; it has: {_names(row)}")
    for turn in turns:
        _check_unicode(turn)
    category = _label(row, layout.category) if layout.category else None
    ids = (_label(row, column) for column in layout.ids)
    question_id = next((found for found in ids if found), str(number))
    return Question(question_id, task, category, turns, row.get("reference"))


def take_round_robin(questions: Sequence[Question], n: int) -> tuple[Question, ...]:
    """The first `n` questions dealt round-robin over their categories.

    Categories come in order of first appearance, a category's questions in file order: of a1 a2 a3 b1, n = 3
    takes a1 b1 a2. Fewer than `n` questions are all taken.
    """
    by_category: dict[str | None, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    longest = max(map(len, by_category.values()), default=0)
    dealt = [group[i] for i in range(longest) for group in by_category.values() if i < len(group)]
    return tuple(dealt[:n])


def shared_prefix(questions: Sequence[Question]) -> dict[str, int]:
    """How much of a first turn another one begins with too: medians over the questions, in characters."""
    turns = sorted(question.turns[0] for question in questions)
    shared = [len(commonprefix(pair)) for pair in pairwise(turns)]  # noqa: RUF071 - text, no paths
    longest = map(max, [0, *shared], [*shared, 0])  # in order, the closest relative is a neighbour
    return {"shared_chars": int(median(longest)), "prompt_chars": int(median(map(len, turns)))}


def _names(row: Row) -> str:
    return ", ".join(map(str, row)) or "nothing"


def _fill(template: str, row: Row) -> str:
    """The template over a row's columns, null columns empty; what an empty last column leaves is stripped."""
    values = {name: "" if value is None else value for name, value in row.items()}
    try:
        return template.format_map(values).rstrip()
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise RowError(f"the template {template!r} finds no {error}; it has: {_names(row)}") from error


def _turns(value: Any, column: str) -> tuple[str, ...]:
    """User turns from a text, a list of texts or a list of messages (the assistant's are not used)."""
    if isinstance(value, str) and column != "turns":
        return (value,)
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        if all(isinstance(turn, str) for turn in value):
            return tuple(value)
        if all(isinstance(message, Mapping) for message in value):
            return _user_turns(value, column)
    wanted = "a non-empty list of strings" if column == "turns" else "a string or a non-empty list of strings"
    raise RowError(f"{column!r} is not {wanted}")


def _user_turns(messages: Sequence[Mapping[str, Any]], column: str) -> tuple[str, ...]:
    """The user's messages: `role`/`content`, or ShareGPT's `from`/`value`."""
    turns = []
    for message in messages:
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if role == "system":
            raise RowError(f"{column!r} has a system message: write it into the first turn")
        if role in USER_ROLES:
            if not isinstance(content, str):
                raise RowError(f"{column!r} has a user message that is not a string")
            turns.append(content)
    if not turns:
        raise RowError(f"{column!r} has no message of a user")
    return tuple(turns)


def _label(row: Row, column: str) -> str | None:
    """A column that names something: a string, or a number as one."""
    value = row.get(column)
    if isinstance(value, bool) or not isinstance(value, str | int | None):
        raise RowError(f"{column!r} is neither a string nor a whole number")
    return None if value is None else str(value)


def _check_unicode(text: str) -> None:
    """Half a surrogate pair is valid in JSON and crashes tokenizers."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"not valid Unicode at character {error.start} of a turn") from error
