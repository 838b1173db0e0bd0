"""Opening a golden folder: the target, our method, and its options from the fixture's settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from parity_record import NotAFixture, Recorder, Run
from parity_scores import SCORES

from specbench.decoding.loop import DraftVerify
from specbench.decoding.method import Request
from specbench.decoding.sampling import Sampling
from specbench.decoding.static_tree import StaticTree
from specbench.measure.clock import NullClock
from specbench.models.load import load
from specbench.models.target import Target
from specbench.spec import find_method, options_of

Golden = dict[str, Any]
NEEDED = ("method", "settings", "prompts", "outputs", "outputs_trimmed", "vanilla", "rounds")


def _tree(settings: Golden) -> dict[str, Any]:
    return {key: settings[key] for key in ("total_token", "depth", "top_k")}


def _lookup(settings: Golden) -> dict[str, Any]:
    """Spec-Bench's own numbers where the fixture names none."""
    return {
        "k": settings.get("num_pred_tokens", settings.get("k", 10)),
        "ngram": settings.get("max_ngram_size", settings.get("ngram", 3)),
    }


def _lookahead(settings: Golden) -> dict[str, Any]:
    return {
        "level": settings["LEVEL"],
        "window": settings["WINDOW_SIZE"],
        "guess": settings["GUESS_SET_SIZE"],
        "pool_from_prompt": bool(settings.get("POOL_FROM_PROMPT", 0)),
    }


def _recycling(settings: Golden) -> dict[str, Any]:
    return {"k": settings["output_id_topk"]}


def _rest(settings: Golden) -> dict[str, Any]:
    spans = settings["token_spans"]
    return {
        "longest": max(spans),
        "shortest": min(spans),
        "matches": settings["k"],
        "depth": settings["continuation"],
        "nodes": settings["choices"],
    }


def _suffix(settings: Golden) -> dict[str, Any]:
    """Of the cold or the warm half of the settings."""
    settings = settings.get("cold", settings)
    return {
        "depth": settings["max_tree_depth"],
        "k": settings["max_spec_tokens"],
        "factor": settings["max_spec_factor"],
        "offset": settings["max_spec_offset"],
        "min_prob": settings["min_token_prob"],
        "tree": settings["use_tree_spec"],
    }


def _sam(settings: Golden) -> dict[str, Any]:
    """n_predicts counts the root."""
    return {
        "k": settings["n_predicts"] - 1,
        "threshold": settings["len_threshold"],
        "bias": settings["len_bias"],
    }


def _none(settings: Golden) -> dict[str, Any]:
    return {}


# How golden.json's method begins, its punctuation left out -> our method, and its options from the settings.
METHODS: dict[str, tuple[str, Callable[[Golden], dict[str, Any]]]] = {
    "eagle1": ("eagle1", _none),
    "eagle2": ("eagle2", _tree),
    "eagle3": ("eagle3", _tree),
    "medusa": ("medusa", _none),
    "hydra": ("hydra", _none),
    "dflash": ("dflash", _none),
    "promptlookup": ("prompt-lookup", _lookup),
    "lookahead": ("lookahead", _lookahead),
    "tokenrecycling": ("token-recycling", _recycling),
    "rest": ("rest", _rest),
    "suffixdecoding": ("suffix", _suffix),
    "samdecoding": ("sam", _sam),
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
        options = {**self.options, **changed}
        if self.name == "sam" and "fallback" not in options:
            options["fallback"] = find_method("token-recycling")(self.target, tree="sam")
        made = self.make(self.target, **options)
        choices = [tuple(path) for path in self.golden.get("tree_choices", [])]
        if choices and sorted(made.tree.choices) != sorted(choices):
            made.tree = StaticTree(choices)
            made.max_nodes = made.tree.width
        return made

    def run(
        self,
        drafter: Any,
        prompts: Sequence[list[int]],
        limit: int,
        stop: frozenset[int],
        sampling: Sampling = Sampling(),
    ) -> Run:
        """Generate, greedily unless told otherwise, and take down every round."""
        recorder = Recorder(drafter, SCORES.get(self.name))
        generators = None if sampling.greedy else [torch.Generator().manual_seed(0) for _ in prompts]
        request = Request([list(p) for p in prompts], limit, stop, sampling, generators)
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
    if not golden["prompts"]:
        raise NotAFixture("golden.json has no prompts in its list")
    key = "".join(c for c in str(golden["method"]).lower() if c.isalnum())
    known = next((known for known in METHODS if key.startswith(known)), None)
    if known is None:
        raise NotAFixture(f"method {golden['method']!r} is not checked here")
    name, options_from = METHODS[known]
    try:
        cls = find_method(name)
        options = options_from(golden["settings"])
        strange = [option for option in options if option not in options_of(cls)]
        if strange:
            raise NotAFixture(f"{name} has no option {strange[0]}")
        if (folder / "draft").is_dir():
            options["draft"] = str(folder / "draft")
        if (folder / "datastore.idx").is_file():
            options["datastore"] = str(folder / "datastore.idx")
        loaded = load(str(folder / "target"), dtype="float32", device="cpu")
    except KeyError as error:
        raise NotAFixture(f"golden.json has no setting {error}") from error
    target = Target(loaded.model, loaded.tokenizer, loaded.identity)
    return Fixture(folder, golden, name, target, cls, options)
