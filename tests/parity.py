"""Check our methods, round by round, against golden folders made by running the official code.

    python tests/parity.py DIR…

A folder holds `golden.json`, `target/` and, for methods with weights, `draft/`. Every round is compared: root, drafted
tokens in node order, parents, accepted nodes, next token; then the outputs, alone and in a batch, with the limit and
the end-of-sequence token as in a user's run. Our loop gets the limit raised by the drafts' depth, so that no draft is
shortened near the end, and is trimmed afterwards. Exit code 1 on a difference (the first is printed), 2 where a
folder is no fixture or of a method that is not checked here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from parity_record import Difference, NotAFixture, Recorder, Run, first_difference
from parity_tensors import compare_tensors

from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Request
from specbench.decoding.static_tree import StaticTree
from specbench.errors import SpecbenchError
from specbench.measure.clock import NullClock
from specbench.models.load import load
from specbench.models.target import Target
from specbench.spec import find_method, options_of

Golden = dict[str, Any]
NEEDED = ("method", "settings", "prompts", "outputs_trimmed", "vanilla", "rounds")


def _tree(settings: Golden) -> dict[str, Any]:
    return {key: settings[key] for key in ("total_token", "depth", "top_k")}


def _lookup(settings: Golden) -> dict[str, Any]:
    """Spec-Bench's own numbers where the fixture names none."""
    return {
        "k": settings.get("num_pred_tokens", settings.get("k", 10)),
        "ngram": settings.get("max_ngram_size", settings.get("ngram", 3)),
    }


def _none(settings: Golden) -> dict[str, Any]:
    return {}


# golden.json's method, its punctuation left out -> our method, and its options from the fixture's settings.
METHODS: dict[str, tuple[str, Callable[[Golden], dict[str, Any]]]] = {
    "eagle1": ("eagle1", _none),
    "eagle2": ("eagle2", _tree),
    "eagle3": ("eagle3", _tree),
    "medusa": ("medusa", _none),
    "medusa1": ("medusa", _none),
    "medusa2": ("medusa", _none),
    "hydra": ("hydra", _none),
    "dflash": ("dflash", _none),
    "promptlookup": ("prompt-lookup", _lookup),
}


@dataclass
class Fixture:
    """One golden folder, and ours ready to run."""

    folder: Path
    golden: Golden
    name: str
    target: Target
    make: Callable[..., Any]
    options: dict[str, Any]
    found: list[str] = field(default_factory=list)  # what else was compared, for the line printed

    @property
    def stop(self) -> frozenset[int]:
        eos = self.golden["settings"].get("eos_token_id")
        return frozenset([eos] if isinstance(eos, int) else eos or [])

    @property
    def limit(self) -> int:
        return int(self.golden["settings"]["max_new_tokens"])

    def drafter(self, **changed: Any) -> Any:
        """A drafter of the fixture's settings; its static tree, where it has one, is the fixture's."""
        made = self.make(self.target, **{**self.options, **changed})
        choices = [tuple(path) for path in self.golden.get("tree_choices", [])]
        if choices and sorted(made.tree.choices) != sorted(choices):
            made.tree = StaticTree(choices)
            made.max_nodes = made.tree.width
        return made

    def run(self, drafter: Any, prompts: Sequence[list[int]], limit: int, stop: frozenset[int]) -> Run:
        """Generate greedily and take down every round."""
        recorder = Recorder(drafter)
        request = Request([list(p) for p in prompts], limit, stop)
        for _ in DraftVerify(self.target, drafter).generate(request, NullClock()):
            pass
        return recorder.stop()


def read(folder: Path) -> Fixture:
    """Open a golden folder. Raises NotAFixture."""
    try:
        golden = json.loads((folder / "golden.json").read_text(encoding="utf-8"))
        missing = [key for key in NEEDED if key not in golden]
    except (OSError, ValueError, TypeError) as error:
        raise NotAFixture(f"golden.json cannot be read: {error}") from error
    if missing:
        raise NotAFixture(f"golden.json has no {', '.join(missing)}")
    key = "".join(c for c in str(golden["method"]).lower() if c.isalnum())
    if key not in METHODS:
        raise NotAFixture(f"method {golden['method']!r} is not checked here")
    name, options_from = METHODS[key]
    try:
        cls = find_method(name)
        options = options_from(golden["settings"])
        strange = [option for option in options if option not in options_of(cls)]
        if strange:
            raise NotAFixture(f"{name} has no option {strange[0]}")
        if (folder / "draft").is_dir():
            options["draft"] = str(folder / "draft")
        loaded = load(str(folder / "target"), dtype="float32", device="cpu")
    except KeyError as error:
        raise NotAFixture(f"golden.json has no setting {error}") from error
    target = Target(loaded.model, loaded.tokenizer, loaded.identity)
    return Fixture(folder, golden, name, target, cls, options)


def check(folder: Path) -> str:
    """Compare a folder; what was compared, as the line to print. Raises Difference, NotAFixture."""
    fixture = read(folder)
    golden, drafter = fixture.golden, fixture.drafter()
    lookup = fixture.name == "prompt-lookup"
    runs = [_check_prompt(fixture, drafter, number, lookup) for number in range(len(golden["prompts"]))]
    compared = sum(count for count, _ in runs)
    ties = sum(tied for _, tied in runs)
    fixture.found.append(f"{compared} rounds of {len(golden['prompts'])} prompts")
    if ties:
        fixture.found.append(f"{ties} of them differ at ties of the draft's own ranks")
    _check_batch(fixture, drafter)
    if lookup:
        fixture.found.append(f"{_check_proposals(fixture)} proposals")
    elif (compared_tensors := compare_tensors(fixture)) is not None:
        fixture.found.append(compared_tensors)
    return "ok: " + ", ".join(fixture.found)


def _check_prompt(fixture: Fixture, drafter: Any, number: int, lookup: bool) -> tuple[int, int]:
    """One prompt alone, limit raised and no stop token; rounds compared, and rounds that differ at a tie."""
    golden = fixture.golden
    prompt, rounds = golden["prompts"][number], golden["rounds"][number]
    reach = max((_reach(golden, one) for one in rounds), default=0)
    run = fixture.run(drafter, [prompt], fixture.limit + 2 * (reach + 2), frozenset())
    if lookup:
        counted = _compare_by_context(fixture, run, number), 0
    else:
        counted = _compare_by_index(fixture, run, number)
    trimmed = _trim(run.emitted[0], fixture.limit, fixture.stop)
    for name in ("vanilla", "outputs_trimmed"):
        first_difference(number, None, name, trimmed, golden[name][number])
    return counted


def _reach(golden: Golden, one: Golden) -> int:
    """How deep the draft of a golden round is."""
    depth: list[int] = []
    for parent in _parents(golden, one):
        depth.append(1 if parent < 0 else depth[parent] + 1)
    return max(depth, default=0)


def _parents(golden: Golden, one: Golden) -> list[int]:
    """A golden round's parents: its own, the fixture's for static trees, or a chain's."""
    return one.get("parents", golden.get("parents", list(range(-1, len(one["draft_tokens"]) - 1))))


def _compare_by_index(fixture: Fixture, run: Run, number: int) -> tuple[int, int]:
    """Golden round i is our round i: both begin with the argmax after the prompt as root.

    Where draft ranks were not screened for ties, a draft may differ from the golden one at tokens which the draft
    itself gave the same score; what follows is then aligned by the tokens that are out.
    """
    golden = fixture.golden
    screened = all("draft_rank_gap" in margin for margin in golden.get("margins", [{}])[number : number + 1])
    ours = run.by_emitted(0)
    out, compared, ties = 1, 0, 0
    for index, one in enumerate(golden["rounds"][number]):
        mine = ours.get(out)
        if mine is None and ties:
            out += one["accepted"] + 1
            continue
        if mine is None:
            raise Difference(number, index, "rounds", len(ours), len(golden["rounds"][number]))
        compared += 1
        out += one["accepted"] + 1
        first_difference(number, index, "root", mine.root, one["root"])
        first_difference(number, index, "parents", mine.parents, _parents(golden, one))
        if not screened and mine.tied_with(one["draft_tokens"]):
            ties += 1
            continue
        for name, value in (
            ("draft_tokens", mine.tokens),
            ("accepted", mine.accepted),
            ("accepted_nodes", mine.accepted_nodes),
            ("next_token", mine.next_token),
        ):
            if name in one:
                first_difference(number, index, name, value, one[name])
    return compared, ties


def _compare_by_context(fixture: Fixture, run: Run, number: int) -> int:
    """Prompt lookup: Spec-Bench drafts from the prompt before any token is out, and forwards token 100 where nothing
    matches (never compared); a draft depends on the text alone, so rounds are told by its length."""
    golden, prompt = fixture.golden, fixture.golden["prompts"][number]
    text = prompt + run.emitted[0]
    ours = run.by_emitted(0)
    for index, one in enumerate(golden["rounds"][number]):
        length = one["context_len"]
        mine = ours.get(length - len(prompt))
        if mine is None:
            tokens = _propose(fixture.drafter(), text[:length])
            accepted = _agreeing(tokens, text[length:])
        else:
            tokens, accepted = mine.tokens, mine.accepted
        first_difference(number, index, "draft_tokens", tokens, one["draft_tokens"])
        room = fixture.limit - (length - len(prompt)) - 1  # Spec-Bench cuts its last round at the limit
        if one.get("real_draft", bool(tokens)):
            first_difference(number, index, "accepted", min(accepted, room), min(one["accepted"], room))
    return len(golden["rounds"][number])


def _agreeing(tokens: list[int], text: list[int]) -> int:
    pairs = zip(tokens, text, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(text)))


def _propose(drafter: Any, text: list[int]) -> list[int]:
    drafter.begin([text])
    return [int(token) for token in drafter.propose([10**6], None)[0].tokens]


def _check_proposals(fixture: Fixture) -> int:
    """The single proposals of a prompt-lookup fixture: text, n-gram size and length to tokens."""
    checked = 0
    for number, case in enumerate(fixture.golden.get("cases", [])):
        for ngram, k, wanted in case.get("original", []):
            tokens = _propose(fixture.drafter(k=k, ngram=ngram), case["input_ids"])
            first_difference(number, None, f"case ngram={ngram} k={k}", tokens, wanted)
            checked += 1
    return checked


def _check_batch(fixture: Fixture, drafter: Any) -> None:
    """All prompts in one batch, with the limit and the stop token of the fixture: the outputs are still vanilla's."""
    run = fixture.run(drafter, fixture.golden["prompts"], fixture.limit, fixture.stop)
    for number, wanted in enumerate(fixture.golden["vanilla"]):
        first_difference(number, None, "output in a batch", run.emitted[number], wanted)


def _trim(tokens: list[int], limit: int, stop: frozenset[int]) -> list[int]:
    tokens = tokens[:limit]
    end = next((place for place, token in enumerate(tokens) if token in stop), None)
    return tokens if end is None else tokens[: end + 1]


def main(folders: Sequence[str]) -> int:
    """Print one line a folder; the exit code."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    if not folders:
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    return max(code for code in _lines(folders))


def _lines(folders: Sequence[str]) -> Iterator[int]:
    for name in folders:
        code = 0
        try:
            line = check(Path(name))
        except Difference as difference:
            code, line = 1, f"DIFFERS: {difference}"
        except NotAFixture as error:
            code, line = 2, f"not checked: {error}"
        except SpecbenchError as error:
            code, line = 2, f"not checked: {error.message}; {error.hint}"
        print(f"{Path(name).name}: {line}", flush=True)
        yield code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
