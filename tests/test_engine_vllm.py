"""vLLM: its command lines, its wire format as captured from 0.32, and whole runs on an imitation that speaks it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_kit import (
    GOLDEN,
    GREEDY,
    PROMPT,
    Measured,
    golden,
    joined,
    launch,
    line_of,
    program,
    read,
    record,
    setup_of,
    truth,
)
from fake_server import raw, sse

from specbench.engines import find_engine
from specbench.engines.record import Arrival, Reply
from specbench.engines.terms import Limits
from specbench.engines.vllm import with_undrafted
from specbench.errors import SpecbenchError
from specbench.serving.probe import check_method, probe
from specbench.serving.rows import rounds_of

VLLM = find_engine("vllm")
BASELINE = (
    "vllm serve /m --host 127.0.0.1 --port 8123 --generation-config vllm --no-enable-prefix-caching "
    "--max-model-len 4096 --seed 0"
)

# -- the command -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "draft", "config"),
    [
        (
            "prompt-lookup",
            None,
            '{"method":"ngram","num_speculative_tokens":10,"prompt_lookup_max":3,"prompt_lookup_min":1}',
        ),
        (
            "prompt-lookup:k=5,ngram=4,engine.speculative_config.prompt_lookup_min=2",
            None,
            '{"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4,"prompt_lookup_min":2}',
        ),
        (
            "ngram-gpu:k=5",
            None,
            '{"method":"ngram_gpu","num_speculative_tokens":5,"prompt_lookup_max":3,"prompt_lookup_min":1}',
        ),
        ("draft-model", "/d", '{"method":"draft_model","num_speculative_tokens":5,"model":"/d"}'),
        (
            "draft-model:engine.speculative_config.use_heterogeneous_vocab=true",
            "/d",
            '{"method":"draft_model","num_speculative_tokens":5,"model":"/d","use_heterogeneous_vocab":true}',
        ),
        ("eagle", "/h", '{"method":"eagle","num_speculative_tokens":3,"model":"/h"}'),
        ("eagle3:k=4", "/h", '{"method":"eagle3","num_speculative_tokens":4,"model":"/h"}'),
        ("mtp", None, '{"method":"mtp","num_speculative_tokens":1}'),
        ("medusa", "/h", '{"method":"medusa","num_speculative_tokens":3,"model":"/h"}'),
        ("mlp-speculator", "/h", '{"method":"mlp_speculator","model":"/h"}'),
        ("dflash", "/h", '{"method":"dflash","num_speculative_tokens":15,"model":"/h"}'),
        ("dspark:k=7", "/h", '{"method":"dspark","num_speculative_tokens":7,"model":"/h"}'),
        ("suffix", None, '{"method":"suffix"}'),
        (
            "suffix:k=24,min_prob=0.2,answers=0",
            None,
            '{"method":"suffix","num_speculative_tokens":24,"suffix_decoding_min_token_prob":0.2,'
            '"suffix_decoding_max_cached_requests":0}',
        ),
    ],
)
def test_the_command_of_each_method(spec: str, draft: str | None, config: str) -> None:
    more = f" --speculative-config '{config}' --per-request-spec-decode-metrics detailed"
    assert line_of(VLLM, setup_of(VLLM, spec, draft)) == BASELINE + more


def test_the_baseline_s_command() -> None:
    assert line_of(VLLM, setup_of(VLLM)) == BASELINE
    flags = setup_of(VLLM, async_scheduling="false", gpu_memory_utilization="0.8", enforce_eager="true")
    line = line_of(VLLM, flags, dtype="bfloat16", trust_remote_code=True)
    own = " --dtype bfloat16 --trust-remote-code"
    assert line == f"{BASELINE}{own} --gpu-memory-utilization 0.8 --enforce-eager --no-async-scheduling"
    assert line_of(VLLM, setup_of(VLLM, **{"speculative_config.x": "1"})) == BASELINE


def test_the_cpu_build_s_sampled_answers_are_not_lossless() -> None:
    doubt = VLLM.doubt("0.32.0+cpu", 0.7)
    assert doubt is not None
    assert VLLM.doubt("0.32.0+cpu", 0.0) is VLLM.doubt("0.32.0", 0.7) is None
    native = setup_of(VLLM, "mtp").doubted(doubt).native
    assert native is not None
    assert (native.lossless, native.note) == (False, doubt)
    assert setup_of(VLLM).doubted(doubt) == setup_of(VLLM)


def test_what_helps_where_its_share_of_the_memory_is_not_free() -> None:
    """As `request_memory` of vllm/v1/worker/utils.py says it."""
    said = "ValueError: Free memory on device cpu (3/8 GiB) on startup is less than desired GPU memory utilization"
    (cure,) = (cure for sign, cure in VLLM.cures.items() if sign in said.casefold())
    assert "vllm:gpu_memory_utilization=0.5" in cure


def test_threads_hold_on_a_cpu_too() -> None:
    assert VLLM.environment(setup_of(VLLM), launch()) == {"VLLM_NO_USAGE_STATS": "1"}
    environment = VLLM.environment(setup_of(VLLM), launch(threads=4))
    assert environment["OMP_NUM_THREADS"] == "4"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"  # else its binding sets their number


def test_a_version_without_metrics_a_request_is_not_asked_for_them() -> None:
    known = frozenset({"--speculative-config"})
    line = line_of(VLLM, setup_of(VLLM, "mtp"), known=known)
    assert line == BASELINE + """ --speculative-config '{"method":"mtp","num_speculative_tokens":1}'"""


def test_what_it_cannot_do() -> None:
    with pytest.raises(SpecbenchError) as error:
        setup_of(VLLM, "lookahead")
    assert error.value.hint.startswith("vllm can do dflash, draft-model, dspark, eagle, eagle3, medusa,")


@pytest.mark.parametrize(
    ("spec", "lossless"),
    [
        ("mtp", True),
        ("mtp:engine.speculative_config.rejection_sample_method=block", True),
        ("mtp:engine.speculative_config.rejection_sample_method=fly", False),
        ("prompt-lookup:engine.speculative_config.rejection_sample_method=synthetic", False),
    ],
)
def test_settings_that_change_answers_are_not_lossless(spec: str, lossless: bool) -> None:
    native = setup_of(VLLM, spec).native
    assert native is not None
    assert native.lossless is lossless


def test_a_method_that_the_version_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The help lists methods: 0.33 has no Medusa any more. Packages that a method needs are looked for too."""
    monkeypatch.setenv("FAKE_WIRE", "{}")
    found = probe(VLLM, str(program(tmp_path, "vllm")))
    assert found.methods == {"draft_model", "mtp", "ngram", "suffix"}
    check_method(VLLM, setup_of(VLLM, "prompt-lookup"), found)
    with pytest.raises(SpecbenchError, match=r"^vllm 1\.2\.3 has no method medusa$"):
        check_method(VLLM, setup_of(VLLM, "medusa", "/h"), found)
    check_method(VLLM, setup_of(VLLM, "suffix"), found)  # no interpreter beside it: not known
    (tmp_path / "python").symlink_to(sys.executable)
    with pytest.raises(SpecbenchError, match="suffix in vllm needs the package arctic-inference"):
        check_method(VLLM, setup_of(VLLM, "suffix"), found)
    monkeypatch.setenv("FAKE_WIRE", '{"older": true}')
    check_method(VLLM, setup_of(VLLM, "medusa", "/h"), probe(VLLM, str(program(tmp_path, "vllm"))))


def test_who_learns_and_who_changes_the_scheduler() -> None:
    assert [name for name, native in VLLM.methods.items() if native.learns] == ["suffix"]
    noted = [name for name, native in VLLM.methods.items() if "asynchronously" in native.note]
    assert noted == ["prompt-lookup", "medusa", "mlp-speculator", "suffix"]


# -- requests ----------------------------------------------------------------------------------------------------


def test_the_request() -> None:
    route, body = VLLM.request(PROMPT, GREEDY, setup_of(VLLM), "tiny")
    assert route == "/v1/completions"
    assert body == {
        "model": "tiny",
        "prompt": [1, 20, 21],
        "max_tokens": 12,
        "temperature": 0.0,
        "seed": 7,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
    }
    _, body = VLLM.request(PROMPT, Limits(12, 0.5, 0.9, 40, 7, True), setup_of(VLLM), "tiny")
    assert (body["temperature"], body["top_p"], body["top_k"], body["ignore_eos"]) == (0.5, 0.9, 40, True)


# -- what it answers ---------------------------------------------------------------------------------------------


@golden
def test_the_captured_stream() -> None:
    """Several tokens an event, empty content, usage that grows: 16 tokens, of which the capture holds the last 13."""
    answer = raw((GOLDEN / "vllm032_ngram_stream_tail.sse").read_text(encoding="utf-8"))
    head = sse(
        {"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": usage(0)},
        {"choices": [{"delta": {"content": "w"}, "token_ids": [5]}], "usage": usage(1)},
        {"choices": [{"delta": {"content": "n"}, "token_ids": [6, 7]}], "usage": usage(3)},
        done=False,
    )
    reply = read(VLLM, joined(head, answer), setup_of(VLLM, "prompt-lookup"))
    assert [arrival.tokens for arrival in reply.arrivals] == [1, 2, 2, 2]
    assert (reply.completion_tokens, reply.prompt_tokens, reply.finish) == (16, 59, "length")
    found = record(VLLM, joined(head, answer), setup_of(VLLM, "prompt-lookup"))
    assert (found.accepted, found.drafted, found.verify_steps) == (7, 10, 6)
    assert found.per_position == [5, 1, 1, 0]
    assert found.target_steps == 16 - 7  # the capture lacks events: no bound from them
    assert (found.source, found.scope) == ("response", "request")


def usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 59, "completion_tokens": tokens}


@golden
def test_the_captured_answer_counts_what_lay_beyond_the_limit() -> None:
    """64 tokens: 1 + 47 accepted + 16 steps' own is 64 already; two steps without a draft leave two too many."""
    body = json.loads((GOLDEN / "vllm032_ngram_nonstream.json").read_text(encoding="utf-8"))
    said = body["metrics"]["speculative_decoding"]
    sizes = [1]  # as such a stream would be: undrafted steps after the fourth and sixth, the last step cut
    for number, accepted in enumerate(said["per_step_accepted"]):
        sizes += [accepted + 1, *([1] if number in (3, 5) else [])]
    sizes[-1] -= 2
    assert sum(sizes) == body["usage"]["completion_tokens"] == 64
    reply = Reply(
        "", [Arrival(0.1 * at, size) for at, size in enumerate(sizes)], None, 59, 64, "length", body
    )
    (found,) = VLLM.record([reply], None, setup_of(VLLM, "prompt-lookup"))
    assert (found.accepted, found.drafted, found.verify_steps, found.target_steps) == (47, 50, 16, 19)
    rounds = rounds_of(found, reply.arrivals)
    assert (sum(rounds.emitted), rounds.total) == (63, 18)
    assert sum(rounds.accepted or ()) == 46  # of the last step's 4 and its own token, 3 were emitted
    assert sum(rounds.with_draft or ()) == 16


@golden
def test_the_captured_counters() -> None:
    found = VLLM.counters((GOLDEN / "vllm032_ngram_metrics.prom").read_text(encoding="utf-8"))
    assert (found["verify_steps"], found["drafted"], found["accepted"]) == (31, 82, 73)
    assert [found[f"per_position@{at}"] for at in range(4)] == [28, 16, 16, 13]
    reply = Reply("", [Arrival(0.0, 112)], completion_tokens=112)
    (record_,) = VLLM.record([reply], found, setup_of(VLLM, "prompt-lookup"))
    assert (record_.accepted, record_.target_steps, record_.source) == (73, 39, "metrics-delta")
    assert (record_.per_position, record_.scope) == ([28, 16, 16, 13], "server")


@pytest.mark.parametrize(
    ("steps", "sizes", "expected"),
    [
        ([(4, 2), (4, 0)], [1, 3, 1, 1], [(4, 2), (4, 0), (0, 0)]),
        ([(4, 2), (4, 4)], [1, 1, 3, 1, 5], [(0, 0), (4, 2), (0, 0), (4, 4)]),
        ([(4, 2), (4, 4)], [1, 3, 2], [(4, 2), (4, 4)]),  # cut at the limit
        ([(4, 2), (4, 1)], [1, 5], [(4, 2), (4, 1)]),  # two steps in one event: as they are
        ([(4, 2)], [1, None, 3], [(4, 2)]),
        ([], [1, 1, 1], [(0, 0), (0, 0)]),
    ],
)
def test_steps_without_a_draft_are_found_by_their_size(
    steps: list[tuple[int, int]], sizes: list[int | None], expected: list[tuple[int, int]]
) -> None:
    assert with_undrafted(steps, sizes) == expected


def test_fields_that_are_missing_are_unknown() -> None:
    reply = Reply(
        "", [Arrival(0.0, 9)], completion_tokens=9, told={"metrics": {"speculative_decoding": None}}
    )
    (found,) = VLLM.record([reply], None, setup_of(VLLM, "mtp"))
    assert (found.accepted, found.drafted, found.target_steps, found.source) == (None, None, None, "none")
    assert VLLM.counters("vllm:generation_tokens_total 5\n") == {}


# -- whole runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("faults", [{"loading": 0.3}, {"older": True}])
def test_a_run(on_engine: Callable[..., Measured], faults: dict[str, object]) -> None:
    run = on_engine("vllm", "prompt-lookup", **faults)
    assert "schedules asynchronously" in run.said
    source = "metrics-delta" if "older" in faults else "response"
    for row in run.rows:
        script = truth(row)
        told = row["acceptance"]
        assert (told["accepted"], told["source"]) == (script.accepted, source)
        assert (told["drafted"], told["verify_steps"]) == (4 * len(script.verified), len(script.verified))
        assert told["target_steps"] == len(script.steps())
        assert row["arrivals"]["tokens"] == [len(step.emitted) for step in script.steps()]
        assert row["output_tokens"] == 12
