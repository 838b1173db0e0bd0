"""Whether a golden folder is whole: a list for every prompt, and rounds that reach the end of their outputs.

Nothing that was cut off a fixture could otherwise be found to differ.
"""

from __future__ import annotations

from parity_fixture import Fixture
from parity_record import Difference, first_difference, trim

RUNS = (("rounds", "outputs"), ("warm_rounds", "warm_outputs"), ("typical_rounds", "typical_outputs"))


def check_lists(fixture: Fixture) -> None:
    """Raise Difference where a list has not one entry for every prompt."""
    golden, count = fixture.golden, len(fixture.golden["prompts"])
    for name in ("vanilla", "outputs_trimmed", *(name for run in RUNS for name in run if name in golden)):
        if len(golden[name]) != count:
            raise Difference(min(len(golden[name]), count), None, name, f"{count} prompts", len(golden[name]))


def check_whole(fixture: Fixture) -> None:
    """Raise Difference where rounds end before their outputs do, or outputs before the limit and the stop token."""
    golden, count = fixture.golden, len(fixture.golden["prompts"])
    for rounds, outputs in RUNS:
        if rounds in golden:
            for number in range(count):
                _check_run(fixture, number, rounds, outputs)
    for number, trimmed in enumerate(golden["outputs_trimmed"]):
        tokens = trim(golden["outputs"][number], fixture.limit, fixture.stop)
        dropped = trimmed[len(tokens) :]  # token recycling stops before a root that ends the text
        if fixture.name == "token-recycling" and len(dropped) == 1 and dropped[0] in fixture.stop:
            tokens = tokens + dropped
        first_difference(number, None, "outputs, trimmed", tokens, trimmed)


def _check_run(fixture: Fixture, number: int, rounds: str, outputs: str) -> None:
    """A round emits its root and what was accepted after it.

    The last next token is not emitted, except by suffix decoding, whose rounds have no root, and by DFlash where it
    ends the generation. Token recycling begins with the last token of the prompt as its root, which is no output.
    """
    found, emitted = fixture.golden[rounds][number], fixture.golden[outputs][number]
    reached = sum(one["accepted"] + 1 for one in found)
    if fixture.name == "token-recycling":
        reached -= 1
    elif fixture.name == "suffix" or (
        fixture.name == "dflash" and emitted[-1:] and emitted[-1] in fixture.stop
    ):
        reached += 1
    if reached < len(emitted):
        words = f"{len(found)} rounds, {reached} tokens"
        raise Difference(number, None, f"{rounds} (cut off?)", f"{len(emitted)} tokens", words)
