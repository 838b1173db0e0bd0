"""What llama.cpp and transformers serve are launched with and sent, word by word."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from specbench.engines import find_engine
from specbench.engines.base import Engine, Setup, flags_in
from specbench.engines.record import Arrival, Event, Reply
from specbench.engines.terms import Launch, Limits, Prompt
from specbench.engines.xllamacpp_server import parser
from specbench.spec import parse_spec

LAUNCH = Launch("t.gguf", 8099, Path("run"), parallel=4, context=512, threads=2)
PROMPT = Prompt([1, 2, 3], "a b c", [{"role": "user", "content": "a b c"}])
LLAMA, SERVE = find_engine("llama.cpp"), find_engine("transformers")


def setup(engine: Engine, text: str | None, draft: str | None = None) -> Setup:
    return engine.setup(text or "vanilla", parse_spec(text) if text else None, draft, {})


def words(engine: Engine, text: str | None, draft: str | None = None) -> str:
    return " ".join(engine.command(["X"], setup(engine, text, draft), LAUNCH).argv)


COMMON = "X -m t.gguf --host 127.0.0.1 --port 8099 -c 2048 -np 4 --metrics --offline -t 2"


@pytest.mark.parametrize(
    ("method", "flags"),
    [
        (None, ""),
        (
            "prompt-lookup",
            "--spec-type ngram-simple --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 10",
        ),
        (
            "prompt-lookup:k=8,ngram=2",
            "--spec-type ngram-simple --spec-ngram-simple-size-n 2 --spec-ngram-simple-size-m 8",
        ),
        ("draft-model:k=4", "--spec-type draft-simple --spec-draft-n-max 4 --spec-draft-model d.gguf"),
        ("eagle3", "--spec-type draft-eagle3 --spec-draft-model d.gguf"),
        ("mtp:k=2", "--spec-type draft-mtp --spec-draft-n-max 2"),
        ("ngram-mod:engine.spec_ngram_mod_n_min=8", "--spec-type ngram-mod --spec-ngram-mod-n-min 8"),
    ],
)
def test_llama_cpp_s_command(method: str | None, flags: str) -> None:
    assert words(LLAMA, method, "d.gguf") == f"{COMMON} {flags}".strip()


def test_the_wheel_s_server_has_every_flag_that_is_used() -> None:
    known = flags_in(parser().format_help())
    for name in LLAMA.methods:
        used = {word for word in words(LLAMA, name, "d.gguf").split() if word.startswith("--")}
        assert used <= known, name
    assert parser().parse_args(words(LLAMA, "prompt-lookup").split()[1:]).port == 8099


def test_llama_cpp_s_request() -> None:
    """Ids in and out, no cache of prompts; sampled from the target's own distribution, without a min-p of its own."""
    route, body = LLAMA.request(PROMPT, Limits(9, seed=5), setup(LLAMA, None), "m")
    assert route == "/completion"
    assert body == {
        "prompt": [1, 2, 3], "n_predict": 9, "temperature": 0.0, "seed": 5, "stream": True,
        "return_tokens": True, "cache_prompt": False, "ignore_eos": False,
    }  # fmt: skip
    _, sampled = LLAMA.request(PROMPT, Limits(9, 0.7, 0.9, 0), setup(LLAMA, None), "m")
    assert {name: sampled[name] for name in ("top_p", "top_k", "min_p")} == {
        "top_p": 0.9,
        "top_k": 0,
        "min_p": 0.0,
    }
    route, chat = LLAMA.request(PROMPT, Limits(9), Setup("vanilla", chat=True), "m")
    assert (route, chat["messages"], chat["cache_prompt"]) == ("/v1/chat/completions", PROMPT.messages, False)
    _, chat = LLAMA.request(PROMPT, Limits(9, 0.7, 0.9, 0), Setup("vanilla", chat=True), "m")
    assert (chat["top_p"], chat["top_k"], chat["min_p"]) == (0.9, 0, 0.0)


def test_nothing_drafted_is_zero_and_no_timings_is_unknown() -> None:
    def told(last: dict[str, Any]) -> Any:
        events = [
            Event(0.0, {"content": "a", "tokens": [4], "stop": False}),
            Event(1.0, {"stop": True, **last}),
        ]
        return LLAMA.told(LLAMA.read(events, setup(LLAMA, "prompt-lookup")))

    assert told({"timings": {"predicted_n": 1}}) == {"drafted": 0, "accepted": 0, "verify_steps": 0}
    assert told({}) == {}


def test_the_decode_counter_tells_of_a_step_that_only_ended_the_answer() -> None:
    """1 + (3 + 1) + 3: the third accepted token is EOS, so the last step's own token is not sent."""
    said = {"predicted_n": 8, "draft_n": 6, "draft_n_accepted": 6}
    tokens = [Event(0.0, {"content": "a", "tokens": [4], "stop": False})]
    reply = LLAMA.read([*tokens, Event(1.0, {"stop": True, "stop_type": "eos", "timings": said})], Setup("x"))
    drafting = setup(LLAMA, "prompt-lookup")
    assert LLAMA.record([reply], {"decodes": 3, "verify_steps": 2}, drafting)[0].target_steps == 3
    assert LLAMA.record([reply, reply], {"decodes": 6, "verify_steps": 4}, drafting)[0].target_steps == 2
    assert reply.finish == "eos"


@pytest.mark.parametrize("name", ["batch-size", "batch_size"])
def test_a_prompt_s_decodes_are_of_the_batch_that_was_asked_for(name: str) -> None:
    """600 tokens of prompt in batches of 256 are 3 decodes, 2 more than the one that gives the first token."""
    said = {"predicted_n": 8, "draft_n": 4, "draft_n_accepted": 4}
    reply = Reply("", [Arrival(0.0, 1)], [4], 600, 8, "length", {"timings": said})
    spec = parse_spec("prompt-lookup")
    for extra, decodes in (({}, 4), ({name: "256"}, 6)):
        drafting = LLAMA.setup("prompt-lookup", spec, None, extra)
        (record,) = LLAMA.record([reply], {"decodes": decodes, "verify_steps": 2}, drafting)
        assert record.target_steps == 4


def test_transformers_serve() -> None:
    command = SERVE.command(["X"], setup(SERVE, "prompt-lookup"), LAUNCH)
    assert " ".join(command.argv) == "X serve t.gguf --host 127.0.0.1 --port 8099"
    assert command.env == {"OMP_NUM_THREADS": "2"}
    _, base = SERVE.request(PROMPT, Limits(9), setup(SERVE, None), "m")
    assert base["prompt"] == "a b c"
    assert base["generation_config"] == '{"max_new_tokens":9,"do_sample":false}'
    assert not base.keys() & {"stream_options", "ignore_eos", "top_k"}  # unknown fields are refused
    _, fast = SERVE.request(
        PROMPT, Limits(9, ignore_eos=True), setup(SERVE, "prompt-lookup:k=4,ngram=2"), "m"
    )
    assert fast["generation_config"] == (
        '{"max_new_tokens":9,"do_sample":false,"min_new_tokens":9,"prompt_lookup_num_tokens":4,'
        '"max_matching_ngram_size":2}'
    )


def test_its_usage_is_steps_where_it_speculates() -> None:
    events = [Event(0.0, {"choices": [{"text": "a b"}]})]
    events.append(
        Event(1.0, {"choices": [{"text": "", "finish_reason": "stop"}], "usage": {"completion_tokens": 6}})
    )
    assert SERVE.read(events, setup(SERVE, None)).completion_tokens == 6
    reply = SERVE.read(events, setup(SERVE, "prompt-lookup"))
    assert (reply.completion_tokens, reply.finish) == (None, None)
    assert SERVE.told(reply) == {}


def test_the_wheel_stands_in_for_a_missing_binary(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xllamacpp")
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)
    assert LLAMA.found() == [sys.executable, "-m", "specbench.engines.xllamacpp_server"]
    assert LLAMA.found("/nowhere/llama-server") is None
