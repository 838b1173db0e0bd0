"""Golden folders made here, of random weights, as if what ours does were golden; and changed copies of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import parity
import pytest
import tiny
import torch
from parity_fixture import read
from safetensors.torch import save_file

from specbench.decoding.static_tree import named

OFFICIAL = Path(__file__).resolve().parents[2] / "shared" / "parity"
VOCAB, NEW, HIDDEN, STOP = 64, 14, 32, 7

Change = Callable[[dict[str, Any]], None]


def save_target(path: Path) -> None:
    target = tiny.llama(VOCAB, seed=1)
    target.model.save_pretrained(path)


def blank(method: str, **settings: Any) -> dict[str, Any]:
    """A golden file with nothing golden in it yet: just enough to run ours."""
    prompts = tiny.prompts(2, VOCAB, seed=3)
    given = {"max_new_tokens": NEW, "eos_token_id": STOP, **settings}
    empty: list[list[Any]] = [[], []]
    rest = dict.fromkeys(("outputs", "outputs_trimmed", "vanilla", "rounds"), empty)
    return {"method": method, "settings": given, "prompts": prompts, **rest}


def write(folder: Path, golden: dict[str, Any]) -> None:
    (folder / "golden.json").write_text(json.dumps(golden), encoding="utf-8")


def medusa_folder(folder: Path) -> Path:
    """A golden folder of four random Medusa heads."""
    tree = named("mc_sim_7b_63")
    save_target(folder / "target")
    generator = torch.Generator().manual_seed(0)
    heads = {"0.linear.weight": (HIDDEN, HIDDEN), "0.linear.bias": (HIDDEN,), "1.weight": (VOCAB, HIDDEN)}
    state = {
        f"{head}.{key}": torch.randn(shape, generator=generator)
        for head in range(4)
        for key, shape in heads.items()
    }
    (folder / "draft").mkdir()
    save_file(state, folder / "draft" / "medusa_lm_head.safetensors")
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1}
    (folder / "draft" / "config.json").write_text(json.dumps(config))
    golden = blank("medusa-1", tensors_prompt_index=1)
    golden |= {"tree_choices": tree.choices, "parents": tree.parents, "margins": [{"draft_rank_gap": 1}] * 2}
    write(folder, golden)
    fill(folder)
    return folder


def fill(folder: Path) -> None:
    """Write down what ours does as golden, official overshoot included."""
    fixture = read(folder)
    golden, drafter = fixture.golden, fixture.drafter()
    golden |= {"rounds": [], "outputs": [], "outputs_trimmed": [], "vanilla": []}
    for prompt in golden["prompts"]:
        run = fixture.run(drafter, [prompt], NEW + 20, frozenset())
        out = run.emitted[0]
        golden["rounds"].append(
            [
                {
                    "context_len": len(prompt) + before,
                    "root": mine.root,
                    "draft_tokens": mine.tokens,
                    "accepted": mine.accepted,
                    "accepted_nodes": mine.accepted_nodes,
                    "next_token": mine.next_token,
                }
                for before, mine in run.by_emitted(0).items()
                if before <= NEW
            ]
        )
        emitted = sum(one["accepted"] + 1 for one in golden["rounds"][-1])
        golden["outputs"].append(out[:emitted])
        end = out.index(STOP) + 1 if STOP in out else NEW
        golden["vanilla"].append(out[: min(NEW, end)])
        golden["outputs_trimmed"].append(out[: min(NEW, end)])
    write(folder, golden)


def changed(folder: Path, tmp_path: Path, change: Change) -> Path:
    """The folder with another golden.json."""
    made = tmp_path / "changed"
    made.mkdir()
    for part in ("target", "draft"):
        if (folder / part).exists():
            (made / part).symlink_to(folder / part)
    golden = json.loads((folder / "golden.json").read_text(encoding="utf-8"))
    change(golden)
    write(made, golden)
    return made


def run(*folders: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    threads, gradients = torch.get_num_threads(), torch.is_grad_enabled()
    try:
        code = parity.main([str(folder) for folder in folders])
    finally:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(gradients)
    return code, capsys.readouterr().out.splitlines()
