"""What engines tell of speculation, in one form; and what the summary makes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fake_engine import Fake

from specbench.analysis.summary import summarise
from specbench.engines import find_engine
from specbench.engines.base import Engine, Setup
from specbench.engines.prometheus import counters, delta
from specbench.engines.record import Acceptance, Arrival, Reply, shared_out, shared_within, with_steps
from specbench.engines.terms import Launch
from specbench.errors import SpecbenchError
from specbench.serving.answers import with_opening
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


def llama_reply(tokens: int, drafted: int, accepted: int, finish: str = "length") -> Reply:
    timings = {"predicted_n": tokens} | (
        {"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {}
    )
    return replace(reply(tokens, timings=timings), finish=finish)


def test_of_requests_side_by_side_the_steps_are_their_own() -> None:
    """A: 20 of 20 accepted in 2 verify steps; B: none of 49 in 6; C drafted nothing; D 7 of 7 in one step.

    Verify steps are shared by what was drafted and positions by what was accepted, never by the length of answers.
    """
    engine = find_engine("llama.cpp")
    replies = [llama_reply(24, 20, 20), llama_reply(24, 49, 0), llama_reply(24, 0, 0), llama_reply(24, 7, 7)]
    counted = {"accepted": 27, "drafted": 76, "verify_steps": 9, "decodes": 60}
    deep = [3, 3, 3, 3, 3, 3, 3, 2, 2, 2]
    counted |= {"per_position": 27} | {f"per_position@{at}": count for at, count in enumerate(deep)}
    found = engine.record(replies, counted, setup("prompt-lookup", engine=engine))
    assert [one.target_steps for one in found] == [4, 24, 24, 17]
    verified = [one.verify_steps or 0 for one in found]
    assert sum(verified) == 9
    assert verified[2] == 0
    assert all(1 <= verified[i] < (found[i].target_steps or 0) for i in (0, 1, 3))
    positions = [one.per_position or [] for one in found]
    assert [sum(counts) for counts in positions] == [20, 0, 0, 7]
    assert [sum(counts) for counts in zip(*positions, strict=True)] == deep
    assert {one.scope for one in found} == {"server"}
    assert {one.source for one in found} == {"response"}
    assert [(one.accepted, one.drafted) for one in found] == [(20, 20), (0, 49), (0, 0), (7, 7)]


def test_two_unequal_replies() -> None:
    engine = find_engine("llama.cpp")
    counted = {"accepted": 20, "drafted": 69, "verify_steps": 8}
    found = engine.record(
        [llama_reply(24, 20, 20), llama_reply(24, 49, 0)], counted, setup("prompt-lookup", engine=engine)
    )
    assert [(one.target_steps, one.verify_steps) for one in found] == [(4, 2), (24, 6)]


def test_shares_keep_within_what_is_possible() -> None:
    assert shared_within(10, [1, 9], [1, 9]) == [1, 9]  # one drafted token a step
    assert shared_within(5, [7, 93], [9, 9]) == [1, 4]  # who drafted at all took a step for it
    assert shared_within(8, [90, 10], [3, 9]) == [3, 5]
    assert shared_within(8, [10, 90], [9, 3]) == [5, 3]
    assert shared_within(0, [3, 0], [2, 2]) == [0, 0]
    assert sum(shared_within(9, [5, 4], [2, 3])) == 9  # impossible: the sum is still the server's


def test_counters_that_are_not_these_requests_are_known() -> None:
    """Other traffic, or a counter that was read too early."""
    engine = find_engine("llama.cpp")
    replies = [llama_reply(24, 17, 13), llama_reply(24, 0, 0)]
    assert engine.accounts_for(replies, {"accepted": 13, "drafted": 17, "verify_steps": 3})
    assert not engine.accounts_for(replies, {"accepted": 19, "drafted": 50, "verify_steps": 8})
    assert not engine.accounts_for(replies, {"accepted": 0, "drafted": 0, "verify_steps": 0})
    assert Fake().accounts_for(replies, {"accepted": 19})  # whose answers do not tell
    derived = [reply(24, avg_decoded_tokens_per_iter=1.51)]
    assert find_engine("tensorrt-llm").accounts_for(derived, {"accepted": 9})


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


def test_rounds_where_the_first_step_drafts_too() -> None:
    """Two identical turns: 24 tokens in 3 steps of 11 at most. Without the first there would be 11.5 a round."""
    record = Acceptance(21, None, None, 3, 24, source="derived")
    rounds = rounds_of(record, [Arrival(1.0, 8), Arrival(2.0, None)], first_drafts=True)
    assert (rounds.emitted, rounds.count, rounds.accepted) == ([24], [3], [21])
    assert list(rounds.round_s or ()) == [0.5]
    one = Acceptance(6, None, None, 1, 7, source="derived")
    rounds = rounds_of(one, [Arrival(1.0, 7)], first_drafts=True)
    assert (rounds.emitted, rounds.count, rounds.round_s) == ([7], [1], None)


def test_decode_is_of_the_tokens_after_the_first_event() -> None:
    """The first event of 8 bears 3 tokens: seconds a token are over the other 5."""
    trials = []
    for n in range(6):
        made = trial("vanilla", str(n), Acceptance(0, 0, 0, 8, 8), 1.0, [0.1] * 5)
        assert made.arrivals is not None
        made.arrivals["tokens"][0] = 3
        trials.append(made)
    assert overall(trials, "vanilla")["tpot_s"] == pytest.approx(0.1)


def test_the_first_event_s_tokens_are_those_of_its_text() -> None:
    def tokenizer(text: str, add_special_tokens: bool) -> dict[str, list[str]]:
        assert not add_special_tokens
        return {"input_ids": text.split()}

    def opened(*arrivals: Arrival, tokens: int = 9) -> list[int | None]:
        found = with_opening(tokenizer, Reply("a b c d e", list(arrivals), None, 5, tokens, opening="a b c"))
        return [arrival.tokens for arrival in found.arrivals]

    assert opened(Arrival(0.0, None), Arrival(1.0, None)) == [3, None]
    assert opened(Arrival(0.0, None), Arrival(1.0, None), tokens=3) == [
        2,
        None,
    ]  # the others bear one at least
    assert opened(Arrival(0.0, None)) == [9]
    assert opened(Arrival(0.0, 2), Arrival(1.0, None)) == [2, None]


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
    assert row["round_s"]["p50"] is None  # of one entry for all rounds only their mean is known
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


def test_a_prompt_that_the_server_does_not_count_keeps_its_length() -> None:
    made = Trial("t", "q", None, 0, "vanilla", 1, 0, prompt_tokens=7)
    for counted, kept in ((None, 7), (8, 8)):
        answer = Reply("x", [Arrival(1.0, 1)], [1], counted, 1)
        fill(made, Answered(Exchange(0.0), answer, Acceptance(0, 0, 0, 1, 1)), 1.0, keep_text=True)
        assert made.prompt_tokens == kept


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
