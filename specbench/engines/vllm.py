"""vLLM: `vllm serve`, on GPUs or its CPU build.

Speculation is one JSON at start (`--speculative-config`). Requests go to `/v1/completions` with ids; each event
holds what one engine step emitted (`token_ids`, several with speculation; `text` may be empty), unless steps merged
on the way. Acceptance comes with the final usage event where the server was started with
`--per-request-spec-decode-metrics detailed` (absent up to 0.28; refused without speculation), else out of
`/metrics`, whose counters exist only while speculating. Both count what was accepted beyond the token limit too.

Facts read in 0.32 and 0.33 and seen on the CPU build of 0.32 (config/speculative.py, config/vllm.py,
v1/spec_decode/metrics.py, entrypoints/openai/completion/serving.py of vllm-project/vllm). In both, the CPU build's
`expand_batch_to_tokens` returns what its memory held in place of each drafted token's temperature
(utils/cpu_triton_utils.py writes to a copy): greedy answers are the baseline's, sampled ones are noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, ClassVar

from specbench.engines.base import Engine, as_json, value_of
from specbench.engines.record import Acceptance, Reply
from specbench.engines.terms import Command, Launch, Limits, Native, Prompt, Setup
from specbench.spec import Spec

PER_REQUEST = ["--per-request-spec-decode-metrics", "detailed"]
INSIDE = "speculative_config."  # of a passed-through name: a key of the JSON and no flag
TOKENS = "num_speculative_tokens"
SYNCHRONOUS = (
    "vLLM schedules asynchronously without it and mostly not with it (the log says), which is part of the "
    "difference; --engine vllm:async_scheduling=false gives the baseline the same"
)
OLD_RUNNER = f"{SYNCHRONOUS}, and VLLM_USE_V2_MODEL_RUNNER=0 in the environment its older model runner"


def _native(method: str, tokens: int | None = None, draft: bool = True, note: str = "") -> Native:
    count = {} if tokens is None else {TOKENS: tokens}
    return Native(
        method, {"method": method, **count}, {"k": TOKENS}, draft="model" if draft else None, note=note
    )


def _lookup(method: str, note: str = "") -> Native:
    # both bounds, as one alone would be the other too; our prompt-lookup's numbers
    bounds = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    return Native(
        method, {"method": method, TOKENS: 10, **bounds}, {"k": TOKENS, "ngram": "prompt_lookup_max"}, note=note
    )  # fmt: skip


class VLLM(Engine):
    name = "vllm"
    install = "pip install 'specbench-llm[vllm]', or --engine vllm:binary=VENV/bin/vllm"
    program = ("vllm",)
    command_words = ("serve",)
    help_words = ("--help=all",)  # the plain help names groups only
    methods: ClassVar = {
        "prompt-lookup": _lookup("ngram", SYNCHRONOUS),
        "ngram-gpu": _lookup("ngram_gpu"),
        "draft-model": _native("draft_model", 5),
        "eagle": _native("eagle", 3),
        "eagle3": _native("eagle3", 3),
        "mtp": _native("mtp", 1, draft=False),
        "medusa": _native("medusa", 3, note=OLD_RUNNER),  # up to 0.32, and so the next
        "mlp-speculator": _native("mlp_speculator", note=OLD_RUNNER),
        "dflash": _native("dflash", 15),  # of the published drafts' blocks of 16; there is no default
        "dspark": _native("dspark"),
        "suffix": Native(
            "suffix",
            {"method": "suffix"},
            {
                "k": TOKENS,
                "depth": "suffix_decoding_max_tree_depth",
                "answers": "suffix_decoding_max_cached_requests",
                "factor": "suffix_decoding_max_spec_factor",
                "min_prob": "suffix_decoding_min_token_prob",
            },
            learns=True,
            package="arctic-inference",
            note=OLD_RUNNER,
        ),
    }
    method_flag = "--spec-method"  # an older help has none
    lossy: ClassVar = {"rejection_sample_method": ("standard", "block", "strict", "probabilistic")}
    metrics = "/metrics"
    evidence = "/metrics"
    cures: ClassVar = {  # by default it wants 0.92 of the memory, on CPUs too
        "memory utilization": "give it a smaller share of the memory, e.g. --engine vllm:gpu_memory_utilization=0.5",
    }
    version_at = ("/version", "version")
    counter_names: ClassVar = {
        "accepted": "vllm:spec_decode_num_accepted_tokens_total",
        "drafted": "vllm:spec_decode_num_draft_tokens_total",
        "verify_steps": "vllm:spec_decode_num_drafts_total",
        "per_position": "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    }

    def setup(self, label: str, spec: Spec | None, draft: str | None, extra: Mapping[str, str]) -> Setup:
        made = super().setup(label, spec, draft, extra)
        inside = {key: value for key, value in made.extra.items() if key.startswith(INSIDE)}
        outside = {key: value for key, value in made.extra.items() if key not in inside}
        if made.native is None:
            return replace(made, extra=outside)
        own = {key.removeprefix(INSIDE): value_of(value) for key, value in inside.items()}
        return replace(made, settings={**made.settings, **own}, extra=outside)

    def doubt(self, version: str, temperature: float) -> str | None:
        if temperature > 0 and version.endswith("+cpu"):
            return "vLLM's CPU build loses the temperature under speculation: what it samples is not the target's"
        return None

    def arguments(self, setup: Setup, launch: Launch) -> list[str]:
        return [
            *(launch.target, "--host", launch.host, "--port", str(launch.port)),
            *("--generation-config", "vllm"),  # else the model's own sampling defaults apply
            "--no-enable-prefix-caching",
            *("--max-model-len", str(launch.context), "--seed", str(launch.seed)),
            *([] if launch.dtype == "auto" else ["--dtype", launch.dtype]),
            *(["--trust-remote-code"] if launch.trust_remote_code else []),
            *self.flags(setup),
            *([] if setup.native is None else PER_REQUEST),
        ]  # fmt: skip

    def flags(self, setup: Setup) -> list[str]:
        if setup.native is None:
            return []
        return ["--speculative-config", as_json(setup.settings)]

    def command(
        self, words: Sequence[str], setup: Setup, launch: Launch, known: frozenset[str] | None = None
    ) -> Command:
        """A version without metrics a request is measured by its counters; `x=false` is the flag `--no-x`."""
        off = {f"no_{name}": "true" for name, value in setup.extra.items() if value == "false"}
        extra = {name: value for name, value in setup.extra.items() if value != "false"} | off
        made = super().command(words, replace(setup, extra=extra), launch, known)
        if not known or PER_REQUEST[0] in known or PER_REQUEST[0] not in made.argv:
            return made
        at = made.argv.index(PER_REQUEST[0])
        return replace(made, argv=made.argv[:at] + made.argv[at + len(PER_REQUEST) :])

    def environment(self, setup: Setup, launch: Launch) -> Mapping[str, str]:
        """On CPUs it takes all cores but one, whatever OpenMP is told, unless it is not to bind its threads."""
        threads = {} if launch.threads is None else {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return {"VLLM_NO_USAGE_STATS": "1", **launch.environment, **threads}

    def speculates(self, body: str) -> bool | None:
        return "vllm:spec_decode_num_drafts" in body if "vllm:" in body else None

    def request(
        self, prompt: Prompt, limits: Limits, setup: Setup, target: str
    ) -> tuple[str, dict[str, Any]]:
        route, body = super().request(prompt, limits, setup, target)
        usage = {"include_usage": True, "continuous_usage_stats": True}
        return route, body | {"return_token_ids": True, "stream_options": usage}

    def told(self, reply: Reply) -> Mapping[str, Any]:
        said = (reply.told.get("metrics") or {}).get("speculative_decoding") or {}
        deep = list(accumulate(reversed(said.get("acceptance_histogram") or [])))[::-1][1:]
        each = zip(said.get("per_step_drafted") or (), said.get("per_step_accepted") or (), strict=False)
        return {
            "accepted": said.get("num_accepted_draft_tokens"),
            "drafted": said.get("num_draft_tokens"),
            "verify_steps": said.get("num_spec_steps"),
            "per_position": deep or None,
            "steps": with_undrafted(list(each), [arrival.tokens for arrival in reply.arrivals]) or None,
        }

    def record(
        self, replies: Sequence[Reply], delta: Mapping[str, int] | None, setup: Setup
    ) -> list[Acceptance]:
        """Every event that bore tokens is a target step or several: a bound where accepted tokens were cut off."""
        records = super().record(replies, delta, setup)
        return [
            record if record.target_steps is None
            else replace(record, target_steps=max(record.target_steps, len(reply.arrivals)))
            for record, reply in zip(records, replies, strict=True)
        ]  # fmt: skip


def with_undrafted(steps: list[tuple[int, int]], sizes: Sequence[int | None]) -> list[tuple[int, int]]:
    """Verify steps `(drafted, accepted)` with a `(0, 0)` for every step that had no draft.

    Args:
        steps: those with a draft, in order; the last one may have accepted more than it could emit.
        sizes: tokens of each event, the first from the prefill. Where they do not fit the steps (events merged, a
            size is unknown), `steps` come back as they are.
    """
    found, rest = [], list(steps)
    for number, size in enumerate(sizes[1:], 2):
        emits = rest[0][1] + 1 if rest else None
        if (
            emits is not None
            and size is not None
            and (emits == size or (number == len(sizes) and emits > size))
        ):
            found.append(rest.pop(0))
        elif size == 1:
            found.append((0, 0))
        else:
            return steps
    return steps if rest else found
