"""Golden folders of suffix decoding and SAM decoding: what the official code does otherwise, done on purpose here.

Suffix decoding's operation logs drive the trees alone, and every draft must be the same one, ties included. Its
warm run ends where the fixture's outputs do, so ours must not learn from what it generates beyond.

The official SAM decoding fills its drafts up with token 0, teaches its fallback every token of the prompt and never
resets it, and draws its first table from zeros. Ours is put into that state from outside, and must then do the same,
round by round. What the fallback's table ranks was not screened for ties.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import tiny_datastore
import torch
from parity_fixture import METHODS, Fixture, Golden
from parity_record import Difference, first_difference, trim
from parity_scores import NodeScores

from specbench.decoding.answers import Answers
from specbench.decoding.draft import Draft
from specbench.decoding.static_tree import StaticTree
from specbench.decoding.suffix_tree import Rule, Speculation, SuffixTree, Text

NEVER = 10**6  # a budget that cuts nothing
_, suffix_options = METHODS["suffixdecoding"]


def check_suffix(fixture: Fixture) -> tuple[int, int]:
    """All prompts, cold and warm; the number of rounds compared, and 0 ties."""
    compared = 0
    for name, outputs, kind in (("rounds", "outputs", "cold"), ("warm_rounds", "warm_outputs", "warm")):
        if name in fixture.golden:
            options = suffix_options(fixture.golden["settings"][kind])
            drafter = fixture.drafter(**options, warm=kind == "warm")
            for number, rounds in enumerate(fixture.golden[name]):
                compared += _check_suffix_run(
                    fixture, drafter, number, rounds, fixture.golden[outputs][number]
                )
    return compared, 0


def _check_suffix_run(
    fixture: Fixture, drafter: Any, number: int, rounds: list[Golden], outputs: list[int]
) -> int:
    _learn_no_more_than(drafter, len(outputs))
    run = fixture.run(
        drafter, [fixture.golden["prompts"][number]], len(outputs) + 2 * drafter.max_nodes, frozenset()
    )
    first_difference(number, None, "outputs", run.emitted[0][: len(outputs)], outputs)
    _check_trimmed(fixture, number, run.emitted[0])
    out = 1
    for index, one in enumerate(rounds):
        mine = run.by_emitted(0).get(out)
        if mine is None:
            raise Difference(number, index, "rounds", f"none after {out} tokens", "a round")
        for key, ours in (
            ("draft_tokens", mine.tokens),
            ("parents", mine.parents),
            ("accepted", mine.accepted),
            ("accepted_nodes", mine.accepted_nodes),
            ("next_token", mine.next_token),
        ):
            first_difference(number, index, key, ours, one[key])
        out += one["accepted"] + 1
    return len(rounds)


def _check_trimmed(fixture: Fixture, number: int, emitted: list[int]) -> None:
    tokens = trim(emitted, fixture.limit, fixture.stop)
    for name in ("vanilla", "outputs_trimmed"):
        first_difference(number, None, name, tokens, fixture.golden[name][number])


def _learn_no_more_than(drafter: Any, tokens: int) -> None:
    observe = drafter.observe

    def observed(outcome: Any) -> None:
        nonlocal tokens
        (new,) = outcome.tokens
        observe(replace(outcome, tokens=[new[:tokens]]))
        tokens -= len(new[:tokens])

    drafter.observe = observed


def check_operations(fixture: Fixture) -> int:
    """The operation logs of a suffix-decoding fixture; how many drafts were compared."""
    logs = fixture.golden.get("operation_logs", [])
    return sum(_Operations(number, log).replay() for number, log in enumerate(logs))


class _Operations:
    """The trees of one operation log: of each active request its own, and one of the answers."""

    def __init__(self, number: int, log: Golden) -> None:
        self.number, self.log, self.depth = number, log, log["max_tree_depth"]
        most = log["max_cached_requests"]
        self.answers = Answers(self.depth, NEVER if most < 0 else most)
        self.active: dict[int, tuple[SuffixTree, Text]] = {}
        self.answer: dict[int, Text] = {}

    def replay(self) -> int:
        drafts = 0
        for index, one in enumerate(self.log["ops"]):
            operation, request = one["op"], one.get("req")
            if operation == "start_request":
                self.active[request] = SuffixTree(self.depth), Text()
                self.answer[request] = self.answers.start()
                self.append(self.active[request], one["prompt"])
            elif operation == "add_active_response":
                self.append(self.active[request], one["tokens"])
                self.append((self.answers.tree, self.answer[request]), one["tokens"])
            elif operation == "stop_request":
                del self.active[request]
            elif operation == "state":
                kept = [request for request, text in self.answer.items() if not text.removed]
                first_difference(
                    self.number, index, "active requests", list(self.active), one["active_requests"]
                )
                first_difference(self.number, index, "cached requests", kept, one["cached_requests"])
            else:
                self.compare(index, self.speculate(one), one["result"])
                drafts += 1
        return drafts

    def append(self, where: tuple[SuffixTree, Text], tokens: list[int]) -> None:
        tree, text = where
        tree.append(text, tokens)

    def speculate(self, one: Golden) -> Speculation:
        rule = Rule(
            one["max_spec_tokens"], one["max_spec_factor"], one["max_spec_offset"],
            one["min_token_prob"], one["use_tree_spec"],
        )  # fmt: skip
        trees = self.active[one["req"]][0], self.answers.tree
        own, others = (tree.speculate(one["context"], rule, NEVER) for tree in trees)
        return own if own.score >= others.score else others

    def compare(self, index: int, ours: Speculation, golden: Golden) -> None:
        for name, mine, wanted in (
            ("token_ids", ours.tokens, golden["token_ids"]),
            ("parents", ours.parents, golden["parents"]),
            ("match_len", ours.match, golden["match_len"]),
            ("probs", _rounded(ours.probs), _rounded(golden["probs"])),
            ("score", _rounded([ours.score]), _rounded([golden["score"]])),
        ):
            first_difference(self.number, index, name, mine, wanted)


def _rounded(values: list[Any]) -> list[str]:
    return [f"{float(value):.5f}" for value in values]


def check_sam(fixture: Fixture) -> tuple[int, int]:
    """All prompts in order, with one fallback; rounds compared, and rounds that differ at ties of its table."""
    official = _Official(fixture)
    compared = ties = 0
    for number, rounds in enumerate(fixture.golden["rounds"]):
        found, tied = official.check(number, rounds)
        compared, ties = compared + found, ties + tied
    return compared, ties


class _Official:
    """Ours made to do what the official code does where it differs."""

    def __init__(self, fixture: Fixture) -> None:
        self.fixture = fixture
        golden, target = fixture.golden, fixture.target
        self.fallback = fixture.drafter().parts[0]
        self.fallback.warm = True
        self.fallback.tree = _tree(golden["tree_adjacency"])
        self.fallback.blank = lambda rows: torch.zeros(
            rows, target.vocab_size + 1, self.fallback.k, dtype=torch.int32
        )
        self.learn = self.fallback.learn
        self.scores: dict[int, torch.Tensor] = {}  # the logits that each row of the table was made of
        eos = golden["settings"]["eos_token_id"]
        entries = [entry if entry[-1] == eos else [*entry, eos] for entry in golden.get("static_entries", [])]
        self.corpus = (
            tiny_datastore.store([token for entry in entries for token in entry]) if entries else None
        )

    def check(self, number: int, rounds: list[Golden]) -> tuple[int, int]:
        fixture, prompt = self.fixture, self.fixture.golden["prompts"][number]
        drafter = fixture.drafter(fallback=self.fallback, corpus=self.corpus)
        self._learn_of_all(prompt, 1 + len(rounds))
        scores: list[NodeScores] = []  # by round
        _fill_up(drafter, lambda: scores.append(self._scores()))
        run = fixture.run(drafter, [prompt], fixture.limit + 2 * (drafter.max_nodes + 2), frozenset())
        _check_trimmed(fixture, number, run.emitted[0])
        out, ties = 1, 0
        for index, one in enumerate(rounds):
            mine = run.by_emitted(0).get(out)
            if mine is None and not ties:
                raise Difference(number, index, "rounds", f"none after {out} tokens", "a round")
            if mine is not None and one["type"] == "tree":
                mine.scores = scores[list(run.by_emitted(0)).index(out)]
            out += one["accepted"] + 1
            if mine is None or mine.tied_with(one["draft_tokens"]):
                ties += 1
                continue
            parents = self.fallback.tree.parents if one["type"] == "tree" else list(range(-1, drafter.k - 1))
            paths = [[mine.tokens[node] for node in mine.accepted_nodes]]
            for key, ours, wanted in (
                ("root", mine.root, one["root"]),
                ("draft_tokens", mine.tokens, one["draft_tokens"]),
                ("parents", mine.parents, parents),
                ("accepted", mine.accepted, one["accepted"]),
                ("next_token", mine.next_token, one["next_token"]),
                ("accepted tokens", paths[0], [one["draft_tokens"][node] for node in one["accepted_nodes"]]),
            ):
                first_difference(number, index, key, ours, wanted)
        return len(rounds), ties

    def _learn_of_all(self, prompt: list[int], passes: int) -> None:
        """The fallback learns of every token of the prompt, and of no more passes than the official run had."""
        target = self.fixture.target

        def learn(tokens: torch.Tensor, live: torch.Tensor, logits: torch.Tensor) -> None:
            nonlocal passes
            if passes == whole:
                tokens = torch.tensor([prompt])
                live = torch.ones_like(tokens, dtype=torch.bool)
                with target.stock_attention():
                    logits = target.model(tokens).logits
            if passes > 0:
                self.learn(tokens, live, logits)
                self.scores |= dict(zip(tokens[0].tolist(), logits[0], strict=True))
            passes -= 1

        whole, self.fallback.learn = passes, learn

    def _scores(self) -> NodeScores:
        """What the next tree's nodes are chosen by; after tokens that the table does not know nothing is tied."""
        unknown = torch.arange(self.fixture.target.vocab_size).float()
        tree, (root,) = self.fallback.tree, self.fallback._last
        tokens = [int(token) for token in self.fallback.propose([NEVER], None)[0].tokens]
        above = [tokens[parent] if parent >= 0 else root for parent in tree.parents]
        return NodeScores(torch.stack([self.scores.get(token, unknown) for token in above]), follow=True)


def _tree(adjacency: list[list[int]]) -> StaticTree:
    paths: list[tuple[int, ...]] = [()] * len(adjacency)
    for node, children in enumerate(adjacency):
        for rank, child in enumerate(children):
            paths[child] = (*paths[node], rank)
    return StaticTree(paths[1:])


def _fill_up(drafter: Any, before: Callable[[], None]) -> None:
    """Chains as long as the official ones, with token 0 where nothing is left to copy; `before` is called first."""
    propose: Callable[..., list[Draft]] = drafter.propose

    def filled(budgets: list[int], generators: Any) -> list[Draft]:
        before()
        return [
            Draft([*draft.tokens, *[0] * (min(drafter.k, budget) - len(draft))]) if _copied(draft) else draft
            for draft, budget in zip(propose(budgets, generators), budgets, strict=True)
        ]

    drafter.propose = filled


def _copied(draft: Draft) -> bool:
    return len(draft) > 0 and draft.parents is None
