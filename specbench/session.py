"""A run from the command line's point of view: prepare, measure, show, and say how it ended."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from specbench.config import (
    EMBEDDED_BATCH_METHODS,
    EMBEDDED_METHODS,
    EMBEDDED_NEW_TOKENS,
    EMBEDDED_TARGET,
    NATIVE,
    RunConfig,
    read_config,
)
from specbench.errors import SpecbenchError
from specbench.store import INTERLEAVED, WHOLE_PASSES, Run, RunStore, default_name, read_run

if TYPE_CHECKING:
    from specbench.build import Named
    from specbench.models.target import Target
    from specbench.plan import Block
    from specbench.precision import Precision
    from specbench.questions import Task
    from specbench.spec import Spec

INTERRUPTED = 130
UNTIL_ENDS = {
    "until reached": "every method's speedup is known to ±{width:.1%}: {found}",
    "complete": "the questions ran out; --until ±{width:.1%}, {found}",
    "time budget": "the time budget ran out; --until ±{width:.1%}, {found}",
}
RUN_REPORTS = ("md", "html")  # that a run writes; where the last one is, it says
PIPED_WIDTH = 120  # of the table in a file or a CI log


def effective_config(given: Mapping[str, Any], file: Path | None) -> RunConfig:
    """Options over a config file over the defaults. Without a target the embedded default fills the gaps."""
    from specbench.prompts import bundled_names

    settings = {**(read_config(file) if file else {}), **given}
    if "target" not in settings:
        settings["target"] = EMBEDDED_TARGET
        if not settings.keys() & {"tasks", "methods"}:
            settings = {"limit": 1, "max_new_tokens": EMBEDDED_NEW_TOKENS, **settings}
    settings.setdefault("tasks", tuple(bundled_names()))
    config = RunConfig(**{"methods": EMBEDDED_METHODS, **settings})
    if config.engine != NATIVE:
        from specbench.serving.options import with_engine_defaults

        return with_engine_defaults(config, settings)
    if config.concurrency or config.request_rates or config.url or config.baseline_url or config.co_resident:
        raise SpecbenchError(
            "--concurrency, --request-rate, --url and --co-resident are for serving engines",
            "name one with --engine, or use --batch-size",
        )
    if "methods" not in settings and 1 not in config.batch_sizes:
        return replace(config, methods=EMBEDDED_BATCH_METHODS)
    return config


def session_class_for(config: RunConfig) -> type[Session]:
    """What carries out a run of this config: our own loop's session, or an engine's."""
    if config.engine == NATIVE:
        return Session
    from specbench.serving.session import EngineSession

    return EngineSession


@dataclass
class Session:
    """One `specbench run`. See its options for the fields."""

    config: RunConfig
    output: Path
    reports: Path
    name: str | None
    fresh: bool
    budget_s: float | None
    until: float | None
    strict: bool
    as_json: bool
    quiet: bool
    argv: Sequence[str]

    def __post_init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)

    def dry_run(self) -> None:
        """Print what would be measured and about how long it takes; load nothing."""
        from specbench.estimate import estimate
        from specbench.plan import counts, plan, shortages
        from specbench.spec import find_method

        specs = self._specs()
        tasks = self._tasks()
        batches = {label: getattr(find_method(spec.name), "batches", True) for label, spec in specs}
        blocks = plan(self.config, tasks)
        self._note_all([*self._opening_notes(tasks), *shortages(blocks)])
        facts: dict[str, Any] = {
            "target": self.config.target,
            "methods": [label for label, _ in specs],
            "tasks": {task.name: len(task.questions) for task in tasks},
            "blocks": len(blocks),
            **counts(blocks, batches),
            "estimate": estimate(self.config, blocks, len(specs)),
        }
        if self.as_json:
            print(json.dumps(facts, indent=2, ensure_ascii=False))
            return
        tokens = f"at most {facts['new_tokens_at_most']} new tokens"
        print(f"target   {facts['target']}")
        print(f"methods  {', '.join(facts['methods'])}")
        print(f"tasks    {', '.join(f'{name} ({count})' for name, count in facts['tasks'].items())}")
        print(f"plan     {len(blocks)} blocks, {facts['trials']} trials, {tokens}")
        print(f"time     {facts['estimate']['text']}")

    def run(self) -> int:
        """Measure, print and report; the exit code."""
        from specbench.manifest import captured, describe, now, resumed
        from specbench.models.attention_choice import choices
        from specbench.models.passes import facts

        tasks = self._tasks()
        specs = self._specs()
        store = self.store = self._store()
        earlier = None if self.fresh or not store.exists else read_run(store.path)
        if earlier is not None:
            self._check_same(earlier)
        store.check_writable()
        self._note_all([*self._opening_notes(tasks), *(earlier.warnings if earlier else [])])
        target, methods = self._open(specs)
        blocks = self._schedule(tasks, methods)
        manifest = describe(store.path.name, self.argv, self.config, tasks, target, methods, self._note)
        manifest["schedule"] = WHOLE_PASSES if blocks[0].only else INTERLEAVED
        manifest |= self._engine_facts()
        if earlier is not None:
            manifest = resumed(manifest, earlier.manifest, self._note)
        self._make_room(store, earlier)
        store.write_manifest(manifest)
        ended = "failed"
        try:
            ended = self._measure(store, blocks, target, methods, earlier)
        except KeyboardInterrupt:
            ended = "interrupted"
        finally:
            manifest |= {"end": now(), "status": ended, **captured(manifest, facts(), choices.facts())}
            store.write_manifest(manifest)
        return self._finish(read_run(store.path), ended)

    # -- before ----------------------------------------------------------------------------------------------

    def _tasks(self) -> list[Task]:
        from specbench.prompts import load_tasks, take_round_robin

        tasks = load_tasks(self.config.tasks, limit=self.config.limit or None)
        # However early a run ends, each category has had its turn.
        return [
            replace(task, questions=take_round_robin(task.questions, len(task.questions))) for task in tasks
        ]

    def _opening_notes(self, tasks: Sequence[Task]) -> list[str]:
        """What is to be known of the tasks and the options before anything is loaded."""
        from specbench.measure.cpu import usable_cpus

        notes = [note for task in tasks for note in task.notes]
        threads, cores = self.config.threads, len(usable_cpus())
        if threads is not None and threads > cores:
            notes.append(f"--threads {threads} on {cores} usable cores: they will wait for each other")
        return notes

    def _store(self) -> RunStore:
        if self.name and (Path(self.name).name != self.name or self.name == ".."):
            raise SpecbenchError(
                f"--name {self.name} is a path", "give a plain name, and the folder with --output"
            )
        return RunStore(self.output / (self.name or default_name(self.config.target)))

    def _make_room(self, store: RunStore, earlier: Run | None) -> None:
        """Cut a half-written block off a run that goes on; with --fresh move the old run aside."""
        if earlier is not None:
            store.resume()
        elif self.fresh and (aside := store.move_aside()) is not None:
            self._note(f"the old run is now {aside}")

    def _check_same(self, earlier: Run) -> None:
        differences = self.config.differences(earlier.manifest.get("config", {}))
        if differences:
            raise SpecbenchError(
                f"run {earlier.path.name} exists with another config: {'; '.join(differences)}",
                "use the same options to resume it, another --name, or --fresh to move it aside",
            )

    def _specs(self) -> list[tuple[str, Spec]]:
        """Label and SPEC of each method, as far as they can be checked before anything is loaded."""
        from specbench.build import labels
        from specbench.spec import find_method, options_of

        specs = labels(self.config.methods)
        classes = {label: find_method(spec.name) for label, spec in specs}
        if self.config.draft and not any("draft" in options_of(cls) for cls in classes.values()):
            raise SpecbenchError("--draft is given, but no method takes a draft", "leave --draft out")
        alone = [label for label, cls in classes.items() if not getattr(cls, "batches", True)]
        if alone and 1 not in self.config.batch_sizes:
            raise SpecbenchError(
                f"{', '.join(alone)} runs at batch size 1 only",
                "add 1 to --batch-size, or leave the method out",
            )
        return specs

    def _open(self, specs: Sequence[tuple[str, Spec]]) -> tuple[Target, list[Named]]:
        import torch

        from specbench.analysis.extract import drafter_line
        from specbench.build import build, open_target
        from specbench.conversation import template_note
        from specbench.draft_costs import learn_costs
        from specbench.models.gguf import cache_folder

        torch.set_grad_enabled(False)
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        target = open_target(self.config, self._note)
        methods = [build(label, spec, target, self.config) for label, spec in specs]
        learn_costs(methods, target, self.config, cache_folder(), self._note)
        note = template_note(target.tokenizer, self.config.template_args)
        self._note_all([note] if note else [])
        self._note_all(getattr(target.identity, "notes", []))
        drafters = ((named.label, drafter_line(named.method.draft_identity())) for named in methods)
        self._note_all([f"{label} drafts with {line}" for label, line in drafters if line])
        return target, methods

    def _engine_facts(self) -> dict[str, Any]:
        """What the manifest says of a serving engine; nothing of our own loop."""
        return {}

    def _schedule(self, tasks: Sequence[Task], methods: Sequence[Named]) -> list[Block]:
        """Blocks that interleave the methods, or whole passes where one keeps what earlier prompts taught it."""
        from specbench.plan import passes, plan

        learning = [named.label for named in methods if named.method.warm]
        if not learning:
            return plan(self.config, tasks)
        if self.until is not None:
            raise SpecbenchError(
                f"--until stops anywhere, and what {learning[0]} has learned depends on where",
                "leave --until out, or warm=true",
            )
        greedy = self.config.sampling.greedy
        even = "" if self.config.repeats % 2 == 0 and greedy else "; an even --repeats lets slow drift cancel"
        self._note(
            f"note: {', '.join(learning)} keeps what earlier prompts taught it: whole passes over the questions, "
            f"in one order, each method in turn{even}"
        )
        return passes(self.config, tasks, [named.label for named in methods], reversible=greedy)

    # -- measuring -------------------------------------------------------------------------------------------

    def _measure(
        self,
        store: RunStore,
        blocks: Sequence[Block],
        target: Target,
        methods: list[Named],
        earlier: Run | None,
    ) -> str:
        import torch

        from specbench.measure import nvml
        from specbench.measure.sampler import Sampler
        from specbench.precision import Precision
        from specbench.progress import Progress
        from specbench.runner import Runner
        from specbench.trial import Instruments

        done = earlier.trials if earlier else []
        on_gpu = target.device.type == "cuda"
        gpu = nvml.open_gpu(str(target.device), warn=self._note) if on_gpu else None
        threads = 1 if on_gpu else torch.get_num_threads()
        labels = [named.label for named in methods]
        until = None if self.until is None else Precision(self.until, labels, done)
        with (
            Sampler(gpu) as sampler,
            Progress(self.console, blocks, done, enabled=not self.quiet) as progress,
        ):
            runner = Runner(
                config=self.config,
                target=target,
                methods=methods,
                store=store,
                instruments=Instruments(str(target.device), threads, sampler),
                done=done,
                on_block=progress.block_done,
                budget_s=self.budget_s,
                until=until,
                gpu=gpu,
            )
            ended = runner.measure(blocks)
        self._say_until(until, ended)
        return ended

    def _say_until(self, until: Precision | None, ended: str) -> None:
        if until is not None:
            self._note(UNTIL_ENDS[ended].format(width=until.width, found=until.describe()))

    # -- after -----------------------------------------------------------------------------------------------

    def _finish(self, run: Run, ended: str) -> int:
        from specbench.analysis.summary import summarise
        from specbench.report import FORMATS
        from specbench.report.terminal import render
        from specbench.verdict import refuse_bugs, refuse_gaps

        summary = summarise([run])
        self._note_all(run.warnings)
        if self.as_json:
            print(FORMATS["json"].render(summary, [run]), end="")
        else:
            out = Console(highlight=False)
            if not out.is_terminal:
                out.width = max(out.width, PIPED_WIDTH)
            out.print(render(summary, out.width))
        if ended == "time budget":
            self._note(
                f"the time budget ended the run early; the same command with --name {run.path.name} goes on"
            )
        if ended == "interrupted":
            self._note(
                f"interrupted: the finished blocks are in {run.path}; the same --name {run.path.name} resumes"
            )
        if run.trials:
            self._report(summary, run)
        if ended == "interrupted":
            return INTERRUPTED
        refuse_bugs(run)
        refuse_gaps(run, ended)
        failed = sum(trial.error is not None for trial in run.trials)
        if failed:
            where = run.path / "trials.jsonl"
            self._note(f"{failed} of {len(run.trials)} trials failed: see `error` in {where}")
        return 1 if failed and self.strict else 0

    def _report(self, summary: dict[str, Any], run: Run) -> None:
        from specbench.cli.report import folder_name, write
        from specbench.report import FORMATS

        folder = self.reports / folder_name([run.path.name])
        try:
            for form in (FORMATS[name] for name in RUN_REPORTS):
                path = write(folder / form.filename, form.render(summary, [run]))
        except SpecbenchError as error:  # the measurements are safe: a report can be made again
            self._note(f"no report: {error.message}")
            return
        print(f"results: {run.path}", file=sys.stderr)
        print(f"report: {path}", file=sys.stderr if self.as_json else sys.stdout)

    def _note(self, text: str) -> None:
        self.console.print(text, style="dim", markup=False, soft_wrap=True)

    def _note_all(self, notes: Sequence[str]) -> None:
        for note in dict.fromkeys(notes):
            self._note(f"note: {note}")
