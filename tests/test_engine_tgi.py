"""Text Generation Inference: its command lines, its native stream as documented, a whole run on an imitation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_kit import GREEDY, PROMPT, Measured, launch, line_of, read, record, setup_of, truth
from fake_server import Answer, sse
from tiny_folder import Workplace

from specbench.engines import find_engine
from specbench.engines.record import Acceptance
from specbench.engines.terms import Limits
from specbench.errors import SpecbenchError

TGI = find_engine("tgi")
LINE = (
    "text-generation-launcher --model-id {} --hostname 127.0.0.1 --port 8123 --max-input-tokens 4095 "
    "--max-total-tokens 4096 --prometheus-port 0 --shard-uds-path {}"
)


@pytest.fixture(autouse=True)
def sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp")


def line(model: str) -> str:
    return LINE.format(model, "/tmp/specbench-tgi-8123")


# -- the command -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "draft", "model", "flags"),
    [
        ("prompt-lookup", None, "/m", " --speculate 10"),
        ("prompt-lookup:k=2", None, "/m", " --speculate 2"),
        ("medusa", "/heads", "/heads", ""),  # speculates by itself, on the base model that its config names
        ("medusa:k=3", "/heads", "/heads", " --speculate 3"),
        ("mlp-speculator", "/heads", "/heads", ""),
    ],
)
def test_the_command_of_each_method(spec: str, draft: str | None, model: str, flags: str) -> None:
    assert line_of(TGI, setup_of(TGI, spec, draft)) == line(model) + flags


def test_the_baseline_s_command_names_the_base_model() -> None:
    assert line_of(TGI, setup_of(TGI)) == line("/m")
    own = line_of(TGI, setup_of(TGI, cuda_memory_fraction="0.8"), dtype="float16", trust_remote_code=True)
    assert own == line("/m") + " --dtype float16 --trust-remote-code --cuda-memory-fraction 0.8"
    assert TGI.environment(setup_of(TGI), launch()) == {"PREFIX_CACHING": "0", "USAGE_STATS": "off"}


def test_two_servers_do_not_meet() -> None:
    first, second = (line_of(TGI, setup_of(TGI), port=port) for port in (1001, 1002))
    assert "specbench-tgi-1001" in first
    assert "specbench-tgi-1002" in second


def test_heads_say_whose_model_runs() -> None:
    assert "base model that the heads' config names" in TGI.methods["medusa"].note


@pytest.mark.parametrize("spec", ["draft-model", "eagle3", "suffix"])
def test_what_it_cannot_do(spec: str) -> None:
    with pytest.raises(SpecbenchError) as error:
        setup_of(TGI, spec, "/d")
    assert error.value.hint == "tgi can do medusa, mlp-speculator, prompt-lookup"


def test_length_cannot_be_forced(tmp_path: Path, make_place: Callable[[str], Workplace]) -> None:
    place = make_place("tgi")
    result = place.run("--engine", "tgi", "--ignore-eos", "--dry-run")
    assert (result.code, result.error_lines[0]) == (2, "error: tgi cannot be told to go on after EOS")


# -- requests and answers ----------------------------------------------------------------------------------------


def test_the_request() -> None:
    route, body = TGI.request(PROMPT, GREEDY, setup_of(TGI), "tiny")
    assert route == "/generate_stream"
    assert body == {
        "inputs": "fg",
        "parameters": {"max_new_tokens": 12, "do_sample": False, "details": True, "seed": 7},
    }
    _, body = TGI.request(PROMPT, Limits(12, 0.5, 0.9, 40, 7), setup_of(TGI), "tiny")
    assert (body["parameters"]["temperature"], body["parameters"]["do_sample"]) == (0.5, True)
    assert (body["parameters"]["top_p"], body["parameters"]["top_k"]) == (0.9, 40)
    _, body = TGI.request(PROMPT, Limits(12, 0.5, 1.0), setup_of(TGI), "tiny")
    assert "top_p" not in body["parameters"]  # TGI refuses 1


def answer(finish: str = "eos_token") -> Answer:
    """Three tokens, the last one EOS."""
    pieces = [(5, "ab", False), (6, " c", False), (2, "</s>", True)]
    details = {"finish_reason": finish, "generated_tokens": 3, "seed": 7, "input_length": 4}
    events: list[dict[str, Any]] = [
        {
            "index": index,
            "token": {"id": one, "text": words, "logprob": -0.1, "special": special},
            "generated_text": "ab c" if index == 3 else None,
            "details": details if index == 3 else None,
        }
        for index, (one, words, special) in enumerate(pieces, 1)
    ]
    return sse(*events, done=False)


@pytest.mark.parametrize(
    ("said", "finish"), [("eos_token", "eos"), ("length", "length"), ("stop_sequence", "eos")]
)
def test_a_native_stream(said: str, finish: str) -> None:
    reply = read(TGI, answer(said), setup_of(TGI))
    assert (reply.text, reply.ids, reply.finish) == ("ab c", [5, 6, 2], finish)
    assert (reply.completion_tokens, reply.prompt_tokens) == (3, 4)
    assert [one.tokens for one in reply.arrivals] == [1, 1, 1]


def test_an_answer_that_is_eos_alone_has_no_text() -> None:
    details = {"finish_reason": "eos_token", "generated_tokens": 1, "input_length": 4}
    token = {"id": 2, "text": "</s>", "special": True}
    reply = read(
        TGI, sse({"token": token, "generated_text": "", "details": details}, done=False), setup_of(TGI)
    )
    assert (reply.text, reply.ids, reply.completion_tokens, reply.finish) == ("", [2], 1, "eos")


def test_a_stream_without_its_end_has_no_finish() -> None:
    cut = Answer(list(answer().pieces)[:2])
    reply = read(TGI, cut, setup_of(TGI))
    assert (reply.text, reply.finish, reply.completion_tokens) == ("ab c", None, None)


def test_skipped_tokens_are_what_was_accepted() -> None:
    text = (
        "# TYPE tgi_request_skipped_tokens summary\n"
        'tgi_request_skipped_tokens{quantile="0"} 0\n'
        'tgi_request_skipped_tokens{quantile="0.5"} 1\n'
        "tgi_request_skipped_tokens_sum 1\n"
        "tgi_request_skipped_tokens_count 2\n"
    )
    delta = TGI.counters(text)
    assert delta == {"accepted": 1, "target_steps": 2}
    found = record(TGI, answer(), setup_of(TGI, "prompt-lookup"), delta)
    assert found == Acceptance(1, None, None, 2, 3, source="metrics-delta", scope="server")
    assert record(TGI, answer(), setup_of(TGI, "prompt-lookup")) == Acceptance(completion_tokens=3)


# -- whole runs --------------------------------------------------------------------------------------------------


def test_a_run(on_engine: Callable[..., Measured]) -> None:
    run = on_engine("tgi", "prompt-lookup", loading=0.3)
    assert "added there" not in run.said  # the text makes the same tokens there
    for row in run.rows:
        script, told = truth(row), row["acceptance"]
        assert told["accepted"] == sum(len(step.emitted) - 1 for step in script.steps())
        assert (told["target_steps"], told["drafted"]) == (len(script.steps()), None)
        assert (told["source"], told["scope"]) == ("metrics-delta", "server")
        assert len(row["output_ids"]) == 12
