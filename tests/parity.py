"""Check our methods, round by round, against golden folders made by running the official code.

    python tests/parity.py DIR…

A folder holds `golden.json`, `target/` and, for methods with weights, `draft/`. Every round is compared: root,
drafted tokens in node order, parents, accepted nodes, next token; then the outputs, alone and in a batch, with the
limit and the end-of-sequence token as in a user's run, the first draft's logits, and Medusa's typical acceptance
(lookahead, token recycling and REST: see `parity_training_free.py`; suffix and SAM decoding: `parity_suffixes.py`).
Rounds must reach the end of the outputs. Our loop gets the limit raised by the drafts' depth, so that no draft is
shortened near the end, and is trimmed afterwards. Exit code 1 on a difference (the first is printed), 2 where a
folder is no fixture or of a method that is not checked here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from parity_fixture import Fixture, Golden, read
from parity_record import Difference, NotAFixture, Run, first_difference, trim
from parity_suffixes import check_operations, check_sam, check_suffix
from parity_tensors import compare_tensors
from parity_training_free import check_lookahead, check_recycling, check_rest, check_searches
from parity_typical import check_typical
from parity_whole import check_lists, check_whole

from specbench.errors import SpecbenchError, first_line

# Methods whose official rounds are told, or begin, in another way: prompt by prompt.
OWN = {"lookahead": check_lookahead, "token-recycling": check_recycling, "rest": check_rest}
# Methods whose official state outlives a prompt: all prompts in order.
IN_ORDER = {"suffix": check_suffix, "sam": check_sam}


def check(folder: Path) -> str:
    """Compare a folder; what was compared, as the line to print. Raises Difference, NotAFixture."""
    fixture = read(folder)
    check_lists(fixture)
    golden, drafter = fixture.golden, fixture.drafter()
    lookup, own = fixture.name == "prompt-lookup", OWN.get(fixture.name)
    numbers = range(len(golden["prompts"]))
    if fixture.name in IN_ORDER:
        runs = [IN_ORDER[fixture.name](fixture)]
    elif own is not None:
        runs = [(own(fixture, number), 0) for number in numbers]
    else:
        runs = [_check_prompt(fixture, drafter, number, lookup) for number in numbers]
    check_whole(fixture)
    compared = sum(count for count, _ in runs)
    ties = sum(tied for _, tied in runs)
    fixture.found.append(f"{compared} rounds of {len(golden['prompts'])} prompts")
    if ties:
        fixture.found.append(f"{ties} of them differ at ties of the draft's own ranks")
    _check_batch(fixture, drafter)
    if lookup:
        fixture.found.append(f"{_check_proposals(fixture)} proposals")
    if fixture.name == "rest":
        fixture.found.append(f"{check_searches(fixture)} searches")
    if fixture.name == "suffix":
        fixture.found.append(f"{check_operations(fixture)} logged drafts")
    if fixture.name == "medusa":
        fixture.found += check_typical(fixture)
    fixture.found += _check_tensors(fixture, drafter)
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
        counted = _compare_by_index(fixture, drafter, run, number)
    first_difference(
        number, None, "outputs", run.emitted[0][: len(golden["outputs"][number])], golden["outputs"][number]
    )
    trimmed = trim(run.emitted[0], fixture.limit, fixture.stop)
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


def _compare_by_index(fixture: Fixture, drafter: Any, run: Run, number: int) -> tuple[int, int]:
    """Golden round i is our round i: both begin with the argmax after the prompt as root.

    Where the draft gave two tokens the same score, ours may be another than the golden one, and the text be cut into
    other rounds from there on: golden rounds that begin where none of ours does are then compared with one of their
    own.
    """
    golden, ours = fixture.golden, run.by_emitted(0)
    out, ties = 1, 0
    for index, one in enumerate(golden["rounds"][number]):
        mine = ours.get(out)
        if mine is None and ties:
            text = golden["prompts"][number] + run.emitted[0][: out - 1]
            mine = fixture.run(drafter, [text], _reach(golden, one) + 3, frozenset()).by_emitted(0)[1]
        if mine is None:
            raise Difference(number, index, "rounds", len(ours), len(golden["rounds"][number]))
        out += one["accepted"] + 1
        first_difference(number, index, "root", mine.root, one["root"])
        first_difference(number, index, "parents", mine.parents, _parents(golden, one))
        if mine.tied_with(one["draft_tokens"]):
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
    return len(golden["rounds"][number]), ties


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


def _check_tensors(fixture: Fixture, drafter: Any) -> list[str]:
    """The first draft's logits, where the fixture holds some."""
    number = fixture.golden["settings"].get("tensors_prompt_index")
    if number is None:
        return []
    prompt = fixture.golden["prompts"][number]
    found = compare_tensors(
        fixture.name,
        drafter,
        fixture.folder,
        number,
        lambda: fixture.run(drafter, [prompt], fixture.limit, frozenset()),
    )
    return [found] if found else []


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
        except Exception as error:  # noqa: BLE001 (a method that breaks is not as golden, and the rest is checked)
            code, line = 1, f"BREAKS: {first_line(error)}"
        print(f"{Path(name).name}: {line}", flush=True)
        yield code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
