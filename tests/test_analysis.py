"""The summary object: every field against numbers worked out by hand."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from trial_factory import FakeRun, block, blocks, row_of, rows_of, spread, trial

from specbench.analysis.summary import FIELDS, summarise
from specbench.store import Rounds, Trial

# q1: vanilla 20 s for 11 tokens, fast 5 s for 11; q2: vanilla 40 s for 21 tokens, fast 35 s for 21
UNEQUAL = block(
    "q1",
    0,
    {
        "vanilla": {"batch_s": 20.0, "decode_s": 18.0},
        "fast": {"batch_s": 5.0, "decode_s": 4.0, "accepted": [4, 4]},
    },
) + block(
    "q2",
    1,
    {
        "vanilla": {"batch_s": 40.0, "decode_s": 36.0, "accepted": [0] * 20},
        "fast": {"batch_s": 35.0, "decode_s": 32.0, "accepted": [1] * 10},
    },
)


def test_speedup_is_a_ratio_of_sums() -> None:
    row = row_of(UNEQUAL, "fast")
    assert row["speedup"]["point"] == pytest.approx((60 / 32) / (40 / 32))
    assert row["decode_speedup"]["point"] == pytest.approx((54 / 30) / (36 / 30))
    assert row["geomean_speedup"] == pytest.approx((4 * 40 / 35) ** 0.5)
    spec_bench = ((11 / 5 + 21 / 35) / 2) / ((11 / 20 + 21 / 40) / 2)
    assert row["spec_bench_speedup"] == pytest.approx(spec_bench)
    assert row["tokens_per_s"] == pytest.approx(32 / 40)
    assert row["tokens"] == 32


def test_speedup_is_per_token() -> None:
    trials = block(
        "q1",
        0,
        {"vanilla": {"batch_s": 11.0}, "fast": {"batch_s": 11.0, "accepted": [1] * 5, "output_tokens": 22}},
    )
    assert row_of(trials, "fast")["speedup"]["point"] == pytest.approx(2.0)


def test_acceptance_fields() -> None:
    trials = block("q1", 0, {"vanilla": {}, "fast": {"accepted": [0, 2, 4, 2], "drafted": 4}})
    fast = trials[1].rounds
    fast.drafted, fast.depth = [0, 2, 4, 4], [0, 2, 4, 4]
    row = row_of(trials, "fast")
    assert row["tau"] == {"low": None, "point": pytest.approx(12 / 4), "high": None}
    assert row["tau_drafted"] == pytest.approx(11 / 3)
    assert row["alpha"] == pytest.approx(2.0)
    assert row["acceptance_rate"] == pytest.approx(8 / 10)
    assert row["acceptance_by_position"] == pytest.approx([1, 1, 1 / 2, 1 / 2])
    assert row["conditional_by_position"] == pytest.approx([1, 1, 1 / 2, 1])
    assert row["accepted_histogram"] == [1, 0, 2, 0, 1]


def test_vanilla_row() -> None:
    row = row_of(UNEQUAL, "vanilla")
    assert row["speedup"]["point"] == 1.0
    assert row["tau"]["point"] == 1.0
    assert row["alpha"] == 0.0
    assert row["acceptance_rate"] is None
    assert row["tau_drafted"] is None
    assert row["verify_inflation"] == 1.0
    assert row["predicted_speedup"] == 1.0


def test_costs_and_prediction() -> None:
    spans = {"draft": 1.0, "verify": 6.0, "accept": 0.5, "other": 0.5}
    fast = {"seconds": 8.0, "accepted": [1] * 5, "spans": spans}
    vanilla_spans = {"draft": 0.0, "verify": 10.0, "accept": 0.0, "other": 2.5}
    trials = blocks(1, {"vanilla": {"seconds": 12.5, "spans": vanilla_spans}, "fast": fast})
    row = row_of(trials, "fast")
    shares = [row[f"{name}_share"] for name in ("draft", "verify", "accept", "other")]
    assert shares == pytest.approx([1 / 8, 6 / 8, 1 / 16, 1 / 16])
    assert row["verify_inflation"] == pytest.approx((6 / 5) / (10 / 10))
    assert row["predicted_speedup"] == pytest.approx(2 / ((1 / 5) / (12.5 / 10) + 1.2))
    assert row["free_draft_limit"] == pytest.approx(2 / 1.2)
    assert row["ttft_s"] == 0.5
    assert row["tpot_s"] == pytest.approx(8 / 10)
    assert row["round_s"] == {"p50": 1.6, "p95": 1.6, "p99": 1.6}
    assert row["roofline_limit"] is None
    assert row["roofline_share"] is None


def test_round_percentiles() -> None:
    one = trial("q1", "vanilla", accepted=[0] * 101)
    one.rounds.round_s = [float(i) for i in range(101)]
    assert row_of([one], "vanilla")["round_s"] == {"p50": 50.0, "p95": 95.0, "p99": 99.0}


def test_missing_spans_come_from_the_rounds() -> None:
    row = row_of(blocks(1, {"vanilla": {}, "fast": {"seconds": 5.0, "accepted": [1] * 5}}), "fast")
    assert row["verify_inflation"] == pytest.approx(0.9)
    assert row["draft_share"] is None  # other is unknown, so the parts would not add up


def test_a_batch_is_timed_once() -> None:
    def rows(method: str, seconds: float, accepted: list[list[int]]) -> list[Trial]:
        spans = {"draft": 0.0, "verify": seconds - 2, "accept": 0.0, "other": 0.0}
        return [
            trial(
                f"q{i}",
                method,
                accepted=a,
                batch_size=2,
                batch="b0",
                batch_s=seconds,
                decode_s=seconds - 2,
                spans=spans,
            )
            for i, a in enumerate(accepted)
        ]

    trials = rows("vanilla", 12.0, [[0] * 10, [0] * 4]) + rows("fast", 8.0, [[4, 4], [0, 0, 0, 0]])
    trials[2].rounds.round_s, trials[3].rounds.round_s = [1.0, 1.0], [1.0, 1.0, 2.0, 2.0]
    row = row_of(trials, "fast")
    assert row["speedup"]["point"] == pytest.approx(12 / 8)
    assert row["tokens_per_s"] == pytest.approx(16 / 8)
    assert row["tau"]["point"] == pytest.approx(14 / 6)  # rounds are each row's own
    assert row["verify_inflation"] == pytest.approx((6 / 4) / (10 / 10))  # passes: the longest row's rounds
    assert row["round_s"]["p50"] == 1.5
    assert row["verify_share"] == 1.0
    assert row["prompts"] == 2


def uneven(method: str, pass_s: float, lengths: list[int], accepted: list[int], number: int) -> list[Trial]:
    """A batch whose rows end at different times: each of `lengths` rounds, which accept as told."""
    longest, drafted = max(lengths) * pass_s, 3 if any(accepted) else 0
    spans = {"draft": 0.0, "verify": longest, "accept": 0.0, "other": 0.0}
    return [
        trial(
            f"b{number}-q{i}", method, accepted=[a] * rounds, batch_size=len(lengths), batch=f"b{number}",
            block=number, seconds=rounds * pass_s, batch_s=longest + 0.5, spans=spans, drafted=drafted,
        )
        for i, (rounds, a) in enumerate(zip(lengths, accepted, strict=True))
    ]  # fmt: skip


def test_the_longest_row_of_a_batch_bounds_its_speedup_and_not_tau() -> None:
    """It accepts 3 of 3 and the others 1 of 3; a pass costs a quarter more than vanilla's."""
    trials = []
    for number in range(6):
        trials += uneven("vanilla", 1.0, [24, 8, 8], [0, 0, 0], number)
        trials += uneven("fast", 1.25, [6, 4, 4], [3, 1, 1], number)
    row = row_of(trials, "fast")
    assert row["tau"]["point"] == pytest.approx(40 / 14)
    assert row["pass_gain"] == pytest.approx((40 / 6) / (40 / 24))
    assert row["decode_speedup"]["point"] == pytest.approx(24 / (6 * 1.25))
    assert row["free_draft_limit"] == pytest.approx(4 / 1.25)
    assert row["predicted_speedup"] == pytest.approx(4 / 1.25)
    assert row["predicted_residual"] == pytest.approx(0)
    found = {w["code"] for w in summarise([FakeRun(trials)])["warnings"]}
    assert "speedup-above-tau" not in found
    for t in trials:
        if t.method == "fast":
            t.decode_s = t.decode_s and t.decode_s * 0.7  # passes that cost less than vanilla's
    (warning,) = [w for w in summarise([FakeRun(trials)])["warnings"] if w["code"] == "speedup-above-tau"]
    assert "above tokens per pass over vanilla's" in warning["message"]


def test_one_request_at_a_time_gains_tau_a_pass() -> None:
    row = row_of(UNEQUAL, "fast")
    assert row["pass_gain"] == row["tau"]["point"]


def test_what_an_interval_rests_on() -> None:
    """Questions; of those in flight together the batches or blocks."""
    assert row_of(blocks(6, {"vanilla": {}, "fast": {"seconds": 5.0}}), "fast")["clusters"] == 6
    assert row_of(blocks(6, {"fast": {"seconds": 5.0}}), "fast")["clusters"] == 0
    batches = [t for n in range(6) for t in uneven("vanilla", 1.0, [8, 8], [0, 0], n)]
    batches += [t for n in range(6) for t in uneven("fast", 1.0, [4, 4], [1, 1], n)]
    row = row_of(batches, "fast")
    assert (row["prompts"], row["clusters"]) == (12, 6)


def test_batches_pair_by_their_questions_and_are_drawn_whole() -> None:
    trials = []
    for number in range(6):
        for method, seconds in (("vanilla", 10.0 + number), ("fast", 5.0)):
            for place in range(2):
                trials.append(
                    trial(
                        f"q{2 * number + place}",
                        method,
                        batch_size=2,
                        block=number,
                        batch_s=seconds,
                        decode_s=1.0,
                    )
                )
    estimate = row_of(trials, "fast")["speedup"]
    assert estimate["point"] == pytest.approx(sum(range(10, 16)) / 30)
    assert estimate["low"] is not None
    assert (
        row_of([t for t in trials if t.block < 4], "fast")["speedup"]["low"] is None
    )  # 4 batches, 8 questions


def test_errors_and_exclusions_leave_the_estimates() -> None:
    good = blocks(3, {"vanilla": {}, "fast": {"seconds": 5.0}})
    failed = block(
        "q8", 8, {"vanilla": {"seconds": 99.0}, "fast": {"error": "out of memory", "finish": "error"}}
    )
    retried = block("q9", 9, {"vanilla": {"seconds": 77.0}, "fast": {"seconds": 1.0}}, excluded="contended")
    again = block("q9", 9, {"vanilla": {"seconds": 10.0}, "fast": {"seconds": 5.0}}, attempt=1)
    row = row_of(good + failed + retried + again, "fast")
    assert row["speedup"]["point"] == pytest.approx(10.5 / 5.5)
    assert (row["prompts"], row["trials"], row["failed"], row["excluded"]) == (4, 6, 1, 1)
    assert row["tokens"] == 4 * 11
    vanilla = row_of(good + failed + retried + again, "vanilla")
    assert vanilla["prompts"] == 5  # the failure was the other method's
    assert vanilla["tokens_per_s"] == pytest.approx(55 / (4 * 10.5 + 99.5))


def test_the_last_good_attempt_counts() -> None:
    first = block("q1", 0, {"vanilla": {}, "fast": {"seconds": 1.0}})
    again = block("q1", 0, {"vanilla": {}, "fast": {"seconds": 5.0}}, attempt=1)
    row = row_of(first + again, "fast")
    assert row["speedup"]["point"] == pytest.approx(10.5 / 5.5)
    assert row["tokens"] == 11


def test_excluded_rows_enter_no_mean() -> None:
    trials = block("q1", 0, {"vanilla": {}}) + block(
        "q2", 1, {"vanilla": {}}, prefill_s=9.0, excluded="throttled"
    )
    row = row_of(trials, "vanilla")
    assert row["ttft_s"] == 0.5
    assert row["tpot_s"] == 1.0


def test_a_batch_of_several_categories_is_timed_in_none_of_them() -> None:
    trials = [
        trial(f"q{i}", method, batch_size=2, category=f"c{i}")
        for method in ("vanilla", "fast")
        for i in (range(2) if method == "vanilla" else (1, 0))  # pairs whatever the order of its rows
    ]
    assert row_of(trials, "fast", "chat")["speedup"]["point"] == 1.0
    category = row_of(trials, "fast", "chat", category="c0")
    assert category["speedup"]["point"] is None
    assert category["tokens_per_s"] is None
    assert category["tau"]["point"] == 1.0


def test_a_missing_column_of_rounds_is_unknown() -> None:
    trials = blocks(1, {"vanilla": {}, "fast": {"accepted": [1] * 5}})
    trials[1].rounds.depth = []
    trials[1].rounds.round_s = None
    row = row_of(trials, "fast")
    assert row["acceptance_by_position"] is None
    assert row["round_s"] == {"p50": None, "p95": None, "p99": None}
    assert row["alpha"] == 1.0
    trials[1].rounds.drafted = []
    row = row_of(trials, "fast")
    assert (row["alpha"], row["acceptance_rate"], row["tau"]["point"]) == (1.0, None, pytest.approx(2.0))


def test_one_bad_row_takes_its_batch_out() -> None:
    pair = [trial(f"q{i}", m, batch_size=2, block=0) for m in ("vanilla", "fast") for i in range(2)]
    pair[3].error = "out of memory"
    row = row_of(pair, "fast")
    assert row["speedup"]["point"] is None
    assert row["tau"]["point"] is None
    assert row["tokens_per_s"] is None
    assert row["prompts"] == 0


def test_unknown_is_none() -> None:
    bare = trial("q1", "vanilla", batch_s=None, total_s=None, decode_s=None, prefill_s=None, rounds=Rounds())
    row = row_of([bare], "vanilla")
    known = {
        "run",
        "method",
        "state",
        "task",
        "batch_size",
        "prompts",
        "clusters",
        "trials",
        "failed",
        "excluded",
        "outliers",
        "tokens",
    }
    for name in set(FIELDS) - known - {"compared", "compared_text"}:
        value = row[name]
        assert value is None or (isinstance(value, dict) and set(value.values()) == {None}), name
    assert row["compared"] == 0


def test_not_a_number_is_unknown() -> None:
    nan = float("nan")
    row = row_of([trial("q1", "vanilla", prefill_s=nan, decode_s=nan)], "vanilla")
    assert row["ttft_s"] is None
    assert row["tpot_s"] is None


def test_rounds_unknown_leaves_output_tokens_for_decode() -> None:
    trials = block("q1", 0, {"vanilla": {"decode_s": 20.0}, "hf": {"decode_s": 8.0, "rounds": Rounds()}})
    row = row_of(trials, "hf")
    assert row["decode_speedup"]["point"] == pytest.approx(20 / 8)
    assert row["tau"]["point"] is None


def test_turns_and_repeats_are_one_question() -> None:
    trials = []
    for number in range(4):
        for turn in range(2):
            for repeat in range(2):
                trials += block(
                    f"q{number}",
                    0,
                    {"vanilla": {}, "fast": {"seconds": 4.0 + number}},
                    turn=turn,
                    repeat=repeat,
                )
    row = row_of(trials, "fast")
    assert row["prompts"] == 4
    assert row["speedup"]["low"] is None
    assert row["speedup"]["point"] == pytest.approx(4 * 10.5 / (4.5 + 5.5 + 6.5 + 7.5))


def test_interval_holds_the_point_and_is_repeatable() -> None:
    trials = spread([3, 5, 8, 13, 21, 4, 7])
    first, second = row_of(trials, "fast"), row_of(trials, "fast")
    assert first == second
    for name in ("speedup", "decode_speedup"):
        low, point, high = first[name]["low"], first[name]["point"], first[name]["high"]
        assert 1 < low < point < high < 3
    assert (
        first["tau"] == {"low": 2.0, "point": pytest.approx(2.0), "high": pytest.approx(2.0)}
        or first["tau"]["low"]
    )
    assert first["tau"]["low"] == pytest.approx(first["tau"]["high"])


def test_agreement() -> None:
    same = {"same": True, "first_difference": None, "logit_gap": None}
    agreements = [
        same,
        same,
        {"same": False, "first_difference": 4, "logit_gap": 1e-4},
        {"same": False, "first_difference": 8, "logit_gap": 0.5},
        {"same": False, "first_difference": 30, "logit_gap": None},
    ]
    trials = [
        t
        for i, a in enumerate(agreements)
        for t in block(f"q{i}", i, {"vanilla": {}, "fast": {"agreement": a}})
    ]
    for t in trials:
        t.lossless = True
    row = row_of(trials, "fast")
    assert (row["identical"], row["compared"], row["near_ties"]) == (2, 5, 1)
    assert row["first_difference_median"] == 8
    assert row["lossless"] is True
    assert row_of(trials, "vanilla")["identical"] is None


def test_memory_and_energy() -> None:
    trials = blocks(2, {"vanilla": {}, "fast": {"nvml": {"joules": 22.0}}})
    trials[0].memory = {"weights_bytes": 100, "kv_bytes": 10, "peak_bytes": 150}
    trials[1].memory = {"weights_bytes": 130, "kv_bytes": None, "peak_bytes": 200}
    row = row_of(trials, "fast")
    assert (row["weights_bytes"], row["kv_bytes"], row["peak_bytes"]) == (130, None, 200)
    assert row["memory_overhead_bytes"] == 50
    assert row["joules_per_token"] == pytest.approx(44 / 22)
    assert row_of(trials, "vanilla")["memory_overhead_bytes"] == 0
    assert row_of(trials, "vanilla")["joules_per_token"] is None


def test_rows_one_a_task_and_category_with_overall() -> None:
    methods = {"vanilla": {}, "fast": {"seconds": 5.0}}
    trials = block("q1", 0, methods, task="spec", category="qa")
    trials += block("q2", 1, methods | {"fast": {"seconds": 2.0}}, task="spec", category="math")
    trials += block("q1", 2, methods, task="chat", category="only")
    places = [(r["method"], r["task"], r["category"]) for r in rows_of(trials)]
    fast = [("spec", None), ("spec", "math"), ("spec", "qa"), ("chat", None), ("overall", None)]
    assert places == [(method, *place) for method in methods for place in fast]
    assert row_of(trials, "fast", "spec", category="math")["speedup"]["point"] == pytest.approx(10.5 / 2.5)
    assert row_of(trials, "fast", "chat")["speedup"]["point"] == pytest.approx(10.5 / 5.5)
    assert row_of(trials, "fast")["prompts"] == 3  # chat's q1 is not spec's q1


def test_batch_sizes_and_concurrencies_are_rows_of_their_own() -> None:
    trials = blocks(2, {"vanilla": {}, "fast": {"seconds": 5.0}})
    trials += [replace(t, batch_size=2, batch_s=4.0 if t.method == "fast" else 8.0) for t in trials]
    trials += [replace(t, concurrency=3, batch_s=t.batch_s) for t in trials[:4]]
    rows = [r for r in rows_of(trials) if r["task"] == "overall" and r["method"] == "fast"]
    assert [(r["batch_size"], r["concurrency"]) for r in rows] == [(1, None), (1, 3), (2, None)]


def test_every_field_of_the_schema_and_json_clean() -> None:
    summary = summarise([FakeRun(UNEQUAL)])
    assert list(summary) == ["schema", "runs", "warnings", "rows", "break_even", "engines"]
    for row in summary["rows"]:
        assert tuple(row) == FIELDS
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_order_and_labels_do_not_matter() -> None:
    trials = spread([3, 5, 8, 13, 21, 4, 7, 9])
    shuffled = list(trials)
    random.Random(3).shuffle(shuffled)
    assert rows_of(shuffled) == rows_of(trials)
    renamed = [replace(t, question=f"z{97 - int(t.question[1:])}", block=t.block * 3 + 5) for t in shuffled]
    for before, after in zip(rows_of(trials), rows_of(renamed), strict=True):
        for name in FIELDS:
            exact = not isinstance(before[name], float | dict)
            assert after[name] == (before[name] if exact else pytest.approx(before[name], rel=1e-12)), name


def test_no_trials_and_several_runs() -> None:
    empty = FakeRun([], {"name": "empty"})
    summary = summarise([empty, FakeRun(UNEQUAL, {"name": "full"})])
    assert [run["name"] for run in summary["runs"]] == ["empty", "full"]
    assert {row["run"] for row in summary["rows"]} == {"full"}


def test_extracts() -> None:
    manifest = {
        "name": "r",
        "target": {"name": "smollm2@q4_1", "source": "pypi", "dtype": "float32", "parameters": 5},
        "machine": {
            "gpus": [{"name": "H200"}, {"name": "H200"}],
            "cpu": {"model": "Xeon", "cores_usable": 2},
        },
        "config": {"temperature": 0},
        "argv": ["specbench", "run"],
        "drafters": {"draft-model:k=4": {"name": "small"}},
    }
    run = summarise([FakeRun([], manifest)])["runs"][0]
    assert run["target"] == "smollm2@q4_1"
    assert run["target_details"]["dtype"] == "float32"
    assert run["machine"] == "2 x H200, Xeon (2 cores)"
    assert run["argv"] == ["specbench", "run"]
    assert run["start"] is None
    assert run["drafters"] == {"draft-model:k=4": "small"}


def test_tau_is_never_said_to_be_below_one() -> None:
    """One question of six accepts nearly everything: the interval of the sums alone would reach below."""
    fast = [{"accepted": a} for a in ([0] * 30, [0] * 20, [0, 0, 1] * 9, [4] * 12, [0] * 25, [0, 1] * 10)]
    found = [t for i, f in enumerate(fast) for t in block(f"q{i}", i, {"vanilla": {}, "fast": f})]
    tau = row_of(found, "fast")["tau"]
    assert tau["low"] == 1.0 < tau["point"] < tau["high"]
