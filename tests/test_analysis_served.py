"""Blocks of requests in flight together at an engine: with one that failed, with too few for the concurrency."""

from __future__ import annotations

from dataclasses import replace

import pytest
from trial_factory import FakeRun, block, row_of, trial

from specbench.analysis.summary import summarise
from specbench.store import Rounds, Trial

QUESTIONS = 4


def served(number: int, failed: dict[str, set[int]], **fields: object) -> list[Trial]:
    """A block of requests in flight together: vanilla takes 10 + i s of decode for question i, `fast` half."""
    batch = "+".join(f"q{i}" for i in range(QUESTIONS))
    found = []
    for i in range(QUESTIONS):
        seconds = {"vanilla": 10.0 + i, "fast": 5.0 + i / 2}
        methods = {
            method: {"seconds": seconds[method], "accepted": [0] * 10 if method == "vanilla" else [1] * 5}
            for method in seconds
        }
        rows = block(f"q{i}", number, methods, concurrency=2, batch=batch, **fields)
        for row in rows:
            row.batch_s = 30.0 if row.method == "vanilla" else 15.0
            if i in failed.get(row.method, ()):
                row.error, row.finish, row.output_tokens, row.rounds = "broke", "error", 0, Rounds()
                row.batch_s = row.prefill_s = row.decode_s = row.total_s = None
        found += rows
    return found


def test_the_others_stand_and_the_throughput_of_the_batch_does_not() -> None:
    whole, holed = served(0, {}, repeat=0), served(1, {"fast": {3}}, repeat=1)
    row = row_of(whole + holed, "fast")
    assert (row["trials"], row["failed"], row["prompts"], row["tokens"]) == (8, 1, 4, 7 * 11)
    assert row["tau"]["point"] == pytest.approx(2.0)
    assert row["ttft_s"] == 0.5
    assert row["tpot_s"] == pytest.approx((2 * (5 + 5.5 + 6) + 6.5) / 70)
    assert row["decode_speedup"]["point"] == pytest.approx(2.0)  # each with vanilla's of the same question
    assert row["speedup"]["point"] == pytest.approx(2.0)
    assert row["tokens_per_s"] == pytest.approx(44 / 15)  # of the whole block alone


@pytest.mark.parametrize("method", ["vanilla", "fast"])
def test_a_run_of_one_block_with_a_hole(method: str) -> None:
    """Question 3 is the slow one: left out on one side only, the ratio would be another."""
    trials = served(0, {method: {3}})
    row = row_of(trials, "fast")
    assert row["decode_speedup"]["point"] == pytest.approx(2.0)
    assert row["speedup"]["point"] is None
    assert row["tau"]["point"] == pytest.approx(2.0)
    (warning,) = [w for w in summarise([FakeRun(trials)])["warnings"] if w["code"] == "failed"]
    assert (
        "1 of 4 trials failed; their blocks are not counted in throughput and speedup" in warning["message"]
    )
    assert not any(w["code"] == "token-totals" for w in summarise([FakeRun(trials)])["warnings"])


def streamed(tokens: list[int | None], rounds: Rounds) -> Trial:
    """A request whose events came 1 s, 2 s, 4 s, … after its sending."""
    at_s = [float(2**number) for number in range(len(tokens))]
    return trial("q1", rounds=rounds, concurrency=2, batch="q1+q2", arrivals={"at_s": at_s, "tokens": tokens})


MEANT = Rounds([12], None, [6], [10], [4], [4], round_s=[1.75])  # four rounds in one entry


def test_the_mean_of_a_request_s_rounds_is_no_round() -> None:
    known = {"p50": None, "p95": None, "p99": None}
    assert row_of([streamed([1, 3, 3, 4], MEANT)], "vanilla")["round_s"] == known
    each = replace(MEANT, count=None, round_s=[1.75])
    assert row_of([streamed([1, 3, 3, 4], each)], "vanilla")["round_s"]["p50"] == 1.75


def test_chunks_of_unknown_tokens_have_no_gaps_between_tokens() -> None:
    """Nor has an engine whose answer came in one piece, of several rounds."""
    unknown = {"p50": None, "p95": None, "p99": None}
    told = row_of([streamed([1, 3, 3, 4], MEANT)], "vanilla")["itl_s"]
    assert told == {"p50": 0.0, "p95": pytest.approx(3.1), "p99": pytest.approx(3.82)}
    assert row_of([streamed([None] * 4, MEANT)], "vanilla")["itl_s"] == unknown
    assert row_of([streamed([1, 3, None, 4], MEANT)], "vanilla")["itl_s"] == unknown
    assert row_of([streamed([11], MEANT)], "vanilla")["itl_s"] == unknown


def test_nothing_is_left_where_no_question_was_answered_by_both() -> None:
    row = row_of(served(0, {"vanilla": {0, 1}, "fast": {2, 3}}), "fast")
    assert row["decode_speedup"]["point"] is None
    assert row["tau"]["point"] == pytest.approx(2.0)


@pytest.mark.parametrize(("concurrency", "warned"), [(2, False), (4, False), (5, True)])
def test_a_concurrency_that_is_never_reached(concurrency: int, warned: bool) -> None:
    trials = served(0, {})
    for row in trials:
        row.concurrency = concurrency
    found = [w for w in summarise([FakeRun(trials)])["warnings"] if w["code"] == "concurrency"]
    assert len(found) == warned
    assert all(
        "5 requests were never in flight: fewer questions than that in chat" in w["message"] for w in found
    )


def test_failed_requests_are_not_called_too_few_questions() -> None:
    found = summarise([FakeRun(served(0, {"vanilla": {0, 1, 2, 3}}))])["warnings"]
    assert {"failed"} <= {w["code"] for w in found}
    assert "concurrency" not in {w["code"] for w in found}


def test_a_batch_of_our_own_loop_stands_or_falls_as_a_whole() -> None:
    rows = [
        trial(f"q{i}", method, batch_size=2, batch="q0+q1", accepted=[1] * 5)
        for method in ("vanilla", "fast")
        for i in range(2)
    ]
    rows[-1].error = "broke"
    row = row_of(rows, "fast")
    assert (row["tau"]["point"], row["prompts"]) == (None, 0)
