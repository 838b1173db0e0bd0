"""A draft of another kind, given to each method that takes one: one line that says what it is and what runs it."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from layouts import KNOWN, folder

from specbench.errors import SpecbenchError
from specbench.models.detect import KINDS
from specbench.spec import find_method

TAKES = {
    "eagle": ("eagle", "eagle3"),
    "eagle1": ("eagle",),
    "eagle2": ("eagle",),
    "eagle3": ("eagle3",),
    "medusa": ("medusa", "medusa-2"),
    "hydra": ("hydra",),
    "dflash": ("dflash", "dspark"),
    "mtp": ("mtp",),
    "pard": ("pard",),
    "draft-model": ("causal-lm", "mtp", "pard", "medusa-2"),
    "hf-assisted": ("causal-lm", "mtp", "pard", "medusa-2"),
}
LAYOUTS = {kind: (config, shapes) for config, shapes, kind, _ in KNOWN.values()}


@pytest.mark.parametrize("method", TAKES)
def test_every_other_kind_is_named(tmp_path: Path, method: str) -> None:
    target = tiny.llama(32, hidden=8)
    for number, (kind, (config, shapes)) in enumerate(LAYOUTS.items()):
        if kind in TAKES[method]:
            continue
        ref = folder(tmp_path / str(number), config, shapes)
        with pytest.raises(SpecbenchError) as caught:
            find_method(method)(target, draft=ref)
        assert caught.value.message.startswith(f"{ref} is {KINDS[kind].words}, not "), (method, kind)
