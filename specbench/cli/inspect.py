"""`specbench inspect`: what a draft or a model is, and which target a draft fits, without loading it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbench.errors import SpecbenchError

if TYPE_CHECKING:
    from specbench.models.checkpoint import Listing
    from specbench.models.detect import Recognised
    from specbench.models.registry import Entry


def register(app: typer.Typer) -> None:
    app.command("inspect")(inspect)


def inspect(
    ref: Annotated[str, typer.Argument(metavar="REF", help="A folder, a Hub id, an alias or a GGUF file.")],
    target: Annotated[
        str | None, typer.Option(help="Say whether the draft fits this target: an alias, Hub id or folder.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Say what a checkpoint is: kind, settings, parameters, bytes, and which target it fits.

    Exit code 0, or 2 if it is damaged, nothing known, or does not fit --target.
    """
    facts, listing = describe(ref, revision)
    if target is not None:
        facts["target"] = _against(facts, listing, target)
    if as_json:
        print(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        for name, value in _lines(facts):
            print(f"{name:<12} {value}".rstrip())
    if target is not None and not facts["target"]["fits"]:
        raise SpecbenchError(
            f"{ref} does not fit {target}: {'; '.join(facts['target']['why_not'])}",
            "give a draft that was made for this target: see `specbench ls targets`",
        )


def describe(ref: str, revision: str | None = None) -> tuple[dict[str, Any], Listing | None]:
    """Everything there is to say of `ref`, and its files, if they are on this machine.

    Raises:
        SpecbenchError: not there, damaged, nothing that is known, or a draft that no run would take.
    """
    from specbench.models import registry

    entry = registry.entry_for(ref)
    if entry is not None:
        return _of_entry(ref, entry, revision)
    path = Path(ref).expanduser()
    if not path.exists() and "/" not in ref:
        registry.find(ref)  # raises, and names the nearest alias
    listing = _list(ref, revision)
    return _of_listing(listing), listing


def _list(ref: str, revision: str | None) -> Listing:
    """The checkpoint at `ref`; a GGUF file as it would be loaded."""
    from dataclasses import replace

    from specbench.models.checkpoint import list_checkpoint

    if not ref.endswith(".gguf"):
        return list_checkpoint(ref, revision)
    from specbench.models.source import resolve

    folder = resolve(ref, notify=lambda line: print(line, file=sys.stderr)).folder
    return replace(list_checkpoint(str(folder)), ref=ref)


def _of_listing(listing: Listing) -> dict[str, Any]:
    from specbench.models.checkpoint import check_finite
    from specbench.models.detect import evidence, recognise
    from specbench.models.fits import DRAFT_MODELS, OWN_TARGET, fitting_targets, named_target, registered
    from specbench.models.packed import parameters, read

    found = recognise(listing)
    if found.kind == "unknown":
        raise SpecbenchError(
            f"{listing.ref} is nothing that specbench knows: {evidence(listing)}",
            "a draft needs its own config.json beside its weights; `specbench ls methods` lists what is run",
        )
    if found.kind not in (*DRAFT_MODELS, *OWN_TARGET):
        check_finite(listing)
        _check_opens(listing, found)
    weights, stored = listing.weights.values(), read(listing.config)
    refused = _refused(listing, found) if found.kind in OWN_TARGET else None
    return {
        "ref": listing.ref,
        "revision": listing.revision,
        "kind": found.kind,
        "what": found.words,
        "layout": found.spelling,
        "method": found.method,
        **({"refused": refused} if refused else {}),
        "settings": found.settings,
        "quantization": None if stored is None else stored.words,
        "parameters": parameters(listing.weights, stored),
        "bytes": sum(weight.bytes for weight in weights),
        "dtypes": sorted({weight.dtype for weight in weights if _is_float(weight.dtype)}),
        "files": {file.name: file.stat().st_size for file in _files(listing)},
        "made_for": named_target(listing.config),
        "fits": [] if found.kind == "causal-lm" else fitting_targets(found),
        "registry": [
            {"target": alias, "method": draft.method, **_draft(draft)}
            for alias, draft in registered(listing.ref)
        ],
    }


def _check_opens(listing: Listing, found: Recognised) -> None:
    """Refuse a draft of heads that no target could take."""
    from specbench.models.opening import check_opens, stand_in

    made_for = stand_in(listing, found)
    if made_for is not None:
        check_opens(listing, found, made_for)


def _refused(listing: Listing, found: Recognised) -> str | None:
    """Why the method of a target's own draft layers would not take them, if so; the target may do without."""
    from specbench.models.opening import blank_target, check_opens

    try:
        target = blank_target(listing.ref, listing.config)
        if target is not None:
            check_opens(listing, found, target)
    except SpecbenchError as error:
        return error.message
    return None


def _of_entry(ref: str, entry: Entry, revision: str | None) -> tuple[dict[str, Any], Listing | None]:
    """A target of the registry: from its files if they are on this machine, else from the registry's numbers."""
    from dataclasses import replace

    from specbench.models.checkpoint import list_checkpoint
    from specbench.models.detect_settings import SETTINGS
    from specbench.models.hub import cached

    known = [
        {"method": method, **_draft(draft)} for method, drafts in entry.drafts.items() for draft in drafts
    ]
    snapshot = None if ref.startswith("random:") else cached(entry.hub, revision)
    if snapshot is not None:
        listing = replace(list_checkpoint(str(snapshot.folder)), ref=ref, revision=snapshot.revision)
        return {**_of_listing(listing), "hub": entry.hub, "drafters": known}, listing
    from specbench.models.checkpoint import Listing
    from specbench.models.fields import Fields

    config = dict(entry.config or {})
    blank = Listing(ref, Path(), config, {}, [])
    settings = SETTINGS["causal-lm"](blank, Fields(ref, config)) if config else {}
    facts = {
        "ref": ref,
        "hub": entry.hub,
        "kind": "causal-lm",
        "what": "a language model",
        "layout": "registry",
        "note": "not on this machine: what is said is the registry's",
        "method": "draft-model",
        "settings": settings,
        "parameters": entry.parameters,
        "bytes": None,
        "dtypes": [entry.dtype],
        "drafters": known,
    }
    return facts, None


def _draft(draft: Any) -> dict[str, Any]:
    return {
        name: getattr(draft, name)
        for name in ("id", "source", "verified", "expected_tau", "tau_source", "note", "not_run")
    }


def _against(facts: dict[str, Any], listing: Listing | None, target: str) -> dict[str, Any]:
    """Whether it fits, and why not: by the numbers, then by opening it for a target of this architecture."""
    from specbench.models.detect import Recognised
    from specbench.models.fits import config_of, misfits, numbers_of
    from specbench.models.opening import blank_target, check_opens

    recognised = Recognised(facts["kind"], facts["layout"], facts["settings"])
    numbers = numbers_of(target)
    why_not = misfits(recognised, numbers)
    if not why_not and listing is not None:
        try:
            blank = blank_target(target, config_of(target))
            if blank is not None:
                check_opens(listing, recognised, blank)
        except SpecbenchError as error:
            why_not = [error.message.removeprefix(f"{listing.ref}: ")]
    return {"ref": target, **vars(numbers), "fits": not why_not, "why_not": why_not}


def _files(listing: Listing) -> list[Path]:
    return [path for path in (listing.folder / "config.json", *listing.files) if path.is_file()]


def _is_float(dtype: str) -> bool:
    return "float" in dtype


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """What is printed, a name and a line each."""
    run_by = f"run by --method {facts['method']}" if facts["method"] else "no method here runs it"
    if facts["kind"] == "causal-lm":
        run_by = "a target, or a draft of --method draft-model"
    lines = [(facts["ref"], ""), ("is", f"{facts['what']}, {facts['layout']} layout: {run_by}")]
    lines += [(name, facts[name]) for name in ("hub", "note") if facts.get(name)]
    lines += [("refused", f"by {facts['method']}: {facts['refused']}")] if "refused" in facts else []
    settings = [f"{name} {_spelled(value)}" for name, value in facts["settings"].items() if value is not None]
    lines += [("settings", ", ".join(settings))] if settings else []
    lines += [("quantised", facts["quantization"])] if facts.get("quantization") else []
    bytes_ = "bytes unknown" if facts["bytes"] is None else f"{facts['bytes']:,} bytes"
    lines.append(("parameters", f"{facts['parameters']:,}, {bytes_}, {'+'.join(facts['dtypes'])}"))
    lines += [("file", f"{name}, {size:,} bytes") for name, size in facts.get("files", {}).items()]
    lines += [("made for", facts["made_for"])] if facts.get("made_for") else []
    if "fits" in facts and facts["kind"] != "causal-lm":
        lines.append(("fits", ", ".join(facts["fits"]) or "no target of the registry by its numbers"))
    for draft in [*facts.get("registry", []), *facts.get("drafters", [])]:
        lines.append(("registry", _registry_line(draft)))
    if "target" in facts:
        told = facts["target"]
        lines.append(("target", f"{told['ref']}: {'fits' if told['fits'] else '; '.join(told['why_not'])}"))
    return lines


def _registry_line(draft: dict[str, Any]) -> str:
    tau = f", τ {draft['expected_tau']} ({draft['tau_source']})" if draft["expected_tau"] else ""
    where = f" of {draft['target']}" if "target" in draft else ""
    verified = "" if draft["verified"] else ", not verified"
    note = f"; {draft['note']}" if draft["note"] else ""
    not_run = f"; not run here: {draft['not_run']}" if draft["not_run"] else ""
    return f"{draft['method']}{where}: {draft['id']}{tau}{verified}{note}{not_run}"


def _spelled(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "+".join(map(str, value)) if isinstance(value, list) else str(value)
