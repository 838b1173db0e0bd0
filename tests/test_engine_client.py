"""The streaming client: what counts as a token, when it came, and what goes wrong on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from math import exp
from pathlib import Path
from typing import Any

import pytest
from fake_server import Answer, FakeServer, raw, sse, stream, text

from specbench.engines import find_engine
from specbench.engines.base import Engine, Setup
from specbench.engines.record import Reply
from specbench.serving import client as client_module
from specbench.serving.client import Client, Exchange, StreamError, Timeouts, api_key, events
from specbench.serving.load import closed_loop, open_loop

ROUTE = "/v1/completions"
GOLDEN = Path(__file__).parents[2] / "shared" / "golden"
BASELINE = Setup("vanilla")


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "RETRY_PAUSE_S", 0.0)


def with_client(url: str, act: Callable[[Client], Awaitable[Any]], **options: Any) -> Any:
    async def run() -> Any:
        client = Client(url, **options)
        try:
            return await act(client)
        finally:
            await client.close()

    return asyncio.run(run())


def exchange(answer: Any, **options: Any) -> tuple[Exchange, FakeServer]:
    with FakeServer({ROUTE: answer}) as server:
        found = with_client(server.url, lambda client: client.stream(ROUTE, {"prompt": [1]}), **options)
    return found, server


def read(answer: Answer) -> Reply:
    found, _ = exchange(answer)
    assert found.error is None
    return Engine().read(list(events(found.chunks)), BASELINE)


# -- events ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_events_do_not_depend_on_how_bytes_are_cut(size: int) -> None:
    whole = b': hello\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata: {"a":\ndata:  2}\n\ndata: [DONE]\n\ndata: {"a": 3}\n\n'
    chunks = [(float(start), whole[start : start + size]) for start in range(0, len(whole), size)]
    found = list(events(chunks))
    assert [event.data["a"] for event in found] == [1, 2]
    ends = [whole.index(b"\r\n\r\n") + 3, whole.index(b"2}\n\n") + 3]
    assert [event.at for event in found] == [float(end // size * size) for end in ends]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'data: {"error": {"message": "out of  memory\\n"}}\n\n', "out of memory"),
        (b'data: {"error": "broke"}\n\n', "broke"),
        (b"data: {oops\n\n", "not JSON"),
        (b"data: 3\n\n", "no object"),
    ],
)
def test_a_stream_that_reports_an_error_or_is_none(body: bytes, words: str) -> None:
    with pytest.raises(StreamError, match=words):
        list(events([(0.0, body)]))


def test_an_event_without_its_end_is_left_out() -> None:
    (found,) = events([(0.0, b'data: {"a": 1}\n\ndata: {"a"')])
    assert found.data == {"a": 1}


# -- counts and times --------------------------------------------------------------------------------------------


def test_counts_come_from_usage_and_not_from_events() -> None:
    reply = read(stream(["one two", " three"], usage=5))
    assert (reply.text, reply.completion_tokens, reply.prompt_tokens) == ("one two three", 5, 3)
    assert [arrival.tokens for arrival in reply.arrivals] == [None, None]
    assert (reply.finish, reply.ids) == ("length", None)


def test_token_ids_count_where_there_is_no_usage() -> None:
    choices = [
        {"text": "ab", "token_ids": [1, 2]},
        {"text": "", "token_ids": [3, 4]},
        {"text": "", "token_ids": []},
    ]
    reply = read(sse(*({"choices": [choice]} for choice in choices)))
    assert (reply.ids, reply.completion_tokens) == ([1, 2, 3, 4], 4)
    assert [arrival.tokens for arrival in reply.arrivals] == [2, 2]  # empty text, but tokens


def test_continuous_usage_says_what_each_event_bore() -> None:
    def event(so_far: int, piece: str) -> dict[str, Any]:
        return {"choices": [{"text": piece}], "usage": {"prompt_tokens": 1, "completion_tokens": so_far}}

    reply = read(sse(event(1, "a"), event(4, ""), event(4, ""), event(6, "bc")))
    assert [arrival.tokens for arrival in reply.arrivals] == [1, 3, 2]
    assert reply.completion_tokens == 6


def test_usage_once_on_the_last_event_bears_no_tokens() -> None:
    last = {"choices": [{"text": "", "finish_reason": "stop"}], "usage": {"completion_tokens": 2}}
    reply = read(sse({"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}, last, done=False))
    assert (len(reply.arrivals), reply.completion_tokens, reply.finish) == (2, 2, "eos")


def test_the_first_token_is_not_the_role() -> None:
    role = {"choices": [{"delta": {"role": "assistant", "content": None}}]}
    word = {"choices": [{"delta": {"content": "hi"}}]}
    found, _ = exchange(sse(role, word, delays=(0.0, 0.2, 0.0)))
    reply = Engine().read(list(events(found.chunks)), BASELINE)
    assert reply.text == "hi"
    assert reply.arrivals[0].at - found.sent_at >= 0.19


def test_times_are_those_of_the_server() -> None:
    """Lower bounds only, and generous upper ones: see tests/benchmarks/client.py for how close they are."""
    found, _ = exchange(stream(["a", "b", "c"], usage=3, delays=(0.2, 0.1, 0.1)))
    at = [
        arrival.at - found.sent_at for arrival in Engine().read(list(events(found.chunks)), BASELINE).arrivals
    ]
    assert at[0] >= 0.2
    assert at[1] - at[0] >= 0.09
    assert 0.39 <= at[2] < 2


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="the captured streams are not here")
def test_llama_cpp_s_captured_stream() -> None:
    found, _ = exchange(raw((GOLDEN / "llama_server_ngram_stream.sse").read_text(encoding="utf-8")))
    engine = find_engine("llama.cpp")
    reply = engine.read(list(events(found.chunks)), BASELINE)
    assert (reply.completion_tokens, reply.prompt_tokens, reply.finish) == (64, 56, "length")
    assert reply.text.startswith("def total(items):")
    assert engine.told(reply) == {"drafted": 48, "accepted": 32}


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="the captured streams are not here")
def test_vllm_s_captured_stream_bears_tokens_without_text() -> None:
    reply = read(raw((GOLDEN / "vllm032_ngram_stream_tail.sse").read_text(encoding="utf-8")))
    assert [arrival.tokens for arrival in reply.arrivals] == [2, 2]
    assert reply.completion_tokens == 16
    assert reply.told["metrics"]["speculative_decoding"]["num_spec_steps"] == 6


# -- faults ------------------------------------------------------------------------------------------------------


def test_a_busy_server_is_asked_again() -> None:
    loading = text('{"error": {"message": "Loading model"}}', 503)
    found, server = exchange([loading, loading, stream(["a"], usage=1)])
    assert (found.error, found.retries, len(server.requests)) == (None, 2, 3)


def test_what_is_wrong_with_a_request_is_not_asked_again() -> None:
    found, server = exchange(text('{"error": {"message": "model `x` does not exist"}}', 404))
    assert found.error == "HTTP 404: model `x` does not exist"
    assert len(server.requests) == 1


def test_nobody_there() -> None:
    with FakeServer() as server:
        url = server.url
    found = with_client(url, lambda client: client.stream(ROUTE, {}))
    assert found.error.startswith("no connection")
    assert found.retries == client_module.RETRIES
    assert with_client(url, lambda client: client.get("/health")) == (0, "")


def test_a_connection_that_breaks_after_a_token_is_not_tried_again() -> None:
    found, server = exchange(stream(["a", "b"], usage=2, cut=True))
    assert found.error.startswith("the connection broke")
    assert len(server.requests) == 1
    assert found.chunks


def test_a_connection_that_breaks_before_anything_came_is_tried_again() -> None:
    found, server = exchange([Answer(cut=True), stream(["a"], usage=1)])
    assert (found.error, found.retries, len(server.requests)) == (
        None,
        0,
        2,
    )  # it may have been idle too long


def test_a_connection_that_keeps_breaking_is_counted() -> None:
    found, server = exchange([Answer(cut=True), Answer(cut=True), stream(["a"], usage=1)])
    assert (found.error, found.retries, len(server.requests)) == (None, 1, 3)


def test_timeouts() -> None:
    slow = stream(["a", "b"], usage=2, delays=(0.0, 5.0))
    found, _ = exchange(slow, timeouts=Timeouts(idle_s=0.2))
    assert found.error == "nothing came for 0.2 s"
    found, _ = exchange(slow, timeouts=Timeouts(request_s=0.2))
    assert found.error == "no end after 0.2 s"


def test_cancelling_closes_the_connection() -> None:
    with FakeServer({ROUTE: stream(["a"] * 500, delays=(0.02,))}) as server:

        async def act(client: Client) -> None:
            task = asyncio.create_task(client.stream(ROUTE, {}))
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        with_client(server.url, act)
        assert server.broken.wait(5)


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in client_module.KEY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert api_key() is None
    monkeypatch.setenv("OPENAI_API_KEY", "second")
    monkeypatch.setenv("SPECBENCH_API_KEY", "first")
    _, server = exchange(stream(["a"], usage=1), api_key=api_key())
    assert server.requests[0][2]["Authorization"] == "Bearer first"


@pytest.mark.parametrize("body", ['{"error": {"message": "no such key:  sesame-open"}}', "sesame-open?"])
def test_a_key_that_a_server_sends_back_is_not_said_again(monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    monkeypatch.setenv("SPECBENCH_API_KEY", "sesame-open")
    found, _ = exchange(text(body, 401), api_key=api_key())
    assert found.error is not None
    assert "(SPECBENCH_API_KEY)" in found.error
    assert "sesame-open" not in found.error
    with pytest.raises(StreamError, match="SPECBENCH_API_KEY") as error:
        list(events([(0.0, f"data: {body}\n\n".encode())]))
    assert "sesame-open" not in str(error.value)


# -- loads -------------------------------------------------------------------------------------------------------


def test_a_closed_loop_keeps_so_many_in_flight() -> None:
    with FakeServer({ROUTE: stream(["a", "b"], usage=2, delays=(0.03,))}) as server:

        async def act(client: Client) -> list[Exchange]:
            return await closed_loop(lambda number: client.stream(ROUTE, {"n": number}), 9, 3)

        found = with_client(server.url, act)
        assert server.most == 3
    assert [one.error for one in found] == [None] * 9
    assert sorted(body["n"] for body in server.bodies(ROUTE)) == list(range(9))


def test_an_open_loop_does_not_wait_for_answers() -> None:
    async def run() -> list[int]:
        begun: list[int] = []
        all_begun = asyncio.Event()

        async def send(number: int) -> int:
            begun.append(number)
            if len(begun) == 5:
                all_begun.set()
            await all_begun.wait()  # a closed loop would never get here
            return number

        assert await open_loop(send, 5, rate=200.0, seed="1") == list(range(5))
        return begun

    assert asyncio.run(run()) == list(range(5))


def test_an_open_loop_s_moments_are_a_poisson_process_that_its_seed_fixes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def moments(seed: str, count: int, rate: float = 4.0) -> list[float]:
        slept: list[float] = []

        async def sleep(seconds: float) -> None:
            slept.append(seconds)

        async def run() -> None:
            monkeypatch.setattr(
                asyncio.get_running_loop(), "time", lambda: 0.0
            )  # so that it sleeps the moments
            await open_loop(answer, count, rate, seed)

        async def answer(number: int) -> int:
            return number

        with monkeypatch.context() as patched:
            patched.setattr(asyncio, "sleep", sleep)
            asyncio.run(run())
        return slept

    assert moments("0 a", 50) == moments("0 a", 50)
    assert moments("0 a", 50) != moments("0 b", 50)
    assert moments("0 a", 50, rate=8.0) == pytest.approx([at / 2 for at in moments("0 a", 50)])
    found = moments("0 a", 4000)
    gaps = [after - before for before, after in pairwise(found)]
    assert found[0] == 0.0
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 4, rel=0.05)
    assert sum(gap > 1 / 4 for gap in gaps) / len(gaps) == pytest.approx(exp(-1), rel=0.05)  # exponential
