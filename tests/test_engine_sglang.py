"""SGLang: its command lines, its wire format as documented, and a whole run on an imitation that speaks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from engine_kit import GREEDY, PROMPT, Measured, line_of, read, record, setup_of, truth
from fake_server import Answer, sse

from specbench.engines import find_engine
from specbench.engines.record import Acceptance
from specbench.errors import SpecbenchError

SGLANG = find_engine("sglang")
BASELINE = (
    "python -m sglang.launch_server --model-path /m --host 127.0.0.1 --port 8123 --enable-metrics "
    "--disable-radix-cache --sampling-defaults openai --context-length 4096 --random-seed 0"
)
DRAFT = " --speculative-draft-model-path /h"
CHAIN = " --speculative-num-steps 3{} --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"

# -- the command -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "draft", "flags"),
    [
        ("prompt-lookup", None, "NGRAM --speculative-num-draft-tokens 11"),
        ("prompt-lookup:k=5", None, "NGRAM --speculative-num-draft-tokens 6"),
        ("draft-model", "/h", "STANDALONE" + CHAIN.format(DRAFT)),
        ("eagle", "/h", "EAGLE" + CHAIN.format(DRAFT)),
        ("eagle3", "/h", "EAGLE3" + CHAIN.format(DRAFT)),
        (
            "eagle3:k=5,topk=4,nodes=8",
            "/h",
            f"EAGLE3 --speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 8{DRAFT}",
        ),
        ("mtp", None, "NEXTN"),
        ("mtp:k=3", None, "NEXTN" + CHAIN.format("")),
        ("dflash", "/h", "DFLASH" + DRAFT),
        ("dflash:k=15", "/h", f"DFLASH{DRAFT} --speculative-num-draft-tokens 16"),
        ("dspark:k=7", "/h", f"DSPARK --speculative-dspark-block-size 7{DRAFT}"),
    ],
)
def test_the_command_of_each_method(spec: str, draft: str | None, flags: str) -> None:
    assert line_of(SGLANG, setup_of(SGLANG, spec, draft)) == f"{BASELINE} --speculative-algorithm {flags}"


def test_the_baseline_s_command() -> None:
    assert line_of(SGLANG, setup_of(SGLANG)) == BASELINE
    flags = setup_of(SGLANG, mem_fraction_static="0.8", enable_deterministic_inference="true")
    line = line_of(SGLANG, flags, dtype="bfloat16", device="cuda:1", trust_remote_code=True)
    own = " --dtype bfloat16 --device cuda --trust-remote-code"
    assert line == f"{BASELINE}{own} --mem-fraction-static 0.8 --enable-deterministic-inference"


def test_one_gpu_of_several_and_the_threads() -> None:
    from engine_kit import launch

    environment = SGLANG.environment(setup_of(SGLANG), launch(device="cuda:1", threads=4))
    assert environment == {"OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "1"}
    assert SGLANG.environment(setup_of(SGLANG), launch(device="cuda")) == {}


@pytest.mark.parametrize(
    ("spec", "message", "hint"),
    [
        (
            "medusa",
            "sglang has no method 'medusa'",
            "sglang can do dflash, draft-model, dspark, eagle, eagle3, mtp,",
        ),
        ("suffix", "sglang has no method 'suffix'", "prompt-lookup"),
        ("eagle:topk=4", "topk=4 in sglang needs the number of nodes", "nodes=N"),
        ("eagle:k=auto", "'auto' is no number of tokens for sglang", "k=3"),
    ],
)
def test_what_it_cannot_do(spec: str, message: str, hint: str) -> None:
    with pytest.raises(SpecbenchError) as error:
        setup_of(SGLANG, spec, "/h")
    assert message in error.value.message
    assert hint in error.value.hint


def test_the_n_gram_trie_learns() -> None:
    assert [name for name, native in SGLANG.methods.items() if native.learns] == ["prompt-lookup"]


@pytest.mark.parametrize(("threshold", "lossless"), [("1.0", True), ("0.9", False)])
def test_lower_thresholds_are_not_lossless(threshold: str, lossless: bool) -> None:
    made = setup_of(SGLANG, f"eagle:engine.speculative_accept_threshold_acc={threshold}", "/h")
    assert made.native is not None
    assert made.native.lossless is lossless
    made = setup_of(SGLANG, "eagle", "/h", **{"speculative-accept-threshold-single": threshold})
    assert made.native is not None
    assert made.native.lossless is lossless


@pytest.mark.parametrize(("status", "ready"), [(200, True), (404, True), (503, False), (0, False)])
def test_a_version_without_the_route_is_ready_when_it_answers(status: int, ready: bool) -> None:
    assert SGLANG.ready(status, "") is ready


def test_another_interpreter_runs_the_module(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n", encoding="utf-8")
    python.chmod(0o755)
    assert SGLANG.found(str(python)) == [str(python), "-m", "sglang.launch_server"]
    assert SGLANG.found(str(tmp_path / "missing")) is None


# -- requests and answers ----------------------------------------------------------------------------------------


def test_the_request() -> None:
    route, body = SGLANG.request(PROMPT, GREEDY, setup_of(SGLANG, "mtp"), "tiny")
    assert route == "/v1/completions"
    assert body["prompt"] == [1, 20, 21]
    assert (body["temperature"], body["seed"]) == (0.0, 7)
    assert body["return_token_ids"] is True
    assert body["return_spec_tokens_details"] is True
    assert "return_meta_info" not in body  # it is refused when streaming
    _, body = SGLANG.request(PROMPT, GREEDY, setup_of(SGLANG), "tiny")
    assert "return_spec_tokens_details" not in body
    _, body = SGLANG.request(PROMPT, GREEDY, replace(setup_of(SGLANG, "mtp"), chat=True), "tiny")
    assert "return_token_ids" not in body  # streams of the chat route refuse it
    assert body["return_spec_tokens_details"] is True


def answer(*last: dict[str, object], ids: bool = True) -> Answer:
    """Ten tokens in the prefill and three verify steps, which accepted 3, 0 and 3."""
    sizes = [[5], [6, 7, 8, 9], [10], [11, 12, 13, 14]]
    events = [
        {
            "choices": [
                {"text": "abcd"[: len(new)], "finish_reason": None, **({"token_ids": new} if ids else {})}
            ],
            "usage": None,
        }
        for new in sizes
    ]
    events[-1]["choices"][0]["finish_reason"] = "stop"  # type: ignore[index]
    usage = {"prompt_tokens": 3, "completion_tokens": 10}
    return sse(*events, *last, {"choices": [], "usage": usage})


DETAILS = {
    "spec_num_correct_drafts": 6,
    "spec_num_proposed_drafts": 9,
    "spec_verify_ct": 3,
    "spec_correct_drafts_histogram": [1, 0, 0, 2],
}


@pytest.mark.parametrize("details", [DETAILS, [DETAILS]])
def test_counts_come_in_an_event_of_their_own(details: object) -> None:
    event = {"choices": [], "usage": None, "sglext": {"spec_tokens_details": details}}
    found = record(SGLANG, answer(event), setup_of(SGLANG, "eagle", "/h"))
    assert found == Acceptance(6, 9, 3, 4, 10, per_position=[2, 2, 2], source="response")
    reply = read(SGLANG, answer(event), setup_of(SGLANG, "eagle", "/h"))
    assert reply.ids == [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    assert ([one.tokens for one in reply.arrivals], reply.finish) == ([1, 4, 1, 4], "eos")


def test_the_names_of_2025() -> None:
    older = {"spec_accept_token_num": 6, "spec_draft_token_num": 9, "spec_verify_ct": 3}
    event = {"choices": [], "sglext": {"spec_tokens_details": older}}
    found = record(SGLANG, answer(event), setup_of(SGLANG, "eagle", "/h"))
    assert (found.accepted, found.drafted, found.verify_steps, found.target_steps) == (6, 9, 3, 4)


def test_verify_calls_alone_tell_what_was_accepted() -> None:
    delta = SGLANG.counters('sglang:spec_verify_calls_total{tp_rank="0"} 3\nsglang:spec_accept_length 2.1\n')
    found = record(SGLANG, answer(), setup_of(SGLANG, "eagle", "/h"), delta)
    assert (found.accepted, found.drafted, found.verify_steps, found.target_steps) == (6, None, 3, 4)
    assert (found.source, found.scope) == ("metrics-delta", "server")


def test_without_counts_it_is_unknown() -> None:
    assert record(SGLANG, answer(), setup_of(SGLANG, "mtp")) == Acceptance(completion_tokens=10)
    assert record(SGLANG, answer(), setup_of(SGLANG)).target_steps == 10  # the baseline


# -- whole runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("faults", [{"loading": 0.3}, {"older": True}])
def test_a_run(on_engine: Callable[..., Measured], faults: dict[str, object]) -> None:
    run = on_engine("sglang", "mtp", **faults)
    assert "sglang counts whole windows as drafted" in run.said
    for row in run.rows:
        script, told = truth(row, gaps=False), row["acceptance"]
        assert (told["verify_steps"], told["target_steps"]) == (len(script.verified), len(script.steps()))
        emitted = sum(len(step.emitted) - 1 for step in script.steps())
        expected = (emitted, "metrics-delta") if "older" in faults else (script.accepted, "response")
        assert (told["accepted"], told["source"]) == expected
