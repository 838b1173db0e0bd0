"""Golden folders of lookahead, token recycling and REST: what the official code does otherwise, done on purpose here.

The official lookahead and token recycling take the last prompt token as their first root, where our loop has it in
the prefill; lookahead credits an n-gram that matches whole one token short and teaches its pool a repeated last
token; token recycling starts from rows of zeros. Ours is put into that state from outside, and must then do the
same, round by round. REST breaks ties at random there, so its rule is said once more here, with dice: what no throw
leaves out must always have been drafted, what was ever drafted must come up, and ours must be one of the outcomes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from parity_fixture import Fixture, Golden
from parity_record import Difference, Mine, Run, first_difference, trim

from specbench.decoding.frequent_tree import frequent_tree
from specbench.decoding.sampling import Sampling
from specbench.decoding.trie import merged
from specbench.decoding.verify import Verdict, verify
from specbench.models.datastore import open_datastore

THROWS = 3000


def check_lookahead(fixture: Fixture, number: int) -> int:
    """One prompt; the number of rounds compared."""
    golden, level = fixture.golden, fixture.options["level"]
    drafter = fixture.drafter()
    first_row = list(golden["initial_rows"][number])
    drafter.first_row = lambda prompt: first_row
    _repeat_last_token(drafter)
    run = _run(fixture, drafter, number, level, most=level - 2)
    out = 1
    for index, one in enumerate(golden["rounds"][number]):
        mine = _round(run, out, number, index)
        tokens, parents = merged(one["guesses"])
        accepted = min(mine.accepted, one["accepted"]) if _ends(fixture, run, out) else mine.accepted
        for name, ours, wanted in (
            ("last_token", mine.root, one["last_token"]),
            ("window", mine.probes, [token for row in one["window"] for token in row]),
            ("guesses", (mine.tokens, mine.parents), (tokens, parents)),
            ("accepted", accepted, one["accepted"]),
            ("argmax", run.emitted[0][out], one["argmax"]),
        ):
            first_difference(number, index, name, ours, wanted)
        out += one["accepted"] + 1
    return len(golden["rounds"][number])


def _ends(fixture: Fixture, run: Run, out: int) -> bool:
    """Whether the official loop stops in the round at `out`: it then counts no further than the stop token."""
    mine = run.by_emitted(0)[out]
    return bool(fixture.stop & set(run.emitted[0][out : out + mine.accepted + 1]))


def _repeat_last_token(drafter: Any) -> None:
    """What the official pool learns of a round with several tokens: the last of them, as often."""
    observe = drafter.observe

    def observed(outcome: Any) -> None:
        observe(replace(outcome, tokens=[[new[-1]] * len(new) for new in outcome.tokens]))

    drafter.observe = observed


def check_recycling(fixture: Fixture, number: int) -> int:
    """One prompt, from an empty table and from the one the official warm run had; the number of rounds compared."""
    golden, compared = fixture.golden, 0
    width = fixture.options["k"]
    with np.load(fixture.folder / "adjacency.npz") as tables:
        before = f"warm_after_{number - 1}"
        warm = tables[before] if number else np.zeros_like(tables["warm_after_0"])
    for name, table in (("rounds", np.zeros_like(warm)), ("warm_rounds", warm)):
        drafter = fixture.drafter()
        start = torch.from_numpy(table[:, :width]).int()
        drafter.blank = lambda rows, start=start: torch.cat([start, start[:1]])[None].clone()
        _learn_from_second_pass(drafter)
        run = _run(fixture, drafter, number, drafter.tree.depth)
        out = 1
        for index, one in enumerate(golden[name][number]):
            mine = _round(run, out, number, index)
            for key, ours in (
                ("root", mine.root),
                ("draft_tokens", mine.tokens),
                ("accepted", mine.accepted),
                ("next_token", mine.next_token),
            ):
                first_difference(number, index, f"{name} {key}", ours, one[key])
            # An empty row proposes token 0 several times, and the official code may follow another twin.
            paths = [
                [mine.tokens[node] for node in nodes]
                for nodes in (mine.accepted_nodes, one["accepted_nodes"])
            ]
            first_difference(number, index, f"{name} accepted tokens", *paths)
            first_difference(number, index, "parents", mine.parents, golden["parents"])
            out += one["accepted"] + 1
        compared += len(golden[name][number])
    return compared


def _learn_from_second_pass(drafter: Any) -> None:
    """The official prefill ends before the last prompt token and teaches nothing."""
    learn = drafter.learn

    def second(*_: Any) -> None:
        drafter.learn = learn

    drafter.learn = second


def check_rest(fixture: Fixture, number: int) -> int:
    """One prompt; the number of rounds compared. Where nothing matches, the official code drafts token 100."""
    golden = fixture.golden
    prompt, rounds = golden["prompts"][number], golden["rounds"][number]
    depth = fixture.options["depth"]
    run = fixture.run(fixture.drafter(), [prompt], fixture.limit + 2 * (depth + 2), frozenset())
    _check_output(fixture, number, run.emitted[0])
    store, out = open_datastore(fixture.options["datastore"]), 1
    for index, one in enumerate(rounds):
        mine = _round(run, out, number, index)
        first_difference(number, index, "root", mine.root, one["root"])
        if one["real_match"]:
            text = prompt + run.emitted[0][:out]
            found = store.search(text, vocab=fixture.target.vocab_size, **_search_options(fixture))
            _compare_trees(
                number, index, _paths(mine.tokens, mine.parents), found, fixture.options["nodes"], one
            )
            first_difference(number, index, "accepted", mine.accepted, one["accepted"])
            first_difference(number, index, "next_token", mine.next_token, one["next_token"])
        else:
            first_difference(number, index, "draft_tokens", mine.tokens, [])
        out += one["accepted"] + 1
    return len(rounds)


def _search_options(fixture: Fixture) -> dict[str, Any]:
    return {name: fixture.options[name] for name in ("longest", "shortest", "matches", "depth")}


def check_searches(fixture: Fixture) -> int:
    """The single searches of a REST fixture; how many."""
    store, golden = open_datastore(str(fixture.folder / "cases.idx")), fixture.golden
    for number, case in enumerate(golden.get("search_cases", [])):
        if case.get("panics_in_15"):
            continue  # the official code crashes where a match has nothing after it
        query, options = case["query"], _search_options(fixture)
        options |= {"longest": len(query), "shortest": len(query), "matches": case["k"]}
        found = store.search(query, vocab=fixture.target.vocab_size, **options)
        paths = _paths(*frequent_tree(found, case["choices"])) if len(found) else []
        names = {"paths": case["node_paths"], "paths_sometimes": case["node_paths_sometimes"]}
        _compare_trees(number, None, paths, found, case["choices"], names)
    return len(golden.get("search_cases", []))


def _paths(tokens: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    paths: list[list[int]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    return paths


def _compare_trees(
    number: int, index: int | None, ours: list[list[int]], found: np.ndarray, choices: int, golden: Golden
) -> None:
    """Our nodes, and those that the official code drafted always or sometimes, against outcomes of its rule."""
    mine, always = set(map(tuple, ours)), set(map(tuple, golden["paths"]))
    ever = always | set(map(tuple, golden["paths_sometimes"]))
    dice = random.Random(0)
    possible: set[tuple[int, ...]] = set()
    needed: set[tuple[int, ...]] | None = None  # None: as far as we saw, the official code gives up
    for throw in range(THROWS):
        nodes = _official_nodes(found, choices, dice)
        possible |= nodes
        if len(nodes) <= choices:
            needed = nodes if needed is None else needed & nodes
        known = needed <= always & mine if needed is not None else throw == THROWS - 1
        if known and ever | mine <= possible:
            return
    raise Difference(number, index, "nodes", sorted(mine), f"always {sorted(always)}, ever {sorted(ever)}")


def _official_nodes(found: np.ndarray, choices: int, dice: random.Random) -> set[tuple[int, ...]]:
    """The tree of DraftRetriever/src/lib.rs as token paths, its ties broken by `dice`."""
    rows = [tuple(token for token in row if token >= 0) for row in found.tolist()]
    counts = Counter(row[:end] for row in rows for end in range(1, len(row) + 1))
    prefixes = sorted(counts, key=lambda prefix: (-counts[prefix], dice.random()))[:choices]
    varied = sorted(prefixes, key=lambda prefix: (len(set(prefix)), dice.random()))
    while sum(len(set(prefix)) for prefix in varied) > choices:
        varied.pop()
    return {prefix[:end] for prefix in varied for end in range(1, len(prefix) + 1)}


def _run(fixture: Fixture, drafter: Any, number: int, depth: int, most: int | None = None) -> Run:
    """Prompt `number`, its last token forced as the first root; at most `most` tokens are accepted a round."""
    prompt = fixture.golden["prompts"][number]
    drafter.judge = _forced(prompt[-1], most)
    run = fixture.run(drafter, [prompt[:-1]], fixture.limit + 2 * (depth + 2), frozenset())
    _check_output(fixture, number, run.emitted[0][1:])
    return run


def _forced(first: int, most: int | None) -> Any:
    """A judge that takes `first` for the prefill's token, and afterwards keeps the greedy rule, up to `most`."""
    begun = False

    def judge(tree: Any, logits: torch.Tensor, generators: Any) -> Verdict:
        nonlocal begun
        if not begun:
            begun = True
            zero = torch.zeros_like(tree.tokens)
            return Verdict(zero[:, 0], torch.full_like(zero[:, 0], first), zero)
        verdict = verify(tree, logits, Sampling(), generators)
        if most is None or int(verdict.accepted) <= most:
            return verdict
        bonus = tree.tokens[0, verdict.path[0, most + 1]]
        return Verdict(torch.full_like(verdict.accepted, most), bonus[None], verdict.path)

    return judge


def _check_output(fixture: Fixture, number: int, emitted: list[int]) -> None:
    tokens = trim(emitted, fixture.limit, fixture.stop)
    for name in ("vanilla", "outputs_trimmed"):
        first_difference(number, None, name, tokens, fixture.golden[name][number])


def _round(run: Run, out: int, number: int, index: int) -> Mine:
    mine = run.by_emitted(0).get(out)
    if mine is None:
        raise Difference(number, index, "rounds", f"none after {out} tokens", "a round")
    return mine
