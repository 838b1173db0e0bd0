"""vLLM: its command lines, its wire format as captured from 0.32, and whole runs on an imitation that speaks it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import fake_wire
import pytest
from engine_kit import (
    GOLDEN,
    GREEDY,
    PROMPT,
    ask,
    at_work,
    golden,
    joined,
    line_of,
    read,
    record,
    setup_of,
    start,
    truth,
)
from fake_server import raw, sse
from tiny_folder import Workplace

from specbench.engines import find_engine
from specbench.engines.record import Arrival, Reply
from specbench.engines.terms import Limits
from specbench.engines.vllm import with_undrafted
from specbench.errors import SpecbenchError
from specbench.serving.client import events
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
        ("medusa", "/h", '{"method":"medusa","model":"/h"}'),
        ("mlp-speculator", "/h", '{"method":"mlp_speculator","model":"/h"}'),
        ("dflash", "/h", '{"method":"dflash","model":"/h"}'),
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


def test_a_version_without_metrics_a_request_is_not_asked_for_them() -> None:
    known = frozenset({"--speculative-config"})
    line = line_of(VLLM, setup_of(VLLM, "mtp"), known=known)
    assert line == BASELINE + """ --speculative-config '{"method":"mtp","num_speculative_tokens":1}'"""


def test_what_it_cannot_do() -> None:
    with pytest.raises(SpecbenchError) as error:
        setup_of(VLLM, "lookahead")
    assert error.value.hint.startswith("vllm can do dflash, draft-model, dspark, eagle, eagle3, medusa,")


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
def test_a_run(
    make_place: Callable[[str], Workplace], monkeypatch: pytest.MonkeyPatch, faults: dict[str, object]
) -> None:
    place = at_work(make_place("vllm"), "vllm", monkeypatch, **faults)
    result = place.run("--method", "prompt-lookup", "--repeats", 1, "--limit", 2)
    assert result.code == 0, result.err
    assert "schedules asynchronously" in result.err
    rows = [row for row in place.rows() if row["method"] == "prompt-lookup"]
    assert all(row["error"] is None and row["agreement"]["same"] for row in rows)
    source = "metrics-delta" if "older" in faults else "response"
    for row in rows:
        script = truth(row)
        told = row["acceptance"]
        assert (told["accepted"], told["source"]) == (script.accepted, source)
        assert (told["drafted"], told["verify_steps"]) == (4 * len(script.verified), len(script.verified))
        assert told["target_steps"] == len(script.steps())
        assert row["arrivals"]["tokens"] == [len(step.emitted) for step in script.steps()]
        assert row["output_tokens"] == 12


@pytest.mark.parametrize(("faults", "unknown"), [({"no_metrics": True}, 4), ({"reset": 2}, 1)])
def test_counters_that_are_missing_or_reset_leave_it_unknown(
    make_place: Callable[[str], Workplace],
    monkeypatch: pytest.MonkeyPatch,
    faults: dict[str, object],
    unknown: int,
) -> None:
    place = at_work(make_place("vllm"), "vllm", monkeypatch, older=True, **faults)
    result = place.run("--method", "prompt-lookup", "--repeats", 1)
    assert result.code == 0, result.err
    told = [row["acceptance"] for row in place.rows() if row["method"] == "prompt-lookup"]
    assert [one["accepted"] for one in told if one["source"] == "none"] == [None] * unknown
    assert [one["accepted"] for one in told if one["source"] == "metrics-delta"] == [7] * (4 - unknown)


def test_a_stream_that_breaks_fails_its_row_alone(
    make_place: Callable[[str], Workplace], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = at_work(make_place("vllm"), "vllm", monkeypatch, cut_every=3)
    place.run("--method", "prompt-lookup", "--repeats", 1)
    errors = [row["error"] for row in place.rows() if row["error"]]
    assert errors
    assert all("the connection broke" in error for error in errors)


def test_starts_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecbenchError, match="Engine core initialization failed"):
        start("vllm", tmp_path, monkeypatch, crash=True)
    taken = tmp_path / "taken"
    start("vllm", tmp_path, monkeypatch, taken=str(taken))
    assert taken.exists()


def test_another_model_is_refused() -> None:
    given = fake_wire.VLLM.parser({}).parse_args(["serve", "/m", "--port", "1"])
    exchange = ask(VLLM, fake_wire.VLLM(given), "other")
    assert exchange.error == "HTTP 404: The model `other` does not exist."
    exchange = ask(VLLM, fake_wire.VLLM(given), "/m")
    assert exchange.error is None
    assert len(list(events(exchange.chunks))) == 13
