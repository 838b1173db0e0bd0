"""`specbench run --engine`: servers started, measured in turn and stopped; and everything that may go wrong."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import fake_engine
import pytest
from fake_server import Answer, FakeServer, Imitation, text
from tiny_folder import Workplace, specbench, write_task
from transformers import AutoTokenizer

from specbench.serving import client, probe, runner, server
from specbench.serving.server import without_home
from specbench.store import read_run

asked_once = functools.cache(server.output_of)  # help and version, which do not change
Two = tuple[FakeServer, FakeServer]  # one that does not speculate, one that does


@pytest.fixture
def place(make_place: Callable[[str], Workplace], monkeypatch: pytest.MonkeyPatch) -> Workplace:
    fake_engine.install(monkeypatch)
    monkeypatch.setattr(client, "RETRY_PAUSE_S", 0.01)
    monkeypatch.setattr(server, "GRACE_S", 2.0)
    monkeypatch.setattr(runner, "SETTLE_S", 0.0)
    monkeypatch.setattr(probe, "output_of", lambda argv: asked_once(tuple(argv)))
    made = make_place("engine")
    made.defaults = ["--engine", "fake", "--warmup", 0]
    return made


@pytest.fixture
def two(place: Workplace) -> Iterator[Two]:
    """A server that does not speculate and one that does."""

    def routes(draft: int) -> dict:
        model = Imitation(draft)
        return {
            "/v1/completions": model.complete,
            "/metrics": model.metrics,
            "/v1/models": text('{"data": [{"id": "served"}]}'),
        }

    with FakeServer(routes(0)) as base, FakeServer(routes(2)) as fast:
        yield base, fast


def methods(rows: list[dict]) -> list[str]:
    """The methods in the order in which blocks were measured."""
    return [row["method"].partition(":")[0] for row in rows]


def error_of(place: Workplace, *options: object, **more: str) -> list[str]:
    result = place.run(*options, **more)
    assert result.code == 2, result.err
    return result.error_lines


def servers_of(pid: int) -> list[int]:
    """Imitations that run as descendants of a process."""
    import psutil

    return [
        p.pid
        for p in psutil.Process(pid).children(recursive=True)
        if "fake_server.py" in " ".join(p.cmdline())
    ]


# -- what is measured --------------------------------------------------------------------------------------------


def test_whole_passes_there_and_back(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "not for servers of ours")
    result = place.run("--method", "prompt-lookup:k=2", "--warmup", 1)
    assert result.code == 0, result.err
    rows = place.rows()
    forward = ["vanilla"] * 4 + ["prompt-lookup"] * 4
    assert methods(rows) == forward + forward[::-1]  # B M M B
    assert {row["error"] for row in rows} == {None}
    assert {row["concurrency"] for row in rows} == {1}
    assert all(row["agreement"]["same"] for row in rows if row["method"] != "vanilla")
    assert not servers_of(os.getpid())
    manifest = place.manifest()
    assert manifest["schedule"] == "whole passes"
    assert manifest["engine"]["version"] == "1.2.3"
    assert "--draft-tokens" in manifest["engine"]["commands"]["prompt-lookup:k=2"]
    assert read_run(place.results / "r").warnings == []
    logs = {path.name: path.read_text(encoding="utf-8") for path in (place.results / "r" / "logs").iterdir()}
    assert sorted(logs) == ["fake-prompt-lookup-k=2.log", "fake-vanilla.log"]
    starts = [logs[name].count("loading") for name in sorted(logs)]
    assert starts == [1, 2]  # one a pass, and the method's two passes share one
    assert "keys: []" in logs["fake-vanilla.log"]


def test_the_record_is_the_server_s_own(place: Workplace) -> None:
    place.run("--method", "prompt-lookup:k=2", "--repeats", 1)
    row = place.rows()[-1]
    assert (row["output_tokens"], len(row["output_ids"]), row["finish"]) == (12, 12, "length")
    record = row["acceptance"]
    counts = [record[name] for name in ("accepted", "verify_steps", "target_steps")]
    assert counts == [7, 4, 5]  # 1 + 3 + 3 + 3 + 2
    assert (record["source"], record["scope"]) == ("metrics-delta", "server")
    assert row["rounds"]["count"] == [4]
    assert row["rounds"]["emitted"] == [11]
    result = place.run("--method", "prompt-lookup:k=2", "--repeats", 1, "--json")
    overall = [row for row in json.loads(result.out)["rows"] if row["task"] == "overall"]
    assert {row["method"]: row["tau"]["point"] for row in overall} == {
        "vanilla": 1.0,
        "prompt-lookup:k=2": 11 / 4,
    }


def test_side_by_side_they_are_interleaved(place: Workplace) -> None:
    result = place.run("--method", "prompt-lookup", "--co-resident")
    assert result.code == 0, result.err
    rows = place.rows()
    assert len(rows) == 8
    order = {(row["block"], row["order"]): row["method"] for row in rows}
    first = [order[block, 0] for block in range(4)]
    assert set(first) == {"vanilla", "prompt-lookup"}  # ABBA
    assert place.manifest()["schedule"] == "interleaved"


def test_concurrency_and_request_rate(place: Workplace) -> None:
    assert place.run("--method", "prompt-lookup", "--concurrency", "1,2", "--co-resident").code == 0
    rows = place.rows()
    assert {row["concurrency"] for row in rows} == {1, 2}
    together = [row for row in rows if row["concurrency"] == 2 and row["turn"] == 0]
    assert {row["batch"] for row in together} == {"q1+q2+q3"}
    assert len({row["batch_s"] for row in together if row["method"] == "vanilla"}) == 1
    rates = ("--request-rate", "100,200", "--concurrency", "1", "--co-resident")
    result = place.run("--method", "prompt-lookup", *rates, "--json", name="rate")
    settings = [(1, None), (None, 100.0), (None, 200.0)]
    sent = place.rows("rate")
    assert list(dict.fromkeys((row["concurrency"], row["request_rate"]) for row in sent)) == settings
    paced = [row for row in sent if row["request_rate"] == 100.0 and row["turn"] == 0]
    assert min(row["sent_s"] for row in paced) == 0
    assert max(row["sent_s"] for row in paced) > 0
    overall = [row for row in json.loads(result.out)["rows"] if row["task"] == "overall"]
    assert [(row["concurrency"], row["request_rate"]) for row in overall[::2]] == settings
    assert all(row["speedup"]["point"] is not None for row in overall)
    assert overall[1]["compared_by"] == "ids"
    assert overall[1]["identical_text"] == overall[1]["compared_text"] == overall[1]["compared"]
    assert overall[1]["counts_source"] == "metrics-delta"
    assert place.run("--method", "prompt-lookup", *rates, name="rate").code == 0
    assert len(place.rows("rate")) == len(sent), "nothing was left to measure"


def test_a_server_has_room_for_the_longest_conversation(place: Workplace) -> None:
    from specbench.config import RunConfig
    from specbench.models.identity import ModelIdentity
    from specbench.prompts import load_tasks
    from specbench.serving.model import MARGIN, STEP, EngineTarget, needed_context

    tokenizer = AutoTokenizer.from_pretrained(place.target)
    write_task(place.path / "long.jsonl", [["a" * 400, "b" * 300], ["short"]])
    tasks = load_tasks([str(place.path / "long.jsonl")])
    config = RunConfig("t", (), ("x",), max_new_tokens=50)
    identity = ModelIdentity("t", "t", "local", None, None, "auto", None, None, 0)

    def needed(most: int | None) -> int:
        return needed_context(
            tasks, config, EngineTarget("t", tokenizer, identity, frozenset(), most, "cpu", {})
        )

    assert needed(None) % STEP == 0
    assert 0 <= needed(None) - (400 + 300 + 2 * 50 + MARGIN) < STEP + 20  # of the template
    assert needed(512) == 512


def test_a_server_is_warmed_up_with_what_teaches_it_nothing(place: Workplace, two: Two) -> None:
    base, _ = two
    assert place.run("--url", base.url, "--warmup", 2, "--limit", 1).code == 0
    first, second, asked = (body["prompt"] for body in base.bodies("/v1/completions")[:3])
    assert first == second != asked
    assert sorted(first) == sorted(asked)
    assert len(place.rows()) == 2  # two turns


def test_a_server_is_warmed_up_for_each_load(place: Workplace, two: Two) -> None:
    """With as many requests as will be in flight: engines prepare for a batch's size when they first meet it."""
    base, _ = two
    assert place.run("--url", base.url, "--warmup", 1, "--concurrency", "1,3").code == 0
    assert len(base.bodies("/v1/completions")) - len(place.rows()) == 1 + 3
    before = len(base.bodies("/v1/completions"))
    assert place.run("--url", base.url, "--warmup", 1, "--request-rate", "100", name="rate").code == 0
    assert len(base.bodies("/v1/completions")) - before - len(place.rows("rate")) == 3  # all may meet


def test_a_warm_up_that_fails_is_told_of_once(place: Workplace) -> None:
    model = Imitation(0)
    answers = [text('{"error": {"message": "too warm"}}', 400)] * 2
    with FakeServer(
        {"/v1/completions": lambda body: answers.pop() if answers else model.complete(body)}
    ) as served:
        result = place.run("--url", served.url, "--warmup", 2)
    assert result.code == 0, result.err
    assert result.err.count("vanilla: its warm-up failed: HTTP 400: too warm") == 1


def test_a_connection_that_was_idle_too_long_is_no_news(place: Workplace) -> None:
    model = Imitation(0)
    cut = [Answer(cut=True)]
    with FakeServer({"/v1/completions": lambda body: cut.pop() if cut else model.complete(body)}) as served:
        result = place.run("--url", served.url)
    assert result.code == 0, result.err
    assert {row["retries"] for row in place.rows()} == {0}
    assert "were sent again" not in result.err


def test_a_learning_server_starts_anew_for_each_pass(place: Workplace) -> None:
    assert place.run("--method", "suffix").code == 0
    log = (place.results / "r" / "logs" / "fake-suffix.log").read_text(encoding="utf-8")
    assert log.count("loading") == 2
    assert {row["state"] for row in place.rows() if row["method"] == "suffix"} == {"warm"}


def test_a_run_goes_on_where_it_was_cut(place: Workplace) -> None:
    assert place.run("--method", "prompt-lookup").code == 0
    lines = place.trials_file().read_bytes().splitlines(keepends=True)
    os.truncate(place.trials_file(), sum(map(len, lines[:6])))
    assert place.run("--method", "prompt-lookup").code == 0
    assert methods(place.rows()) == methods([json.loads(line) for line in lines])
    assert place.trials_file().read_bytes().splitlines(keepends=True)[:6] == lines[:6]


def test_a_run_until_its_speedups_are_known(place: Workplace) -> None:
    questions = [[f"{'xyz' * number} {number}"] for number in range(40)]
    place = replace(place, task=write_task(place.path / "many.jsonl", questions))
    options = ("--method", "prompt-lookup", "--co-resident", "--until", "90%")
    result = place.run(*options, name="until")
    assert result.code == 0, result.err
    assert "every method's speedup is known to ±90.0%" in " ".join(result.err.split())
    assert 2 * 20 <= len(place.rows("until")) < 2 * 40


def test_a_dry_run_prints_the_commands_and_starts_nothing(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBENCH_API_KEY", "sesame-open")
    result = place.run(
        "--method", "draft-model:k=4,engine.slow_start=1", "--draft", place.target, "--dry-run"
    )
    assert result.code == 0, result.err
    command = result.out.splitlines()[-1]
    assert command.endswith(f"--draft-tokens 4 --draft-model {place.target} --slow-start 1")
    assert f"--model {place.target} --host 127.0.0.1 --port " in command
    assert "sesame-open" not in result.out + result.err
    assert not place.results.exists()


def test_a_dry_run_says_what_the_run_would_note(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = {
        "prompt-lookup": replace(fake_engine.Fake.methods["prompt-lookup"], note="spelt otherwise in 2.0")
    }
    fake_engine.install(monkeypatch, methods=noted, warnings=("fakes all",))
    for where in ([], ["--url", "http://host", "--baseline-url", "http://host"]):
        result = place.run("--method", "prompt-lookup", "--dry-run", *where)
        assert result.code == 0, result.err
        assert "note: prompt-lookup: spelt otherwise in 2.0" in result.err
        assert "note: fakes all" in result.err


def test_a_dry_run_s_commands_are_the_run_s(place: Workplace) -> None:
    """But for the port: that is chosen when a server is started."""

    def commands(facts: dict) -> dict[str, list[str]]:
        return {
            label: re.sub(r"--port \d+", "", argv if isinstance(argv, str) else shlex.join(argv))
            for label, argv in facts.items()
        }

    options = ["--method", "draft-model:k=4", "--draft", place.target, "--repeats", 1]
    dry = json.loads(place.run(*options, "--dry-run", "--json", name="dry").out)["commands"]
    assert place.run(*options, name="dry").code == 0
    assert commands(dry) == commands(place.manifest("dry")["engine"]["commands"])
    log = (place.results / "dry" / "logs" / "fake-vanilla.log").read_text(encoding="utf-8")
    assert commands({"vanilla": log.splitlines()[0].removeprefix("$ ")}) == {
        "vanilla": commands(dry)["vanilla"]
    }


def test_the_manifest_does_not_name_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    words = ["/home/ann/v/bin/serve", '{"model":"/home/ann/draft"}', "/home/anna", "m"]
    assert [without_home(word) for word in words] == [
        "~/v/bin/serve",
        '{"model":"~/draft"}',
        "/home/anna",
        "m",
    ]


def test_a_dry_run_without_the_target_s_tokenizer_says_what_it_guesses(place: Workplace) -> None:
    result = place.run("--target", "nobody/nothing", "--dry-run")
    assert result.code == 0, result.err
    assert "room for 4096 tokens" in " ".join(result.err.split())
    assert "--model nobody/nothing " in result.out


# -- servers -----------------------------------------------------------------------------------------------------


def test_a_server_that_loads_is_waited_for(place: Workplace) -> None:
    place.defaults[1] = "fake:slow-start=0.5"
    assert place.run("--method", "prompt-lookup", "--repeats", 1).code == 0
    assert {row["error"] for row in place.rows()} == {None}


def test_a_port_that_is_taken_is_left_to_its_owner(place: Workplace) -> None:
    place.defaults[1] = f"fake:taken={place.path / 'taken'}"
    assert place.run("--repeats", 1).code == 0
    assert "Address already in use" in (place.results / "r" / "logs" / "fake-vanilla.log").read_text(
        encoding="utf-8"
    )


def test_a_server_that_crashes_at_start_says_why(place: Workplace) -> None:
    place.defaults[1] = "fake:crash=true"
    message, hint = error_of(place, "--method", "prompt-lookup")
    assert "fake stopped by itself (exit 1): RuntimeError: CUDA out of memory: tried" in message
    assert "Traceback" not in message + hint
    (log,) = (place.results / "r" / "logs").iterdir()  # without vanilla no other server is started
    assert hint == f"  hint: see its log, {log}"
    assert place.manifest()["status"] == "failed"


def test_what_an_engine_s_adapter_knows_of_a_crash_is_said(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_engine.install(monkeypatch, cures={"out of memory": "buy more"})
    place.defaults[1] = "fake:crash=true"
    assert error_of(place)[1].startswith("  hint: buy more; see its log")


def test_a_method_whose_server_crashes_does_not_end_the_run(place: Workplace) -> None:
    result = place.run("--method", "prompt-lookup:engine.crash=true", "--method", "suffix")
    assert result.code == 2
    assert "nothing was measured of prompt-lookup:engine.crash=true: fake stopped by itself" in result.err
    assert f"see its log, {place.results / 'r' / 'logs'}" in result.err.replace("\n", "")
    failed = {row["method"] for row in place.rows() if row["error"]}
    assert failed == {"prompt-lookup:engine.crash=true"}
    assert sum(row["method"] == "suffix" and row["error"] is None for row in place.rows()) == 8


def test_a_stream_that_breaks_is_a_failed_row(place: Workplace) -> None:
    result = place.run("--method", "prompt-lookup:engine.drop_every=4")
    assert result.code == 0, result.err
    rows = [row for row in place.rows() if row["method"] != "vanilla"]
    broken = [row for row in rows if row["error"]]
    assert 0 < len(broken) < len(rows)
    assert all("the connection broke" in row["error"] for row in broken)
    sent = {(row["question"], row["turn"]): row["prompt_tokens"] for row in place.rows() if not row["error"]}
    assert all(row["prompt_tokens"] == sent[row["question"], row["turn"]] > 0 for row in broken)
    assert f"{len(broken)} of 16 trials failed" in result.err


def test_what_is_not_installed(place: Workplace) -> None:
    place.defaults[1] = "fake:binary=missing"
    assert error_of(place) == ["error: missing is not installed", "  hint: pip install fake-engine"]


def test_a_program_whose_help_does_not_come(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(probe, "output_of", lambda argv: server.output_of(slow, within_s=0.2))
    message, hint = error_of(place)
    assert message == "error: fake does not print its help: it was not done after 0.2 s"
    assert "try once more" in hint
    assert server.output_of([str(place.path / "none")])[0] is None


def test_a_flag_that_was_removed_is_caught_before_anything_starts(place: Workplace) -> None:
    assert error_of(place, "--method", "gone")[0] == "error: fake 1.2.3 has no flag --flag-that-was-removed"
    assert not (place.results / "r" / "logs").exists()


def test_what_is_known_of_a_version_is_said_and_not_called_lossless(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_engine.install(monkeypatch, doubt=lambda self, version, temperature: f"{version} samples noise")
    result = place.run("--method", "prompt-lookup", "--limit", 1)
    assert result.code == 0, result.err
    assert "prompt-lookup: 1.2.3 samples noise" in result.err
    assert {row["lossless"] for row in place.rows() if row["method"] == "prompt-lookup"} == {False}
    assert {row["lossless"] for row in place.rows() if row["method"] == "vanilla"} == {True}


def test_doctor_says_what_each_engine_can_do(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    result = specbench("doctor", "--engines")
    assert result.code == 0, result.err
    assert "fake: found, version 1.2.3" in result.out
    assert "methods: draft-model, gone, prompt-lookup, suffix" in result.out
    assert "gone cannot run here: no flag --flag-that-was-removed" in result.out
    fake_engine.install(
        monkeypatch, found=lambda self, binary=None: None, methods={}, no_speculation="it drafts nothing"
    )
    (fake,) = json.loads(specbench("doctor", "--engines", "--json").out)["engines"].values()
    assert (fake["found"], fake["missing"], fake["install"]) == (
        False,
        "fake is not installed",
        "pip install fake-engine",
    )
    assert "it drafts nothing" in specbench("doctor", "--engines").out
    assert "fake: fake is not installed" in specbench("doctor", "--engine", "fake").out
    assert specbench("doctor", "--engine", "nothing").code == 2


# -- attaching ---------------------------------------------------------------------------------------------------


def test_attached_servers_are_used_as_they_are(
    place: Workplace, two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBENCH_API_KEY", "sesame-open")
    base, fast = two
    result = place.run("--method", "prompt-lookup", "--url", fast.url, "--baseline-url", base.url)
    assert result.code == 0, result.err
    assert "others' traffic" in result.err.replace("\n", " ")
    assert len(place.rows()) == 8
    for served in two:
        _, body, headers = next(asked for asked in served.requests if asked[0] == "/v1/completions")
        assert body["model"] == "served"
        assert headers["Authorization"] == "Bearer sesame-open"
    assert place.rows()[1]["acceptance"]["accepted"] > 0
    for file in place.path.rglob("*"):
        if file.is_file():
            assert b"sesame-open" not in file.read_bytes(), file


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--url", "http://127.0.0.1:1", "--method", "prompt-lookup"],
            "cannot switch speculation per request",
        ),
        (["--baseline-url", "http://127.0.0.1:1"], "--baseline-url is given without --url"),
        (["--url", "http://me:secret@host"], "--url holds a name or password, which would be written down"),
        (["--url", "http://host/v1?key=secret"], "--url holds a query"),
        (["--url", "http://host", "--baseline-url", "http://b?k=s"], "--baseline-url holds a query"),
        (["--url", "http://host", "--baseline-url", "b"], "--baseline-url b is no address of a server"),
        *(
            (["--url", url], f"--url {url} is no address of a server")
            for url in (
                "nonsense",
                "ftp://host",
                "http://",
                "http://[::1",
                "http://host:x",
                "http://host:99999",
            )
        ),
        (
            ["--url", "http://127.0.0.1:1"],
            "error: nothing answers at http://127.0.0.1:1",
        ),
        (["--engine", "fake:api-key=x"], "--api-key would write a secret into logs"),
        (["--engine", "fake:apikey=x"], "--apikey would write a secret into logs"),
        (["--method", "prompt-lookup:engine.hf_token=x"], "--hf-token would write a secret into logs"),
        (["--engine", "fake:port=8000"], "the port of a server that specbench starts is its own choice"),
        (["--engine", "fake:host=10.0.0.7"], "must listen on loopback, and host=10.0.0.7 does not"),
        (["--batch-size", "2"], "--batch-size is for specbench's own loop"),
        (["--target", "random:llama-8b"], "fake cannot load random:llama-8b"),
        (["--concurrency", "0"], "--concurrency 0 is not a list"),
        (["--request-rate", "1,x"], "--request-rate 1,x is not a list of numbers"),
        (["--until", "3%"], "--until needs the methods side by side"),
        (["--until", "3%", "--concurrency", "1,2", "--co-resident"], "--until looks at one --concurrency"),
        (["--until", "3%", "--request-rate", "1,2", "--co-resident"], "--until looks at one --concurrency"),
        (["--method", "medusa"], "fake has no method 'medusa'"),
        (["--engine", "other"], "unknown engine 'other'"),
    ],
)
def test_options_that_do_not_go_together(place: Workplace, options: list[str], message: str) -> None:
    assert message in error_of(place, *options)[0]


def test_options_of_engines_are_not_for_our_own_loop(place: Workplace) -> None:
    place.defaults = []
    assert "are for serving engines" in error_of(place, "--concurrency", "4")[0]


def test_a_second_template_is_noticed(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_more(self: Imitation, body: dict) -> object:
        return complete(self, {**body, "prompt": [1, *body["prompt"]]})

    complete = Imitation.complete
    monkeypatch.setattr(Imitation, "complete", one_more)
    with FakeServer({"/v1/completions": Imitation(0).complete}) as served:
        result = place.run("--url", served.url)
    assert "prompt tokens where" in result.err
    assert result.err.count("a template or special tokens are added there") == 1


def test_requests_that_are_sent_again_are_told_of(place: Workplace) -> None:
    model = Imitation(0)
    busy = iter([503, 503])

    def answer(body: dict) -> Answer:
        status = next(busy, 200)
        return model.complete(body) if status == 200 else text('{"error": {"message": "busy"}}', status)

    with FakeServer({"/v1/completions": answer}) as served:
        result = place.run("--url", served.url)
    assert result.code == 0, result.err
    assert [row["retries"] for row in place.rows()] == [2, 0, 0, 0]
    assert result.err.count("were sent again") == 1


def test_text_only_engines_are_compared_by_text(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    from fake_server import stream

    fake_engine.install(monkeypatch, takes_ids=False, metrics=None)
    with FakeServer({"/v1/completions": stream(["so ", "it ", "is"], usage=3)}) as served:
        url = served.url
        assert (
            place.run("--url", url, "--baseline-url", url, "--method", "prompt-lookup", "--no-text").code == 0
        )
        assert isinstance(served.bodies("/v1/completions")[0]["prompt"], str)
    rows = [row for row in place.rows() if row["method"] != "vanilla"]
    assert {row["agreement"]["same"] for row in rows} == {True}
    assert {(row["output_tokens"], row["text"], row["acceptance"]["source"]) for row in rows} == {
        (3, "so it is", "none")
    }
