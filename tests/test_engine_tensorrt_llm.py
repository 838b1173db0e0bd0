"""TensorRT-LLM: its command lines and YAML, its wire format as documented, a whole run on an imitation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_wire
import pytest
from engine_kit import GREEDY, PROMPT, Measured, launch, line_of, read, record, setup_of, truth
from fake_server import Answer, sse

from specbench.engines import find_engine
from specbench.engines.record import Acceptance
from specbench.engines.terms import Limits, Setup
from specbench.errors import SpecbenchError

TRTLLM = find_engine("tensorrt-llm")
LINE = "trtllm-serve /m --host 127.0.0.1 --port 8123 --backend pytorch --config logs/trtllm-{}.yaml"
ALWAYS = {
    "return_perf_metrics": True,
    "kv_cache_config": {"enable_block_reuse": False},
    "max_seq_len": 4096,
}


def config_of(setup: Setup, **more: Any) -> dict[str, Any]:
    (content,) = TRTLLM.files(setup, launch(**more)).values()
    return json.loads(content)


# -- the command -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "draft", "speculation", "overlap"),
    [
        (
            "prompt-lookup",
            None,
            {
                "decoding_type": "NGram",
                "max_draft_len": 10,
                "max_matching_ngram_size": 3,
                "is_public_pool": False,
            },
            False,
        ),
        (
            "draft-model",
            "/d",
            {"decoding_type": "DraftTarget", "max_draft_len": 3, "speculative_model": "/d"},
            False,
        ),
        (
            "draft-model:decoding_type=Draft_Target",
            "/d",
            {"decoding_type": "Draft_Target", "max_draft_len": 3, "speculative_model": "/d"},
            False,
        ),
        (
            "eagle3:k=4",
            "/h",
            {"decoding_type": "Eagle3", "max_draft_len": 4, "speculative_model": "/h"},
            True,
        ),
        ("mtp", None, {"decoding_type": "MTP", "max_draft_len": 1}, True),
        ("pard", "/h", {"decoding_type": "PARD", "max_draft_len": 4, "speculative_model": "/h"}, True),
        ("dflash", "/h", {"decoding_type": "DFlash", "max_draft_len": 4, "speculative_model": "/h"}, True),
        (
            "dspark:k=7",
            "/h",
            {"decoding_type": "DSpark", "max_draft_len": 7, "speculative_model": "/h"},
            True,
        ),
        ("sam", None, {"decoding_type": "SA", "max_draft_len": 4}, True),
        (
            "sam:ngram=3",
            None,
            {"decoding_type": "SA", "max_draft_len": 4, "max_matching_ngram_size": 3},
            True,
        ),
    ],
)
def test_the_command_of_each_method(
    spec: str, draft: str | None, speculation: dict[str, Any], overlap: bool
) -> None:
    setup = setup_of(TRTLLM, spec, draft)
    assert line_of(TRTLLM, setup) == LINE.format(spec.replace(":", "-"))
    expected = {**ALWAYS, "speculative_config": speculation}
    assert config_of(setup) == expected | ({} if overlap else {"disable_overlap_scheduler": True})
    assert list(TRTLLM.files(setup, launch())) == [Path(f"logs/trtllm-{spec.replace(':', '-')}.yaml")]


def test_the_baseline_s_command() -> None:
    assert line_of(TRTLLM, setup_of(TRTLLM)) == LINE.format("vanilla")
    assert config_of(setup_of(TRTLLM)) == ALWAYS
    assert config_of(setup_of(TRTLLM), dtype="bfloat16")["dtype"] == "bfloat16"


def test_names_with_a_dot_are_keys_of_the_yaml() -> None:
    passed = {"kv_cache_config.free_gpu_memory_fraction": "0.8", "max_batch_size": "8"}
    setup = setup_of(TRTLLM, "eagle3:engine.speculative_config.use_dynamic_tree=true", "/h", **passed)
    found = config_of(setup)
    assert found["kv_cache_config"] == {"enable_block_reuse": False, "free_gpu_memory_fraction": 0.8}
    assert found["speculative_config"]["use_dynamic_tree"] is True
    known = frozenset({"--max_batch_size", "--config"})
    assert line_of(TRTLLM, setup, known=known).endswith(".yaml --max_batch_size 8")


def test_relaxed_acceptance_is_not_lossless() -> None:
    setup = setup_of(TRTLLM, "mtp:engine.speculative_config.use_relaxed_acceptance_for_thinking=true")
    assert setup.native is not None
    assert not setup.native.lossless


def test_a_pool_that_requests_share_learns() -> None:
    setup = setup_of(TRTLLM, "sam:engine.speculative_config.enable_global_pool=true")
    assert setup.native is not None
    assert setup.native.learns
    setup = setup_of(TRTLLM, "prompt-lookup")
    assert setup.native is not None
    assert not setup.native.learns
    setup = setup_of(TRTLLM, "prompt-lookup:engine.speculative_config.is_public_pool=true")
    assert setup.native is not None
    assert setup.native.learns
    assert config_of(setup)["speculative_config"]["is_public_pool"] is True


def test_older_releases_call_the_file_otherwise() -> None:
    line = line_of(TRTLLM, setup_of(TRTLLM), known=frozenset({"--extra_llm_api_options"}))
    assert line == LINE.format("vanilla").replace("--config", "--extra_llm_api_options")


def test_the_overlap_scheduler_is_off_on_both_sides_or_on_none() -> None:
    setups = {"vanilla": setup_of(TRTLLM), "prompt-lookup": setup_of(TRTLLM, "prompt-lookup")}
    found = TRTLLM.even(setups)
    assert [config_of(setup)["disable_overlap_scheduler"] for setup in found.values()] == [True, True]
    setups = {"vanilla": setup_of(TRTLLM), "mtp": setup_of(TRTLLM, "mtp")}
    assert TRTLLM.even(setups) == setups


@pytest.mark.parametrize("spec", ["eagle", "medusa", "suffix", "lookahead"])
def test_what_it_cannot_do(spec: str) -> None:
    with pytest.raises(SpecbenchError) as error:
        setup_of(TRTLLM, spec, "/h")
    assert error.value.hint == (
        "tensorrt-llm can do dflash, draft-model, dspark, eagle3, mtp, pard, prompt-lookup, sam"
    )


# -- requests and answers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [GREEDY, Limits(12, 0.7, 0.9, 20, 7, True)])
def test_only_fields_that_its_schema_has_are_sent(limits: Limits) -> None:
    route, body = TRTLLM.request(PROMPT, limits, setup_of(TRTLLM, "mtp"), "tiny")
    assert route == "/v1/completions"
    assert set(body) <= set(fake_wire.TensorRTLLM.fields)
    assert set(body["stream_options"]) == {"include_usage", "continuous_usage_stats"}
    assert (body["prompt"], body["repetition_penalty"]) == ([1, 20, 21], 1.0)


def answer(per_step: float | None = 2.5) -> Answer:
    """Ten tokens in four iterations."""
    texts, counts = ["a", "bcd", "", "e"], [1, 5, 6, 10]
    events: list[dict[str, Any]] = [
        {
            "choices": [
                {
                    "index": 0,
                    "text": words,
                    "token_ids": None,
                    "finish_reason": None if count < 10 else "length",
                    "avg_decoded_tokens_per_iter": None if per_step is None else count / number,
                }
            ],
            "usage": {"prompt_tokens": 3, "completion_tokens": count},
        }
        for number, (words, count) in enumerate(zip(texts, counts, strict=True), 1)
    ]
    return sse(*events, {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 10}})


def test_steps_follow_from_tokens_an_iteration() -> None:
    reply = read(TRTLLM, answer(), setup_of(TRTLLM, "mtp"))
    assert [one.tokens for one in reply.arrivals] == [1, 4, 1, 4]  # the third has no text yet
    found = record(TRTLLM, answer(), setup_of(TRTLLM, "mtp"))
    assert found == Acceptance(6, None, None, 4, 10, source="derived")


def test_drafted_tokens_are_the_server_s() -> None:
    text = (
        "# TYPE trtllm_spec_decode_drafted_tokens_total counter\n"
        'trtllm_spec_decode_drafted_tokens_total{model_name="tiny"} 12.0\n'
        'trtllm_spec_decode_accepted_tokens_total{model_name="tiny"} 7.0\n'
        'trtllm_spec_decode_drafted_tokens_created{model_name="tiny"} 1.7e+09\n'
    )
    delta = TRTLLM.counters(text)
    found = record(TRTLLM, answer(), setup_of(TRTLLM, "mtp"), delta)
    assert (found.accepted, found.drafted, found.target_steps, found.source) == (6, 12, 4, "derived")
    found = record(TRTLLM, answer(None), setup_of(TRTLLM, "mtp"), delta)
    assert (found.accepted, found.drafted, found.target_steps) == (7, 12, 3)
    assert (found.source, found.scope) == ("metrics-delta", "server")


def test_the_counters_are_by_position() -> None:
    """Three drafts of 4, 4 and 1 tokens; 3, 0 and 1 of them accepted."""
    by_position = {
        "drafted": [3, 2, 2, 2],
        "accepted": [2, 1, 1],
    }  # a position that nothing reached is left out
    text = "".join(
        f'trtllm_spec_decode_{name}_tokens_total{{engine_type="trtllm",token_position="{at}"}} {count}.0\n'
        for name, counts in by_position.items()
        for at, count in enumerate(counts)
    )
    found = record(TRTLLM, answer(None), setup_of(TRTLLM, "prompt-lookup"), TRTLLM.counters(text))
    assert (found.accepted, found.drafted, found.verify_steps) == (4, 9, 3)
    assert found.per_position == [2, 1, 1]


def test_without_either_it_is_unknown() -> None:
    assert record(TRTLLM, answer(None), setup_of(TRTLLM, "mtp")) == Acceptance(completion_tokens=10)


# -- whole runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("faults", [{"loading": 0.3}, {"older": True, "no_metrics": True}])
def test_a_run(on_engine: Callable[..., Measured], faults: dict[str, object]) -> None:
    run = on_engine("tensorrt-llm", "prompt-lookup", **faults)
    for row in run.rows:
        script, told = truth(row), row["acceptance"]
        assert (told["target_steps"], told["source"]) == (len(script.steps()), "derived")
        assert told["accepted"] == sum(len(step.emitted) - 1 for step in script.steps())
        assert told["drafted"] == (None if "older" in faults else 4 * len(script.verified))
        assert told["verify_steps"] == (None if "older" in faults else len(script.verified))
    for label in ("vanilla", "prompt-lookup"):
        written = run.place.results / "r" / "logs" / f"trtllm-{label}.yaml"
        config = json.loads(written.read_text(encoding="utf-8"))
        assert config["disable_overlap_scheduler"] is True
