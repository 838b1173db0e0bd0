"""Medusa's typical acceptance against golden folders: whole runs at a temperature, and single decisions.

The runs are not screened for decisions that hang on float noise. Where one differs, it must be such a decision; the
rounds after it are then compared from the golden text.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
from parity_fixture import Fixture, Golden
from parity_record import Difference, Mine, first_difference
from parity_scores import TIE, overheard

from specbench.decoding.draft import Draft
from specbench.decoding.sampling import Sampling, probabilities
from specbench.decoding.static_tree import StaticTree
from specbench.decoding.tree import Tree, collate

typical = importlib.import_module("specbench.methods.medusa").typical
NOISE = 1e-6  # between two programs, of probabilities of the same logits
COMPARED = ("root", "accepted", "accepted_nodes")


def check_typical(fixture: Fixture) -> list[str]:
    """What was compared of typical acceptance, in words. Raises Difference."""
    golden, found = fixture.golden, []
    if "typical_rounds" in golden:
        counts = [_check_prompt(fixture, number) for number in range(len(golden["prompts"]))]
        found.append(f"{sum(rounds for rounds, _ in counts)} typical rounds")
        if noise := sum(close for _, close in counts):
            found.append(f"{noise} of them decided by float noise")
    if "typical_cases" in golden:
        found.append(f"{_check_cases(fixture)} typical decisions")
    return found


def _check_prompt(fixture: Fixture, number: int) -> tuple[int, int]:
    """Rounds compared, and those that differ by a decision within float noise."""
    golden, settings = fixture.golden, fixture.golden["settings"]["typical"]
    prompt, outputs = golden["prompts"][number], golden["typical_outputs"][number]
    rounds, sampling = golden["typical_rounds"][number], Sampling(settings["temperature"])
    drafter = fixture.drafter(
        posterior="typical", epsilon=settings["posterior_threshold"], alpha=settings["posterior_alpha"]
    )
    room = drafter.tree.depth + 2
    run = fixture.run(drafter, [prompt], len(outputs) + room, frozenset(), sampling)
    ours, out, noise = run.by_emitted(0), 1, 0
    for index, one in enumerate(rounds):
        mine, at = ours.get(out), out
        out += one["accepted"] + 1
        margin = float("inf")
        if noise or mine is None or _differs(mine, one):
            text = prompt + outputs[: at - 1]
            mine, margin = _round_after(fixture, drafter, text, room, sampling)
        if margin < TIE and _differs(mine, one):
            noise += 1
            continue
        for name in COMPARED:
            first_difference(number, index, f"typical {name}", getattr(mine, name), one[name])
    if not noise:
        first_difference(number, None, "typical_outputs", run.emitted[0][: len(outputs)], outputs)
    return len(rounds), noise


def _differs(mine: Mine, one: Golden) -> bool:
    return any(getattr(mine, name) != one[name] for name in COMPARED)


def _round_after(
    fixture: Fixture, drafter: Any, text: list[int], room: int, sampling: Sampling
) -> tuple[Mine, float]:
    """The round whose root is the token after `text`, and how near its nearest decision was."""
    judged: list[tuple[Tree, torch.Tensor]] = []
    judge = drafter.judge

    def overhear(tree: Tree, logits: torch.Tensor, generators: Any) -> Any:
        judged.append((tree, logits))
        return judge(tree, logits, generators)

    drafter.judge = overhear
    try:
        with overheard(drafter.heads, "logits") as heads:
            run = fixture.run(drafter, [text], room, frozenset(), sampling)
    finally:
        del drafter.judge
    (_, first), (tree, logits) = judged[:2]
    margins = [_top_gap(first, 1), _decision_gap(drafter, tree, logits, sampling)]
    margins += [_top_gap(heads[0][:, depth], ranks) for depth, ranks in _ranks(drafter.tree).items()]
    return run.by_emitted(0)[1], min(margins)


def _ranks(tree: StaticTree) -> dict[int, int]:
    """How many of each head's best guesses are drafted."""
    depths = range(tree.depth)
    return {d: 1 + max(path[-1] for path in tree.choices if len(path) == d + 1) for d in depths}


def _top_gap(logits: torch.Tensor, ranks: int) -> float:
    """The smallest gap between neighbours among the best `ranks` and the next."""
    best = logits.float().topk(min(ranks + 1, logits.shape[-1])).values
    return float((best[..., :-1] - best[..., 1:]).min())


def _decision_gap(drafter: Any, tree: Tree, logits: torch.Tensor, sampling: Sampling) -> float:
    """How near any node's probability is to its threshold."""
    p = probabilities(logits, sampling)[0]
    entropy = -(p * (p + 1e-5).log()).sum(-1)
    threshold = (drafter.alpha * (-entropy).exp()).clamp(max=drafter.epsilon)
    parents = tree.parents[0, 1:]
    own = p[parents, tree.tokens[0, 1:]]
    return float((own - threshold[parents]).abs().min())


def _check_cases(fixture: Fixture) -> int:
    """The decisions on fixed logits: all on the official code's padded candidates, and on the tree itself those that
    padding has no part in. How many there are."""
    golden, tree = fixture.golden, StaticTree([tuple(path) for path in fixture.golden["tree_choices"]])
    with np.load(fixture.folder / "typical.npz") as tensors:
        rows = torch.from_numpy(tensors["retrieve_indices"])
        for case in golden["typical_cases"]:
            number, wanted = case["case"], case["accepted_nodes"]
            nodes = torch.from_numpy(tensors[f"node_tokens_{number}"])
            logits = torch.from_numpy(tensors[f"node_logits_{number}"])
            options = Sampling(case["temperature"]), case["posterior_threshold"], case["posterior_alpha"]
            laid, at = _padded(nodes, logits, rows)
            depth = rows.shape[1] - 1
            columns = _kept(typical(laid, at, *options))
            found = [[int(rows[column // depth, column % depth + 1]) - 1 for column in columns]]
            if -2 not in wanted:
                whole = collate(nodes[:1], [Draft(nodes[1:], tree.parents)], [True], logits.shape[-1])
                found.append(_kept(typical(whole, logits[None], *options)))
            close = case.get("min_abs_p_minus_threshold", 1.0) < NOISE
            for kept in found:
                if kept != wanted and not close:
                    raise Difference(number, None, "typical case", kept, wanted)
                first_difference(number, None, "typical case, accepted", len(wanted), case["accept_length"])
    return len(golden["typical_cases"])


def _kept(verdict: Any) -> list[int]:
    """The accepted nodes, the root left out."""
    return (verdict.path[0, 1 : int(verdict.accepted) + 1] - 1).tolist()


def _padded(nodes: torch.Tensor, logits: torch.Tensor, rows: torch.Tensor) -> tuple[Tree, torch.Tensor]:
    """The official layout: a chain a leaf, short ones padded with token 0, which the last node's logits follow."""
    tokens = torch.where(rows < 0, 0, nodes[rows])[:, 1:]
    chains, depth = tokens.shape
    parents = torch.arange(chains * depth).view(chains, depth) - 1
    parents[:, 0] = -1
    tree = collate(nodes[:1], [Draft(tokens.flatten(), parents.flatten())], [True], logits.shape[-1])
    return tree, torch.cat([logits[:1], logits[rows[:, 1:]].flatten(0, 1)])[None]
