"""What the command line says of an engine: `--engine NAME:FLAG=value,…` and the defaults that go with one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from specbench.build import VANILLA
from specbench.config import RunConfig
from specbench.engines import find_engine
from specbench.engines.base import Engine
from specbench.engines.terms import LOOPBACK
from specbench.errors import SpecbenchError
from specbench.spec import parse_spec

CONTEXT = 4096  # tokens of prompt and answer a server makes room for, unless told otherwise
OURS = ("binary", "context", "route")  # options of --engine that are no flags of its server
SECRET = (
    "key",
    "token",
    "password",
    "secret",
)  # how the names of flags end whose values are not to be written
ADDRESS = ("host", "hostname")
HOSTS = (LOOPBACK, "0.0.0.0", "::")  # noqa: S104 - only where asked for; loopback is among these


@dataclass(frozen=True)
class Options:
    """`--engine` taken apart.

    binary: the program, in place of the one that would be found. context: tokens a request may have.
    chat: send messages to the chat route, whose template is the server's own. flags: passed through to all servers.
    """

    engine: Engine
    binary: str | None = None
    context: int | None = None
    chat: bool = False
    flags: Mapping[str, str] = field(default_factory=dict)


def parse_engine(text: str) -> Options:
    """`llama.cpp` or `llama.cpp:binary=PATH,FLAG=value`.

    Raises:
        SpecbenchError: an unknown engine, a value of the wrong kind, or a key on the command line.
    """
    spec = parse_spec(text)
    engine = find_engine(spec.name)
    flags = {key: value for key, value in spec.options.items() if key not in OURS}
    refuse_flags(flags)
    context = spec.options.get("context")
    if context is not None and not context.isdecimal():
        raise SpecbenchError(
            f"context={context} of --engine is no number of tokens", "write e.g. context=8192"
        )
    route = spec.options.get("route", "plain")
    if route not in ("plain", "chat"):
        raise SpecbenchError(
            f"route={route} of --engine is neither plain nor chat", "leave it out, or route=chat"
        )
    return Options(
        engine, spec.options.get("binary"), int(context) if context else None, route == "chat", flags
    )


def refuse_flags(flags: Mapping[str, str]) -> None:
    """Refuse passed-through flags that cannot be.

    Raises:
        SpecbenchError: a flag that would carry a key, or that would have the server listen where it is not found.
    """
    for name, value in flags.items():
        if name.lower().endswith(SECRET):
            raise SpecbenchError(
                f"--{name.replace('_', '-')} would write a secret into logs and manifests",
                "put keys into the environment: SPECBENCH_API_KEY",
            )
        if name == "port":
            raise SpecbenchError(
                "the port of a server that specbench starts is its own choice",
                "leave port= out; --url attaches to a server on a port of yours",
            )
        if name in ADDRESS and value not in HOSTS:
            raise SpecbenchError(
                f"a server that specbench starts must listen on loopback, and {name}={value} does not",
                f"leave it out, or {name}=0.0.0.0 to have it listen everywhere",
            )


def with_engine_defaults(config: RunConfig, given: Mapping[str, Any]) -> RunConfig:
    """The config of an engine's run: what was not given is what suits servers.

    Raises:
        SpecbenchError: options that do not go together.
    """
    options = parse_engine(config.engine)
    engine = options.engine
    changes: dict[str, Any] = {}
    if "methods" not in given:
        usual = "prompt-lookup"
        fits = usual in engine.methods and (
            config.url is None or config.baseline_url is not None or engine.per_request
        )
        changes["methods"] = (usual,) if fits else ()
    if not config.concurrency and not config.request_rates:
        changes["concurrency"] = (1,)
    if "repeats" not in given and not _side_by_side(config):
        changes["repeats"] = 2  # whole passes, B M M B: slow drift cancels
    config = replace(config, **changes)
    _check(config, options)
    return config


def _side_by_side(config: RunConfig) -> bool:
    return config.co_resident or config.url is not None


def _check(config: RunConfig, options: Options) -> None:
    engine = options.engine
    if config.batch_sizes != (1,):
        raise SpecbenchError(
            "--batch-size is for specbench's own loop", "use --concurrency: engines batch themselves"
        )
    if config.quantize != "none":
        raise SpecbenchError(
            f"--quantize {config.quantize} is for specbench's own loop",
            f"name a quantised checkpoint, or give {engine.name} its own flag: --engine {engine.name}:FLAG=value",
        )
    if config.target.startswith("random:"):
        raise SpecbenchError(f"{engine.name} cannot load {config.target}", "name a model with weights")
    if engine.no_speculation:
        for spec in map(parse_spec, config.methods):
            engine.setup(spec.label, None if spec.name == VANILLA else spec, config.draft, options.flags)
    if config.temperature == 0 and not engine.greedy:
        raise SpecbenchError(
            f"{engine.name} has no greedy decoding over HTTP", "give a --temperature above 0"
        )
    if config.ignore_eos and not engine.forces_length:
        raise SpecbenchError(f"{engine.name} cannot be told to go on after EOS", "leave --ignore-eos out")
    if config.baseline_url is not None and config.url is None:
        raise SpecbenchError(
            "--baseline-url is given without --url", "give --url for the server that speculates"
        )
    _check_url("--url", config.url)
    _check_url("--baseline-url", config.baseline_url)
    if config.url is None or engine.per_request:
        return
    speculating = [text for text in config.methods if parse_spec(text).name != VANILLA]
    if speculating and config.baseline_url is None:
        raise SpecbenchError(
            f"{engine.name} cannot switch speculation per request, and there is no server for the baseline",
            "give it with --baseline-url, or leave --method out to measure the baseline alone",
        )
    if len(speculating) > 1:
        raise SpecbenchError("one server speculates in one way", "give one --method with --url")


def _check_url(option: str, url: str | None) -> None:
    """Refuse what is no address, or might hold a key: that must not even be said again."""
    if url is None:
        return
    for sign, what in (("@", "a name or password"), ("?", "a query"), ("#", "a fragment")):
        if sign in url:
            raise SpecbenchError(
                f"{option} holds {what}, which would be written down",
                "put a key into the environment: SPECBENCH_API_KEY",
            )
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not close, a port that is no number or too large
        good = False
    if not good:
        raise SpecbenchError(f"{option} {url} is no address of a server", "write e.g. http://127.0.0.1:8000")
