"""Text Generation Inference: `text-generation-launcher`. In maintenance mode since 2026.

Speculation is set at start: `--speculate N` copies what followed the first earlier occurrence of the last token.
There is no flag for a drafter: a model id that names Medusa heads or an MLP speculator loads the base model that
its config names, and speculates even without the flag. The target is therefore always the base model, and heads
take its place in `--model-id`.

Requests go as text to the native `/generate_stream`, whose events are one token each, with its id, in bursts. Its
tokenizer puts special tokens before the text. It stops at EOS, asked or not. Nothing is told of a request:
`tgi_request_skipped_tokens` of `/metrics` takes in the tokens beyond the first of every target step, the prefill's
too, so that its sum is what was accepted and its count the target steps. What was drafted is not counted.

Facts read in 3.3.7 (launcher/src/main.rs, router/src/{server,lib,validation}.rs, backends/v3/src/backend.rs,
server/text_generation_server/models/__init__.py of huggingface/text-generation-inference); not run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from specbench.engines.base import FINISH, Engine
from specbench.engines.record import Arrival, Event, Reply
from specbench.engines.terms import Launch, Limits, Native, Prompt, Setup

MODEL = "model-id"
OTHER_BASE = "TGI takes the base model that the heads' config names: it must be the target"


def _heads(name: str) -> Native:
    return Native(name, {}, {"k": "speculate"}, draft=MODEL, note=OTHER_BASE)


class TGI(Engine):
    name = "tgi"
    install = "see https://huggingface.co/docs/text-generation-inference (a container, or built from source)"
    program = ("text-generation-launcher",)
    methods: ClassVar = {
        "prompt-lookup": Native("n-gram", {"speculate": 10}, {"k": "speculate"}),
        "medusa": _heads("medusa"),
        "mlp-speculator": _heads("mlp_speculator"),
    }
    takes_ids = False
    adds_special = True
    forces_length = False
    route = "/generate_stream"
    metrics = "/metrics"
    version_at = ("/info", "version")
    counter_names: ClassVar = {
        "accepted": "tgi_request_skipped_tokens_sum",
        "target_steps": "tgi_request_skipped_tokens_count",
    }

    def arguments(self, setup: Setup, launch: Launch) -> list[str]:
        sockets = Path(tempfile.gettempdir()) / f"specbench-tgi-{launch.port}"
        return [
            *("--model-id", str(setup.settings.get(MODEL, launch.target))),
            *("--hostname", launch.host, "--port", str(launch.port)),
            *("--max-input-tokens", str(launch.context - 1), "--max-total-tokens", str(launch.context)),
            # of its own, so that two servers can run: else both want the same ones
            *("--prometheus-port", "0", "--shard-uds-path", str(sockets)),
            *([] if launch.dtype == "auto" else ["--dtype", launch.dtype]),
            *(["--trust-remote-code"] if launch.trust_remote_code else []),
            *self.flags(setup),
        ]  # fmt: skip

    def flags(self, setup: Setup) -> list[str]:
        count = setup.settings.get("speculate")
        return [] if count is None else ["--speculate", str(count)]

    def environment(self, setup: Setup, launch: Launch) -> Mapping[str, str]:
        return {"PREFIX_CACHING": "0", "USAGE_STATS": "off", **launch.environment}

    def request(
        self, prompt: Prompt, limits: Limits, setup: Setup, target: str
    ) -> tuple[str, dict[str, Any]]:
        if setup.chat:
            return super().request(prompt, limits, setup, target)
        parameters: dict[str, Any] = {
            "max_new_tokens": limits.max_new_tokens,
            "do_sample": limits.temperature > 0,
            "details": True,
            "seed": limits.seed,
        }
        if limits.temperature > 0:
            parameters["temperature"] = limits.temperature
            parameters |= {"top_p": limits.top_p} if limits.top_p < 1 else {}  # 1 is refused
            parameters |= {"top_k": limits.top_k} if limits.top_k else {}
        return self.route, {"inputs": prompt.text, "parameters": parameters}

    def read(self, events: Sequence[Event], setup: Setup) -> Reply:
        if setup.chat:
            return super().read(events, setup)
        tokens = [(event.at, event.data["token"]) for event in events if event.data.get("token")]
        last = events[-1].data if events else {}
        details = last.get("details") or {}
        pieces = "".join(token["text"] for _, token in tokens if not token.get("special"))
        finish = details.get("finish_reason")
        return Reply(
            text=last.get("generated_text") or pieces,
            arrivals=[Arrival(at, 1) for at, _ in tokens],
            ids=[token["id"] for _, token in tokens],
            prompt_tokens=details.get("input_length"),
            completion_tokens=details.get("generated_tokens"),
            finish="eos" if finish == "stop_sequence" else FINISH.get(finish or "", finish),
            told={},
        )
