"""Real engines on this machine: llama.cpp through `xllamacpp`, and `transformers serve`."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tiny_folder import Workplace

from specbench.engines import find_engine
from specbench.engines.prometheus import delta
from specbench.engines.record import Acceptance, Reply
from specbench.engines.terms import Launch, Limits, Prompt, Setup
from specbench.serving.client import Client, events
from specbench.serving.model import gguf_file
from specbench.serving.server import Server, free_port
from specbench.spec import parse_spec

TARGET = "smollm2-135m@q4_1"  # pinned: needs PyPI or the cache, never the Hub
# "<|im_start|>user\n… …<|im_end|>\n<|im_start|>assistant\n": nonsense that repeats itself, as the answer will
NONSENSE = [504, 2365, 12217, 16301, 253, 23045, 18]
PROMPT = [1, 4093, 198, *NONSENSE, *NONSENSE, *NONSENSE[:4], 2, 198, 1, 520, 9531, 198]
TOKENS = 24


def ask(folder: Path, spec: str | None) -> tuple[Reply, Acceptance, dict[str, int]]:
    """One request to a server of its own: what came, the record, and what the server counted."""
    engine = find_engine("llama.cpp")
    path = str(gguf_file(TARGET, engine.name, lambda line: None))
    setup = engine.setup(spec or "vanilla", parse_spec(spec) if spec else None, path, {})
    words = engine.found()
    assert words is not None
    launch = Launch(path, free_port(), folder, threads=1, context=256)
    server = Server(engine, engine.command(words, setup, launch), launch.port, folder / "log")

    async def talk() -> tuple[Reply, Acceptance, dict[str, int]]:
        client = Client(server.url)
        try:
            await server.wait_ready(client, within_s=120)
            assert listening() == {"127.0.0.1"}
            before = engine.counters((await client.get("/metrics"))[1])
            limits = Limits(TOKENS, ignore_eos=True)
            exchange = await client.stream(*engine.request(Prompt(PROMPT, ""), limits, setup, path))
            assert exchange.error is None
            counted = delta(before, engine.counters((await client.get("/metrics"))[1]))
            assert counted is not None
        finally:
            await client.close()
        reply = engine.read(list(events(exchange.chunks)), setup)
        return reply, engine.record([reply], counted, setup)[0], counted

    try:
        return asyncio.run(talk())
    finally:
        server.stop()


@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="pip install xllamacpp")
def test_llama_cpp_s_own_counts(tmp_path: Path) -> None:
    """Accepted and drafted are the server's own, target steps its decode counter, and the text the baseline's."""
    base, plain, counted = ask(tmp_path, None)
    assert (base.prompt_tokens, base.completion_tokens, len(base.ids or [])) == (len(PROMPT), TOKENS, TOKENS)
    assert plain.target_steps == counted["decodes"] == TOKENS
    for spec in ("prompt-lookup:k=8,ngram=2", "draft-model:k=3"):
        reply, record, counted = ask(tmp_path, spec)
        assert (reply.ids, reply.text) == (base.ids, base.text), spec
        assert (record.accepted, record.drafted) == (counted["accepted"], counted["drafted"])
        assert record.accepted
        assert record.target_steps == counted["decodes"] == TOKENS - record.accepted
        assert record.verify_steps == counted["verify_steps"]
        assert sum(record.per_position or ()) == record.accepted


def listening() -> set[str]:
    """The addresses where processes that this one started listen."""
    started = psutil.Process().children(recursive=True)
    sockets = [one for process in started for one in process.net_connections("inet")]
    return {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN}


async def ready(server: Server) -> None:
    client = Client(server.url)
    await server.wait_ready(client, within_s=180)
    await client.close()


SERVING = ("fastapi", "uvicorn", "openai", "accelerate")


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in SERVING), reason="its extras are missing"
)
def test_transformers_serve(make_place: Callable[[str], Workplace]) -> None:
    """Its stream's usage counts steps under prompt lookup; the tokens are those of the same request unstreamed."""
    place = make_place("serve")
    engine = find_engine("transformers")
    launch = Launch(str(place.target), free_port(), place.path, threads=1)
    words = engine.found()
    assert words is not None
    server = Server(engine, engine.command(words, Setup("any"), launch), launch.port, place.path / "log")
    try:
        asyncio.run(ready(server))
        assert listening() == {"127.0.0.1"}
        options = ["--engine", "transformers", "--url", server.url, "--method", "prompt-lookup:k=3"]
        result = place.run(*options, "--limit", 2, "--ignore-eos")
    finally:
        server.stop()
    assert result.code == 0, result.err
    rows = place.rows()
    assert {row["error"] for row in rows} == {None}
    assert {row["output_tokens"] for row in rows} == {12}
    fast = [row for row in rows if row["method"] != "vanilla"]
    assert all(row["agreement"]["same"] for row in fast)
    assert all(row["acceptance"]["target_steps"] == 12 - row["acceptance"]["accepted"] for row in fast)
    assert {row["acceptance"]["source"] for row in fast} == {"derived"}
    for row in fast:  # the first step drafts too: all of them are rounds
        assert (row["rounds"]["emitted"], row["rounds"]["count"]) == (
            [12],
            [row["acceptance"]["target_steps"]],
        )
    assert all(1 <= row["arrivals"]["tokens"][0] <= 12 for row in rows)
    assert "tokenised again" not in result.err
