"""Programs that take the command lines of real engines and answer in their wire formats, as documented or captured.

    python fake_wire.py vllm|sglang|tensorrt-llm|tgi|deepspeed-mii ARGUMENTS…

The model behind all of them is `Script`: its answer depends on the prompt alone, its drafts are accepted as scripted.
Like the real ones, they refuse a flag that they do not have, and a request for another model; TensorRT-LLM refuses a
field that it does not know. The variable FAKE_WIRE holds what is to go wrong, as JSON: `older` (an older version),
`loading` (seconds), `crash`, `taken` (a file: while it is missing, make it and find the port taken), `no_metrics`,
`reset` (N: after the Nth request counters begin anew), `cut_every` (N: every Nth stream breaks in the middle), `slow`
(seconds before each event).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import string
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from fake_server import Answer, FakeServer, sse, text
from tiny_folder import SPECIAL

VOCABULARY = {token: number for number, token in enumerate([*SPECIAL, *string.printable.strip(), " ", "\n"])}
LETTER_A = VOCABULARY["a"]
PIECES = re.compile("|".join([*map(re.escape, SPECIAL), "(?s:.)"]))
SLOT = 4  # tokens of every draft


def tokenise(words: str) -> list[int]:
    """What the tiny tokenizer of `tiny_folder` makes of a text; it has no special tokens to add."""
    return [VOCABULARY.get(piece, 0) for piece in PIECES.findall(words)]


@dataclass(frozen=True)
class Step:
    """A target step: tokens of the draft it verified (0: none), those accepted, those emitted."""

    drafted: int
    accepted: int
    emitted: list[int]


@dataclass(frozen=True)
class Script:
    """An answer of `count` tokens. `gaps`: every third step has no draft, as with n-grams."""

    prompt: list[int]
    count: int
    speculates: bool
    gaps: bool = True

    @property
    def ids(self) -> list[int]:
        return [LETTER_A + (sum(self.prompt) + 7 * number) % 26 for number in range(self.count)]

    @property
    def words(self) -> str:
        return spelled(self.ids)

    def steps(self) -> list[Step]:
        """The prefill's step and those after it; the last one may have accepted more than it emits."""
        steps, place = [Step(0, 0, self.ids[:1])], 1
        while place < self.count:
            number = len(steps)
            drafted = SLOT if self.speculates and not (self.gaps and number % 3 == 0) else 0
            accepted = min(number % (SLOT + 1), drafted)
            steps.append(Step(drafted, accepted, self.ids[place : place + accepted + 1]))
            place += accepted + 1
        return steps

    @property
    def verified(self) -> list[Step]:
        return [step for step in self.steps() if step.drafted]

    @property
    def accepted(self) -> int:
        return sum(step.accepted for step in self.steps())


def spelled(ids: Sequence[int]) -> str:
    return "".join(string.ascii_lowercase[one - LETTER_A] for one in ids)


def series(name: str, **labels: object) -> str:
    """A Prometheus series by its labels."""
    return name + "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"


@dataclass
class Wire:
    """An engine's program. `counts` are its counters, by their Prometheus names."""

    given: argparse.Namespace
    faults: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    asked: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    prog: ClassVar[str]
    flags: ClassVar[Sequence[str]] = ()  # those with a value
    switches: ClassVar[Sequence[str]] = ()
    newer: ClassVar[Sequence[str]] = ()  # of the flags, those that an older version lacks
    health: ClassVar[str] = "/health"
    route: ClassVar[str] = "/v1/completions"
    metrics: ClassVar[str | None] = "/metrics"
    crash: ClassVar[str] = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    taken: ClassVar[str] = "OSError: [Errno 98] Address already in use"

    @classmethod
    def parser(cls, faults: dict[str, Any]) -> argparse.ArgumentParser:
        made = argparse.ArgumentParser(prog=cls.prog, allow_abbrev=False)
        made.add_argument("--version", action="version", version=f"{cls.prog} 1.2.3")
        for flag in cls.flags:
            if not (faults.get("older") and flag in cls.newer):
                made.add_argument(flag)
        for flag in cls.switches:
            made.add_argument(flag, action="store_true")
        return made

    @property
    def model(self) -> str:
        return self.given.model

    @property
    def speculates(self) -> bool:
        raise NotImplementedError

    def complete(self, body: dict[str, Any]) -> Answer:
        if problem := self.refusal(body):
            return problem
        script = self.script(body)
        with self.lock:
            self.asked += 1
            for name, more in self.counted(script).items():
                anew = self.asked == self.faults.get("reset")
                more += self.faults.get("others", 0)  # that someone else's request drafted meanwhile
                self.counts[name] = 0.0 if anew else self.counts.get(name, 0.0) + more
            cut = self.faults.get("cut_every") and self.asked % self.faults["cut_every"] == 0
        events = list(self.events(script, body))
        delays = (self.faults.get("slow", 0.0),)
        return sse(*events[:2], done=False, cut=True) if cut else sse(*events, delays=delays)

    def refusal(self, body: dict[str, Any]) -> Answer | None:
        if body.get("model") == self.model:
            return None
        message = f"The model `{body.get('model')}` does not exist."
        return text(json.dumps({"error": {"message": message, "code": 404}}), 404)

    def script(self, body: dict[str, Any]) -> Script:
        prompt = body["prompt"]
        ids = tokenise(prompt) if isinstance(prompt, str) else prompt
        return Script(ids, body["max_tokens"], self.speculates)

    def events(self, script: Script, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def counted(self, script: Script) -> dict[str, float]:
        return {}

    def shown(self, body: dict[str, Any]) -> Answer:
        known = dict.fromkeys(self.counted(Script([0], 2, self.speculates)), 0.0) | self.counts
        lines = [f"{name} {value}\n" for name, value in known.items()]
        return text("".join(lines), kind="text/plain; version=0.0.4")

    def routes(self) -> dict[str, Any]:
        began = time.monotonic()

        def health(body: dict[str, Any]) -> Answer:
            ready = time.monotonic() - began >= self.faults.get("loading", 0.0)
            return text("", 200 if ready else 503)

        named = {"/v1/models": text(json.dumps({"data": [{"id": self.model}]}))}
        shown = {} if self.metrics is None or self.faults.get("no_metrics") else {self.metrics: self.shown}
        return {self.health: health, self.route: self.complete, **named, **shown}


class VLLM(Wire):
    prog = "vllm"
    flags = (
        *("--host", "--port", "--generation-config", "--max-model-len", "--seed", "--dtype"),
        *("--speculative-config", "--per-request-spec-decode-metrics"),
    )
    switches = (
        *("--no-enable-prefix-caching", "--trust-remote-code", "--async-scheduling", "--no-async-scheduling"),
    )
    newer = ("--per-request-spec-decode-metrics",)
    crash = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"

    @classmethod
    def parser(cls, faults: dict[str, Any]) -> argparse.ArgumentParser:
        made = super().parser(faults)
        made.add_argument("serve", choices=["serve"])
        if not faults.get("older"):
            made.add_argument("--spec-method", choices=["draft_model", "mtp", "ngram", "suffix"])
        made.add_argument("model")
        return made

    @property
    def speculates(self) -> bool:
        return bool(self.given.speculative_config)

    def events(self, script: Script, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        steps, so_far = script.steps(), 0
        prompt = {"prompt_tokens": len(script.prompt)}
        for number, step in enumerate(steps):
            so_far += len(step.emitted)
            last = number == len(steps) - 1
            choice = {
                "index": 0,
                "text": "" if last else spelled(step.emitted),  # the detokenizer holds back its end
                "logprobs": None,
                "finish_reason": "length" if last else None,
                "token_ids": step.emitted,
            }
            yield {"choices": [choice], "usage": {**prompt, "completion_tokens": so_far}}
        final: dict[str, Any] = {"choices": [], "usage": {**prompt, "completion_tokens": script.count}}
        if getattr(self.given, "per_request_spec_decode_metrics", None):
            final["metrics"] = {"speculative_decoding": vllm_metrics(script)}
        yield final

    def counted(self, script: Script) -> dict[str, float]:
        if not self.speculates:
            return {}

        def name(part: str, **labels: object) -> str:
            return series(f"vllm:spec_decode_num_{part}_total", engine=0, model_name="tiny", **labels)

        reached = {
            name("accepted_tokens_per_pos", position=at): sum(step.accepted > at for step in script.verified)
            for at in range(SLOT)
        }
        return {
            name("drafts"): len(script.verified),
            name("draft_tokens"): SLOT * len(script.verified),
            name("accepted_tokens"): script.accepted,
            **reached,
        }


def vllm_metrics(script: Script) -> dict[str, Any]:
    accepted = [step.accepted for step in script.verified]
    return {
        "mean_acceptance_length": 1 + sum(accepted) / len(accepted),
        "acceptance_histogram": [accepted.count(deep) for deep in range(SLOT + 1)],
        "num_spec_steps": len(accepted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": SLOT * len(accepted),
        "num_spec_tokens": SLOT,
        "per_step_accepted": accepted,
        "per_step_drafted": [SLOT] * len(accepted),
    }


class SGLang(Wire):
    prog = "sglang"
    flags = (
        *("--model-path", "--host", "--port", "--sampling-defaults", "--context-length", "--random-seed"),
        *("--dtype", "--device", "--speculative-algorithm", "--speculative-draft-model-path"),
        *("--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens"),
        "--speculative-dspark-block-size",
    )
    switches = ("--enable-metrics", "--disable-radix-cache", "--trust-remote-code")
    health = "/ready"

    @property
    def model(self) -> str:
        return self.given.model_path

    @property
    def speculates(self) -> bool:
        return bool(self.given.speculative_algorithm)

    def script(self, body: dict[str, Any]) -> Script:
        return Script(body["prompt"], body["max_tokens"], self.speculates, gaps=False)

    def events(self, script: Script, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        steps = script.steps()
        for number, step in enumerate(steps):
            last = number == len(steps) - 1
            choice = {"index": 0, "text": spelled(step.emitted), "finish_reason": "length" if last else None}
            if body.get("return_token_ids"):
                choice["token_ids"] = step.emitted
            yield {"choices": [choice], "usage": None}
        if body.get("return_spec_tokens_details") and not self.faults.get("older"):
            yield {
                "choices": [],
                "usage": None,
                "sglext": {"spec_tokens_details": sglang_details(script, SLOT)},
            }
        usage = {"prompt_tokens": len(script.prompt), "completion_tokens": script.count}
        yield {"choices": [], "usage": usage}

    def counted(self, script: Script) -> dict[str, float]:
        if not self.speculates:
            return {}
        return {
            series("sglang:spec_verify_calls_total", model_name="tiny", tp_rank=0): len(script.verified),
            series("sglang:generation_tokens_total", model_name="tiny", tp_rank=0): script.count,
        }

    def shown(self, body: dict[str, Any]) -> Answer:
        self.counts["sglang:spec_accept_length"] = 3.7  # a gauge of the last interval
        return super().shown(body)


def sglang_details(script: Script, drafted: int) -> dict[str, Any]:
    accepted = [step.accepted for step in script.verified]
    return {
        "spec_accept_rate": sum(accepted) / (drafted * len(accepted)),
        "spec_accept_length": script.count / len(accepted),
        "spec_num_correct_drafts": sum(accepted),
        "spec_num_proposed_drafts": drafted * len(accepted),
        "spec_verify_ct": len(accepted),
        "spec_correct_drafts_histogram": [accepted.count(deep) for deep in range(SLOT + 1)],
    }


class TensorRTLLM(Wire):
    prog = "trtllm-serve"
    flags = ("--host", "--port", "--backend", "--config", "--extra_llm_api_options")
    switches = ("--trust_remote_code",)
    newer = ("--config",)
    metrics = "/prometheus/metrics"
    taken = "RuntimeError: Failed to bind socket to 127.0.0.1:8000: [Errno 98] Address already in use"
    fields = (
        *("model", "prompt", "max_tokens", "temperature", "seed", "stream", "stream_options", "ignore_eos"),
        *("top_p", "top_k", "min_p", "repetition_penalty", "min_tokens", "logprobs", "stop"),
    )

    @classmethod
    def parser(cls, faults: dict[str, Any]) -> argparse.ArgumentParser:
        made = super().parser(faults)
        made.add_argument("model")
        return made

    @property
    def config(self) -> dict[str, Any]:
        return json.loads(
            Path(getattr(self.given, "config", None) or self.given.extra_llm_api_options).read_text("utf-8")
        )

    @property
    def speculates(self) -> bool:
        return "speculative_config" in self.config

    def refusal(self, body: dict[str, Any]) -> Answer | None:
        for name in body:
            if name not in self.fields:
                problem = [
                    {
                        "type": "extra_forbidden",
                        "loc": ["body", name],
                        "msg": "Extra inputs are not permitted",
                    }
                ]
                return text(json.dumps({"object": "error", "message": str(problem), "code": 400}), 400)
        return super().refusal(body)

    def events(self, script: Script, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        steps, so_far = script.steps(), 0
        for number, step in enumerate(steps, 1):
            so_far += len(step.emitted)
            choice = {
                "index": 0,
                "text": spelled(step.emitted),
                "token_ids": None,
                "finish_reason": "length" if number == len(steps) else None,
                "avg_decoded_tokens_per_iter": so_far / number,
            }
            usage = {"prompt_tokens": len(script.prompt), "completion_tokens": so_far}
            yield {"choices": [choice], "usage": usage}
        yield {"choices": [], "usage": usage}

    def counted(self, script: Script) -> dict[str, float]:
        if not self.speculates or not self.config["return_perf_metrics"]:
            return {}
        accepted = [step.accepted for step in script.verified]
        found = {}
        for at in range(SLOT):
            where = {"engine_type": "trtllm", "model_name": "tiny", "token_position": at}
            found[series("trtllm_spec_decode_drafted_tokens_total", **where)] = len(accepted)
            found[series("trtllm_spec_decode_accepted_tokens_total", **where)] = sum(n > at for n in accepted)
        return found


class TGI(Wire):
    prog = "text-generation-launcher"
    flags = (
        *("--model-id", "--hostname", "--port", "--max-input-tokens", "--max-total-tokens", "--dtype"),
        *("--prometheus-port", "--shard-uds-path", "--speculate"),
    )
    switches = ("--trust-remote-code",)
    route = "/generate_stream"
    crash = "Error: ShardCannotStart"
    taken = 'Error: Os { code: 98, kind: AddrInUse, message: "Address already in use" }'

    @property
    def model(self) -> str:
        return self.given.model_id

    @property
    def speculates(self) -> bool:
        return bool(self.given.speculate) or "medusa" in self.given.model_id

    def refusal(self, body: dict[str, Any]) -> Answer | None:
        return None if set(body) == {"inputs", "parameters"} else text('{"error": "no inputs"}', 422)

    def script(self, body: dict[str, Any]) -> Script:
        return Script(tokenise(body["inputs"]), body["parameters"]["max_new_tokens"], self.speculates)

    def events(self, script: Script, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        details = {
            "finish_reason": "length",
            "generated_tokens": script.count,
            "seed": body["parameters"]["seed"],
            "input_length": len(script.prompt),
        }
        for index, one in enumerate(script.ids, 1):
            last = index == script.count
            yield {
                "index": index,
                "token": {"id": one, "text": spelled([one]), "logprob": -0.5, "special": False},
                "generated_text": script.words if last else None,
                "details": details if last else None,
            }

    def counted(self, script: Script) -> dict[str, float]:
        steps = script.steps()
        return {
            "tgi_request_skipped_tokens_sum": sum(len(step.emitted) - 1 for step in steps),
            "tgi_request_skipped_tokens_count": len(steps),
        }

    def shown(self, body: dict[str, Any]) -> Answer:
        self.counts['tgi_request_skipped_tokens{quantile="0.5"}'] = 1.0  # rendered as a summary
        return super().shown(body)


class DeepSpeedMII(Wire):
    prog = "mii"
    flags = ("--model", "--host", "--port", "--max-length")
    metrics = None
    speculates = False  # type: ignore[assignment]

    def refusal(self, body: dict[str, Any]) -> Answer | None:
        if body.get("model") == self.model:
            return None
        return text(json.dumps({"object": "error", "message": "Model not found.", "code": 40301}), 400)

    def events(self, script: Script, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for index, one in enumerate(script.ids, 1):
            finish = "length" if index == script.count else None
            yield {"choices": [{"index": 0, "text": spelled([one]), "finish_reason": finish}]}


WIRES: dict[str, type[Wire]] = {
    "vllm": VLLM,
    "sglang": SGLang,
    "tensorrt-llm": TensorRTLLM,
    "tgi": TGI,
    "deepspeed-mii": DeepSpeedMII,
}


def words_of(argv: Sequence[str]) -> list[str]:
    """Arguments without the `-m module` of a module, and with the forms of help that engines have."""
    words = list(argv)
    if words[:1] == ["-m"]:
        words = words[2:]
    return ["--help" if word == "--help=all" else word for word in words]


def main(name: str, argv: Sequence[str]) -> None:
    faults = json.loads(os.environ.get("FAKE_WIRE", "{}"))
    wire_type = WIRES[name]
    words = words_of(argv)
    parser = wire_type.parser(faults)
    if "--help" in words:
        parser.print_help()
        return
    given = parser.parse_args(words)
    if faults.get("crash"):
        print('Traceback (most recent call last):\n  File "engine.py", line 7, in <module>\n    load()')
        sys.exit(wire_type.crash)
    if faults.get("taken") and not Path(faults["taken"]).exists():
        Path(faults["taken"]).touch()
        sys.exit(wire_type.taken)
    with FakeServer(wire_type(given, faults).routes(), port=int(given.port)):
        print("ready", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
