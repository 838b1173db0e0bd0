"""DeepSpeed-MII: a baseline only, sampled, of text; its command line and a whole run on an imitation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engine_kit import PROMPT, at_work, line_of, read, setup_of
from fake_server import sse
from tiny_folder import Workplace

from specbench.engines import find_engine
from specbench.engines.terms import Limits
from specbench.errors import SpecbenchError

MII = find_engine("deepspeed-mii")
LINE = "python -m mii.entrypoints.openai_api_server --model /m --host 127.0.0.1 --port 8123 --max-length 4096"


def test_the_command() -> None:
    assert line_of(MII, setup_of(MII)) == LINE  # its own default host is 0.0.0.0
    assert line_of(MII, setup_of(MII, tensor_parallel="2")) == f"{LINE} --tensor-parallel 2"


@pytest.mark.parametrize("spec", ["prompt-lookup", "draft-model", "eagle3", "medusa"])
def test_it_does_not_speculate(spec: str) -> None:
    with pytest.raises(SpecbenchError) as error:
        setup_of(MII, spec, "/d")
    assert error.value.message == f"deepspeed-mii has no method {spec!r}"
    assert error.value.hint == (
        "deepspeed-mii has no speculative decoding in its code: leave --method out to measure its baseline"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "prompt-lookup"], "deepspeed-mii has no method 'prompt-lookup'"),
        ([], "deepspeed-mii has no greedy decoding over HTTP"),
        (["--temperature", 0.7, "--ignore-eos"], "deepspeed-mii cannot be told to go on after EOS"),
    ],
)
def test_what_it_has_no_way_to_do(
    make_place: Callable[[str], Workplace], options: list[object], message: str
) -> None:
    result = make_place("mii").run("--engine", "deepspeed-mii", "--dry-run", *options)
    assert (result.code, result.error_lines[0]) == (2, f"error: {message}")


def test_the_request() -> None:
    route, body = MII.request(PROMPT, Limits(12, 0.7, 1.0, 0, 7), setup_of(MII), "tiny")
    assert route == "/v1/completions"
    expected = {
        "model": "tiny",
        "prompt": "fg",
        "max_tokens": 12,
        "temperature": 0.7,
        "top_p": 1.0,
        "stream": True,
    }
    assert body == expected  # top_p said: its own default is 0.9


def test_its_stream_does_not_say_how_many_tokens_it_holds() -> None:
    pieces = [{"choices": [{"text": words, "finish_reason": None}]} for words in ("ab", "c")]
    reply = read(MII, sse(*pieces, {"choices": [{"text": "", "finish_reason": "stop"}]}), setup_of(MII))
    assert (reply.text, reply.finish, reply.completion_tokens) == ("abc", "eos", None)
    assert [one.tokens for one in reply.arrivals] == [None, None]


def test_a_run(make_place: Callable[[str], Workplace], monkeypatch: pytest.MonkeyPatch) -> None:
    place = at_work(make_place("mii"), "deepspeed-mii", monkeypatch, loading=0.3)
    result = place.run("--temperature", 0.7, "--repeats", 1, "--limit", 2)
    assert result.code == 0, result.err
    assert "its texts are tokenised again" in result.err
    assert "takes no seed over HTTP" in result.err
    assert {(row["method"], row["output_tokens"], row["error"]) for row in place.rows()} == {
        ("vanilla", 12, None)
    }
