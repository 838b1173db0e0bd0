"""`specbench run --engine …`: the parts of a session that differ where an engine serves."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.build import AGAIN, VANILLA, Named
from specbench.engines.base import PREFIX, Launch, Setup
from specbench.errors import SpecbenchError
from specbench.plan import RATE_BLOCK, Block, counts, passes, plan
from specbench.serving.fleet import Attached, Fleet
from specbench.serving.options import CONTEXT, Options, parse_engine, refuse_secrets
from specbench.serving.probe import Probe, check_flags, require
from specbench.serving.server import free_port, shown
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
        """Print what would be measured and the exact commands; start nothing."""
        specs, tasks = self._specs(), self._tasks()
        self._note_all([note for task in tasks for note in task.notes])
        blocks = self._blocks(tasks, [label for label, _ in specs])
        engine = self.options.engine
        words = engine.found(self.options.binary)
        if self.config.url is None and words is None:
            self._note(f"note: {engine.name} is not installed here: {engine.install}")
        start = words or engine.usual_words()
        launch = self._launch(self._weights(self.config.target), CONTEXT, Path(LOGS))(free_port())
        commands = {} if self.config.url else {
            setup.label: engine.command(start, setup, launch) for setup in self._setups(specs).values()
        }  # fmt: skip
        facts: dict[str, Any] = {
            "engine": self.config.engine,
            "target": self.config.target,
            "methods": [label for label, _ in specs],
            "tasks": {task.name: len(task.questions) for task in tasks},
            "blocks": len(blocks),
            **counts(blocks, {label: True for label, _ in specs}),
            "commands": {label: shown(command) for label, command in commands.items()},
            "files": {
                str(path): text for command in commands.values() for path, text in command.files.items()
            },
        }
        if self.as_json:
            print(json.dumps(facts, indent=2, ensure_ascii=False))
            return
        print(f"engine   {facts['engine']}{f' at {self.config.url}' if self.config.url else ''}")
        print(f"target   {facts['target']}")
        print(f"tasks    {', '.join(f'{name} ({count})' for name, count in facts['tasks'].items())}")
        print(f"plan     {len(blocks)} blocks, {facts['trials']} trials, "
              f"at most {facts['new_tokens_at_most']} new tokens")  # fmt: skip
        for label, command in facts["commands"].items():
            print(f"{label}\n  {command}")
        for path, text in facts["files"].items():
            print(f"{path}\n" + "".join(f"  {line}\n" for line in text.splitlines()), end="")

    def _specs(self) -> list[tuple[str, Spec]]:
        """Label and SPEC of each method; the engine must be able to do them all."""
        found = [(VANILLA, Spec(VANILLA))]
        for text in self.config.methods:
            spec = parse_spec(text)
            label = AGAIN if spec.name == VANILLA else spec.label
            if label in {known for known, _ in found}:
                raise SpecbenchError(f"method {spec.label} is given twice", "give each method once")
            refuse_secrets({key: value for key, value in spec.options.items() if key.startswith(PREFIX)})
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
        from specbench.serving.model import needed_context, open_target
        from specbench.serving.runner import EngineMethod

        engine = self.options.engine
        kernels = {
            "engine": engine.name,
            "version": (self.found.version if self.found else None) or "unknown",
        }
        target = open_target(self.config, engine, kernels, self._note)
        context = self.options.context or needed_context(self._tasks(), self.config, target)
        target = replace(target, context=context)
        self.setups = self._setups(specs)
        self.launch = self._launch(target.path, context, self.store.path / LOGS)
        if self.found is not None and self.found.words is not None:
            for setup in self.setups.values():
                command = engine.command(self.found.words, setup, self.launch(0), self.found.flags)
                check_flags(engine, command, self.found)
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
        return target, methods

    def _warnings(self) -> list[str]:
        notes = [
            f"{label}: {s.native.note}" for label, s in self.setups.items() if s.native and s.native.note
        ]
        if self.config.url and self.options.engine.metrics and self.config.methods:
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
        engine, found = self.options.engine, self.found
        commands = {}
        if found is not None and found.words is not None:
            commands = {
                label: engine.command(found.words, setup, self.launch(0), found.flags).argv
                for label, setup in self.setups.items()
            }
        return {
            "engine": {
                "name": engine.name,
                "version": found.version if found else None,
                "attached": found is None,
                "commands": commands,
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
        if self.until is not None and len(self.config.concurrency) > 1:
            raise SpecbenchError("--until looks at one --concurrency", "make a run of each")
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
                    blocks[0].only is None, lambda label, line: progress.say(f"{label}: {line}")
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

    def _fleet(self, together: bool, on_line: Callable[[str, str], None]) -> Fleet:
        engine = self.options.engine
        if self.config.url is not None:
            return Attached(
                engine, self.config.target, self.config.url, self.config.baseline_url, (VANILLA, AGAIN)
            )
        return Fleet(
            engine,
            self.setups,
            self.launch,
            self.found,
            self.store.path / LOGS,
            together=together,
            on_line=on_line,
        )
