"""The words that adapters and what drives them share: a method in an engine's terms, a launch, a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Native:
    """One of our methods in an engine's own words.

    Args:
        name: what the engine calls it.
        settings: set unless the SPEC says otherwise: setting -> value.
        options: our option -> the engine's setting.
        draft: the setting that takes the drafter's weights; None if it has none.
        learns: it keeps what earlier requests taught it.
        lossless: its output is the target's own.
        package: what must be installed beside the engine for it.
        note: what a reader of its results must know.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    draft: str | None = None
    learns: bool = False
    lossless: bool = True
    package: str | None = None
    note: str = ""


@dataclass(frozen=True)
class Setup:
    """One server's configuration: the target with one method, or none (`native` None: the baseline).

    label: of the method in results. settings: the engine's settings for it. extra: flags passed through. chat: send
    messages to the chat route, in place of a prompt that is already rendered.
    """

    label: str
    native: Native | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, str] = field(default_factory=dict)
    chat: bool = False

    def doubted(self, why: str) -> Setup:
        """The same, not taken for lossless; the baseline as it is."""
        if self.native is None:
            return self
        note = "; ".join(filter(None, (self.native.note, why)))
        return replace(self, native=replace(self.native, lossless=False, note=note))


@dataclass(frozen=True)
class Launch:
    """Where and for what a server is started.

    target: what the engine loads (`Engine.weights` says what kind of thing that is).
    parallel: most requests at once. context: most tokens of prompt and answer. folder: the run's, for logs and
    config files. python: the interpreter of `module` engines.
    """

    target: str
    port: int
    folder: Path
    host: str = LOOPBACK
    parallel: int = 1
    context: int = 4096
    seed: int = 0
    threads: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """Variables that programs go by: OpenMP's threads, and which GPU of several."""
        threads = {} if self.threads is None else {"OMP_NUM_THREADS": str(self.threads)}
        _, _, number = self.device.partition("cuda:")
        return threads | ({"CUDA_VISIBLE_DEVICES": number} if number else {})


@dataclass(frozen=True)
class Command:
    """What is run: argv, environment beyond ours, files that must be there first (path -> content)."""

    argv: list[str]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[Path, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Prompt:
    """A prompt in the forms that routes take: its ids, those as text, and the turns of a chat."""

    ids: list[int]
    text: str
    messages: list[dict[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Limits:
    """How a request is to be answered. temperature 0 is greedy; top_k 0 and top_p 1 are off."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    ignore_eos: bool = False
