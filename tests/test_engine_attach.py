"""Attached to servers of real engines' wire formats: what is taken for what, and whose counters they are."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import fake_wire
import pytest
from engine_kit import PROMPT, read, setup_of, truth
from fake_server import Answer, FakeServer, sse, text
from tiny_folder import Workplace

from specbench.engines import find_engine
from specbench.engines.terms import Limits
from specbench.serving import client, runner


@pytest.fixture
def place(make_place: Callable[[str], Workplace], monkeypatch: pytest.MonkeyPatch) -> Workplace:
    monkeypatch.setattr(client, "RETRY_PAUSE_S", 0.01)
    monkeypatch.setattr(runner, "SETTLE_S", 0.0)
    made = make_place("attach")
    made.defaults = ["--engine", "vllm", "--warmup", 0, "--limit", 2]
    return made


def vllm(*flags: str, **faults: object) -> fake_wire.Wire:
    return fake_wire.VLLM(fake_wire.VLLM.parser({}).parse_args(["serve", "served", *flags]), dict(faults))


@pytest.fixture
def servers() -> Iterator[Callable[[fake_wire.Wire], FakeServer]]:
    with ExitStack() as stack:
        yield lambda wire: stack.enter_context(FakeServer(wire.routes()))


Start = Callable[[fake_wire.Wire], FakeServer]
SPECULATING = ("--speculative-config", "{}")


def test_both_servers_as_they_are(place: Workplace, servers: Start) -> None:
    fast, slow = servers(vllm(*SPECULATING)), servers(vllm("--seed", "0"))
    slow.routes["/metrics"] = text("vllm:generation_tokens_total 3\n")
    options = ["--url", fast.url, "--baseline-url", slow.url, "--method", "prompt-lookup"]
    result = place.run(*options, "--method", "eagle", "--draft", "/h")
    assert (result.code, result.error_lines[0]) == (2, "error: one server speculates in one way")
    result = place.run(*options, "--method", "vanilla")
    assert result.code == 0, result.err
    assert "others' traffic" in result.err
    assert {body["model"] for body in fast.bodies("/v1/completions")} == {"served"}  # its only model
    for row in place.rows():
        if row["method"] == "prompt-lookup":
            assert row["acceptance"]["source"] == "metrics-delta"  # started without metrics a request
            assert row["acceptance"]["target_steps"] == len(truth(row).steps())
    counts = Counter(row["method"] for row in place.rows())
    assert counts == dict.fromkeys(("vanilla", "prompt-lookup", "vanilla-again"), counts["vanilla"])
    assert len(slow.bodies("/v1/completions")) == 2 * len(fast.bodies("/v1/completions"))


def test_a_server_against_itself(place: Workplace, servers: Start) -> None:
    """`vanilla-again` needs no server but the baseline's."""
    plain = servers(vllm())
    result = place.run("--url", plain.url, "--method", "vanilla")
    assert result.code == 0, result.err
    assert "others' traffic" not in result.err  # no counters are read
    rows = place.rows()
    assert {row["method"] for row in rows} == {"vanilla", "vanilla-again"}
    assert {row["error"] for row in rows} == {None}
    assert all(row["agreement"]["same"] for row in rows if row["method"] == "vanilla-again")


@pytest.mark.parametrize("swapped", [False, True])
def test_a_server_taken_for_the_other_is_refused(place: Workplace, servers: Start, swapped: bool) -> None:
    plain = servers(vllm())
    plain.routes["/metrics"] = text("vllm:generation_tokens_total 3\n")
    other = servers(vllm(*SPECULATING)) if swapped else plain
    result = place.run("--url", plain.url, "--baseline-url", other.url, "--method", "prompt-lookup")
    assert result.code == 2, result.err
    wrong = f"{other.url} speculates" if swapped else f"{plain.url} does not speculate"
    hint = "  hint: --url is the server that speculates, --baseline-url the one that does not"
    assert result.error_lines == [f"error: the server at {wrong}", hint]
    assert not (place.results / "r").exists()


def models(*names: str) -> Answer:
    return text(json.dumps({"data": [{"id": name} for name in names]}))


def test_a_server_of_several_models_none_of_which_is_the_target(place: Workplace, servers: Start) -> None:
    server = servers(vllm())
    server.routes["/v1/models"] = models("a/other", "b/another")
    result = place.run("--url", server.url)
    assert result.code == 2
    called = f"error: the server at {server.url} serves a/other, b/another: none is called {place.target}"
    assert result.error_lines[0] == called
    assert not (place.results / "r").exists()


def test_the_target_among_several_models(place: Workplace, servers: Start) -> None:
    name = f"org/{Path(place.target).name}"
    server = servers(fake_wire.VLLM(fake_wire.VLLM.parser({}).parse_args(["serve", name])))
    server.routes["/v1/models"] = models("a/other", name)
    server.routes["/version"] = text('{"version": "0.99"}')
    result = place.run("--url", server.url)
    assert result.code == 0, result.err
    assert "taken to be" not in result.err
    engine = place.manifest()["engine"]
    assert (engine["served"], engine["version"]) == ({"vanilla": name}, "0.99")


def test_another_model_than_the_target_is_told_of(place: Workplace, servers: Start) -> None:
    server = servers(vllm())
    server.routes["/version"] = text('{"version": "b0-unknown"}')
    result = place.run("--url", server.url)
    assert result.code == 0, result.err
    assert place.manifest()["engine"]["version"] is None
    assert result.err.count(f"serves served: taken to be {place.target}") == 1
    assert place.manifest()["engine"]["served"] == {"vanilla": "served"}


def test_nothing_at_the_address(place: Workplace) -> None:
    result = place.run("--url", "http://127.0.0.1:9/")
    assert result.code == 2
    assert result.error_lines == [
        "error: nothing answers at http://127.0.0.1:9/",
        "  hint: start the server, or check its address",
    ]
    assert "warming up" not in result.err
    assert not (place.results / "r").exists()


@pytest.mark.parametrize(
    ("engine", "body", "found"),
    [
        ("vllm", "vllm:spec_decode_num_drafts_total 0\n", True),
        ("vllm", "vllm:generation_tokens_total 0\n", False),
        ("vllm", "# nothing\n", None),
        ("sglang", '{"speculative_algorithm": "EAGLE", "version": "0.5.23"}', True),
        ("sglang", '{"speculative_algorithm":null}', False),
        ("sglang", "{}", None),
        ("llama.cpp", '[{"id":0,"n_ctx":256,"speculative":true,"is_processing":false}]', True),
        ("llama.cpp", '[{"id":0,"n_ctx":256,"speculative":false,"is_processing":false}]', False),
        ("llama.cpp", "[]", None),
        ("tgi", "{}", None),
    ],
)
def test_whether_a_server_speculates(engine: str, body: str, found: bool | None) -> None:
    assert find_engine(engine).speculates(body) is found


def test_a_model_that_is_not_there(place: Workplace, servers: Start) -> None:
    server = servers(vllm())
    server.routes["/v1/models"] = text("{}", 404)
    result = place.run("--url", server.url)
    assert result.code == 2
    error = place.rows()[0]["error"]
    assert error == f"HTTP 404: The model `{place.target}` does not exist."


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "tgi", "deepspeed-mii"])
def test_the_chat_route_on_request(engine: str) -> None:
    adapter = find_engine(engine)
    setup = replace(setup_of(adapter), chat=True)
    route, body = adapter.request(PROMPT, Limits(12, 0.7), setup, "tiny")
    assert route == "/v1/chat/completions"
    assert body["messages"] == PROMPT.messages
    assert "prompt" not in body
    events = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
        {"choices": [{"delta": {"content": "ab"}, "finish_reason": None}]},
        {"choices": [{"delta": {}, "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
    ]
    reply = read(adapter, sse(*events), setup)
    assert (reply.text, reply.completion_tokens, reply.prompt_tokens) == ("ab", 2, 3)
    assert [round(one.at, 2) for one in reply.arrivals] == [0.01]  # the role is no token
