"""The cascade: who is asked, what is handed on, what holds of both together, and how nested SPECs are made."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import eagle_heads as heads
import pytest
import tiny
import torch
from tiny_folder import DRAFTER, Workplace

from specbench.build import labels, make
from specbench.config import RunConfig
from specbench.decoding.draft import Draft, Drafter, Outcome, Probes
from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Request
from specbench.decoding.tree import Tree
from specbench.decoding.verify import Verdict
from specbench.errors import SpecbenchError
from specbench.measure.clock import NullClock
from specbench.models import registry
from specbench.models.target import Target
from specbench.spec import parse_spec

VOCAB = 64
Cascade = importlib.import_module("specbench.methods.cascade").Cascade
PromptLookup = importlib.import_module("specbench.methods.prompt_lookup").PromptLookup
Lookahead = importlib.import_module("specbench.methods.lookahead").Lookahead
Eagle2 = importlib.import_module("specbench.methods.eagle2").Eagle2
Eagle3 = importlib.import_module("specbench.methods.eagle3").Eagle3
CONFIG = RunConfig("t", (), ("x",))


class Part(Drafter):
    """Proposes what it is told to, a list a row, and takes down what it hears."""

    def __init__(self, *drafts: Draft, **attributes: Any) -> None:
        super().__init__(None)
        self.drafts, self.heard = drafts, []
        for name, value in attributes.items():
            setattr(self, name, value)

    def begin(self, prompts: list[list[int]]) -> None:
        self.heard.append(("begin", prompts))

    def observe(self, outcome: Outcome) -> None:
        self.heard.append(("observe", outcome))

    def forget(self) -> None:
        self.heard.append(("forget",))

    def release(self) -> None:
        self.heard.append(("release",))

    def propose(self, budgets: list[int], generators: object) -> list[Draft]:
        self.heard.append(("propose", list(budgets)))
        return [
            draft if budget >= max(1, len(draft)) else Draft()
            for draft, budget in zip(self.drafts, budgets, strict=True)
        ]


def generate(target: Target, drafter: Drafter, request: Request) -> list[list[int]]:
    rounds = list(DraftVerify(target, drafter).generate(request, NullClock()))
    return [[t for one in rounds for t in one.tokens[row]] for row in range(len(request.prompts))]


def test_the_second_is_asked_where_the_first_has_nothing() -> None:
    first = Part(Draft([1]), Draft(), Draft([3]), Draft())
    then = Part(Draft([5]), Draft([6, 7], [-1, -1]), Draft([8]), Draft())
    drafter = Cascade(None, first=first, then=then)
    drafts = drafter.propose([4, 5, 0, 6], None)
    assert [list(draft.tokens) for draft in drafts] == [[1], [6, 7], [], []]
    assert drafts[1].parents == [-1, -1]
    assert first.heard == [("propose", [4, 5, 0, 6])]
    assert then.heard == [("propose", [0, 5, 0, 6])]
    drafter.propose([4, 0, 0, 0], None)
    assert then.heard[-1] == ("propose", [0, 0, 0, 0]), "it hears of rounds in which it has nothing to do"


def test_both_hear_everything() -> None:
    first, then = Part(), Part()
    drafter, outcome = Cascade(None, first=first, then=then), SimpleNamespace()
    drafter.request = request = Request([[1]], 5)
    drafter.answer = [[2]]
    drafter.begin([[1]])
    drafter.observe(outcome)
    drafter.forget()
    drafter.release()
    assert first.heard == then.heard == [("begin", [[1]]), ("observe", outcome), ("forget",), ("release",)]
    for part in (drafter, first, then):
        assert part.request is request
        assert part.answer == [[2]]


def test_what_holds_of_both_together() -> None:
    first = Part(
        max_nodes=3,
        taps=("final", "embed"),
        weights_bytes=lambda: 5,
        kv_bytes=lambda: 7,
        graph_bytes=lambda: 9,
    )
    then = Part(
        max_nodes=60,
        taps=("layer:1", "final"),
        weights_bytes=lambda: 2,
        kv_bytes=lambda: 1,
        graph_bytes=lambda: 4,
    )
    drafter = Cascade(None, first=first, then=then)
    assert drafter.taps == ("final", "embed", "layer:1")
    assert drafter.max_nodes == 63, "one's probes may ride beside the other's draft"
    assert (drafter.weights_bytes(), drafter.kv_bytes(), drafter.graph_bytes()) == (7, 8, 13)
    assert (drafter.lossless, drafter.warm, drafter.wants_answer, drafter.draft_identity()) == (
        True,
        False,
        False,
        None,
    )
    for change in ({"lossless": False}, {"warm": True}, {"wants_answer": True}):
        for parts in ((Part(**change), Part()), (Part(), Part(**change))):
            drafter = Cascade(None, first=parts[0], then=parts[1])
            (name, value), = change.items()  # fmt: skip
            assert getattr(drafter, name) == value


def test_the_identity_is_that_of_the_one_that_has_one_or_of_both() -> None:
    one, other = {"name": "a", "ref": "org/a"}, {"name": "b"}
    named = [Part(draft_identity=lambda identity=identity: identity) for identity in (one, other, None)]
    assert Cascade(None, first=named[2], then=named[1]).draft_identity() == other
    both = Cascade(None, first=named[0], then=named[1]).draft_identity()
    assert both == {"name": "a + b", "parts": [one, other]}


class Keen(Part):
    """A rule of its own: everything is accepted, and 9 follows."""

    lossless = False

    def judge(self, tree: Tree, logits: torch.Tensor, generators: object) -> Verdict:
        accepted = torch.tensor(tree.drafted)
        columns = torch.arange(tree.tokens.shape[1]).expand_as(tree.tokens)
        return Verdict(accepted, torch.full_like(accepted, 9), columns)


def test_each_row_is_judged_by_the_rule_of_its_drafter() -> None:
    target, prompts = tiny.llama(VOCAB), tiny.prompts(3, VOCAB, seed=4)
    plain = [generate(target, Drafter(target), Request([prompt], 7))[0] for prompt in prompts]
    keen = Keen(Draft(), Draft([1, 2]), Draft(), max_nodes=2)
    first = Part(Draft([60]), Draft(), Draft(), max_nodes=1)
    drafter = Cascade(target, first=first, then=keen)
    outputs = generate(target, drafter, Request(prompts, 7))
    assert (outputs[0], outputs[2]) == (plain[0], plain[2]), (
        "the lossless rules, drafted by the first or by none"
    )
    assert outputs[1] == [plain[1][0], 1, 2, 9, 1, 2, 9], (
        "its own rule, but the prefill's token is the target's"
    )
    assert not drafter.lossless


def test_probes_of_the_first_ride_beside_the_draft_of_the_second() -> None:
    visible = torch.tensor([[True, True, False], [True, True, True]])
    first = Part(Draft(probes=Probes([8, 9], [1, 2], visible)))
    (draft,) = Cascade(None, first=first, then=Part(Draft([4, 5]))).propose([3], None)
    assert draft.tokens == [4, 5]
    assert draft.probes.visible.tolist() == [
        [True, False, False, True, False],
        [True, False, False, True, True],
    ]
    with pytest.raises(ValueError, match="only one"):
        Cascade(None, first=first, then=Part(Draft([1], probes=first.drafts[0].probes))).propose([3], None)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", ["lookup, eagle3", "eagle3, eagle2", "lookahead, eagle3"])
def test_output_is_the_targets_own_and_both_draft(name: str, rows: int) -> None:
    target = tiny.llama(VOCAB, layers=8)
    eagle3 = Eagle3(target, draft=heads.eagle3(target), total_token=9, depth=2, top_k=3)
    first, then = {
        "lookup, eagle3": (PromptLookup(target, k=4, ngram=2), eagle3),
        "eagle3, eagle2": (
            eagle3,
            Eagle2(target, draft=heads.eagle1(target), total_token=9, depth=2, top_k=3),
        ),
        "lookahead, eagle3": (Lookahead(target, level=4, window=3, guess=2), eagle3),
    }[name]
    authors: list[Any] = []
    drafter = Cascade(target, first=first, then=then)
    propose = drafter.propose
    drafter.propose = lambda *args: (propose(*args), authors.extend(drafter.authors))[0]
    request = Request(tiny.prompts(rows, VOCAB, seed=3), 30)
    assert generate(target, drafter, request) == generate(target, Drafter(target), request)
    assert first in authors
    assert then in authors or name.startswith("eagle3")


# -- nested SPECs --------------------------------------------------------------------------------------------

WITH_DRAFT = (
    DRAFTER
    + """
class Mine(Drafter):
    def __init__(self, target, *, draft: str | None = None, k: int = 1):
        super().__init__(target)
        self.draft, self.k = draft, k
"""
)


@pytest.fixture
def mine(tmp_path: Path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(WITH_DRAFT)
    return f"{file}::Mine"


def test_nested_methods_get_their_draft_as_they_do_alone(mine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = SimpleNamespace(id="registered")
    monkeypatch.setattr(registry, "drafts_for", lambda ref, method: (known,) if method == mine else ())
    target = tiny.llama(VOCAB)
    for spec, config, drafts in (
        (mine, CONFIG, ["registered"]),
        (mine, RunConfig("t", (), ("x",), draft="ours"), ["ours"]),
        (mine + ":draft=own", CONFIG, ["own"]),
        (f"cascade:first=(prompt-lookup),then=({mine})", CONFIG, ["registered"]),
        (f"cascade:first=({mine}:draft=own),then=({mine}:k=2)", CONFIG, ["own", "registered"]),
        (f"cascade:first=(sam:fallback=({mine}:k=2)),then=({mine}:draft=own)", CONFIG, ["registered", "own"]),
    ):
        assert [part.draft for part in leaves(make(parse_spec(spec), target, config))] == drafts, spec


def leaves(drafter: Any) -> list[Any]:
    found = [leaf for part in getattr(drafter, "parts", ()) for leaf in leaves(part)]
    return found or ([drafter] if hasattr(drafter, "draft") else [])


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("cascade:first=(prompt-lookup),then=(nothing)", "unknown method 'nothing'"),
        ("cascade:first=(prompt-lookup:kk=1),then=(suffix)", "prompt-lookup has no option 'kk'"),
        ("cascade:first=prompt-lookup,then=(suffix)", "first=prompt-lookup of cascade is not a SPEC in parentheses$"),
        ("sam:fallback=(cascade:first=(suffix:k=x),then=(suffix))", "k=x of suffix is not a whole number"),
    ],
)  # fmt: skip
def test_nested_mistakes_are_found_before_anything_is_loaded(spec: str, said: str) -> None:
    with pytest.raises(SpecbenchError, match=said):
        labels([spec])


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("cascade:first=(prompt-lookup)", "cascade needs two methods"),
        ("cascade:first=(hf-generate),then=(suffix)", "cascade: hf-generate is no drafter"),
        ("cascade:first=(suffix:k=0),then=(suffix)", "suffix:k=0: k must be at least 1"),
        ("cascade:first=(suffix),then=(draft-model)", "draft-model needs a draft model"),
        ("cascade:first=(lookahead),then=(lookahead)", "only one of a cascade's methods can be lookahead"),
        ("cascade:first=(lookahead),then=(sam:fallback=(lookahead))", "only one of a cascade's methods"),
        ("lookahead:guess=1000000", "lookahead:guess=1000000: a draft of up to 4000027 nodes is too large"),
        ("lookahead:level=2000000000", "is too large, 1024 is the most"),
        ("suffix:k=1000000", "a draft of up to 1000000 nodes is too large, 1024 is the most"),
        ("sam:k=1025", "a draft of up to 1025 nodes"),
        ("prompt-lookup:k=1000000", "a draft of up to 1000000 nodes"),
        ("cascade:first=(suffix:k=1025),then=(suffix)", "^suffix:k=1025: a draft of up to 1025 nodes"),
    ],
)
def test_what_cannot_be_made(spec: str, said: str) -> None:
    with pytest.raises(SpecbenchError, match=said):
        make(parse_spec(spec), tiny.llama(VOCAB), CONFIG)


def test_in_a_run(fresh: Workplace) -> None:
    oracle = "cascade:first=(prompt-lookup:ngram=2),then=(oracle:k=3,rate=1)"
    warm = "cascade:first=(suffix:warm=true),then=(token-recycling)"
    result = fresh.run("--method", oracle, "--method", warm, "--json")
    assert result.code == 0, result.err
    rows = {row["method"]: row for row in json.loads(result.out)["rows"] if row["task"] == "overall"}
    assert rows[oracle]["tau"]["point"] > 2, "the oracle was told the answer"
    assert [rows[method]["state"] for method in (oracle, warm)] == ["cold", "warm"]
    for method in (oracle, warm):
        assert rows[method]["identical"] == rows[method]["compared"] > 0
    refused = fresh.run("--method", oracle, "--temperature", 1, name="sampled")
    assert refused.code == 2
    assert "greedy answer only" in refused.err
