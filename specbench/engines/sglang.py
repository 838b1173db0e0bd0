"""SGLang: `python -m sglang.launch_server`.

Speculation is set at start. Requests go to `/v1/completions` with ids, and `return_token_ids` brings ids back;
`return_spec_tokens_details` brings the request's counts in an event of their own (root `sglext`). Versions without
it are measured by `/metrics`, where only the verify calls and the generated tokens are counters; its acceptance
figures are gauges of the last interval, and useless here. Every step after the prefill verifies a draft. What is
drafted is nominal: verify steps x (window - 1), whatever the tree or the n-gram match really held.

`/health` generates a token, `/ready` does not. The n-gram trie keeps what earlier requests taught it. Lossless as
long as `--speculative-accept-threshold-*` stay at 1.

Facts read in 0.5.23 (arg_groups/fields/spec.py, arg_groups/speculative_hook.py, managers/tokenizer_manager.py,
entrypoints/openai/{protocol,serving_completions,utils}.py of sgl-project/sglang); not run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from specbench.engines.base import Engine
from specbench.engines.record import Acceptance, Reply
from specbench.engines.terms import Launch, Limits, Native, Prompt, Setup
from specbench.errors import SpecbenchError
from specbench.spec import Spec

ALGORITHM = "speculative-algorithm"
DRAFT = "speculative-draft-model-path"
STEPS, TOPK, WINDOW = "speculative-num-steps", "speculative-eagle-topk", "speculative-num-draft-tokens"
OLDER = {"accepted": "spec_accept_token_num", "drafted": "spec_draft_token_num"}  # names of 2025


def _chain(algorithm: str, draft: str | None = DRAFT, steps: int | None = 3) -> Native:
    """A drafter that steps; its window is set by `SGLang.setup`, as the three numbers go together."""
    count = {} if steps is None else {STEPS: steps}
    return Native(
        algorithm, {ALGORITHM: algorithm, **count}, {"k": STEPS, "topk": TOPK, "nodes": WINDOW}, draft=draft
    )


class SGLang(Engine):
    name = "sglang"
    install = "pip install 'specbench-llm[sglang]', or --engine sglang:binary=VENV/bin/python"
    module = "sglang.launch_server"
    distribution = "sglang"
    methods: ClassVar = {
        "prompt-lookup": Native("NGRAM", {ALGORITHM: "NGRAM", WINDOW: 11}, {"k": "k"}, learns=True),
        "draft-model": _chain("STANDALONE"),
        "eagle": _chain("EAGLE"),
        "eagle3": _chain("EAGLE3"),
        "mtp": _chain("NEXTN", draft=None, steps=None),  # its own numbers differ by model
        "dflash": Native("DFLASH", {ALGORITHM: "DFLASH"}, {"k": "k"}, draft=DRAFT),
        "dspark": Native(
            "DSPARK", {ALGORITHM: "DSPARK"}, {"k": "speculative-dspark-block-size"}, draft=DRAFT
        ),
    }
    lossy: ClassVar = {
        "speculative_accept_threshold_single": ("1", "1.0"),
        "speculative_accept_threshold_acc": ("1", "1.0"),
    }
    health = "/ready"
    metrics = "/metrics"
    evidence = "/server_info"
    version_at = ("/server_info", "version")
    counter_names: ClassVar = {"verify_steps": "sglang:spec_verify_calls_total"}
    warnings = ("sglang counts whole windows as drafted: its acceptance rates are no other engine's",)

    def setup(self, label: str, spec: Spec | None, draft: str | None, extra: Mapping[str, str]) -> Setup:
        made = super().setup(label, spec, draft, extra)
        return replace(made, settings=_windowed(dict(made.settings)))

    def arguments(self, setup: Setup, launch: Launch) -> list[str]:
        device = launch.device.partition(":")[0]
        return [
            *("--model-path", launch.target, "--host", launch.host, "--port", str(launch.port)),
            *("--enable-metrics", "--disable-radix-cache"),
            *("--sampling-defaults", "openai"),  # else the model's own apply, its repetition penalty too
            *("--context-length", str(launch.context), "--random-seed", str(launch.seed)),
            *([] if launch.dtype == "auto" else ["--dtype", launch.dtype]),
            *([] if device == "auto" else ["--device", device]),
            *(["--trust-remote-code"] if launch.trust_remote_code else []),
            *self.flags(setup),
        ]  # fmt: skip

    def environment(self, setup: Setup, launch: Launch) -> Mapping[str, str]:
        return launch.environment

    def ready(self, status: int, body: str) -> bool:
        """An older version has no such route: it answers once its model is loaded."""
        return status in (200, 404)

    def speculates(self, body: str) -> bool | None:
        found = re.search(r'"speculative_algorithm":\s*(null|")', body)
        return None if found is None else found[1] != "null"

    def request(
        self, prompt: Prompt, limits: Limits, setup: Setup, target: str
    ) -> tuple[str, dict[str, Any]]:
        route, body = super().request(prompt, limits, setup, target)
        usage = {"include_usage": True, "continuous_usage_stats": True}
        body |= {"stream_options": usage}
        body |= {} if setup.chat else {"return_token_ids": True}  # refused by streams of its chat route
        return route, body if setup.native is None else body | {"return_spec_tokens_details": True}

    def told(self, reply: Reply) -> Mapping[str, Any]:
        found = (reply.told.get("sglext") or {}).get("spec_tokens_details") or {}
        said: Mapping[str, Any] = found[0] if isinstance(found, list) else found
        verified = said.get("spec_verify_ct")
        histogram = said.get("spec_correct_drafts_histogram") or []
        return {
            "accepted": said.get("spec_num_correct_drafts", said.get(OLDER["accepted"])),
            "drafted": said.get("spec_num_proposed_drafts", said.get(OLDER["drafted"])),
            "verify_steps": verified,
            "target_steps": None if verified is None else verified + 1,
            "per_position": [sum(histogram[deep:]) for deep in range(1, len(histogram))] or None,
        }

    def record(
        self, replies: Sequence[Reply], delta: Mapping[str, int] | None, setup: Setup
    ) -> list[Acceptance]:
        return [_from_verified(record) for record in super().record(replies, delta, setup)]


def _windowed(settings: dict[str, Any]) -> dict[str, Any]:
    """`k` drafted tokens as the window the engine wants, which holds the last token of the target's too.

    Raises:
        SpecbenchError: a count that is no number, or a tree without its number of nodes.
    """
    for name in ("k", STEPS, TOPK, WINDOW):
        if not isinstance(settings.get(name, 1), int):
            raise SpecbenchError(f"{settings[name]!r} is no number of tokens for sglang", "write e.g. k=3")
    if "k" in settings:
        settings[WINDOW] = settings.pop("k") + 1
    if STEPS not in settings:
        return settings
    topk = settings.setdefault(TOPK, 1)
    if topk > 1 and WINDOW not in settings:
        raise SpecbenchError(
            f"topk={topk} in sglang needs the number of nodes", "give nodes=N, the last token among them"
        )
    settings.setdefault(WINDOW, settings[STEPS] + 1)
    return settings


def _from_verified(record: Acceptance) -> Acceptance:
    """What follows from verify steps alone: all but the prefill's token and one a step were drafted and accepted."""
    verified, tokens = record.verify_steps, record.completion_tokens
    if record.accepted is not None or verified is None or tokens is None:
        return record
    return replace(record, accepted=max(tokens - 1 - verified, 0), target_steps=verified + 1)
