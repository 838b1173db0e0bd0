"""TensorRT-LLM: `trtllm-serve` with the PyTorch backend, on NVIDIA GPUs.

Speculation is part of a YAML file (`--config`, in older releases `--extra_llm_api_options`), which we write as
JSON. A request with a field that the server does not know is refused, so only known ones are sent. Its completions
take ids and give ids only in place of text, which would leave detokenising out of what is timed: we take the text,
and usage that grows with every event. `avg_decoded_tokens_per_iter` (of a choice) is all tokens over all target
steps, the prefill among them; what was accepted follows. Drafted tokens are counted by `/prometheus/metrics`
(`/metrics` is JSON, of iterations), with `return_perf_metrics` alone, position by position: the first one's are the
drafts, that is the verify steps.

The examples of NGram and DraftTarget switch the overlap scheduler off; then it is off for the baseline too. NGram's
pool of n-grams is shared by all requests unless told otherwise, as it is here.

Facts read in single files of the main branch of 2026 (docs/source/features/speculative-decoding.md,
serve/{openai_protocol,postprocess_handlers}.py, commands/serve.py, metrics/collector.py of NVIDIA/TensorRT-LLM);
not run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from specbench.engines.base import Engine, value_of
from specbench.engines.record import Event, Reply
from specbench.engines.terms import Command, Launch, Limits, Native, Prompt, Setup
from specbench.spec import Spec

SPECULATION = "speculative_config"
POOLS = ("is_public_pool", "enable_global_pool")  # shared by all requests
NO_OVERLAP = "disable_overlap_scheduler"
CONFIG, OLDER_CONFIG = "--config", "--extra_llm_api_options"
PER_STEP = "avg_decoded_tokens_per_iter"
SPELLING = "newer releases may want decoding_type=Draft_Target"


def _native(
    kind: str, length: int, options: Mapping[str, str] | None = None, *, draft: bool = True, **more: Any
) -> Native:
    """`more`: further settings; those with a dot (or of the whole server) are no part of the speculation's."""
    return Native(
        kind,
        {"decoding_type": kind, "max_draft_len": length, **more},
        {"k": "max_draft_len", **(options or {})},
        draft="speculative_model" if draft else None,
    )


class TensorRTLLM(Engine):
    name = "tensorrt-llm"
    install = (
        "pip install 'specbench-llm[tensorrt-llm]', or --engine tensorrt-llm:binary=VENV/bin/trtllm-serve"
    )
    program = ("trtllm-serve",)
    help_words = ("serve", "--help")  # its plain help lists commands; `serve` is the one it takes for granted
    distribution = "tensorrt-llm"
    methods: ClassVar = {
        "prompt-lookup": _native(
            "NGram",
            10,
            {"ngram": "max_matching_ngram_size"},
            draft=False,
            max_matching_ngram_size=3,
            is_public_pool=False,
            **{NO_OVERLAP: True},
        ),
        "draft-model": replace(
            _native("DraftTarget", 3, {"decoding_type": "decoding_type"}, **{NO_OVERLAP: True}), note=SPELLING
        ),
        "eagle3": _native("Eagle3", 3),
        "mtp": _native("MTP", 1, draft=False),
        "pard": _native("PARD", 4),
        "dflash": _native("DFlash", 4),
        "dspark": _native("DSpark", 5),  # must be its checkpoint's block size
        "sam": _native("SA", 4, {"ngram": "max_matching_ngram_size"}, draft=False),
    }
    lossy: ClassVar = {"use_relaxed_acceptance_for_thinking": ("false",)}
    metrics = "/prometheus/metrics"
    version_at = ("/version", "version")
    counter_names: ClassVar = {
        "accepted": "trtllm_spec_decode_accepted_tokens_total",
        "drafted": "trtllm_spec_decode_drafted_tokens_total",
    }

    def setup(self, label: str, spec: Spec | None, draft: str | None, extra: Mapping[str, str]) -> Setup:
        """Names with a dot that are passed through are keys of the YAML, the others flags."""
        made = super().setup(label, spec, draft, extra)
        keys = {name: value_of(value) for name, value in made.extra.items() if "." in name}
        flags = {name: value for name, value in made.extra.items() if name not in keys}
        native = made.native
        if native is not None and any(keys.get(f"{SPECULATION}.{pool}") for pool in POOLS):
            native = replace(native, learns=True)
        return replace(made, native=native, settings={**made.settings, **keys}, extra=flags)

    def even(self, setups: Mapping[str, Setup]) -> Mapping[str, Setup]:
        if not any(NO_OVERLAP in setup.settings for setup in setups.values()):
            return setups
        return {
            label: replace(setup, settings={**setup.settings, NO_OVERLAP: True})
            for label, setup in setups.items()
        }

    def arguments(self, setup: Setup, launch: Launch) -> list[str]:
        return [
            *(launch.target, "--host", launch.host, "--port", str(launch.port), "--backend", "pytorch"),
            *(["--trust_remote_code"] if launch.trust_remote_code else []),
            *(CONFIG, str(_config_path(setup, launch))),
        ]  # fmt: skip

    def flags(self, setup: Setup) -> list[str]:
        return []

    def command(
        self, words: Sequence[str], setup: Setup, launch: Launch, known: frozenset[str] | None = None
    ) -> Command:
        made = super().command(words, setup, launch, known)
        if not known or CONFIG in known:
            return made
        return replace(made, argv=[OLDER_CONFIG if word == CONFIG else word for word in made.argv])

    def files(self, setup: Setup, launch: Launch) -> Mapping[Path, str]:
        config: dict[str, Any] = {
            "return_perf_metrics": True,
            "kv_cache_config": {"enable_block_reuse": False},
            "max_seq_len": launch.context,
            **({} if launch.dtype == "auto" else {"dtype": launch.dtype}),
        }
        for name, value in setup.settings.items():
            whole = "." in name or name == NO_OVERLAP
            _put(config, name.split(".") if whole else [SPECULATION, name], value)
        return {_config_path(setup, launch): json.dumps(config, indent=2) + "\n"}

    def environment(self, setup: Setup, launch: Launch) -> Mapping[str, str]:
        return launch.environment

    def request(
        self, prompt: Prompt, limits: Limits, setup: Setup, target: str
    ) -> tuple[str, dict[str, Any]]:
        route, body = super().request(prompt, limits, setup, target)
        usage = {"include_usage": True, "continuous_usage_stats": True}
        # said, so that no default of the model's takes its place
        return route, body | {"stream_options": usage, "repetition_penalty": 1.0}

    def counters(self, text: str) -> dict[str, int]:
        found = super().counters(text)
        deep = {
            key.replace("accepted", "per_position"): n
            for key, n in found.items()
            if key.startswith("accepted@")
        }
        return found | deep | ({"verify_steps": found["drafted@0"]} if "drafted@0" in found else {})

    def read(self, events: Sequence[Event], setup: Setup) -> Reply:
        reply = super().read(events, setup)
        choices = [choice for event in events for choice in event.data.get("choices") or ()]
        said = [choice[PER_STEP] for choice in choices if choice.get(PER_STEP)]
        return replace(reply, told={**reply.told, PER_STEP: said[-1]}) if said else reply

    def told(self, reply: Reply) -> Mapping[str, Any]:
        per_step, tokens = reply.told.get(PER_STEP), reply.completion_tokens
        if not per_step or not tokens:
            return {}
        steps = min(round(tokens / per_step), tokens)
        return {"target_steps": steps, "accepted": tokens - steps, "source": "derived"}


def _config_path(setup: Setup, launch: Launch) -> Path:
    safe = re.sub(r"[^\w.=-]", "-", setup.label)
    return launch.folder / f"trtllm-{safe}.yaml"


def _put(config: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *parents, last = path
    for name in parents:
        config = config.setdefault(name, {})
    config[last] = value
