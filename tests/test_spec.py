"""SPECs: parsing, labels, option types, and finding methods."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from specbench.build import labels
from specbench.decoding.draft import Drafter
from specbench.errors import SpecbenchError
from specbench.spec import (
    Spec,
    convert_options,
    find_method,
    method_names,
    options_of,
    parse_spec,
    summary_line,
)


class Typed(Drafter):
    """A method with one option of every kind.

    More words.
    """

    def __init__(
        self,
        target: object,
        *,
        k: int = 1,
        rate: float = 0.5,
        skip: list[int] | None = None,
        loud: bool = False,
        kind: Literal["a", "b"] = "a",
        first: Spec | None = None,
        ref: str | None = None,
        size: int | float | None = None,
        bare=3,
        callback: object = None,
    ) -> None: ...


@pytest.mark.parametrize(
    ("text", "label", "options"),
    [
        ("vanilla", "vanilla", {}),
        (" m:b=2 , a=1 ", "m:a=1,b=2", {"a": "1", "b": "2"}),
        ("m:max-depth=2", "m:max_depth=2", {"max_depth": "2"}),
        ("m:draft.quantize=int8", "m:draft.quantize=int8", {"draft.quantize": "int8"}),
        ("m:quantize=int8", "m:quantize=int8", {"quantize": "int8"}),
        ("m:draft.k=5", "m:draft.k=5", {"draft.k": "5"}),
        ("m:draft=org/name:x", "m:draft=org/name:x", {"draft": "org/name:x"}),
        ("c:first=(p:k=5,n=2),k=1", "c:first=(p:k=5,n=2),k=1", {"first": "(p:k=5,n=2)", "k": "1"}),
        ("./f.py::Mine:k=3", "./f.py::Mine:k=3", {"k": "3"}),
        ("c:then=(./f.py::Mine:k=3)", "c:then=(./f.py::Mine:k=3)", {"then": "(./f.py::Mine:k=3)"}),
        ("./f (1).py::Mine:k=3", "./f (1).py::Mine:k=3", {"k": "3"}),
        ("m:", "m", {}),
        ("m:x=a=b", "m:x=a=b", {"x": "a=b"}),
    ],
)
def test_parsing(text: str, label: str, options: dict[str, str]) -> None:
    spec = parse_spec(text)
    assert (spec.label, dict(spec.options)) == (label, options)
    assert parse_spec(spec.label) == spec


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no name"),
        (":k=1", "has no name"),
        ("m:k", "'k' of method 'm:k' is not key=value"),
        ("m:=1", "is not key=value"),
        ("m:k=", "is not key=value"),
        ("m:k=1,k=2", "'k' of method 'm:k=1,k=2' is given twice"),
        ("m:quantize=int8,draft.quantize=int8", "'draft.quantize' of method"),
        ("m:f=(p:k=1", "parentheses do not match"),
        ("m:f=p)", "parentheses do not match"),
    ],
)
def test_what_is_no_spec(text: str, said: str) -> None:
    with pytest.raises(SpecbenchError) as caught:
        parse_spec(text)
    assert said in caught.value.message


def test_options_become_what_the_constructor_asks_for() -> None:
    text = "t:k=3,rate=1,skip=1+2,loud=True,kind=b,first=(p:k=5),ref=7,size=2.5,bare=4"
    assert convert_options(Typed, parse_spec(text)) == {
        "k": 3,
        "rate": 1.0,
        "skip": [1, 2],
        "loud": True,
        "kind": "b",
        "first": Spec("p", {"k": "5"}),
        "ref": "7",
        "size": 2.5,
        "bare": 4,
    }


def test_only_quantize_may_be_said_of_the_draft() -> None:
    with pytest.raises(SpecbenchError, match=r"method t has no option 'draft\.k'"):
        convert_options(Typed, parse_spec("t:draft.k=5"))


class Quantised:
    def __init__(self, target: object, *, quantize: Literal["none", "int8"] = "none", k: int = 1) -> None: ...


@pytest.mark.parametrize("spelling", ["draft.quantize", "quantize"])
def test_what_of_the_draft_is_quantised_is_said_as_it_was_written(spelling: str) -> None:
    spec = parse_spec(f"q:{spelling}=int8")
    assert spec.label == f"q:{spelling}=int8"
    assert convert_options(Quantised, spec) == {"quantize": "int8"}
    with pytest.raises(SpecbenchError) as caught:
        convert_options(Quantised, parse_spec(f"q:{spelling}=int9"))
    assert caught.value.message.startswith(f"option {spelling}=int9 of q is not")
    assert caught.value.hint.startswith(f"give {spelling} as")
    with pytest.raises(SpecbenchError) as caught:
        convert_options(Quantised, parse_spec("q:draft.quantise=int8"))
    assert caught.value.message == "method q has no option 'draft.quantise'"
    assert caught.value.hint == "its options: draft.quantize, k"


def test_a_method_in_two_spellings_is_given_twice() -> None:
    with pytest.raises(SpecbenchError, match=r"hydra:draft\.quantize=int8 is given twice"):
        labels(["hydra:quantize=int8", "hydra:draft.quantize=int8"])


@pytest.mark.parametrize(
    ("option", "wanted"),
    [
        ("k=1.5", "a whole number"),
        ("rate=fast", "a number"),
        ("loud=1", "true or false"),
        ("kind=c", "a or b"),
        ("skip=1+x", "a whole number"),
        ("first=p", "a SPEC in parentheses"),
        ("size=x", "a whole number or a number"),
        ("callback=x", "an option that can be given on the command line"),
    ],
)
def test_values_of_the_wrong_kind(option: str, wanted: str) -> None:
    with pytest.raises(SpecbenchError) as caught:
        convert_options(Typed, parse_spec(f"t:{option}"))
    assert option in caught.value.message
    assert wanted in caught.value.hint


def test_what_a_drafter_inherits_is_no_option() -> None:
    class Plain(Drafter):
        """Has no constructor of its own."""

    class Open(Drafter):
        def __init__(self, target: object, **options: object) -> None: ...

    assert options_of(Plain) == {}
    with pytest.raises(SpecbenchError, match="no option 'k'"):
        convert_options(Plain, parse_spec("p:k=1"))
    spec = parse_spec("o:a=1,b=0.5,c=false,d=x,e=1+2")
    assert convert_options(Open, spec) == {"a": 1, "b": 0.5, "c": False, "d": "x", "e": "1+2"}


def test_every_installed_method_can_be_found_and_described() -> None:
    names = method_names()
    assert {"vanilla", "prompt-lookup", "draft-model", "oracle", "hf-generate"} <= set(names)
    for name in names:
        assert summary_line(find_method(name)).endswith(".")
        options_of(find_method(name))
    assert summary_line(Typed) == "A method with one option of every kind."


def test_labels_begin_with_vanilla() -> None:
    assert [label for label, _ in labels(["oracle:k=2"])] == ["vanilla", "oracle:k=2"]
    assert [label for label, _ in labels(["oracle", "vanilla"])] == ["vanilla", "oracle", "vanilla-again"]
    for twice in (["oracle", "oracle"], ["vanilla", "vanilla"], ["oracle:k=1,rate=1", "oracle:rate=1,k=1"]):
        with pytest.raises(SpecbenchError, match="given twice"):
            labels(twice)


def test_the_same_file_name_in_two_folders_is_two_methods(tmp_path: Path) -> None:
    source = "from specbench.decoding.draft import Drafter\nclass Mine(Drafter):\n    '''{}.'''\n"
    found = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        file = tmp_path / name / "mine.py"
        file.write_text(source.format(name))
        found.append(find_method(f"{file}::Mine"))
    assert [summary_line(cls) for cls in found] == ["one.", "two."]
