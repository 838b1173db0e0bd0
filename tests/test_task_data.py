"""The bundled prompts: every tasks/*.jsonl with its TOML is well formed and varied enough to measure with."""

import json
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "tasks"
BUNDLED = {"chat", "code", "translation", "summarization", "reasoning", "qa", "rag", "structured"}
FIELDS = {"description": str, "licence": str, "turns": int, "category_field": str, "max_new_tokens": int}
CJK = re.compile(r"([\u3040-\u30ff\u3400-\u9fff])")

each_task = pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.jsonl")))


def read_rows(name: str) -> list[dict]:
    with (FOLDER / f"{name}.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def read_toml(name: str) -> dict:
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def opening(text: str) -> tuple[str, ...]:
    """The first ten words in lower case. Chinese and Japanese have no spaces: there a character is a word."""
    return tuple(CJK.sub(r" \1 ", text).lower().split()[:10])


def is_text(value) -> bool:
    return isinstance(value, str) and bool(value.strip())


def repeated(values) -> list:
    return [value for value, count in Counter(values).items() if count > 1]


def test_all_bundled_tasks_are_there():
    assert {path.stem for path in FOLDER.glob("*.jsonl")} >= BUNDLED
    assert {path.stem for path in FOLDER.glob("*.toml")} >= BUNDLED


@each_task
def test_at_least_thirty_rows(name):
    assert len(read_rows(name)) >= 30


@each_task
def test_rows_have_the_format(name):
    for row in read_rows(name):
        assert {"question_id", "category", "turns"} <= row.keys(), row
        assert row.keys() <= {"question_id", "category", "turns", "reference"}, row["question_id"]
        assert is_text(row["question_id"]), row
        assert is_text(row["category"]), row["question_id"]
        assert isinstance(row["turns"], list), row["question_id"]
        reference = row.get("reference", ["none"])
        assert isinstance(reference, list), row["question_id"]
        assert reference, row["question_id"]
        assert all(is_text(text) for text in reference), row["question_id"]


@each_task
def test_question_ids_are_unique(name):
    assert repeated(row["question_id"] for row in read_rows(name)) == []


@each_task
def test_turns_are_not_empty(name):
    for row in read_rows(name):
        assert row["turns"], row["question_id"]
        assert all(is_text(turn) for turn in row["turns"]), row["question_id"]


@each_task
def test_no_two_prompts_begin_alike(name):
    """Prompts with a common beginning would let a prefix cache, not the method, decide the result."""
    assert repeated(opening(row["turns"][0]) for row in read_rows(name)) == []


@each_task
def test_text_is_stored_as_it_reads(name):
    r"""UTF-8, not \uXXXX: the files are meant to be read in a diff."""
    text = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8")
    assert re.findall(r"\\u[0-9a-f]{4}", text) == []
    assert "\ufffd" not in text


@each_task
def test_toml_has_its_fields(name):
    toml = read_toml(name)
    for field, kind in FIELDS.items():
        assert type(toml.get(field)) is kind, field
    assert toml["description"].strip()
    assert "\n" not in toml["description"]
    assert toml["licence"] == "Apache-2.0"
    assert toml["category_field"] == "category"
    assert toml["max_new_tokens"] > 0
    assert toml["turns"] == max(len(row["turns"]) for row in read_rows(name))


def test_chat_has_two_or_three_turns():
    assert {len(row["turns"]) for row in read_rows("chat")} <= {2, 3}


def test_translation_covers_six_pairs_and_both_directions_of_chinese():
    pairs = {row["category"] for row in read_rows("translation")}
    assert all(re.fullmatch(r"[a-z]{2}-[a-z]{2}", pair) for pair in pairs), pairs
    assert len(pairs) >= 6
    assert {"zh-en", "en-zh"} <= pairs


@pytest.mark.parametrize("name", ["summarization", "rag"])
def test_long_inputs_are_long_but_not_too_long(name):
    lengths = {row["question_id"]: len(turn) for row in read_rows(name) for turn in row["turns"]}
    assert {key: length for key, length in lengths.items() if not 1500 <= length <= 6500} == {}
