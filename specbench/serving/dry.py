"""What `specbench run --engine … --dry-run` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specbench.config import RunConfig
from specbench.engines.terms import Command
from specbench.plan import Block, counts
from specbench.questions import Task
from specbench.serving.server import shown


def facts(
    config: RunConfig, tasks: Sequence[Task], blocks: Sequence[Block], labels: Sequence[str],
    commands: Mapping[str, Command],
) -> dict[str, Any]:  # fmt: skip
    """The plan of a run as data; `commands` by label, and the files that they name."""
    return {
        "engine": config.engine,
        "url": config.url,
        "target": config.target,
        "methods": list(labels),
        "tasks": {task.name: len(task.questions) for task in tasks},
        "blocks": len(blocks),
        **counts(blocks, dict.fromkeys(labels, True)),
        "commands": {label: shown(command) for label, command in commands.items()},
        "files": {str(path): text for command in commands.values() for path, text in command.files.items()},
    }


def lines(plan: Mapping[str, Any]) -> list[str]:
    """The same for reading."""
    tasks = ", ".join(f"{name} ({count})" for name, count in plan["tasks"].items())
    trials = f"{plan['trials']} trials, at most {plan['new_tokens_at_most']} new tokens"
    found = [
        f"engine   {plan['engine']}{' at ' + plan['url'] if plan['url'] else ''}",
        f"target   {plan['target']}",
        f"tasks    {tasks}",
        f"plan     {plan['blocks']} blocks, {trials}",
    ]
    for label, command in plan["commands"].items():
        found += [label, f"  {command}"]
    for path, text in plan["files"].items():
        found += [path, *(f"  {line}" for line in text.splitlines())]
    return found
