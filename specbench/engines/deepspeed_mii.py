"""DeepSpeed-MII (FastGen): `python -m mii.entrypoints.openai_api_server`, on NVIDIA GPUs. It does not speculate.

Its code has no speculation at all, so that only a baseline can be measured, beside those of other engines. Over
HTTP it always samples (`do_sample` is fixed, the temperature must be above 0, there is no seed) and always stops at
EOS. Its streams hold text only: no ids, no usage. Prompts are text, before which its tokenizer puts special tokens.

Facts read at 8abdd98 of 2025-06-30 (mii/entrypoints/openai_api_server.py, mii/config.py of
deepspeedai/DeepSpeed-MII); not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from specbench.engines.base import Engine
from specbench.engines.terms import Launch, Limits, Prompt, Setup


class DeepSpeedMII(Engine):
    name = "deepspeed-mii"
    install = "pip install 'specbench-llm[deepspeed-mii]', or --engine deepspeed-mii:binary=VENV/bin/python"
    module = "mii.entrypoints.openai_api_server"
    needs = ("fastchat", "shortuuid")
    distribution = "deepspeed-mii"
    methods: ClassVar = {}
    no_speculation = "deepspeed-mii has no speculative decoding in its code"
    takes_ids = False
    adds_special = True
    greedy = False
    forces_length = False
    warnings = ("deepspeed-mii takes no seed over HTTP: its answers differ from run to run",)

    def arguments(self, setup: Setup, launch: Launch) -> list[str]:
        return [
            *("--model", launch.target, "--host", launch.host, "--port", str(launch.port)),
            *("--max-length", str(launch.context)),
        ]  # fmt: skip

    def environment(self, setup: Setup, launch: Launch) -> Mapping[str, str]:
        return launch.environment

    def request(
        self, prompt: Prompt, limits: Limits, setup: Setup, target: str
    ) -> tuple[str, dict[str, Any]]:
        route, body = super().request(prompt, limits, setup, target)
        return route, {key: value for key, value in body.items() if key not in ("seed", "stream_options")}
