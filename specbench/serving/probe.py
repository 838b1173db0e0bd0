"""What is installed: where an engine's program is, its version, the flags it has."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbench.engines.base import Command, Engine, Setup, choices_of, flags_in
from specbench.errors import SpecbenchError
from specbench.serving.server import output_of

TRY_AGAIN = "run its program by hand with --help; a first start takes longest, so try once more"


class Lacking(SpecbenchError):
    """Something that the installed version does not have; `what` names it in a few words."""

    def __init__(self, message: str, hint: str, what: str) -> None:
        super().__init__(message, hint)
        self.what = what


@dataclass(frozen=True)
class Probe:
    """An engine as found here.

    words: what starts its program; None if it is missing.
    flags: those its help names; empty where it prints no help.
    methods: those its help names, in its own words; empty where it does not say.
    why: it cannot be used. cure: what helps, other than installing it.
    """

    words: list[str] | None
    version: str | None = None
    flags: frozenset[str] = field(default_factory=frozenset)
    methods: frozenset[str] = field(default_factory=frozenset)
    why: str | None = None
    cure: str | None = None


def probe(engine: Engine, binary: str | None = None) -> Probe:
    """Ask the engine's own program; takes as long as that takes to print its help."""
    words = engine.found(binary)
    if words is None:
        return Probe(None, why=f"{binary or engine.name} is not installed")
    lacking = [name for name in engine.needs if importlib.util.find_spec(name) is None]
    if lacking and binary is None:
        return Probe(words, why=f"{engine.name} needs {', '.join(lacking)}, which is not installed")
    code, help_text = output_of([*words, *engine.command_words, *engine.help_words])
    flags = flags_in(help_text)
    if code is None:
        return Probe(words, why=f"{engine.name} does not print its help: {help_text}", cure=TRY_AGAIN)
    if code != 0 and not flags:
        last = help_text.strip().splitlines()[-1:] or ["it prints nothing"]
        return Probe(words, _version(engine, words), why=f"{engine.name} does not start: {last[0]}")
    methods = choices_of(engine.method_flag, help_text) if engine.method_flag else frozenset()
    return Probe(words, _version(engine, words), flags, methods)


def _version(engine: Engine, words: Sequence[str]) -> str | None:
    if engine.distribution is not None:
        return _installed(engine.distribution, words)
    code, text = output_of([*words, *engine.version_words])
    if code is None:
        return None
    found = re.search(r"\d+(\.\d+)+[\w.+-]*|(?<=version: )\d+", text)
    return found.group() if found else None


def _installed(distribution: str, words: Sequence[str]) -> str | None:
    """The version of a package where the program is: it may have an environment of its own."""
    code, text = _asked(words, f"from importlib.metadata import version; print(version({distribution!r}))")
    return text.strip() if code == 0 else None


def _asked(words: Sequence[str], code: str) -> tuple[int | None, str]:
    """What the program's own Python answers; status None where it has none beside it."""
    return output_of([words[0] if "-m" in words else str(Path(words[0]).with_name("python")), "-c", code])


def survey(asked: Iterable[tuple[Engine, str | None]]) -> dict[str, dict[str, Any]]:
    """What `doctor --engines` shows: each engine (its program given or looked for), and what it can do here.

    `lacking`: methods that this version cannot do -> what it does not have for them.
    """
    found = {}
    for engine, binary in asked:
        here = probe(engine, binary)
        found[engine.name] = {
            "found": here.words is not None and here.why is None,
            "missing": here.why,
            "version": here.version,
            "methods": sorted(engine.methods),
            "no_speculation": engine.no_speculation,
            "install": engine.install,
            "lacking": _lacking(engine, here),
        }
    return found


def _lacking(engine: Engine, here: Probe) -> dict[str, str]:
    lacking = {}
    for method, native in engine.methods.items():
        drafter = {native.draft: "draft"} if native.draft else {}
        setup = Setup(method, native, {**native.settings, **drafter})
        try:
            check_method(engine, setup, here)
            check_flags(engine, Command(engine.flags(setup)), here)
        except Lacking as error:
            lacking[method] = error.what
    return lacking


def require(engine: Engine, binary: str | None = None) -> Probe:
    """The engine as found here.

    Raises:
        SpecbenchError: it is not installed, or its program does not even print its help.
    """
    found = probe(engine, binary)
    if found.words is None or found.why:
        raise SpecbenchError(found.why or f"{engine.name} is not installed", found.cure or engine.install)
    return found


def check_method(engine: Engine, setup: Setup, found: Probe) -> None:
    """Catch a method that this version does not have, or whose package is missing, before anything is started.

    Raises:
        Lacking: naming the method and the engine's version, or the package.
    """
    native = setup.native
    if native is None or found.words is None:
        return
    if found.methods and native.name not in found.methods:
        raise Lacking(
            f"{engine.name} {found.version or '(unknown version)'} has no method {native.name}",
            "methods come and go: take a version that has it",
            f"method {native.name}",
        )
    if native.package is not None:
        code, _ = _asked(found.words, f"import importlib.metadata as m; m.version({native.package!r})")
        if code:
            raise Lacking(
                f"{native.name} in {engine.name} needs the package {native.package}, which is not installed",
                f"install it where {engine.name} is",
                f"package {native.package}",
            )


def check_flags(engine: Engine, command: Command, found: Probe) -> None:
    """Catch a flag that this version does not have before anything is started.

    Raises:
        Lacking: naming the flag and the engine's version.
    """
    if not found.flags:
        return
    for word in command.argv:
        flag = word.partition("=")[0]
        if flag.startswith("--") and len(flag) > 2 and flag not in found.flags:
            raise Lacking(
                f"{engine.name} {found.version or '(unknown version)'} has no flag {flag}",
                "its flags change: take a version that has it, or leave the option out",
                f"flag {flag}",
            )
