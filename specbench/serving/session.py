"""`specbench run --engine …`: the parts of a session that differ where an engine serves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.build import AGAIN, VANILLA, Named
from specbench.engines.base import PREFIX, Command, Launch, Setup
from specbench.errors import SpecbenchError
from specbench.plan import RATE_BLOCK, Block, passes, plan
from specbench.serving import dry
from specbench.serving.fleet import Attached, Fleet, Host, called_so
from specbench.serving.options import CONTEXT, Options, parse_engine, refuse_flags
from specbench.serving.probe import Probe, check_flags, check_method, probe, require
from specbench.serving.server import free_port, without_home
from specbench.session import Session
from specbench.spec import Spec, parse_spec
from specbench.store import Run, RunStore

if TYPE_CHECKING:
    from specbench.questions import Task
    from specbench.serving.model import EngineTarget

LOGS = "logs"


@dataclass
class EngineSession(Session):
    """One `specbench run` on an engine: launched here, or attached to with `--url`."""

    setups: dict[str, Setup] = field(init=False)  # of each server, by its method's label
    launch: Callable[[int], Launch] = field(init=False)  # by port
    commands: dict[str, Command] = field(init=False)  # of each server that is started
    attached: dict[str, Host] = field(
        default_factory=dict
    )  # what each server that we did not start says of itself
    _loaded: list[Task] | None = None

    @cached_property
    def options(self) -> Options:
        return parse_engine(self.config.engine)

    @cached_property
    def found(self) -> Probe | None:
        """The engine as installed; None where it is attached to."""
        return None if self.config.url else require(self.options.engine, self.options.binary)

    # -- before ----------------------------------------------------------------------------------------------

    def dry_run(self) -> None:
        """Print what would be measured and the exact commands, but for the ports; start no server."""
        specs, tasks = self._specs(), self._tasks()
        self._note_all([note for task in tasks for note in task.notes])
        blocks = self._blocks(tasks, [label for label, _ in specs])
        if self.config.url:
            self.setups, commands = self._setups(specs), {}
        else:
            commands = self._dry_commands(specs)
        self._note_all([*self.options.engine.warnings, *self._warnings()])
        facts = dry.facts(self.config, tasks, blocks, [label for label, _ in specs], commands)
        print(
            json.dumps(facts, indent=2, ensure_ascii=False) if self.as_json else "\n".join(dry.lines(facts))
        )

    def _dry_commands(self, specs: Sequence[tuple[str, Spec]]) -> dict[str, Command]:
        """Those of a run. What is not here (the engine, the target's tokenizer) is guessed, and said to be."""
        from specbench.serving.model import open_target, weights

        engine, ref = self.options.engine, self.config.target
        found = probe(engine, self.options.binary)
        if found.why is not None:
            self._note(f"note: {found.why}: {engine.install}")
            found = replace(found, words=found.words or engine.usual_words())
        try:
            target = open_target(self.config, engine, {}, self._note)
            path, context = target.path, self._context(target)
        except SpecbenchError as error:
            path, context = weights(ref, engine, self._note), self.options.context or CONTEXT
            self._note(
                f"note: {error.message}: room for {context} tokens, which may not be what the tasks need"
            )
        self._arrange(specs, path, context, self._store())
        return self._commands(found, free_port())

    def _specs(self) -> list[tuple[str, Spec]]:
        """Label and SPEC of each method; the engine must be able to do them all."""
        found = [(VANILLA, Spec(VANILLA))]
        for text in self.config.methods:
            spec = parse_spec(text)
            label = AGAIN if spec.name == VANILLA else spec.label
            if label in {known for known, _ in found}:
                raise SpecbenchError(f"method {spec.label} is given twice", "give each method once")
            given = spec.options.items()
            refuse_flags({k.removeprefix(PREFIX): v for k, v in given if k.startswith(PREFIX)})
            self._setup(label, spec, draft=self.config.draft)
            found.append((label, spec))
        return found

    def _setup(self, label: str, spec: Spec, draft: str | None) -> Setup:
        known = None if spec.name == VANILLA else spec
        setup = self.options.engine.setup(label, known, draft, self.options.flags)
        return replace(setup, chat=self.options.chat)

    def _setups(self, specs: Sequence[tuple[str, Spec]]) -> dict[str, Setup]:
        """Each method in the engine's words, its drafter found."""
        setups = {}
        for label, spec in specs:
            setup = self._setup(label, spec, self.config.draft)
            if setup.native is not None and setup.native.draft and self.config.url is None:
                name = setup.native.draft
                draft = self._weights(str(setup.settings[name]))
                setup = replace(setup, settings={**setup.settings, name: draft})
            setups[label] = setup
        return dict(self.options.engine.even(setups))

    def _weights(self, ref: str) -> str:
        from specbench.serving.model import weights

        return weights(ref, self.options.engine, self._note)

    def _open(self, specs: Sequence[tuple[str, Spec]]) -> tuple[EngineTarget, list[Named]]:  # type: ignore[override]
        from specbench.conversation import template_note
        from specbench.serving.model import open_target
        from specbench.serving.runner import EngineMethod

        engine = self.options.engine
        kernels = {
            "engine": engine.name,
            "version": (self.found.version if self.found else None) or "unknown",
        }
        target = open_target(self.config, engine, kernels, self._note)
        if self.config.url:
            self.attached = asyncio.run(self._look(target, [label for label, _ in specs]))
            kernels["version"] = self._version or "unknown"
        context = self._context(target)
        self._arrange(specs, target.path, context, self.store)
        self.commands = {} if self.found is None else self._commands(self.found)
        if doubt := engine.doubt(kernels["version"], self.config.temperature):
            self.setups = {label: setup.doubted(doubt) for label, setup in self.setups.items()}
        methods = []
        for label, spec in specs:
            native = self.setups[label].native
            draft = self.config.draft if native and native.draft else None
            methods.append(
                Named(label, spec, EngineMethod(self.setups[label], spec.options.get("draft", draft)))
            )
        note = template_note(target.tokenizer, self.config.template_args)
        self._note_all(
            [*([note] if note else []), *target.identity.notes, *engine.warnings, *self._warnings()]
        )
        return replace(target, context=context), methods

    async def _look(self, target: EngineTarget, labels: Sequence[str]) -> dict[str, Host]:
        """The servers that are attached to, closed again: whatever is wrong with one is said before a run is made.

        Raises:
            SpecbenchError: one does not answer, is not what it is taken for, or does not serve the target.
        """
        fleet = self._attach(target)
        try:
            found = {label: await fleet.host(label) for label in labels}
        finally:
            await fleet.close()
        names = _names(target)
        strange = {
            fleet.url(label): host.model
            for label, host in found.items()
            if not called_so([host.model], names)
        }
        self._note_all(
            [f"the server at {url} serves {model}: taken to be {names[0]}" for url, model in strange.items()]
        )
        return found

    @property
    def _version(self) -> str | None:
        """The engine's; of servers that were attached to, each one's if they differ."""
        if self.found is not None:
            return self.found.version
        told = dict.fromkeys(host.version for host in self.attached.values() if host.version)
        return ", ".join(told) or None

    def _context(self, target: EngineTarget) -> int:
        """The tokens that a server makes room for."""
        from specbench.serving.model import needed_context

        return self.options.context or needed_context(self._tasks(), self.config, target)

    def _arrange(self, specs: Sequence[tuple[str, Spec]], path: str, context: int, store: RunStore) -> None:
        """Settle how each server is started."""
        self.setups = self._setups(specs)
        self.launch = self._launch(path, context, store.path / LOGS)

    def _commands(self, found: Probe, port: int = 0) -> dict[str, Command]:
        """Each server's exact command.

        Raises:
            SpecbenchError: this version of the engine does not have a method or a flag.
        """
        engine = self.options.engine
        assert found.words is not None
        commands = {}
        for label, setup in self.setups.items():
            check_method(engine, setup, found)
            commands[label] = engine.command(found.words, setup, self.launch(port), found.flags)
            check_flags(engine, commands[label], found)
        return commands

    def _warnings(self) -> list[str]:
        notes = [
            f"{label}: {s.native.note}" for label, s in self.setups.items() if s.native and s.native.note
        ]
        counted = any(setup.native for setup in self.setups.values())
        if self.config.url and self.options.engine.metrics and counted:
            notes.append(
                "the server's counters hold everybody's requests: others' traffic spoils what they say here"
            )
        return notes

    def _launch(self, target: str, context: int, folder: Path) -> Callable[[int], Launch]:
        config = self.config
        most = max((*config.concurrency, *(RATE_BLOCK for _ in config.request_rates)), default=1)

        def launch(port: int) -> Launch:
            return Launch(
                target, port, folder, parallel=most, context=context, seed=config.seed, threads=config.threads,
                dtype=config.dtype, device=config.device, trust_remote_code=config.trust_remote_code,
            )  # fmt: skip

        return launch

    def _engine_facts(self) -> dict[str, Any]:
        """The engine, its version, and each server's exact command (its port aside, which differs by start)."""
        engine = self.options.engine
        served = {label: host.model for label, host in self.attached.items()}
        return {
            "engine": {
                "name": engine.name,
                "version": self._version,
                "attached": self.found is None,
                **({"served": served} if served else {}),
                "commands": {
                    label: [without_home(word) for word in command.argv]
                    for label, command in self.commands.items()
                },
                "warnings": [*engine.warnings, *self._warnings()],
            }
        }

    def _tasks(self) -> list[Task]:
        if self._loaded is None:
            self._loaded = super()._tasks()
        return self._loaded

    # -- the schedule ----------------------------------------------------------------------------------------

    def _blocks(self, tasks: Sequence[Task], labels: Sequence[str]) -> list[Block]:
        if self.config.co_resident or self.config.url is not None:
            return plan(self.config, tasks)
        return passes(self.config, tasks, labels, reversible=self.config.sampling.greedy)

    def _schedule(self, tasks: Sequence[Task], methods: Sequence[Named]) -> list[Block]:
        """Blocks that interleave the servers where all run at once; else whole passes, B M M B."""
        blocks = self._blocks(tasks, [named.label for named in methods])
        if self.until is not None and len(self.config.concurrency) + len(self.config.request_rates) > 1:
            raise SpecbenchError("--until looks at one --concurrency or --request-rate", "make a run of each")
        if blocks[0].only is None:
            learning = [named.label for named in methods if named.method.warm]
            if learning:
                self._note(
                    f"note: {', '.join(learning)} keeps what earlier prompts taught it, repeats included"
                )
            return blocks
        if self.until is not None:
            raise SpecbenchError(
                "--until needs the methods side by side, and each server has the machine to itself here",
                "add --co-resident if memory allows, or leave --until out",
            )
        if self.config.repeats % 2:
            self._note("note: one server at a time; an even --repeats lets slow drift cancel (B M M B)")
        return blocks

    # -- measuring -------------------------------------------------------------------------------------------

    def _measure(  # type: ignore[override]
        self,
        store: RunStore,
        blocks: Sequence[Block],
        target: EngineTarget,
        methods: list[Named],
        earlier: Run | None,
    ) -> str:
        from specbench.measure.sampler import Sampler
        from specbench.precision import Precision
        from specbench.progress import Progress
        from specbench.serving.runner import EngineRunner
        from specbench.trial import Instruments

        done = earlier.trials if earlier else []
        labels = [named.label for named in methods]
        until = None if self.until is None else Precision(self.until, labels, done)
        with (
            Sampler(self._gpu()) as sampler,
            Progress(self.console, blocks, done, enabled=not self.quiet) as progress,
        ):
            runner = EngineRunner(
                config=self.config,
                target=target,  # type: ignore[arg-type]
                methods=methods,
                store=store,
                instruments=Instruments("cpu", 1, sampler),
                done=done,
                on_block=progress.block_done,
                budget_s=self.budget_s,
                until=until,
                engine=self.options.engine,
                fleet=self._fleet(
                    target, blocks[0].only is None, lambda label, line: progress.say(f"{label}: {line}")
                ),
                note=lambda line: self._note(f"note: {line}"),
            )
            ended = runner.measure(blocks)
        self._say_until(until, ended)
        return ended

    def _gpu(self) -> Any:
        from specbench.measure import nvml

        if self.config.device in ("cpu", "mps"):
            return None
        return nvml.open_gpu(
            "cuda:0" if self.config.device == "auto" else self.config.device, warn=lambda line: None
        )

    def _attach(self, target: EngineTarget) -> Attached:
        assert self.config.url is not None
        urls = self.config.url, self.config.baseline_url
        return Attached(self.options.engine, _names(target), *urls, (VANILLA, AGAIN))

    def _fleet(self, target: EngineTarget, together: bool, on_line: Callable[[str, str], None]) -> Fleet:
        if self.config.url is not None:
            return self._attach(target)
        return Fleet(
            self.options.engine,
            self.setups,
            self.launch,
            self.found,
            self.store.path / LOGS,
            together=together,
            on_line=on_line,
        )


def _names(target: EngineTarget) -> list[str]:
    """What a server may call the target, the user's own word first."""
    known = target.identity
    return [known.ref, *filter(None, (target.path, known.name, known.hub_id))]
