"""llama.cpp: `llama-server`, or the same server out of the PyPI wheel `xllamacpp`.

Speculation cannot be switched per request: one server a configuration. Prompts go as ids to the native route
`/completion`, which sends ids back (`tokens`), one event a token, in bursts. The last event's `timings` hold
`draft_n` and `draft_n_accepted`, absent where nothing was drafted; `/metrics` counts verify steps too. The draft is
capped near the token limit, so that nothing accepted is ever cut: target steps = predicted - accepted (equal to
`n_decode_total`). `-md` without `--spec-type draft-simple` loads a draft and never uses it.

Facts seen at b10434 and b11549 (docs/speculative.md, common/arg.cpp, tools/server of ggml-org/llama.cpp).
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from specbench.engines.base import (
    Acceptance,
    Arrival,
    Engine,
    Event,
    Launch,
    Limits,
    Native,
    Prompt,
    Reply,
    Setup,
)

WHEEL = "xllamacpp"
BATCH, BATCH_FLAG = 2048, "batch-size"  # llama-server's own default: tokens of a prompt that one decode takes
LAUNCHER = "specbench.engines.xllamacpp_server"


def _drafts(kind: str) -> Native:
    return Native(
        f"draft-{kind}",
        {"spec-type": f"draft-{kind}"},
        {"k": "spec-draft-n-max"},
        draft="spec-draft-model",
    )


class LlamaCpp(Engine):
    name = "llama.cpp"
    install = "pip install 'specbench-llm[llama-cpp]', or put llama-server on PATH"
    program = ("llama-server",)
    weights = "gguf"
    methods: ClassVar = {
        "prompt-lookup": Native(
            "ngram-simple",
            # llama.cpp's own 12 and 48 hardly ever fire on short answers; these are our prompt-lookup's
            {"spec-type": "ngram-simple", "spec-ngram-simple-size-n": 3, "spec-ngram-simple-size-m": 10},
            {"ngram": "spec-ngram-simple-size-n", "k": "spec-ngram-simple-size-m"},
        ),
        "ngram-mod": Native(
            "ngram-mod",
            {"spec-type": "ngram-mod"},
            {"ngram": "spec-ngram-mod-n-match", "k": "spec-ngram-mod-n-max"},
            learns=True,
        ),
        "draft-model": _drafts("simple"),
        "eagle3": _drafts("eagle3"),
        "dflash": _drafts("dflash"),
        "mtp": Native("draft-mtp", {"spec-type": "draft-mtp"}, {"k": "spec-draft-n-max"}),
    }
    lossy: ClassVar = {"spec_synth_len": (), "spec_synth_rates": ()}  # accept at random, to a given rate
    route = "/completion"
    metrics = "/metrics"
    evidence = "/slots"
    version_at = ("/props", "build_info")
    counter_names: ClassVar = {
        "accepted": "llamacpp:spec_decode_num_accepted_tokens_total",
        "drafted": "llamacpp:spec_decode_num_draft_tokens_total",
        "verify_steps": "llamacpp:spec_decode_num_drafts_total",
        "per_position": "llamacpp:spec_decode_num_accepted_tokens_per_pos_total",
        "decodes": "llamacpp:n_decode_total",
    }

    def found(self, binary: str | None = None) -> list[str] | None:
        words = super().found(binary)
        if words is None and binary is None and importlib.util.find_spec(WHEEL) is not None:
            return [sys.executable, "-m", LAUNCHER]
        return words

    def arguments(self, setup: Setup, launch: Launch) -> list[str]:
        threads = [] if launch.threads is None else ["-t", str(launch.threads)]
        slots = launch.parallel
        return [
            *("-m", launch.target, "--host", launch.host, "--port", str(launch.port)),
            *("-c", str(launch.context * slots), "-np", str(slots), "--metrics", "--offline"),
            *threads,
            *self.flags(setup),
        ]  # fmt: skip

    def speculates(self, body: str) -> bool | None:
        found = re.search(r'"speculative":\s*(true|false)', body)
        return None if found is None else found[1] == "true"

    def request(
        self, prompt: Prompt, limits: Limits, setup: Setup, target: str
    ) -> tuple[str, dict[str, Any]]:
        # its own defaults (top-k 40, min-p 0.05) are another distribution
        sampling = (
            {"top_k": limits.top_k, "top_p": limits.top_p, "min_p": 0.0} if limits.temperature > 0 else {}
        )
        if setup.chat:
            route, chat = super().request(prompt, limits, setup, target)
            return route, chat | {"cache_prompt": False} | sampling
        body: dict[str, Any] = {
            "prompt": prompt.ids,
            "n_predict": limits.max_new_tokens,
            "temperature": limits.temperature,
            "seed": limits.seed,
            "stream": True,
            "return_tokens": True,
            "cache_prompt": False,
            "ignore_eos": limits.ignore_eos,
        }
        return self.route, body | sampling

    def read(self, events: Sequence[Event], setup: Setup) -> Reply:
        if any("choices" in event.data for event in events):
            return super().read(events, setup)
        ids: list[int] = []
        text: list[str] = []
        arrivals: list[Arrival] = []
        last: Mapping[str, Any] = {}
        for event in events:
            new = event.data.get("tokens") or []
            if new and not event.data.get(
                "stop"
            ):  # the last event of a stream repeats nothing, but may hold []
                arrivals.append(Arrival(event.at, len(new)))
                ids += new
            text.append(event.data.get("content") or "")
            last = event.data if event.data.get("stop") else last
        timings = last.get("timings") or {}
        return Reply(
            text="".join(text),
            arrivals=arrivals,
            ids=ids,
            prompt_tokens=last.get("tokens_evaluated"),
            completion_tokens=timings.get("predicted_n", last.get("tokens_predicted")),
            finish={"eos": "eos", "word": "eos", "limit": "length"}.get(str(last.get("stop_type"))),
            told={"timings": timings},
        )

    def record(
        self, replies: Sequence[Reply], delta: Mapping[str, int] | None, setup: Setup
    ) -> list[Acceptance]:
        """Of a request alone the decode counter tells whether its last step's own token came after EOS."""
        records = super().record(replies, delta, setup)
        if len(replies) > 1 or not delta or setup.native is None or records[0].target_steps is None:
            return records
        prefills = -(-(replies[0].prompt_tokens or 1) // _batch(setup))  # a long prompt takes several decodes
        steps = delta.get("decodes", 0) - (prefills - 1)
        least = records[0].target_steps
        return [replace(records[0], target_steps=min(max(steps, least), least + 1))]

    def told(self, reply: Reply) -> Mapping[str, Any]:
        timings = reply.told.get("timings") or {}
        if not timings:
            return {}
        drafted, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
        return {"drafted": drafted, "accepted": accepted, **({} if drafted else {"verify_steps": 0})}


def _batch(setup: Setup) -> int:
    """Tokens a decode, as they were asked for."""
    given = {name.replace("_", "-"): value for name, value in setup.extra.items()}.get(BATCH_FLAG, "")
    return int(given) if given.isdecimal() and int(given) else BATCH
