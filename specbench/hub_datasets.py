"""Tasks from datasets of the Hugging Face Hub: `--task hf:ID[:config[:split]][:key=value,…]`.

`datasets` is imported only when such a task is loaded.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from specbench.errors import SpecbenchError
from specbench.hub_presets import PRESETS, Preset, in_column
from specbench.questions import DEFAULT_MAX_NEW_TOKENS, Layout, Question, Row, Task, build_questions

OPTIONS = ("column", "category", "config", "split", "revision")
SYNTAX = "write hf:ID:config:split:column=NAME (config and split may be left out)"
SPLITS = ("test", "validation", "train")
NO_NETWORK = {
    "ConnectionError", "ConnectError", "ConnectTimeout", "ReadTimeout", "Timeout", "TimeoutError",
    "OfflineModeIsEnabled", "LocalEntryNotFoundError",
}  # fmt: skip


@dataclass(frozen=True)
class HubRef:
    """A parsed `hf:` reference."""

    id: str
    config: str | None = None
    split: str | None = None
    options: dict[str, str] = field(default_factory=dict)

    @property
    def spelled(self) -> str:
        """The normalised reference."""
        places = ":".join([self.id, self.config or "", self.split or ""]).rstrip(":")
        options = ",".join(f"{key}={value}" for key, value in sorted(self.options.items()))
        return f"hf:{places}:{options}".rstrip(":")


def parse_ref(ref: str) -> HubRef:
    """`hf:ID[:config[:split]]`, then `column=`, `category=`, `revision=` (or `config=`, `split=`).

    Pieces stand between ":" or ","; those with "=" are options, the others id, config and split in that
    order. An empty piece leaves the default: `hf:openai/gsm8k::train`. A folder with data files is an id too.
    """
    pieces = re.split("[:,]", ref.removeprefix("hf:"))
    places = [piece for piece in pieces if "=" not in piece]
    options: dict[str, str] = {}
    for piece in pieces:
        key, equals, value = piece.partition("=")
        if equals and (key not in OPTIONS or not value or key in options):
            raise SpecbenchError(f"{ref}: {piece!r} is not an option here", f"options: {', '.join(OPTIONS)}")
        if equals:
            options[key] = value
    if not places or not places[0] or len(places) > 3:
        raise SpecbenchError(f"{ref}: not a dataset reference", f"{SYNTAX}; presets: {', '.join(PRESETS)}")
    config, split = [*places[1:], "", ""][:2]
    config, split = options.pop("config", config), options.pop("split", split)
    return HubRef(places[0], config or None, split or None, options)


def load_hub_task(ref: str, *, limit: int | None = None) -> Task:
    """The task of a preset (by name or id) or of any dataset with `column=`.

    With a limit and no categories the split is streamed, so that a huge one is not downloaded; round-robin
    needs all categories, hence the whole split.

    Raises:
        SpecbenchError: `datasets` is not installed, the Hub cannot be reached, or the reference is wrong.
    """
    asked = parse_ref(ref)
    name, preset = _find_preset(asked.id)
    layout = _layout(asked, preset)
    known = _defaults(asked, preset)
    rows = _fetch(known, None if layout.category else limit, layout)
    rows, notes = _drop_placeholders(rows, layout.column, preset.placeholder if preset else None, known)
    task_name = _task_name(name or asked.id, known, preset)
    questions = build_questions(
        ((f"row {number}", row) for number, row in enumerate(rows, 1)), layout, task_name, known.spelled
    )
    return Task(
        name=task_name,
        description=preset.description if preset else f"the {asked.options['column']!r} column of {known.id}",
        licence=preset.licence if preset else f"see https://huggingface.co/datasets/{known.id}",
        max_new_tokens=preset.max_new_tokens if preset else DEFAULT_MAX_NEW_TOKENS,
        questions=questions,
        sha256=_digest(questions),
        source=known.spelled,
        template=layout.spelled,
        notes=notes,
    )


def _find_preset(asked: str) -> tuple[str | None, Preset | None]:
    wanted = asked.lower()
    for name, preset in PRESETS.items():
        if wanted in (name, preset.id.lower(), *preset.aliases):
            return name, preset
    return None, None


def _layout(asked: HubRef, preset: Preset | None) -> Layout:
    """The preset's layout with what the options say otherwise."""
    column, category = asked.options.get("column"), asked.options.get("category")
    if column:
        return in_column(column, category or (preset.layout.category if preset else None))
    if preset is None:
        close = difflib.get_close_matches(asked.id.lower(), PRESETS, n=1)
        guess = f"did you mean hf:{close[0]}? " if close else ""
        raise SpecbenchError(f"hf:{asked.id} is no preset and names no prompt column", f"{guess}{SYNTAX}")
    return replace(preset.layout, category=category) if category else preset.layout


def _defaults(asked: HubRef, preset: Preset | None) -> HubRef:
    if preset is None:
        return asked
    return replace(
        asked, id=preset.id, config=asked.config or preset.config, split=asked.split or preset.split
    )


def _task_name(base: str, ref: HubRef, preset: Preset | None) -> str:
    usual = preset.config if preset else None
    variant = f"-{ref.config}" if ref.config != usual else ""
    return re.sub(r"[^a-z0-9_.-]+", "_", f"{base.rstrip('/').rpartition('/')[2]}{variant}".lower())


def _fetch(ref: HubRef, limit: int | None, layout: Layout) -> list[Row]:
    """The first `limit` rows of a split (None: all of them), checked for the columns the layout needs."""
    datasets = _import_datasets()
    revision = ref.options.get("revision")
    # Offline only the cache can answer, and `datasets` does not stream from it.
    streaming = limit is not None and not getattr(getattr(datasets, "config", None), "HF_HUB_OFFLINE", False)
    try:
        split = ref.split or _first_split(
            datasets.get_dataset_split_names(ref.id, ref.config, revision=revision)
        )
        data = datasets.load_dataset(ref.id, ref.config, split=split, streaming=streaming, revision=revision)
        rows = list(islice(data, limit))
    except Exception as error:  # datasets, the Hub client and the network raise dozens of kinds
        raise _explain(error, ref) from error
    if rows:
        _check_columns(layout, rows[0], ref)
    return rows


def _first_split(names: Sequence[str]) -> str:
    return next((name for name in SPLITS if name in names), names[0])


def _check_columns(layout: Layout, row: Row, ref: HubRef) -> None:
    wanted = [*layout.columns, *([layout.category] if layout.category else [])]
    missing = [column for column in wanted if column not in row]
    if missing:
        raise SpecbenchError(
            f"{ref.spelled} has no column {', '.join(map(repr, missing))}",
            f"its columns are {', '.join(row)}: choose with column=",
        )


def _drop_placeholders(
    rows: list[Row], column: str, mark: str | None, ref: HubRef
) -> tuple[list[Row], tuple[str, ...]]:
    """Without the rows whose turns start with `mark`, and a note of how many they were."""
    if mark is None:
        return rows, ()
    kept = [row for row in rows if not any(str(turn).startswith(mark) for turn in row[column])]
    dropped = len(rows) - len(kept)
    if not dropped:
        return rows, ()
    what = f"{dropped} of {len(rows)} rows of {ref.spelled} hold a placeholder instead of a prompt"
    cure = "fill them with NVIDIA Model-Optimizer's examples/specdec_bench/prepare_data.py"
    if not kept:
        raise SpecbenchError(what, f"{cure}, then --task hf:FOLDER:column=turns,category=category")
    return kept, (f"{what} and are left out ({cure})",)


def _digest(questions: Sequence[Question]) -> str:
    content = [[q.id, q.category, *q.turns] for q in questions]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _import_datasets() -> Any:
    try:
        module = importlib.import_module("datasets")
    except ImportError as error:
        raise SpecbenchError(
            f"tasks of the Hugging Face Hub need the package 'datasets' ({error})",
            "pip install 'specbench-llm[datasets]'",
        ) from error
    if not hasattr(module, "load_dataset"):  # a folder called datasets/ where the command was started
        raise SpecbenchError(
            "the package 'datasets' is not installed; a folder of that name hides or replaces it",
            "pip install 'specbench-llm[datasets]', and start from another folder",
        )
    return module


def _explain(error: Exception, ref: HubRef) -> SpecbenchError:
    """What the user can do about a dataset that does not load."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    message = " ".join(str(error).split())[:300] or type(error).__name__
    page = f"https://huggingface.co/datasets/{ref.id}"
    if "gated" in message.lower():
        return SpecbenchError(f"{ref.id} is gated", f"accept its terms on {page}, then `hf auth login`")
    if kinds & NO_NETWORK:
        return SpecbenchError(
            f"the Hugging Face Hub cannot be reached for {ref.id}: {message}",
            "check the network, use a cached dataset (HF_HUB_OFFLINE=1), or give --task FILE.jsonl",
        )
    if "DatasetNotFoundError" in kinds:
        return SpecbenchError(message, f"check the id on {page}; presets: {', '.join(PRESETS)}")
    if "scripts are no longer supported" in message:
        return SpecbenchError(f"{ref.id}: {message}", "add revision=refs/convert/parquet")
    return SpecbenchError(f"{ref.spelled} does not load: {message}", SYNTAX)
