"""What an adapter of a serving engine is: the seam between specbench and an engine.

An adapter is one file here with one subclass of `Engine`. It says how the engine is found and launched, what our
methods are called there, what a request looks like, and what its answers mean; nothing in it does I/O. The least
one needs, for an engine that speaks OpenAI's completions with token ids and usage:

    class Example(Engine):
        name = "example"
        install = "pip install example-server"
        program = ("example-server",)             # on PATH; or `module = "example"` for python -m
        methods: ClassVar = {
            "prompt-lookup": Native("ngram", {"num-tokens": 5}, options={"k": "num-tokens"}, learns=False),
            "draft-model": Native("draft", draft="draft-path", options={"k": "num-tokens"}),
        }
        metrics = "/metrics"
        counter_names: ClassVar = {"accepted": "example:accepted_total", "drafted": "example:drafted_total"}

        def arguments(self, setup, launch):
            return ["--model", launch.target, "--host", launch.host, "--port", str(launch.port), *self.flags(setup)]

        def told(self, reply):                    # what the response itself says, by the names of Acceptance
            found = reply.told.get("metrics") or {}
            return {"accepted": found.get("n_accepted"), "drafted": found.get("n_drafted")}

Overridden where an engine differs: `flags` (a JSON or a file instead of `--name value`), `request` (a native route,
extra fields), `read` (another stream), `ready`, `record`. What is known of the engine, and of which version, belongs
in the adapter's docstring. `specbench.serving` does the rest: it starts, waits, sends, times and writes rows.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from specbench.engines.prometheus import counters
from specbench.engines.record import (
    COUNTS,
    Acceptance,
    Arrival,
    Event,
    Reply,
    Scope,
    from_counters,
    plain,
    with_steps,
)
from specbench.engines.terms import Command, Launch, Limits, Native, Prompt, Setup
from specbench.errors import SpecbenchError
from specbench.spec import Spec

PREFIX = "engine."  # of an option that goes to the engine as it is
FINISH = {"stop": "eos", "eos": "eos", "eos_token": "eos", "length": "length", "limit": "length"}
ROOT = ("timings", "metrics", "sglext", "usage")  # what engines put beside `choices`, on whichever event


class Engine:
    """An engine's adapter. Class attributes say what is plain fact; methods say what depends on a setup."""

    name: ClassVar[str]
    install: ClassVar[str]  # the command that installs it
    program: ClassVar[Sequence[str]] = ()  # names on PATH, the preferred first
    module: ClassVar[str | None] = None  # else `python -m module`
    command_words: ClassVar[Sequence[str]] = ()  # after the program: `serve`
    help_words: ClassVar[Sequence[str]] = ("--help",)
    version_words: ClassVar[Sequence[str]] = ("--version",)
    needs: ClassVar[Sequence[str]] = ()  # modules that must be importable beside its program
    distribution: ClassVar[str | None] = None  # the PyPI package whose version is the engine's
    methods: ClassVar[Mapping[str, Native]] = {}
    method_flag: ClassVar[str | None] = None  # whose choices in the help are the methods of that version
    lossy: ClassVar[Mapping[str, Sequence[str]]] = {}  # setting that may change answers -> values that do not
    no_speculation: ClassVar[str | None] = None  # why there are no methods
    weights: ClassVar[str] = "folder"  # what it loads: `folder` (or a Hub id) or `gguf`
    first_drafts: ClassVar[bool] = False  # the step over the prompt verifies a draft too
    takes_ids: ClassVar[bool] = True  # prompts as ids; else as text without added special tokens
    adds_special: ClassVar[bool] = False  # puts BOS before a text prompt, asked or not
    counts_unstreamed: ClassVar[bool] = False  # a request that is not streamed tells its tokens
    greedy: ClassVar[bool] = True  # whether temperature 0 can be asked for
    forces_length: ClassVar[bool] = True  # whether --ignore-eos can be asked for
    per_request: ClassVar[bool] = False  # speculation is part of a request: one server can do all methods
    health: ClassVar[str] = "/health"
    route: ClassVar[str] = "/v1/completions"
    chat_route: ClassVar[str] = "/v1/chat/completions"
    metrics: ClassVar[str | None] = None
    counter_names: ClassVar[Mapping[str, str]] = {}  # name of an Acceptance field -> Prometheus name
    evidence: ClassVar[str | None] = None  # a route whose answer tells whether a server speculates
    version_at: ClassVar[tuple[str, str] | None] = None  # a route, and the key of its JSON's version
    cures: ClassVar[Mapping[str, str]] = {}  # words (lower case) of why a server did not start -> what helps
    warnings: ClassVar[Sequence[str]] = ()  # what a reader of its results must know

    # -- methods -----------------------------------------------------------------------------------------------

    def setup(self, label: str, spec: Spec | None, draft: str | None, extra: Mapping[str, str]) -> Setup:
        """A SPEC in this engine's words; None is the baseline. `extra` holds flags for all of the run's servers.

        Raises:
            SpecbenchError: a method or an option that the engine does not have, or a drafter that is missing.
        """
        if spec is None:
            return Setup(label, extra=extra)
        own = {k.removeprefix(PREFIX): v for k, v in spec.options.items() if k.startswith(PREFIX)}
        native = self.methods.get(spec.name)
        if native is None:
            raise SpecbenchError(f"{self.name} has no method {spec.name!r}", self._what_it_can())
        given = {key: value for key, value in spec.options.items() if not key.startswith(PREFIX)}
        draft = given.pop("draft", draft)
        unknown = sorted(given.keys() - native.options.keys())
        if unknown:
            known = [*native.options, *(["draft"] if native.draft else []), f"{PREFIX}FLAG"]
            raise SpecbenchError(
                f"{spec.name} in {self.name} has no option {unknown[0]!r}", f"its options: {', '.join(known)}"
            )
        settings = {
            **native.settings,
            **{native.options[key]: value_of(value) for key, value in given.items()},
        }
        if native.draft:
            if draft is None:
                raise SpecbenchError(
                    f"{spec.name} in {self.name} needs a drafter", "give it with --draft REF"
                )
            settings[native.draft] = draft
        extra = {**extra, **own}
        native = replace(native, lossless=native.lossless and self._keeps_answers({**settings, **extra}))
        return Setup(label, native, settings, extra)

    def _keeps_answers(self, given: Mapping[str, Any]) -> bool:
        """Whether no setting lets tokens through that are not the target's. A prefix with a dot is not looked at."""
        named = {key.rpartition(".")[2].replace("-", "_"): str(value).lower() for key, value in given.items()}
        return all(named[name] in keeps for name, keeps in self.lossy.items() if name in named)

    def even(self, setups: Mapping[str, Setup]) -> Mapping[str, Setup]:
        """The setups of a run, by label, made alike in what one of them needs and speculation is not about."""
        return setups

    def doubt(self, version: str, temperature: float) -> str | None:
        """Why answers under speculation are not the target's in this version, where that is known."""
        return None

    def _what_it_can(self) -> str:
        if self.no_speculation:
            return f"{self.no_speculation}: leave --method out to measure its baseline"
        return f"{self.name} can do {', '.join(sorted(self.methods))}"

    # -- launching ---------------------------------------------------------------------------------------------

    def found(self, binary: str | None = None) -> list[str] | None:
        """The words that start the engine's program, `binary` in place of what would be looked for; None: missing."""
        if binary is not None:
            path = shutil.which(str(Path(binary).expanduser()))
            return None if path is None else [path, *self._module_words()]
        for name in self.program:
            if path := shutil.which(name, path=_path()):
                return [path]
        if self.module is not None and importlib.util.find_spec(self.module.partition(".")[0]) is not None:
            return [sys.executable, *self._module_words()]
        return None

    def _module_words(self) -> list[str]:
        """What follows the interpreter of an engine that is a module; nothing for a program."""
        return [] if self.module is None else ["-m", self.module]

    def usual_words(self) -> list[str]:
        """What starts it where it is installed as documented: for a dry run without it."""
        return [self.program[0]] if self.program else ["python", *self._module_words()]

    def arguments(self, setup: Setup, launch: Launch) -> list[str]:
        """What follows the program (and `command_words`); `extra` flags are added by `command`."""
        raise NotImplementedError

    def flags(self, setup: Setup) -> list[str]:
        """The speculative settings as `--setting value`; none for the baseline."""
        return [word for key, value in setup.settings.items() for word in (f"--{key}", str(value))]

    def files(self, setup: Setup, launch: Launch) -> Mapping[Path, str]:
        """Files that the command names and that must be written first, path -> content."""
        return {}

    def environment(self, setup: Setup, launch: Launch) -> Mapping[str, str]:
        """Variables beyond ours."""
        return {}

    def command(
        self, words: Sequence[str], setup: Setup, launch: Launch, known: frozenset[str] | None = None
    ) -> Command:
        """The exact command of a server. `known` flags (from its help) tell `--a-b` from `--a_b` in `extra`.

        A passed-through flag that we give too takes the place of ours: some parsers refuse one that is given twice.
        """
        argv = [*words, *self.command_words, *self.arguments(setup, launch)]
        for name, value in setup.extra.items():
            flag = f"--{name}" if known and f"--{name}" in known else f"--{name.replace('_', '-')}"
            given = [flag] if value == "true" else [flag, value]
            if flag in argv:
                at = argv.index(flag)
                argv[at : at + len(given)] = given
            else:
                argv += given
        return Command(argv, self.environment(setup, launch), self.files(setup, launch))

    # -- requests ----------------------------------------------------------------------------------------------

    def ready(self, status: int, body: str) -> bool:
        """Whether the answer of `health` means that requests may be sent."""
        return status == 200

    def speculates(self, body: str) -> bool | None:
        """Whether a server speculates, by what it answers to `evidence`; None if that does not tell."""
        return None

    def request(
        self, prompt: Prompt, limits: Limits, setup: Setup, target: str
    ) -> tuple[str, dict[str, Any]]:
        """Route and JSON body of a streamed request. `target`: the model's name as the server knows it."""
        body: dict[str, Any] = {
            "model": target,
            "max_tokens": limits.max_new_tokens,
            "temperature": limits.temperature,
            "seed": limits.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if limits.temperature > 0:
            body |= {"top_p": limits.top_p}
            body |= {"top_k": limits.top_k} if limits.top_k else {}
        if limits.ignore_eos:
            body["ignore_eos"] = True
        if setup.chat:
            return self.chat_route, body | {"messages": prompt.messages}
        return self.route, body | {"prompt": prompt.ids if self.takes_ids else prompt.text}

    def read(self, events: Sequence[Event], setup: Setup) -> Reply:
        """A stream of OpenAI's completions (or chat) with what engines add: `token_ids`, usage and root objects.

        An event bears tokens if it says so (`token_ids`, or usage that grew); else if it bears text. Usage that comes
        once, at the end, says nothing of the events.
        """
        usages = [(event.data.get("usage") or {}).get("completion_tokens") for event in events]
        continuous = sum(count is not None for count in usages) > 1
        text: list[str] = []
        ids: list[int] | None = None
        arrivals: list[Arrival] = []
        told: dict[str, Any] = {}
        finish: str | None = None
        opening = ""
        seen = 0
        for event, usage in zip(events, usages, strict=True):
            told |= {key: event.data[key] for key in ROOT if event.data.get(key)}
            so_far = usage if continuous else None
            for choice in event.data.get("choices") or ():
                piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                new = choice.get("token_ids")
                count = len(new) if new is not None else None if so_far is None else so_far - seen
                if new is not None:
                    ids = (ids or []) + new
                if count or (count is None and piece):
                    arrivals.append(Arrival(event.at, count))
                text.append(piece)
                opening = opening or piece
                finish = choice.get("finish_reason") or finish
            seen = seen if so_far is None else so_far
        counts = told.get("usage") or {}
        return Reply(
            text="".join(text),
            arrivals=arrivals,
            ids=ids,
            prompt_tokens=counts.get("prompt_tokens"),
            completion_tokens=counts.get("completion_tokens", None if ids is None else len(ids)),
            finish=FINISH.get(finish or "", finish),
            told=told,
            opening=opening,
        )

    # -- acceptance --------------------------------------------------------------------------------------------

    def told(self, reply: Reply) -> Mapping[str, Any]:
        """What the response itself says of speculation, by the names of `Acceptance`; {} if nothing.

        `reply.completion_tokens` is known here: where `read` leaves it out, the text has been tokenised again.
        """
        return {}

    def counters(self, text: str) -> dict[str, int]:
        """The server's counters from the body of `metrics`."""
        return counters(text, self.counter_names)

    def record(
        self, replies: Sequence[Reply], delta: Mapping[str, int] | None, setup: Setup
    ) -> list[Acceptance]:
        """The normalised record of each of a block's requests: the response first, then the counters.

        `delta` is what the server counted during the block; None where it cannot be had.
        """
        if setup.native is None:
            return [plain(reply.completion_tokens) for reply in replies]
        told = [self._own(reply) for reply in replies]
        if not delta or not any(name in delta for name in COUNTS):
            return [with_steps(record) for record in told]
        counted = from_counters(delta, replies, told)
        return [
            with_steps(share) if own.accepted is None else _filled(own, share, alone=len(replies) == 1)
            for own, share in zip(told, counted, strict=True)
        ]

    def accounts_for(self, replies: Sequence[Reply], delta: Mapping[str, int]) -> bool:
        """Whether what the server counted is what these replies tell (and not what is derived), as far as both do.

        If not, it served others meanwhile, or its counters were read before they held all.
        """
        told = [self._own(reply) for reply in replies]
        for name in ("accepted", "drafted"):
            counts = [getattr(one, name) for one in told if one.source == "response"]
            known = name in delta and len(counts) == len(told) and None not in counts
            if known and sum(counts) != delta[name]:
                return False
        return True

    def _own(self, reply: Reply) -> Acceptance:
        """What a response itself tells; unknown if that is not what was accepted."""
        said = {key: value for key, value in self.told(reply).items() if value is not None}
        if "accepted" not in said:
            return Acceptance(completion_tokens=reply.completion_tokens)
        return Acceptance(**{"source": "response", **said, "completion_tokens": reply.completion_tokens})


def _filled(own: Acceptance, counted: Acceptance, *, alone: bool) -> Acceptance:
    """A response's own record; a count it leaves out is the server's.

    Those of one request `alone` are its own. A share of several requests' is an estimate: no step follows from it.
    """
    own = own if alone else with_steps(own)
    fill = {
        name: getattr(counted, name)
        for name in (*COUNTS, "per_position")
        if getattr(own, name) is None and getattr(counted, name) is not None
    }
    scope: Scope = "request" if alone or not fill else "server"
    return with_steps(replace(own, **fill, scope=scope))


def flags_in(text: str) -> frozenset[str]:
    """Every `--flag` that a help text names."""
    return frozenset(re.findall(r"(?<![\w-])--[A-Za-z0-9][\w-]*", text))


def choices_of(flag: str, text: str) -> frozenset[str]:
    """The values of `flag` that a help text lists (`--flag {a,b}`); empty where it lists none."""
    found = re.search(rf"(?<![\w-]){re.escape(flag)}[ =]\{{([^}}]*)\}}", text)
    return frozenset(word.strip() for word in found[1].split(",")) if found else frozenset()


def as_json(settings: Mapping[str, Any]) -> str:
    """Settings as the compact JSON that a flag takes."""
    return json.dumps(settings, separators=(",", ":"))


def value_of(text: str) -> int | float | bool | str:
    """A value of a SPEC as JSON would have it."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _path() -> str | None:
    """Where programs are looked for: beside our interpreter first, as an activated environment would."""
    import os

    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
