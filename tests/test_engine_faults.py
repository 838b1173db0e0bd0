"""What goes wrong with an engine, for each that cannot run here, on a program that speaks its wire format."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import fake_wire
import pytest
from engine_kit import GREEDY, PROMPT, Asked, ask, at_work, setup_of, start, wire_of
from tiny_folder import Workplace

from specbench.engines import find_engine
from specbench.engines.base import Engine
from specbench.engines.record import Acceptance
from specbench.engines.terms import Setup
from specbench.errors import SpecbenchError
from specbench.serving.answers import NoAnswer, read_answer

ENGINES = sorted(fake_wire.WIRES)
COUNTING = [name for name in ENGINES if find_engine(name).metrics]
FROM_RESPONSE = ("tensorrt-llm",)  # says itself what was accepted, whatever its counters do
every_engine = pytest.mark.parametrize("name", ENGINES)


def speculating(engine: Engine) -> Setup:
    return setup_of(engine, "prompt-lookup" if engine.methods else "vanilla")


def asked(name: str, folder: Path, times: int = 1, **faults: object) -> Asked:
    """The last of so many requests, from a version that says nothing of a request where there is one."""
    engine = find_engine(name)
    setup = speculating(engine)
    wire = wire_of(name, folder, setup, older=True, **faults)
    return [ask(engine, wire, setup) for _ in range(times)][-1]


def record_of(name: str, found: Asked) -> Acceptance:
    engine = find_engine(name)
    setup = speculating(engine)
    (record,) = engine.record([read_answer(engine, found.exchange, setup)], found.counted, setup)
    return record


# -- starting ----------------------------------------------------------------------------------------------------


@every_engine
def test_a_crash_at_start_is_told_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash = fake_wire.WIRES[name].crash
    with pytest.raises(SpecbenchError, match=re.escape(crash)) as error:
        start(name, tmp_path, monkeypatch, crash=True)
    assert error.value.message.startswith(f"{name} stopped by itself (exit 1): ")
    assert "\n" not in error.value.message + error.value.hint
    assert str(tmp_path) in error.value.hint
    (log,) = tmp_path.glob("*.log")
    assert "Traceback" in log.read_text(encoding="utf-8")


@every_engine
def test_a_port_that_is_taken_meanwhile_is_left_for_another(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(name, tmp_path, monkeypatch, taken=str(tmp_path / "taken"), loading=0.2)
    assert (tmp_path / "taken").exists()
    (log,) = tmp_path.glob("*.log")
    ports = [
        line.split("--port ")[1].split()[0] for line in log.read_text("utf-8").splitlines() if line[:1] == "$"
    ]
    assert len(set(ports)) == 2


def test_its_log_is_shown_while_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert start("vllm", tmp_path, monkeypatch, loading=1.2) == ["ready"]  # it is looked at once a second


# -- requests ----------------------------------------------------------------------------------------------------


@every_engine
def test_another_model_s_name(name: str, tmp_path: Path) -> None:
    engine = find_engine(name)
    setup = setup_of(engine)
    found = ask(engine, wire_of(name, tmp_path, setup), setup, model="other")
    if name == "tgi":  # its route takes no model
        assert found.exchange.error is None
    else:
        assert found.exchange.error in (
            "HTTP 404: The model `other` does not exist.",
            "HTTP 400: Model not found.",
        )
        assert found.exchange.retries == 0


@every_engine
def test_a_stream_that_breaks_is_no_answer(name: str, tmp_path: Path) -> None:
    engine = find_engine(name)
    setup = speculating(engine)
    found = asked(name, tmp_path, cut_every=1)
    assert found.exchange.chunks
    with pytest.raises(NoAnswer, match="the connection broke"):
        read_answer(engine, found.exchange, setup)
    found.exchange.error = None  # nor is one that ends early in good order
    if engine.takes_ids:
        with pytest.raises(NoAnswer, match="the stream ended before the answer did"):
            read_answer(engine, found.exchange, setup)


@every_engine
def test_an_answer_s_tokens(name: str, tmp_path: Path) -> None:
    """Usage last, several tokens an event, events without text: the tokens are those that were asked for."""
    engine = find_engine(name)
    found = asked(name, tmp_path)
    reply = read_answer(engine, found.exchange, speculating(engine))
    script = fake_wire.Script(PROMPT.ids if engine.takes_ids else fake_wire.tokenise(PROMPT.text), 12, False)
    if name != "deepspeed-mii":  # it does not say
        assert (reply.completion_tokens, reply.prompt_tokens) == (GREEDY.max_new_tokens, len(script.prompt))
    assert reply.ids in (None, script.ids)
    assert reply.finish == "length"


# -- counters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COUNTING)
@pytest.mark.parametrize("faults", [{"no_metrics": True}, {"reset": 2, "times": 2}])
def test_counters_that_are_missing_or_reset_leave_unknown_what_they_alone_tell(
    name: str, tmp_path: Path, faults: dict[str, int]
) -> None:
    found = asked(name, tmp_path, **faults)
    assert found.counted is None
    record = record_of(name, found)
    assert (record.drafted, record.verify_steps) == (None, None)
    assert record.source == ("derived" if name in FROM_RESPONSE else "none")
    assert (record.accepted is None) is (name not in FROM_RESPONSE)
    assert record_of(name, asked(name, tmp_path)).accepted is not None  # they do tell otherwise


def test_a_broken_stream_fails_its_row_alone(
    make_place: Callable[[str], Workplace], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = at_work(make_place("faults"), "vllm", monkeypatch, cut_every=3)
    result = place.run("--method", "prompt-lookup", "--repeats", 1)
    assert result.code == 0, result.err
    errors = [row["error"] for row in place.rows() if row["error"]]
    assert errors
    assert all("the connection broke" in error for error in errors)
    assert f"{len(errors)} of {len(place.rows())} trials failed" in result.err


def test_the_reset_counters_of_a_run(
    make_place: Callable[[str], Workplace], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = at_work(make_place("reset"), "vllm", monkeypatch, older=True, reset=2)
    result = place.run("--method", "prompt-lookup", "--repeats", 1)
    assert result.code == 0, result.err
    told = [row["acceptance"] for row in place.rows() if row["method"] == "prompt-lookup"]
    assert [(one["source"], one["accepted"]) for one in told] == [
        ("metrics-delta", 7),
        ("none", None),
        ("metrics-delta", 7),
        ("metrics-delta", 7),
    ]


def test_counters_of_others_too_are_not_used(
    make_place: Callable[[str], Workplace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a server that others use: what the answers tell stays, and it is said once."""
    place = at_work(make_place("others"), "vllm", monkeypatch, others=3)
    result = place.run("--method", "prompt-lookup", "--repeats", 1)
    assert result.code == 0, result.err
    assert result.err.count("counted other drafts than those of this run's answers") == 1
    told = [row["acceptance"] for row in place.rows() if row["method"] == "prompt-lookup"]
    assert {(one["source"], one["scope"], one["accepted"]) for one in told} == {("response", "request", 7)}
