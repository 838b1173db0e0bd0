"""Datastores: building, both forms on disk, what is mapped and not loaded, and every way to get it wrong."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import json
import mmap
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_datastore
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_folder import Workplace, save_folder, specbench

from specbench.errors import SpecbenchError
from specbench.models.datastore import FACTS, SUFFIXES, TOKENS, Datastore, Shard, open_datastore
from specbench.models.datastore_build import build
from specbench.models.load import load_tokenizer
from specbench.models.suffix_array import suffix_array

Rest = importlib.import_module("specbench.methods.rest").Rest


@pytest.fixture(scope="module")
def tokenizer(tiny_target: Path) -> Any:
    return load_tokenizer(str(tiny_target))[1]


@pytest.fixture
def made(tiny_target: Path, tmp_path: Path) -> Path:
    """A datastore of one small text, built by the command."""
    text = tmp_path / "text.txt"
    text.write_text("abc abd abc\n" * 3)
    assert (
        specbench("datastore", "build", text, "--target", tiny_target, "--output", tmp_path / "s").code == 0
    )
    return tmp_path / "s"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([0, 1, 255, 256, 65_535, 70_000, 2**32 - 1]), max_size=40), st.booleans())
def test_suffix_array_is_the_sorted_suffixes(tokens: list[int], wide: bool) -> None:
    kind = np.uint32 if wide else np.uint16
    text = [min(token, np.iinfo(kind).max) for token in tokens] or [0]
    places = suffix_array(np.array(text, dtype=kind))
    assert places.dtype == np.int32
    assert places.tolist() == sorted(range(len(text)), key=lambda place: text[place:])


# -- building ------------------------------------------------------------------------------------------------


def documents(store: Datastore, tokenizer: Any) -> list[str]:
    (shard,) = store.shards
    text: list[list[int]] = [[]]
    for token in shard.tokens.tolist():
        if token == np.iinfo(shard.tokens.dtype).max:
            text.append([])
        else:
            text[-1].append(token)
    assert text.pop() == [], "a document's end closes the last one too"
    return [tokenizer.decode(ids) for ids in text]


def test_texts_and_rows_become_documents(tiny_target: Path, tmp_path: Path, tokenizer: Any) -> None:
    plain, rows, packed = tmp_path / "a.txt", tmp_path / "b.jsonl", tmp_path / "c.jsonl.gz"
    plain.write_text("one\ntwo\n\nthree")
    shapes = [
        {"text": "four"},
        {"turns": ["five", "six"], "category": "x"},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
    ]
    rows.write_text("\n\n".join(map(json.dumps, shapes)))
    packed.write_bytes(
        gzip.compress(json.dumps({"conversations": [{"from": "human", "value": "hey"}]}).encode())
    )
    result = specbench(
        "datastore", "build", plain, rows, packed, "--target", tiny_target, "--output", tmp_path / "s"
    )
    assert (result.code, result.out.strip()) == (0, str(tmp_path / "s"))
    store = open_datastore(result.out.strip())
    assert documents(store, tokenizer) == ["one\ntwo\n\nthree", "four", "five\nsix", "hi\nho", "hey"]
    assert (store.facts["documents"], store.facts["tokens"]) == (5, len(store))
    assert store.facts["target"] == "tiny"
    (shard,) = store.shards
    assert shard.suffixes.tolist() == sorted(
        range(len(store)), key=lambda place: shard.tokens[place:].tolist()
    )


def test_a_long_text_is_read_in_parts(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specbench.models.datastore_build.BATCH_CHARACTERS", 64)
    text = "".join(f"line {number}\n" for number in range(50)) + "a last line that is longer than a part"
    (tmp_path / "a.txt").write_text(text)
    build([tmp_path / "a.txt"], tokenizer, "tiny", tmp_path / "s")
    assert documents(open_datastore(str(tmp_path / "s")), tokenizer) == [text]


def test_a_large_vocabulary_takes_32_bits(tmp_path: Path) -> None:
    class Large:
        def __len__(self) -> int:
            return 128_256

        def get_vocab(self) -> dict[str, int]:
            return {"x": 128_000}

        def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
            return {"input_ids": [[128_000 + ord(c) % 256 for c in text] for text in texts]}

    (tmp_path / "a.txt").write_text("abab")
    build([tmp_path / "a.txt"], Large(), "large", tmp_path / "s")
    (shard,) = open_datastore(str(tmp_path / "s")).shards
    assert (shard.tokens.dtype, shard.tokens.max()) == (np.uint32, 2**32 - 1)
    assert list(shard.find([128_097])) == [0, 1]


def test_by_default_it_lies_in_the_cache(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "words.txt").write_text("some words")
    for text in ("some words", "other words, more of them"):  # the second time in place of the first
        (tmp_path / "words.txt").write_text(text)
        result = specbench("datastore", "build", tmp_path / "words.txt", "--target", tiny_target)
        assert result.code == 0, result.err
        assert "rest:datastore=words-tiny" in result.err
        assert len(open_datastore("words-tiny")) == len(text) + 1
    with pytest.raises(SpecbenchError) as caught:
        open_datastore("wods")
    assert "known ones: words-tiny" in caught.value.hint


BAD_FILES: dict[str, tuple[str, bytes, str]] = {
    "no text": ("a.txt", b"", "there is no text in the files"),
    "not UTF-8": ("a.txt", b"\xff\xfe\xfa", "a.txt cannot be read"),
    "not gzip": ("a.txt.gz", b"abc", "a.txt.gz cannot be read"),
    "cut gzip": ("a.txt.gz", gzip.compress(b"abc" * 99)[:-9], "a.txt.gz cannot be read"),
    "not JSON": ("a.jsonl", b'{"text": "x"}\n{"text"', "a.jsonl, line 2: "),
    "no column": ("a.jsonl", b'{"prompt": "x"}', "a.jsonl, line 1: none of text, turns"),
    "no object": ("a.jsonl", b"[1]", "a.jsonl, line 1: none of text, turns"),
    "no list": ("a.jsonl", b'{"turns": 3}', "neither a text nor a list"),
    "no text in it": ("a.jsonl", b'{"turns": ["a", 3]}', "has a turn that is no text"),
    "half a pair": ("a.jsonl", b'{"text": "\\ud800"}', "a.jsonl, line 1: "),
}


@pytest.mark.parametrize(("name", "data", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_files_that_cannot_be_stored(
    tiny_target: Path, tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(data)
    output = tmp_path / "s"
    result = specbench("datastore", "build", tmp_path / name, "--target", tiny_target, "--output", output)
    assert result.code == 2
    assert message in result.error_lines[0]
    assert len(result.error_lines) == 2
    assert not output.exists()


def test_other_things_that_end_a_build(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, target = tmp_path / "a.txt", ["--target", tiny_target]
    text.write_text("words")

    def error(*args: object) -> str:
        result = specbench("datastore", "build", *args)
        assert (result.code, len(result.error_lines)) == (2, 2), result.err
        return result.error_lines[0]

    assert "there is no such file" in error(tmp_path / "b.txt", *target)
    assert "has no tokenizer" in error(text, "--target", "random:llama-8b")
    assert "no such folder" in error(text, "--target", "./nowhere")
    assert "exists and is no datastore" in error(text, *target, "--output", tmp_path)
    assert "cannot write" in error(text, *target, "--output", text / "below-a-file")
    monkeypatch.setitem(sys.modules, "pydivsufsort", None)
    assert "needs pydivsufsort" in error(text, *target, "--output", tmp_path / "s")


# -- reading -------------------------------------------------------------------------------------------------


def mapped(array: Any) -> bool:
    while not isinstance(array, mmap.mmap):
        array = array.obj if isinstance(array, memoryview) else getattr(array, "base", None)
        if array is None:
            return False
    return True


@pytest.mark.parametrize("kind", ["<u2", "<u4"])
def test_the_official_form(tmp_path: Path, kind: str) -> None:
    texts = [[3, 1, 2, 3, 1], [1, 2, 9] if kind == "<u2" else [1, 2, 90_000], [5]]
    store = open_datastore(str(tiny_datastore.write_official(tmp_path / "a.idx", texts, kind)))
    assert [shard.tokens.tolist() for shard in store.shards] == texts
    assert all(mapped(part) for shard in store.shards for part in (shard.tokens, shard.suffixes))
    found = store.search([1, 2], longest=2, shortest=2, matches=9, depth=2, vocab=100_000)
    assert found.tolist() == [[3, 1], [texts[1][2], -1]]


def test_ours_is_mapped(made: Path) -> None:
    (shard,) = open_datastore(str(made)).shards
    assert mapped(shard.tokens)
    assert mapped(shard.suffixes)
    assert type(shard.tokens) is np.ndarray


def facts(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        known = json.loads((path / FACTS).read_text())
        change(known)
        (path / FACTS).write_text(json.dumps(known))

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no facts": (lambda path: (path / FACTS).unlink(), "is no datastore: there is no datastore.json in it$"),
    "facts no JSON": (lambda path: (path / FACTS).write_text("{"), "is no datastore"),
    "facts a list": (lambda path: (path / FACTS).write_text("[]"), "is no datastore"),
    "newer": (facts(lambda known: known.update(schema=99)), "is of a newer form"),
    "no tokenizer": (facts(lambda known: known.pop("tokenizer")), "do not fit together"),
    "other count": (facts(lambda known: known.update(tokens=7)), "do not fit together"),
    "no suffixes": (lambda path: (path / SUFFIXES).unlink(), "is no datastore"),
    "cut off": (
        lambda path: (path / TOKENS).write_bytes((path / TOKENS).read_bytes()[:-8]),
        "is no datastore",
    ),
    "empty file": (lambda path: (path / TOKENS).write_bytes(b""), "is no datastore"),
    "floats": (
        lambda path: np.save(path / TOKENS, np.load(path / TOKENS).astype(float)),
        "do not fit together",
    ),
    "a matrix": (
        lambda path: np.save(path / SUFFIXES, np.load(path / SUFFIXES)[:, None]),
        "do not fit together",
    ),
    "a single number": (lambda path: np.save(path / SUFFIXES, np.int32(3)), "do not fit together"),
    "places after the end": (
        lambda path: np.save(path / SUFFIXES, np.load(path / SUFFIXES) + 10_000),
        "a place outside its text",
    ),
    "places before the beginning": (
        lambda path: np.save(path / SUFFIXES, np.load(path / SUFFIXES) - 1),
        "a place outside its text",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_damaged(made: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(made)
    with pytest.raises(SpecbenchError, match=message):
        open_datastore(str(made))


@pytest.mark.parametrize("change", [[0, 0], [3, 3], [10, 10], [24, 24], [-1, -1], [12, 14]])
def test_a_damaged_official_file(tmp_path: Path, change: list[int]) -> None:
    """Cut off at a place, or with two bytes left out of it, the lengths before them put right."""
    path = tiny_datastore.write_official(tmp_path / "a.idx", [[3, 1, 2, 3, 1]])
    data, (stop, start) = path.read_bytes(), change
    if start > stop:
        data = (8).to_bytes(4, "little") + data[4:]
    path.write_bytes(data[:stop] + (data[start:] if start > stop else b""))
    with pytest.raises(SpecbenchError, match="is no datastore of REST"):
        open_datastore(str(path))


def test_official_places_outside_the_text(tmp_path: Path) -> None:
    path = tiny_datastore.write_official(tmp_path / "a.idx", [[3, 1, 2, 3, 1]])
    path.write_bytes(path.read_bytes()[:-4] + (5).to_bytes(4, "little"))
    with pytest.raises(SpecbenchError, match="a place outside its text"):
        open_datastore(str(path))


@pytest.mark.parametrize("place", [-1, 6])
def test_places_outside_the_text_that_opening_did_not_meet(place: int) -> None:
    good = tiny_datastore.shard([1, 2, 1, 2, 1, 2])
    for entry in range(6):
        suffixes = good.suffixes.copy()
        suffixes[entry] = place
        bad = Shard(good.tokens, suffixes)
        for look in (
            lambda: bad.continues(range(entry, 6), 1, 9),  # noqa: B023
            lambda: bad.following(range(entry, 6), 1, 2, 9),  # noqa: B023
            lambda: bad.first_following(range(entry, 6), 1, 2, 9),  # noqa: B023
        ):
            with pytest.raises(SpecbenchError, match="a place outside its text"):
                look()
    with pytest.raises(SpecbenchError, match="a place outside its text"):
        Shard(good.tokens, np.full(6, place, dtype=np.int32)).find([1])


def test_who_it_is_follows_from_its_tokens(tmp_path: Path, tokenizer: Any) -> None:
    def identity(text: str) -> dict[str, Any]:
        (tmp_path / "a.txt").write_text(text)
        build([tmp_path / "a.txt"], tokenizer, "tiny", tmp_path / "s", fresh=True)
        return open_datastore(str(tmp_path / "s")).identity()

    first, second = identity("abc"), identity("abd")
    assert first["tokens"] == second["tokens"]
    assert first["sha256"] != second["sha256"]
    assert identity("abc") == first
    tokens = open_datastore(str(tmp_path / "s")).shards[0].tokens
    assert hashlib.sha256(tokens.tobytes()).hexdigest() == identity("abc")["sha256"]
    official = tiny_datastore.write_official(tmp_path / "a.idx", [tokens.tolist()])
    assert open_datastore(str(official)).identity()["sha256"] == first["sha256"]


def test_a_datastore_of_other_files_is_not_replaced_unasked(tiny_target: Path, tmp_path: Path) -> None:
    one, other, output = tmp_path / "a" / "text.txt", tmp_path / "b" / "text.txt", tmp_path / "s"
    for file in (one, other):
        file.parent.mkdir()
        file.write_text(file.parent.name)

    def built(file: Path, *more: object) -> Any:
        return specbench("datastore", "build", file, "--target", tiny_target, "--output", output, *more)

    assert "replaces" not in built(one).err
    assert f"replaces {output}, of the same files" in built(one).err
    refused = built(other)
    assert refused.code == 2
    assert refused.error_lines[0].endswith(f"{output} is a datastore of other files: {one}")
    assert "--fresh" in refused.error_lines[1]
    assert open_datastore(str(output)).facts["files"] == [str(one)]
    result = built(other, "--fresh")
    assert result.code == 0
    assert f"replaces {output}, of other files" in result.err
    assert open_datastore(str(output)).facts["files"] == [str(other)]
    (output / FACTS).write_text("{")
    assert built(other).code == 2
    assert built(other, "--fresh").code == 0


def test_the_help_names_both_methods_that_use_it() -> None:
    for arguments in (["--help"], ["datastore", "--help"], ["datastore", "build", "--help"]):
        lines = specbench(*arguments).out.splitlines()
        text = "\n".join(line for line in lines if "atastore" in line)
        assert "rest" in text
        assert "sam" in text


def test_a_datastore_of_another_tokenizer(made: Path, tiny_target: Path, tmp_path: Path) -> None:
    store = open_datastore(str(made))
    other = save_folder(tmp_path / "other", alphabet="zyxwvutsrqponmlkjihgfedcba \n")
    with pytest.raises(SpecbenchError, match="was built for tiny, whose tokenizer is another one"):
        store.check_target(SimpleNamespace(tokenizer=load_tokenizer(str(other))[1]))
    with pytest.raises(SpecbenchError, match="this target has no tokenizer"):
        store.check_target(SimpleNamespace(tokenizer=None))
    store.check_target(SimpleNamespace(tokenizer=load_tokenizer(str(tiny_target))[1]))


# -- a run ---------------------------------------------------------------------------------------------------


def test_a_run_with_a_datastore(fresh: Workplace, tiny_target: Path, tmp_path: Path) -> None:
    assert fresh.run(name="first").code == 0
    answers = tmp_path / "answers.txt"
    answers.write_text("\n".join(row["text"] for row in fresh.rows("first")))
    store = tmp_path / "store"
    assert specbench("datastore", "build", answers, "--target", tiny_target, "--output", store).code == 0
    result = fresh.run("--method", f"rest:datastore={store},shortest=1", "--json")
    assert result.code == 0, result.err
    (row,) = (
        r for r in json.loads(result.out)["rows"] if r["method"] != "vanilla" and r["task"] == "overall"
    )
    assert (row["lossless"], row["identical"] == row["compared"] > 0, row["state"]) == (True, True, "cold")
    assert row["alpha"] > 0.5
    (drafter,) = fresh.manifest()["drafters"].values()
    assert drafter["kind"] == "datastore"
    assert drafter["ref"] == str(store)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("rest", "rest needs a datastore"),
        ("rest:datastore=./nowhere", "there is no datastore ./nowhere"),
        ("rest:datastore={task}", "is no datastore of REST"),
    ],
)
def test_a_run_without_a_datastore(fresh: Workplace, spec: str, message: str) -> None:
    result = fresh.run("--method", spec.format(task=fresh.task))
    assert result.code == 2
    assert message in result.error_lines[0]
    assert len(result.error_lines) == 2
