"""A run for tests of the HTML report: tasks and categories, a method that differs, text that means harm."""

from __future__ import annotations

from typing import Any

from trial_factory import FakeRun, trial

from specbench.store import Trial

EVIL = "</script><script>window.harmed=1</script><img src=x onerror=window.harmed=1>\"'`](javascript:window.harmed=1)"
HIDDEN = "\x1b[31mred\u202egnihtemos"
BASE = "The quick brown fox jumps over the lazy dog."
OTHER = "The quick brown cat sleeps."
TASKS = ("chat", "code", "qa")


def methods(task: str, number: int, speeds: dict[str, float]) -> dict[str, dict[str, Any]]:
    """What each method did on question `number`: every third output of the last method differs."""
    found: dict[str, dict[str, Any]] = {
        "vanilla": {"seconds": 10.0, "accepted": [0] * 10, "text": BASE, "memory": {"peak_bytes": 10**9}}
    }
    for place, (name, speed) in enumerate(speeds.items()):
        differs = place == len(speeds) - 1 and number % 3 == 0
        found[name] = {
            "seconds": 10.0 / speed * (1 + 0.02 * (number % 4)) * (1 + 0.1 * TASKS.index(task)),
            "accepted": [1, 1, 0, 2, 1],
            "text": OTHER if differs else BASE,
            "lossless": True,
            "memory": {"peak_bytes": 10**9 + 10**8 * (place + 1)},
            "agreement": {
                "same": not differs,
                "first_difference": 3 if differs else None,
                "logit_gap": 0.25 if differs else None,
            },
        }
    return found


def run(speeds: dict[str, float] | None = None, questions: int = 6, **fields: Any) -> FakeRun:
    """`questions` questions a task, in two categories; `fields` go into the manifest."""
    speeds = speeds or {"slow:k=3": 0.8, "fast:k=3": 2.0, "fast:k=5": 2.5}
    trials: list[Trial] = []
    for task in TASKS:
        for number in range(questions):
            spans = {"draft": 1.0, "verify": 3.0, "accept": 0.25, "other": 0.25}
            trials += [
                trial(
                    f"{task}-{number}",
                    method,
                    **({"task": task, "block": len(trials), "order": order, "spans": spans} | own),
                    category=f"{task}-{'even' if number % 2 == 0 else 'odd'}",
                    prompt_tokens=20 + number,
                )
                for order, (method, own) in enumerate(methods(task, number, speeds).items())
            ]
    known = {"name": "page", "target": {"name": "tiny", "dtype": "float32"}, "argv": ["specbench", "run"]}
    return FakeRun(trials, known | {"config": {"temperature": 0}} | fields)


def hostile() -> FakeRun:
    """Every text that a model, a file or the command line can bring means harm."""
    text = EVIL + HIDDEN + "\ud800"
    found = run(
        {text: 2.0},
        name=text,
        target={"name": text, "dtype": text, "notes": [text]},
        argv=["specbench", text],
    )
    found.manifest |= {"machine": {"cpu": {"model": text}}, "git": {"commit": text}, "config": {text: text}}
    found.warnings.append(text)
    for one in found.trials:
        one.text = text + (one.text or "")
        one.category = text
        if one.task == "qa":
            one.task = text
        if one.question.endswith("0"):
            one.question = text
    return found
