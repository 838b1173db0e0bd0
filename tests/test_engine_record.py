"""What engines tell of speculation, in one form; and what the summary makes of it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fake_engine import Fake

from specbench.analysis.summary import summarise
from specbench.engines import find_engine
from specbench.engines.base import Engine, Setup
from specbench.engines.prometheus import counters, delta
from specbench.engines.record import Acceptance, Arrival, Reply, shared_out, with_steps
from specbench.engines.terms import Launch
from specbench.errors import SpecbenchError
from specbench.serving.client import Exchange
from specbench.serving.rows import Answered, fill, rounds_of
from specbench.spec import parse_spec
from specbench.store import Rounds, Run, Trial

GOLDEN = Path(__file__).parents[2] / "shared" / "golden"
golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason="the captured responses are not here")


def reply(tokens: int, **told: Any) -> Reply:
    return Reply("", [Arrival(0.0, 1)], completion_tokens=tokens, prompt_tokens=5, told=told)


def setup(text: str, draft: str | None = None, engine: Engine | None = None) -> Setup:
    return (engine or Fake()).setup(text, parse_spec(text), draft, {})


# -- counters ----------------------------------------------------------------------------------------------------


def test_counters_are_summed_over_labels_and_kept_by_position() -> None:
    text = """# TYPE x_total counter
x_total{engine="0",model_name="a b"} 3.0
x_total{engine="1",model_name="a b"} 4
x_created{engine="0"} 1.7e9
pos_total{position="0"} 5
pos_total{position="1"} 2
odd NaN
broken line here
"""
    found = counters(
        text, {"accepted": "x_total", "per_position": "pos_total", "drafted": "missing", "odd": "odd"}
    )
    assert found == {"accepted": 7, "per_position": 7, "per_position@0": 5, "per_position@1": 2}


def test_a_counter_that_went_backwards_was_reset() -> None:
    assert delta({"a": 5}, {"a": 7, "b": 2}) == {"a": 2, "b": 2}
    assert delta({"a": 5}, {"a": 4, "b": 2}) is None


@golden
def test_llama_cpp_s_counters_and_response_agree() -> None:
    engine = find_engine("llama.cpp")
    body = json.loads((GOLDEN / "llama_server_ngram_nonstream.json").read_text(encoding="utf-8"))
    said = engine.told(reply(64, timings=body["timings"]))
    assert said == {"drafted": 48, "accepted": 32}
    counted = engine.counters((GOLDEN / "llama_server_ngram_metrics.prom").read_text(encoding="utf-8"))
    assert {name: counted[name] for name in ("drafted", "accepted", "verify_steps", "decodes")} == {
        "drafted": 96,
        "accepted": 64,
        "verify_steps": 12,
        "decodes": 64,
    }  # fmt: skip  (two such requests)
    half = {name: value // 2 for name, value in counted.items()}
    (record,) = engine.record(
        [reply(64, timings=body["timings"])], half, setup("prompt-lookup", engine=engine)
    )
    assert (record.accepted, record.drafted, record.verify_steps, record.target_steps) == (32, 48, 6, 32)
    assert record.per_position == [6, 5, 5, 4, 3, 3, 3, 3]
    assert (record.source, record.scope) == ("response", "request")


# -- records -----------------------------------------------------------------------------------------------------


def test_a_share_is_whole_and_the_sum_exact() -> None:
    assert shared_out(10, [1, 1, 1]) == [3, 4, 3]
    assert sum(shared_out(17, [5, 0, 9, 4])) == 17
    assert shared_out(3, [0, 0]) == [0, 0] or sum(shared_out(3, [0, 0])) == 3


def test_the_baseline_has_a_step_a_token() -> None:
    (record,) = Fake().record([reply(7)], None, Setup("vanilla"))
    assert (record.accepted, record.target_steps, record.source) == (0, 7, "derived")


def test_counters_are_shared_out_and_marked_as_the_server_s() -> None:
    seen = {"accepted": 12, "drafted": 20, "verify_steps": 6}
    first, second = Fake().record([reply(10), reply(20)], seen, setup("prompt-lookup"))
    assert (first.accepted, second.accepted) == (4, 8)
    assert (first.target_steps, second.target_steps) == (6, 12)
    assert {first.scope, second.scope} == {"server"}
    assert first.source == "metrics-delta"


def test_unknown_stays_unknown() -> None:
    (record,) = Fake().record([reply(10)], None, setup("prompt-lookup"))
    assert record == Acceptance(completion_tokens=10)
    assert rounds_of(record, [Arrival(0.0, 1), Arrival(1.0, 9)]) == Rounds()


def test_steps_at_eos_are_at_least_the_verified_drafts() -> None:
    assert with_steps(Acceptance(accepted=6, completion_tokens=8, verify_steps=2)).target_steps == 3
    assert with_steps(Acceptance(accepted=6, completion_tokens=8)).target_steps == 2
    assert with_steps(Acceptance(completion_tokens=8)).target_steps is None


# -- rounds ------------------------------------------------------------------------------------------------------


def test_rounds_that_are_not_told_apart_are_one_entry() -> None:
    record = Acceptance(accepted=12, drafted=30, verify_steps=4, target_steps=9, completion_tokens=21)
    rounds = rounds_of(record, [Arrival(1.0, 1), Arrival(5.0, 20)])
    assert (rounds.emitted, rounds.count, rounds.with_draft) == ([20], [8], [4])
    assert (rounds.accepted, rounds.drafted, rounds.depth) == ([12], [30], None)
    assert list(rounds.round_s or ()) == [0.5]
    assert rounds.total == 8


def test_rounds_that_are_told_apart_are_cut_where_the_answer_ends() -> None:
    steps = [(4, 4), (3, 0), (4, 4)]
    record = Acceptance(8, 11, 3, 4, 10, steps=steps)  # 5 + 1 + 5 is two more than the 9 that were emitted
    rounds = rounds_of(record, [Arrival(0.0, 1), Arrival(1.0, 9)])
    assert rounds.emitted == [5, 1, 3]
    assert rounds.accepted == [4, 0, 3]
    rounds = rounds_of(Acceptance(4, 4, 1, 6, 10, steps=steps[:1]), [Arrival(0.0, 1), Arrival(1.0, 9)])
    assert (rounds.emitted, rounds.count, rounds.with_draft) == ([5, 4], [1, 4], [1, 0])
    assert rounds.drafted == [4, 0]


# -- the summary -------------------------------------------------------------------------------------------------


def trial(
    method: str, question: str, record: Acceptance, begin: float, gaps: list[float], **more: Any
) -> Trial:
    made = Trial(
        "t", question, None, 0, method, 1, 0, block=int(question), batch=question, concurrency=1, **more
    )
    at = [begin]
    for gap in gaps:
        at.append(at[-1] + gap)
    tokens = [1] * len(at)
    answer = Reply(
        "x", [Arrival(*pair) for pair in zip(at, tokens, strict=True)], [1], 5, record.completion_tokens
    )
    fill(made, Answered(Exchange(0.0), answer, record), at[-1], keep_text=True)
    return made


def overall(trials: list[Trial], method: str) -> dict[str, Any]:
    summary = summarise([Run(Path("r"), {"name": "r", "config": {"temperature": 0}}, trials, [])])
    (row,) = [row for row in summary["rows"] if (row["task"], row["method"]) == ("overall", method)]
    return row


def test_tokens_per_round_both_ways() -> None:
    """An n-gram drafter that seldom drafts: 96 tokens in 83 steps, 10 of them with a draft, 13 accepted."""
    fast = Acceptance(13, 71, 10, 83, 96, source="response")
    trials = [trial("vanilla", str(n), Acceptance(0, 0, 0, 96, 96), 1.0, [0.02] * 95) for n in range(6)]
    trials += [trial("ngram", str(n), fast, 1.0, [0.01] * 95) for n in range(6)]
    row = overall(trials, "ngram")
    assert row["tau"]["point"] == pytest.approx(95 / 82)
    assert row["tau_drafted"] == pytest.approx(1 + 13 / 10)
    assert row["alpha"] == pytest.approx(13 / 82)
    assert row["acceptance_rate"] == pytest.approx(13 / 71)
    assert (row["accepted_histogram"], row["acceptance_by_position"]) == (None, None)
    assert row["decode_speedup"]["point"] == pytest.approx(2.0)
    assert row["speedup"]["point"] == pytest.approx((1 + 95 * 0.02) / (1 + 95 * 0.01))
    assert row["tpot_s"] == pytest.approx(0.01)
    assert row["itl_s"]["p50"] == pytest.approx(0.01)
    assert row["round_s"]["p50"] == pytest.approx(0.95 / 82)
    base = overall(trials, "vanilla")
    assert (base["tau"]["point"], base["accepted_histogram"]) == (1.0, [6 * 95])


def test_what_an_engine_does_not_tell_is_null() -> None:
    trials = [trial("vanilla", str(n), Acceptance(0, 0, 0, 9, 9), 1.0, [0.02] * 8) for n in range(6)]
    silent = Acceptance(completion_tokens=9)
    trials += [trial("silent", str(n), silent, 1.0, [0.01] * 8) for n in range(6)]
    only_accepted = Acceptance(4, None, None, 5, 9, source="derived")
    trials += [trial("half", str(n), only_accepted, 1.0, [0.01] * 8) for n in range(6)]
    row = overall(trials, "silent")
    assert (row["tau"]["point"], row["alpha"], row["acceptance_rate"]) == (None, None, None)
    assert row["decode_speedup"]["point"] == pytest.approx(2.0)
    row = overall(trials, "half")
    assert (row["tau"]["point"], row["alpha"]) == (2.0, 1.0)
    assert (row["acceptance_rate"], row["tau_drafted"]) == (None, None)


def test_requests_beside_each_other_are_one_batch() -> None:
    """Throughput from the block's seconds, TPOT from each request's own."""
    trials = []
    for method, gaps, batch_s in (
        ("vanilla", [0.02, 0.04, 0.06, 0.08], 8.0),
        ("fast", [0.01, 0.01, 0.01, 0.07], 2.0),
    ):
        for block in range(6):
            for place in range(4):
                made = trial(
                    method, str(block * 4 + place), Acceptance(0, 0, 0, 9, 9), 1.0, [gaps[place]] * 8
                )
                made.block, made.batch, made.concurrency, made.batch_s = block, f"b{block}", 2, batch_s
                trials.append(made)
    row = overall(trials, "fast")
    assert row["tokens_per_s"] == pytest.approx(4 * 9 / 2.0)
    assert row["speedup"]["point"] == pytest.approx(4.0)
    assert row["decode_speedup"]["point"] == pytest.approx(0.20 / 0.10)
    assert (row["concurrency"], row["trials"]) == (2, 24)


def test_rows_survive_the_disk() -> None:
    made = trial("vanilla", "0", Acceptance(0, 0, 0, 9, 9), 1.0, [0.02] * 8)
    again = Trial.from_json(json.loads(json.dumps(made.to_json())))
    assert again == made
    assert all(after >= before for before, after in pairwise(made.arrivals["at_s"] if made.arrivals else []))


# -- methods -----------------------------------------------------------------------------------------------------


def test_a_method_in_the_engine_s_words() -> None:
    found = setup("prompt-lookup:k=7,engine.foo_bar=2")
    assert (found.settings, found.extra) == ({"draft-tokens": 7}, {"foo_bar": "2"})
    found = setup("draft-model", draft="small")
    assert found.settings == {"draft-tokens": 2, "draft-model": "small"}
    assert setup("draft-model:draft=tiny", draft="small").settings["draft-model"] == "tiny"


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("medusa", "fake has no method 'medusa'", "fake can do draft-model, gone, prompt-lookup, suffix"),
        ("prompt-lookup:tree=4", "has no option 'tree'", "k, engine.FLAG"),
        ("draft-model", "needs a drafter", "--draft"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(text: str, message: str, hint: str) -> None:
    with pytest.raises(SpecbenchError) as error:
        setup(text)
    assert message in error.value.message
    assert hint in error.value.hint


def test_a_flag_that_we_give_too_is_given_once() -> None:
    """With the user's value: some parsers refuse a flag that is there twice."""
    engine = find_engine("vllm")
    setup = engine.setup("vanilla", None, None, {"max_model_len": "99", "no_enable_prefix_caching": "true"})
    argv = engine.command(["vllm"], setup, Launch("/m", 1, Path("logs"))).argv
    plain = engine.command(["vllm"], Setup("vanilla"), Launch("/m", 1, Path("logs"), context=99)).argv
    assert argv == plain


def test_an_engine_without_speculation_says_why() -> None:
    class Plain(Fake):
        methods: ClassVar = {}
        no_speculation = "plain has no speculative decoding"

    with pytest.raises(SpecbenchError) as error:
        setup("prompt-lookup", engine=Plain())
    assert error.value.hint.startswith("plain has no speculative decoding: ")
