"""Sweeps of load: closed and open loops, where a method stops paying, and whether a server kept up."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from rich.console import Console
from trial_factory import FakeRun, trial

from specbench.analysis.break_even import break_even as of_rows
from specbench.analysis.compare import compare
from specbench.analysis.frame import build
from specbench.analysis.history import history
from specbench.analysis.matching import Matching
from specbench.analysis.open_loop import PILING, queue_growth
from specbench.analysis.setting import Setting, in_words
from specbench.analysis.summary import summarise
from specbench.report import FORMATS, break_even, figures, words
from specbench.report.terminal import render
from specbench.store import Trial

TOKENS = 11  # of a trial of the factory


def sent(
    rate: float | None, seconds: dict[str, float], questions: int = 8, blocks: int = 6, **fields: Any
) -> list[Trial]:
    """Blocks of requests in flight together; each takes a method as long as `seconds` says, give or take some
    percent; at a `rate` the block takes as long as the arrivals do."""
    draw, found = Random(1), []
    for number in range(blocks):
        for order, (method, each) in enumerate(seconds.items()):
            for place in range(questions):
                length = each * (1 + 0.01 * draw.random() + 0.05 * (number % 3))
                at = place / rate if rate else 0.0
                together = 1 if fields.get("concurrency", 1) == 1 else questions / fields["concurrency"]
                total = questions / rate if rate else length * together
                found.append(
                    trial(
                        f"b{number}-q{place}", method, seconds=length - 0.5, total_s=length, batch_s=total,
                        batch=f"b{number}", block=number, order=order, request_rate=rate, sent_s=at, **fields,
                    )
                )  # fmt: skip
    return found


def overall(trials: list[Trial]) -> dict[tuple[Any, ...], dict[str, Any]]:
    rows = summarise([FakeRun(trials)])["rows"]
    return {
        (row["method"], row["concurrency"], row["request_rate"]): row
        for row in rows
        if row["task"] == "overall"
    }


# -- an axis of its own --------------------------------------------------------------------------------------


def test_rates_are_rows_of_their_own_and_never_paired() -> None:
    trials = sent(1.0, {"vanilla": 4.0, "fast": 2.0}) + sent(2.0, {"vanilla": 9.0, "fast": 3.0})
    rows = overall(trials)
    assert list(rows) == [(m, None, rate) for rate in (1.0, 2.0) for m in ("vanilla", "fast")]
    assert rows["fast", None, 1.0]["speedup"]["point"] == pytest.approx(2.0, rel=0.01)
    assert rows["fast", None, 2.0]["speedup"]["point"] == pytest.approx(3.0, rel=0.01)
    alone = sent(1.0, {"vanilla": 4.0}) + sent(2.0, {"fast": 3.0})
    assert overall(alone)["fast", None, 2.0]["speedup"]["point"] is None


def test_what_is_usual_is_so_at_each_rate() -> None:
    rows = overall(sent(1.0, {"vanilla": 4.0}) + sent(4.0, {"vanilla": 12.0}, blocks=2))
    assert [row["outliers"] for row in rows.values()] == [0, 0]


def test_at_a_rate_the_speedup_is_of_the_requests_own_seconds() -> None:
    """The blocks of both take equally long, since the arrivals set that: their throughput is no speedup."""
    row = overall(sent(0.25, {"vanilla": 4.0, "fast": 2.0}))["fast", None, 0.25]
    base = overall(sent(0.25, {"vanilla": 4.0, "fast": 2.0}))["vanilla", None, 0.25]
    assert row["tokens_per_s"] == base["tokens_per_s"] == pytest.approx(0.25 * TOKENS)
    assert row["requests_per_s"] == pytest.approx(0.25)
    assert row["speedup"]["point"] == pytest.approx(2.0, rel=0.01)
    assert row["speedup"]["low"] is not None
    assert row["decode_speedup"]["point"] == pytest.approx(3.5 / 1.5, rel=0.02)
    assert row["latency_s"] == pytest.approx(2.1, rel=0.02)
    closed = overall(sent(None, {"vanilla": 4.0, "fast": 2.0}, concurrency=4))["fast", 4, None]
    assert closed["speedup"]["point"] == pytest.approx(2.0, rel=0.01)
    assert closed["tokens_per_s"] > row["tokens_per_s"]


def test_one_unknown_latency_leaves_its_block_out_of_the_speedup() -> None:
    trials = sent(1.0, {"vanilla": 4.0, "fast": 2.0})
    whole = overall(trials)["fast", None, 1.0]["speedup"]["point"]
    trials[-1].total_s = None
    fewer = sent(1.0, {"vanilla": 4.0, "fast": 2.0}, blocks=5)
    left, of_fewer = (overall(some)["fast", None, 1.0]["speedup"]["point"] for some in (trials, fewer))
    assert left == of_fewer != whole


def test_a_comparison_keeps_rates_apart() -> None:
    one = FakeRun(sent(1.0, {"vanilla": 4.0, "fast": 2.0}) + sent(2.0, {"vanilla": 9.0, "fast": 3.0}))
    other = FakeRun([replace(t) for t in one.trials if t.request_rate == 2.0])
    table = Matching(one.trials, other.trials, ())
    assert {place.setting for place in table.shared} == {Setting(1, 0, 2.0)}
    found = compare(one, other)
    (row,) = (r for r in found["rows"] if r["metric"] == "speedup" and r["task"] == "overall")
    assert (row["method"], row["request_rate"], row["concurrency"]) == ("fast", 2.0, None)
    assert row["change"]["point"] == pytest.approx(1)
    assert row["base"]["point"] == pytest.approx(3, rel=0.01)
    assert {(m["method"], m["request_rate"]) for m in found["missing"]} == {("vanilla", 1.0), ("fast", 1.0)}


def test_history_and_sections_keep_rates_apart() -> None:
    run = FakeRun(sent(1.0, {"vanilla": 4.0, "fast": 2.0}) + sent(2.5, {"vanilla": 9.0, "fast": 3.0}))
    (group,) = history([run], "speedup")["groups"]
    assert [series["request_rate"] for series in group["series"]] == [1.0, 2.5]
    summary = summarise([run])
    assert [section.setting for section in words.sections(summary)] == [["1 requests/s"], ["2.5 requests/s"]]
    assert [len(scene.trials) for scene in figures.scenes(summary, [run])] == [96, 96]
    assert "fast makes tiny 2.00x faster per request" in FORMATS["md"].render(summary, [run])
    assert in_words({"batch_size": 4, "concurrency": None, "request_rate": None}) == ["batch size 4"]


# -- did the server keep up? ---------------------------------------------------------------------------------


def queue(load: float, slots: int, seed: int) -> Iterator[Trial]:
    """32 requests of about `slots` seconds at one queue and `slots` slots, which come `load` times as fast as these
    can answer."""
    draw, free, now = Random(seed), [0.0] * slots, 0.0
    for number in range(32):
        slot = min(range(slots), key=free.__getitem__)
        free[slot] = max(free[slot], now) + slots * max(0.1, draw.gauss(1, 0.3))
        yield trial(
            f"{seed}-{number}", batch=f"b{seed}", block=seed, sent_s=now, total_s=free[slot] - now, batch_s=1.0,
            request_rate=load,
        )  # fmt: skip
        now += draw.expovariate(load)


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize(("load", "low", "high"), [(0.5, -0.05, 0.05), (1.5, 0.25, 0.45), (3.0, 0.6, 0.75)])
def test_a_queue_grows_by_what_is_not_answered(load: float, slots: int, low: float, high: float) -> None:
    """Over long the share of requests that pile up is 1 - 1 / load."""
    rows = build([t for seed in range(6) for t in queue(load, slots, seed)]).rows
    growth = queue_growth(rows)
    assert growth is not None
    assert low <= growth <= high


def test_warns_of_a_server_that_did_not_keep_up() -> None:
    def warned(load: float) -> list[str]:
        trials = [t for seed in range(6) for t in queue(load, 2, seed)]
        return [w["message"] for w in summarise([FakeRun(trials)])["warnings"] if w["code"] == "queue"]

    assert warned(0.5) == []
    (message,) = warned(2.0)
    assert message.startswith("vanilla did not keep up: unanswered requests rose by 0.")
    assert message.endswith("(2 requests/s)")
    row = next(iter(overall([t for seed in range(6) for t in queue(2.0, 2, seed)]).values()))
    assert row["queue_growth"] > PILING


def unlimited(seed: int, rate: float = 16.0, requests: int = 32) -> list[Trial]:
    """Requests to a server that takes any number at once: each lasts about two seconds."""
    draw, now, found = Random(seed), 0.0, []
    for number in range(requests):
        found.append(
            trial(
                f"{seed}-{number}", batch=f"b{seed}", block=seed, sent_s=now, total_s=draw.uniform(1.5, 2.5),
                batch_s=1.0, request_rate=rate,
            )
        )  # fmt: skip
        now += draw.expovariate(rate)
    return found


def codes(trials: list[Trial]) -> dict[str, str]:
    return {w["code"]: w["message"] for w in summarise([FakeRun(trials)])["warnings"]}


def test_a_block_that_only_fills_is_no_queue() -> None:
    """16 a second of 2 s each are 32 in flight: 32 requests are never all of them at once."""
    trials = [t for seed in range(6) for t in unlimited(seed)]
    assert queue_growth(build(trials).rows) is None
    found = codes(trials)
    assert "queue" not in found
    assert "at 2 s a request it puts 33 in flight, and a block of 32 requests is" in found["short-block"]
    assert found["short-block"].endswith("(16 requests/s)")


def test_a_block_long_enough_is_not_called_short() -> None:
    assert not {"queue", "short-block"} & set(codes([t for seed in range(6) for t in unlimited(seed, 2.0)]))
    longer = [t for seed in range(2) for t in unlimited(seed, 16.0, 200)]
    assert not {"queue", "short-block"} & set(codes(longer))
    found = codes([t for seed in range(6) for t in queue(2.0, 2, seed)])  # said to be a queue, once
    assert "queue" in found
    assert "short-block" not in found


@pytest.mark.parametrize(("requests", "blocks"), [(8, 3), (16, 1), (16, 3)])
def test_few_requests_of_a_block_say_nothing_of_a_queue(requests: int, blocks: int) -> None:
    """A third of such runs, at 0.6 times what the server can do, would read as a queue by chance."""
    for start in range(30):
        seeds = range(start * blocks, (start + 1) * blocks)
        trials = [t for seed in seeds for t in list(queue(0.6, 4, seed))[:requests]]
        assert queue_growth(build(trials).rows) is None


def test_growth_is_unknown_where_nobody_knows_when_requests_were_sent() -> None:
    trials = [t for seed in range(2) for t in queue(2.0, 2, seed)]
    trials[3].sent_s = None
    assert queue_growth(build(trials[:32]).rows) is None
    assert queue_growth(build(trials[32:38]).rows) is None  # too few to say anything
    assert overall(sent(None, {"vanilla": 4.0}, concurrency=4))["vanilla", 4, None]["queue_growth"] is None


# -- break-even ----------------------------------------------------------------------------------------------


def sweep(axis: str, speedups: dict[float, float]) -> list[Trial]:
    """Vanilla and `fast` at each load, `fast` as much faster as told, over blocks that differ by some percent."""
    found = []
    for load, speedup in speedups.items():
        setting = {axis: load} if axis != "request_rate" else {}
        rate = load if axis == "request_rate" else None
        found += sent(rate, {"vanilla": 4.0, "fast": 4.0 / speedup}, questions=3, blocks=8, **setting)
    return found


@pytest.mark.parametrize(
    ("axis", "words_of"), [("concurrency", "a concurrency"), ("request_rate", "a request rate")]
)
def test_break_even_lies_where_it_was_put(axis: str, words_of: str) -> None:
    """speedup = 2 - load / 8 is 1 at a load of 8, and a straight line."""
    trials = sweep(axis, {load: 2 - load / 8 for load in (1, 4, 10)})
    (found,) = summarise([FakeRun(trials)])["break_even"]
    assert (found["axis"], list(found["of"])) == (axis, ["1", "4", "10"])
    assert found["low"] < found["value"] < found["high"]
    assert found["value"] == pytest.approx(8, rel=0.03)
    assert found["low"] > 7
    assert found["high"] < 9
    said = break_even.sentence(found)
    assert said.startswith(f"fast pays up to {words_of} of about {found['value']:.3g} [{found['low']:.3g}, ")
    assert "speedup at 1: 1.8" in said


def test_break_even_of_one_that_pays_later_never_or_always() -> None:
    def of(speedups: dict[float, float]) -> dict[str, Any]:
        (found,) = summarise([FakeRun(sweep("concurrency", speedups))])["break_even"]
        return found

    later = of({1: 0.5, 4: 1.5})
    assert later["low"] < later["value"] < later["high"]
    assert break_even.sentence(later).startswith("fast pays from a concurrency of about 2.5 [")
    assert break_even.sentence(of({1: 0.5, 4: 0.8})).startswith(
        "fast pays at no concurrency measured (speedup"
    )
    both = break_even.sentence(of({1: 2.0, 2: 0.5, 4: 2.0}))
    assert both.startswith("fast pays up to a concurrency of about 1.67 [")
    assert "], beyond which it crosses 1 again (speedup at 1: " in both
    assert "again" not in break_even.sentence(later)
    always = of({1: 2.0, 4: 1.01})
    assert (always["low"], always["value"], always["high"]) == (None, None, None)
    assert break_even.sentence(always).startswith("fast pays at every concurrency measured")


def test_what_the_intervals_leave_open_is_said() -> None:
    def entry(*of: tuple[float | None, float, float | None], **ends: float | None) -> dict[str, Any]:
        estimates = [dict(zip(("low", "point", "high"), e, strict=True)) for e in of]
        where = {"low": None, "value": None, "high": None} | ends
        return {"method": "m", "axis": "concurrency", "of": dict(zip("14", estimates, strict=True)), **where}

    sure, open_, below = (1.5, 1.8, 2.0), (0.9, 1.2, 1.5), (0.6, 0.9, 1.1)
    assert "pays at every concurrency measured, which is not sure at 4 (" in break_even.sentence(
        entry(sure, open_)
    )
    said = break_even.sentence(entry(sure, below, low=2.0, value=3.0))
    assert said.startswith("m pays up to a concurrency of about 3 [2, above 4] (")
    bare = (None, 1.2, None), (None, 0.8, None)
    said = break_even.sentence(entry(*bare, value=2.0))
    assert said.startswith(
        "m pays up to a concurrency of about 2, from too few questions to be sure (speedup at 1: 1.20x"
    )
    said = break_even.sentence(entry(bare[1], bare[1]))
    assert said.startswith("m pays at no concurrency measured, from too few questions to be sure (")
    said = break_even.sentence(entry((0.9, 1.2, 1.5), (0.5, 0.6, 0.7), value=2.0, high=3.0))
    assert said.startswith("m pays up to a concurrency of about 2 [below 1, 3] (")


@pytest.mark.parametrize(
    ("speedups", "value", "said"),
    [
        ((1.0, 0.8), None, "m pays at no batch size measured"),
        ((1.0, 1.0), None, "m pays at no batch size measured"),
        ((1.0, 1.2), 1.0, "m pays from a batch size of about 1"),
        ((0.8, 1.0), None, "m pays at no batch size measured"),
        ((1.2, 1.0), 4.0, "m pays up to a batch size of about 4"),
    ],
)
def test_break_even_at_exactly_one(speedups: tuple[float, float], value: float | None, said: str) -> None:
    rows = [
        {
            "run": "r", "method": "m", "task": "overall", "batch_size": size, "concurrency": None,
            "request_rate": None, "speedup": {"low": point - 0.05, "point": point, "high": point + 0.05},
        }
        for size, point in zip((1, 4), speedups, strict=True)
    ]  # fmt: skip
    (found,) = of_rows(rows, "overall", ("vanilla",))
    assert found["value"] == value
    assert break_even.sentence(found).startswith(said)


# -- what a reader sees --------------------------------------------------------------------------------------


def drawn(run: FakeRun) -> dict[str, str]:
    """Name of each figure and what it says, of all sections."""
    summary = summarise([run])
    with figures.style.styled():
        found = [d for scene in figures.scenes(summary, [run]) for d in figures.draw(scene)]
    of_load = [d for d in found if "load" in d.drawing.title]
    assert len({d.drawing.name for d in of_load}) == len(of_load), "each once"
    return {d.drawing.name: d.said for d in of_load}


def test_figures_of_a_sweep() -> None:
    said = drawn(FakeRun(sweep("concurrency", {1: 1.8, 4: 1.2, 8: 0.8})))
    assert list(said) == ["load", "throughput", "latency-load"]
    assert said["load"].startswith("fast: 1 1.80x [")
    assert said["throughput"].startswith("vanilla: 1 2.6 tok/s, 4 ")
    assert "fast: 1 2.33 s" in said["latency-load"]
    closed = sweep("concurrency", {1: 2, 4: 1})
    sizes = [replace(t, batch_size=int(t.concurrency or 1), concurrency=None) for t in closed]
    assert list(drawn(FakeRun(sizes))) == ["load", "throughput"]
    rates = FakeRun(sweep("request_rate", {0.5: 1.5, 2.0: 1.2}))
    assert list(drawn(rates)) == ["load", "throughput", "latency-load"]
    one = FakeRun(sweep("request_rate", {0.5: 1.5}))
    assert drawn(one) == {}


def test_the_order_of_measuring_shows_the_requests_own_seconds_at_a_rate() -> None:
    run = FakeRun(sweep("request_rate", {0.5: 1.5}))
    (scene,) = figures.scenes(summarise([run]), [run])
    with figures.style.styled():
        said = {d.drawing.name: d.said for d in figures.draw(scene)}
    assert said["run-order"].startswith("fast: first 1.50x, last 1.50x")


def order_of(trials: list[Trial]) -> tuple[str, Any]:
    """What the figure of the order of measuring says, and its axes."""
    run = FakeRun(trials)
    (scene,) = figures.scenes(summarise([run]), [run])
    with figures.style.styled():
        (found,) = (d for d in figures.draw(scene) if d.drawing.name == "run-order")
    return found.said, found.figure.axes[0]


@pytest.mark.parametrize("fault", [{"error": "HTTP 500", "total_s": None}, {"excluded": "throttled"}])
def test_the_order_of_measuring_leaves_out_what_the_tables_do(fault: dict[str, Any]) -> None:
    """A block with a request that failed has seconds of all its requests and tokens of some."""
    whole = sent(None, {"vanilla": 4.0, "fast": 2.0}, questions=4, blocks=9, concurrency=4)
    lame = next(trial for trial in whole if trial.block == 4 and trial.method == "fast")
    broken = [replace(trial, **fault) if trial is lame else trial for trial in whole]
    without = [trial for trial in whole if trial.block != 4]
    assert order_of(broken)[0] == order_of(without)[0]


def test_an_attempt_made_again_stands_in_the_order_of_measuring() -> None:
    whole = sent(None, {"vanilla": 4.0, "fast": 2.0}, questions=4, blocks=8, concurrency=4)
    first = [replace(trial, excluded="throttled", batch_s=99.0) for trial in whole if trial.block == 4]
    again = [replace(trial, attempt=1) if trial.block == 4 else trial for trial in whole]
    assert order_of(first + again)[0] == order_of(whole)[0]


def test_the_order_of_measuring_says_how_it_counts() -> None:
    for rate, how in ((None, "end to end"), (0.5, "per request")):
        _, axes = order_of(sent(rate, {"vanilla": 4.0, "fast": 2.0}, questions=3, blocks=4, concurrency=3))
        assert axes.get_ylabel() == f"speedup, {how}"
        assert all(float(tick).is_integer() for tick in axes.get_xticks()), "there is no half a block"


def test_a_point_without_an_interval_hides_no_other_ones() -> None:
    """Of four loads the second has too few questions: its marker alone is hollow, and the band is of the others."""
    trials = sweep("concurrency", {1: 1.8, 2: 1.6, 4: 1.4, 8: 1.2})
    run = FakeRun([t for t in trials if t.concurrency != 2 or t.block < 2])
    scene = next(figures.scenes(summarise([run]), [run]))
    with figures.style.styled():
        found = next(d for d in figures.draw(scene) if d.drawing.name == "load")
    (axes,) = found.figure.axes
    marked = [line for line in axes.lines if line.get_marker() not in ("None", "")]
    faces = {x: line.get_markerfacecolor() for line in marked for x in line.get_xdata()}
    assert [load for load, face in sorted(faces.items()) if face == "none"] == [2]
    reach = [path.vertices[:, 0] for band in axes.collections for path in band.get_paths()]
    assert sorted((min(x), max(x)) for x in reach) == [(1, 1), (4, 8)]


def test_the_terminal_says_the_break_even() -> None:
    out = io.StringIO()
    summary = summarise([FakeRun(sweep("concurrency", {1: 1.8, 8: 0.8}))])
    Console(width=100, file=out, force_terminal=False).print(render(summary, 100))
    text = " ".join(out.getvalue().split())
    assert re.search(
        r"fast pays up to a concurrency of about 6\.\d+ \[6\.\d+, 6\.\d+\] \(speedup at 1: 1\.\d", text
    )


def test_rates_stand_in_every_format() -> None:
    run = FakeRun(sweep("request_rate", {0.5: 1.5, 2.0: 1.2}))
    table: Any = FORMATS["md"].render(summarise([run]), [run])
    assert "requests/s, of those offered |" in table
    assert " 0.50 of 0.5 |" in table
    assert "of those offered" not in FORMATS["md"].render(
        summarise([FakeRun(sweep("concurrency", {1: 2}))]), []
    )
    summary = summarise([run])
    for name in ("md", "html", "csv", "trials-csv", "leaderboard"):
        content: Any = FORMATS[name].render(summary, [run])
        assert "0.5 requests/s" in content or "request_rate" in content, name
    assert math.isfinite(summary["rows"][0]["request_rate"])
