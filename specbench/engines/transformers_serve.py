"""transformers' own server, `transformers serve`.

Speculation is part of a request (`generation_config`, a JSON text): prompt lookup only, no assistant model. A
`generation_config` replaces the request's defaults as a whole, so the baseline sends one too. Prompts are text; the
tokenizer puts its special tokens before them. The stream's usage counts calls of the streamer: tokens without
speculation, but target steps with it, each with all the tokens it emitted; the finish reason follows from that count
and is as wrong. The same request without `stream` tells the tokens. The first step verifies a draft too, so that it
may emit several tokens and is a round like the others. `stream_options` is ignored, and there is no `[DONE]`.

Seen in transformers 5.19 and 5.24 (cli/serving/{completion,utils}.py, generation/utils.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from specbench.engines.base import Engine, Event, Launch, Limits, Native, Prompt, Reply, Setup, as_json

STEPS = "steps"  # in `Reply.told`


class TransformersServe(Engine):
    name = "transformers"
    install = "pip install 'specbench-llm[transformers-serve]'"
    program = ("transformers",)
    command_words = ("serve",)
    needs = ("fastapi", "uvicorn", "openai", "accelerate")
    distribution = "transformers"
    methods: ClassVar = {
        "prompt-lookup": Native(
            "prompt_lookup",
            {"prompt_lookup_num_tokens": 10},
            {"k": "prompt_lookup_num_tokens", "ngram": "max_matching_ngram_size"},
        ),
    }
    takes_ids = False
    adds_special = True
    per_request = True
    counts_unstreamed = True
    first_drafts = True

    def arguments(self, setup: Setup, launch: Launch) -> list[str]:
        trust = ["--trust-remote-code"] if launch.trust_remote_code else []
        dtype = [] if launch.dtype == "auto" else ["--dtype", launch.dtype]
        device = [] if launch.device == "auto" else ["--device", launch.device]
        return [launch.target, "--host", launch.host, "--port", str(launch.port), *dtype, *device, *trust]

    def flags(self, setup: Setup) -> list[str]:
        return []  # speculation is asked for in each request

    def environment(self, setup: Setup, launch: Launch) -> Mapping[str, str]:
        return {} if launch.threads is None else {"OMP_NUM_THREADS": str(launch.threads)}

    def request(
        self, prompt: Prompt, limits: Limits, setup: Setup, target: str
    ) -> tuple[str, dict[str, Any]]:
        route, body = super().request(prompt, replace(limits, ignore_eos=False), setup, target)
        del body["stream_options"]
        body.pop("top_k", None)
        config: dict[str, Any] = {
            "max_new_tokens": limits.max_new_tokens,
            "do_sample": limits.temperature > 0,
        }
        if limits.temperature > 0:
            config |= {"top_k": limits.top_k, "top_p": limits.top_p, "temperature": limits.temperature}
        if limits.ignore_eos:
            config["min_new_tokens"] = limits.max_new_tokens
        return route, body | {"generation_config": as_json({**config, **setup.settings})}

    def read(self, events: Sequence[Event], setup: Setup) -> Reply:
        reply = super().read(events, setup)
        if setup.native is None:
            return reply
        told = {**reply.told, STEPS: reply.completion_tokens}
        return replace(reply, completion_tokens=None, finish=None, told=told)

    def told(self, reply: Reply) -> Mapping[str, Any]:
        steps = reply.told.get(STEPS)
        if steps is None or reply.completion_tokens is None:
            return {}
        return {
            "target_steps": steps,
            "accepted": max(reply.completion_tokens - steps, 0),
            "source": "derived",
        }
