"""`k=auto`: the k of the closed form, near the best fixed k on a simulated machine, from costs that are kept."""

from __future__ import annotations

import importlib
import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from test_self_speculation import idle

from specbench.analysis.closed_form import LONGEST as CLOSED_FORM_LONGEST
from specbench.analysis.closed_form import speedup
from specbench.build import Named
from specbench.config import RunConfig
from specbench.decoding.draft import Draft, Drafter
from specbench.decoding.draft_length import (
    LONGEST,
    AdaptiveLength,
    DraftLength,
    HeuristicLength,
    draft_length,
    interpolated,
)
from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Request
from specbench.decoding.rehearsal import adaptive_parts, rehearse
from specbench.decoding.sampling import Sampling
from specbench.draft_costs import learn_costs
from specbench.errors import SpecbenchError
from specbench.manifest import FIXED, resumed
from specbench.measure.clock import Clock, HostStamps, NullClock
from specbench.measure.cpu import CpuProbe
from specbench.models.target import Target
from specbench.spec import Spec, convert_options, parse_spec

PromptLookup = importlib.import_module("specbench.methods.prompt_lookup").PromptLookup
DraftModel = importlib.import_module("specbench.methods.draft_model").DraftModel
SelfSpeculation = importlib.import_module("specbench.methods.self_speculation").SelfSpeculation
Cascade = importlib.import_module("specbench.methods.cascade").Cascade

# Rounds in units of a vanilla round: verification as it was measured on a CPU, and drafts that cost c a token.
VERIFY = {1: 1.1, 3: 1.2, 7: 1.4, 15: 1.9, 16: 1.95}


def costs(c: float) -> dict[int, float]:
    return {k: seconds + c * k for k, seconds in enumerate(interpolated(VERIFY, LONGEST), start=1)}


def adaptive(c: float = 0.0, rows: int = 1) -> AdaptiveLength:
    length = AdaptiveLength()
    length.costs[rows] = costs(c)
    length.begin(rows)
    return length


def play(length: DraftLength, *outcomes: tuple[int, int]) -> None:
    """A round: what each row proposed and had accepted."""
    length.wanted([LONGEST] * len(outcomes))
    length.proposed([Draft([0] * drafted) for drafted, _ in outcomes])
    length.observe(SimpleNamespace(accepted=[accepted for _, accepted in outcomes]))


# -- the rule ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("c", [0.02, 0.1, 0.4])
@pytest.mark.parametrize("chance", [0.3, 0.6, 0.8, 0.95])
def test_it_is_the_closed_form_where_verifying_costs_the_same_at_any_length(chance: float, c: float) -> None:
    length = AdaptiveLength()
    length.costs[1] = {k: c * k + 1 for k in range(1, LONGEST + 1)}
    length.begin(1)
    expected = [speedup(chance, k, c) for k in range(1, CLOSED_FORM_LONGEST + 1)]
    assert length._rates(chance) == pytest.approx(expected)


def simulate(length: DraftLength, c: float, chance: float, new: int, questions: int) -> float:
    """Tokens a vanilla round's time, with tokens accepted independently of each other."""
    dice, cost = random.Random(1), costs(c)
    tokens = seconds = 0.0
    for _ in range(questions):
        length.begin(1)
        left = new
        while left > 1:
            (k,) = length.wanted([left - 1])
            accepted = next((i for i in range(k) if dice.random() >= chance), k)
            length.proposed([Draft([0] * k)])
            length.observe(SimpleNamespace(accepted=[accepted]))
            tokens, seconds, left = tokens + accepted + 1, seconds + cost[k], left - accepted - 1
    return tokens / seconds


@pytest.mark.parametrize(("new", "share"), [(48, 0.92), (400, 0.97)])
@pytest.mark.parametrize("c", [0.0, 0.1, 0.3, 0.9])
@pytest.mark.parametrize("chance", [0.2, 0.5, 0.7, 0.85, 0.95])
def test_it_comes_near_the_best_fixed_k(c: float, chance: float, new: int, share: float) -> None:
    questions = 12_000 // new
    auto = AdaptiveLength()
    auto.costs[1] = costs(c)
    fixed = [simulate(DraftLength(k), c, chance, new, questions) for k in (1, 2, 3, 4, 6, 8, 12, 16)]
    assert simulate(auto, c, chance, new, questions) > share * max(fixed)


def test_a_question_begins_without_what_the_last_one_taught() -> None:
    length = adaptive(0.1)
    first = length.lengths
    for _ in range(10):
        play(length, (4, 0))
    assert length.lengths == [1] != first
    length.begin(1)
    fresh = adaptive(0.1)
    for outcome in ((first[0], first[0]), (4, 4), (6, 2)):
        assert length.lengths == fresh.lengths
        play(length, outcome)
        play(fresh, outcome)
    assert length.lengths == fresh.lengths


def test_rows_have_lengths_of_their_own() -> None:
    length = adaptive(0.1, rows=2)
    for _ in range(10):
        play(length, (4, 4), (4, 0))
    good, poor = length.lengths
    assert good > 8
    assert poor == 1
    assert length.wanted([3, 0]) == [3, 0]


def test_only_own_proposals_count() -> None:
    length = adaptive(0.1)
    play(length, (4, 4))
    first = length.lengths
    for accepted in (0, 0, 0, 5):
        length.wanted([9])  # asked, but another drafter's draft was taken
        length.observe(SimpleNamespace(accepted=[accepted]))
    assert length.lengths == first


def test_a_slightly_better_length_is_not_worth_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    length = adaptive(0.1)
    monkeypatch.setattr(length, "_rates", lambda chance: [1.0] * 4 + [1.009] + [1.0] * 11)
    length._lengths = [3]
    play(length, (3, 3))
    assert length.lengths == [3]
    monkeypatch.setattr(length, "_rates", lambda chance: [1.0] * 4 + [1.011] + [1.0] * 11)
    play(length, (3, 3))
    assert length.lengths == [5]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(1, 40),
    st.dictionaries(st.integers(1, 16), st.floats(1e-6, 1e3), min_size=1),
    st.lists(st.tuples(st.integers(0, 16), st.integers(0, 16)), max_size=40),
)
def test_lengths_stay_within_bounds(
    longest: int, seconds: dict[int, float], rounds: list[tuple[int, int]]
) -> None:
    length = AdaptiveLength(longest)
    length.costs[1] = seconds
    length.begin(1)
    for outcome in rounds:
        assert 1 <= length.lengths[0] <= min(longest, LONGEST) == length.longest
        play(length, outcome)
    assert max(length.ladder) == length.longest


def test_costs_between_measured_lengths_are_on_the_line() -> None:
    assert interpolated({2: 1.0, 4: 3.0}, 6) == [1.0, 1.0, 2.0, 3.0, 3.0, 3.0]


def test_heuristic_lengths() -> None:
    length = HeuristicLength(2)
    length.begin(1)
    seen = [length.lengths[0]]
    for outcome in ((2, 2), (4, 4), (6, 1), (5, 0), (0, 0)):
        play(length, outcome)
        seen.append(length.lengths[0])
    assert seen == [2, 4, 6, 5, 4, 4]
    assert length.longest == 32


def test_options() -> None:
    assert isinstance(draft_length("auto"), AdaptiveLength)
    assert draft_length("auto", longest=7).longest == 7
    assert draft_length(30).longest == 30
    with pytest.raises(ValueError, match="k must be at least 1"):
        draft_length(0)
    with pytest.raises(ValueError, match="exclude each other"):
        DraftModel(tiny.llama(), draft=tiny.llama(), k="auto", schedule="heuristic")


def test_k_on_the_command_line() -> None:
    assert convert_options(PromptLookup, parse_spec("prompt-lookup:k=auto")) == {"k": "auto"}
    assert convert_options(PromptLookup, parse_spec("prompt-lookup:k=3")) == {"k": 3}
    with pytest.raises(SpecbenchError, match="k=fast of prompt-lookup is not a whole number or auto"):
        convert_options(PromptLookup, parse_spec("prompt-lookup:k=fast"))


# -- costs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama() -> Target:
    return tiny.llama(layers=3)


DRAFTERS: dict[str, Callable[[Target], Any]] = {
    "prompt-lookup": lambda target: PromptLookup(target, k="auto"),
    "draft-model": lambda target: DraftModel(target, draft=tiny.llama(seed=4), k="auto"),
    "self-speculation": lambda target: SelfSpeculation(target, search=True, k="auto"),
}


class Passes(HostStamps):
    """Time is counted in tokens that went through the target."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.spent = 0.0
        self.widths: list[int] = []
        self.handle = target.model.register_forward_pre_hook(self._spend, with_kwargs=True)

    def _spend(self, model: object, args: object, kwargs: dict[str, Any]) -> None:
        self.widths.append(kwargs["input_ids"].shape[1])
        self.spent += self.widths[-1]

    def now(self) -> float:  # type: ignore[override]
        return self.spent


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("accepted", ["little", "everything"])
def test_costs_are_of_rounds_of_each_length(
    llama: Target, accepted: str, sampling: Sampling, rows: int
) -> None:
    """A target without whose layers nothing changes is foretold in full, and soon a layer search has its tokens."""
    target = llama if accepted == "little" else idle(*range(4), layers=4)
    for name, make in DRAFTERS.items():
        stamps = Passes(target)
        drafter = make(target)
        found = rehearse(target, drafter, rows, sampling, clock=lambda device, s=stamps: Clock(device, s))
        stamps.handle.remove()
        own = name == "self-speculation"  # its draft passes, one a token, are the target's too
        assert found == {k: 1 + k + own * k for k in (1, 2, 4, 8, 16)}, name
        assert drafter.length.forced is None


def test_a_shorter_round_costs_no_more_than_a_longer_one(
    llama: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specbench.decoding.rehearsal._cycle", lambda *args: [(1, 9.0), (2, 3.0), (4, 4.0)])
    assert rehearse(llama, PromptLookup(llama, k="auto"), 1) == {1: 3.0, 2: 3.0, 4: 4.0}


def test_costs_need_room(llama: Target) -> None:
    short = tiny.build(tiny.llama().config, 0)
    short.context = 90
    assert set(rehearse(short, PromptLookup(short, k="auto"), 1)) == {1, 2, 4, 8}
    short.context = 60
    passes = Passes(short)
    assert rehearse(short, PromptLookup(short, k="auto"), 1) == {}
    assert passes.widths == []


def test_parts_of_a_cascade_are_found(llama: Target) -> None:
    inner = PromptLookup(llama, k="auto")
    drafter = Cascade(llama, first=inner, then=Cascade(llama, first=PromptLookup(llama), then=inner))
    assert list(adaptive_parts(drafter)) == [inner, inner]


def learn(
    target: Target,
    folder: Path,
    label: str = "prompt-lookup:k=auto",
    heard: list[str] | None = None,
    drafter: Drafter | None = None,
    **options: Any,
) -> Named:
    named = Named(label, Spec(label), DraftVerify(target, drafter or PromptLookup(target, k="auto")))
    config = RunConfig(target="tiny", methods=(label,), tasks=("t",), **options)
    learn_costs([named, Named("vanilla", Spec("vanilla"), DraftVerify(target, PromptLookup(target)))],
                target, config, folder, [].append if heard is None else heard.append)  # fmt: skip
    return named


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A processor probe that sees others while `contended` says so."""
    seen = SimpleNamespace(contended=False)
    monkeypatch.setattr(CpuProbe, "stop", lambda self: seen)
    return seen


def test_disturbed_costs_serve_one_run(
    llama: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probe: SimpleNamespace
) -> None:
    counter: Iterator[int] = itertools.count(1)
    monkeypatch.setattr("specbench.draft_costs.rehearse", lambda *args: {1: next(counter)})
    probe.contended, heard = True, []
    assert learn(llama, tmp_path, heard=heard).method.drafter.length.costs == {1: {1: 1}}
    assert list(tmp_path.iterdir()) == []
    assert len(heard) == 2
    assert "busy" in heard[1]
    probe.contended, heard = False, []
    for _ in range(2):
        assert learn(llama, tmp_path, heard=heard).method.drafter.length.costs == {1: {1: 2}}
    assert len(heard) == 1


def test_a_method_is_announced_once_with_the_way_to_measure_again(
    llama: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probe: SimpleNamespace
) -> None:
    monkeypatch.setattr("specbench.draft_costs.rehearse", lambda *args: {1: 1.0})
    first, then = PromptLookup(llama, k="auto"), PromptLookup(llama, k="auto", ngram=1)
    options = {"drafter": Cascade(llama, first=first, then=then), "batch_sizes": (1, 4)}
    heard: list[str] = []
    learn(llama, tmp_path, "both", heard, **options)
    (said,) = heard
    assert "both" in said
    assert "batch size 1, 4" in said
    kept = set(tmp_path.iterdir())
    (pattern,) = [word.rstrip(";") for word in said.split() if str(tmp_path) in word]
    assert len(kept) == 4
    assert set(tmp_path.glob(Path(pattern).name)) == kept


def test_no_room_for_any_length_is_found_out_once(
    llama: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probe: SimpleNamespace
) -> None:
    monkeypatch.setattr("specbench.draft_costs.rehearse", lambda *args: {})
    learn(llama, tmp_path)
    monkeypatch.setattr("specbench.draft_costs.rehearse", lambda *args: pytest.fail("measured again"))
    heard: list[str] = []
    assert learn(llama, tmp_path, heard=heard).method.drafter.length.costs == {}
    assert heard == []


def test_costs_are_measured_once_and_kept(
    llama: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probe: SimpleNamespace
) -> None:
    counter: Iterator[int] = itertools.count(1)
    monkeypatch.setattr("specbench.draft_costs.rehearse", lambda *args: {1: next(counter), 16: 50.0})
    first = learn(llama, tmp_path)
    assert first.method.draft_costs == {"PromptLookup 0": {"1": {"1": 1, "16": 50.0}}}
    assert json.loads(json.dumps(first.to_json()))["draft_costs"] == first.method.draft_costs
    assert learn(llama, tmp_path).method.draft_costs == first.method.draft_costs
    assert len(list(tmp_path.iterdir())) == 1
    both = learn(llama, tmp_path, batch_sizes=(1, 4)).method
    assert both.draft_costs == {"PromptLookup 0": {"1": {"1": 1, "16": 50.0}, "4": {"1": 2, "16": 50.0}}}
    assert both.drafter.length.costs == {1: {1: 1.0, 16: 50.0}, 4: {1: 2, 16: 50.0}}
    for other in ({"temperature": 0.5}, {"label": "prompt-lookup:k=auto,ngram=2"}):
        assert learn(llama, tmp_path, **other).method.draft_costs != first.method.draft_costs


@pytest.mark.parametrize(
    "content", ["", "[]", '{"1": "much"}', '{"one": 1}', '{"1": 0}', '{"0": 1}', '{"1": NaN}']
)
def test_spoilt_costs_are_measured_again(
    llama: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probe: SimpleNamespace, content: str
) -> None:
    monkeypatch.setattr("specbench.draft_costs.rehearse", lambda *args: {1: 1.5})
    learn(llama, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(content)
    assert learn(llama, tmp_path).method.drafter.length.costs == {1: {1: 1.5}}


def test_the_choice_follows_the_costs(llama: Target) -> None:
    """In the loop, with a draft that is always right: long where length is free, short where it is dear."""
    (prompt,) = tiny.prompts(1, 64)
    drafter = DraftModel(llama, draft=Target(llama.model), k="auto")
    for table, longest in (({1: 1.0, 16: 1.0}, 16), ({1: 1.0, 2: 9.0, 16: 99.0}, 1)):
        drafter.length.costs[1] = table
        rounds = list(DraftVerify(llama, drafter).generate(Request([prompt], 120), NullClock()))
        assert [one.depth[0] for one in rounds[1:-1]] == [longest] * (len(rounds) - 2)


def test_a_resumed_run_says_that_costs_are_new() -> None:
    def manifest(cost: float) -> dict[str, Any]:
        part = {name: {} for name in FIXED}
        methods = [{"label": "prompt-lookup:k=auto", "draft_costs": {"PromptLookup 0": {"1": {"1": cost}}}}]
        return {"name": "r", "start": "now", "versions": {}, "git": {}, "methods": methods, **part}

    heard: list[str] = []
    resumed(manifest(1.0), manifest(1.0), heard.append)
    assert heard == []
    resumed(manifest(1.5), manifest(1.0), heard.append)
    assert "measured anew" in heard[0]
