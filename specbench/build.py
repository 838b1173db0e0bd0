"""From a config to what is measured: the target, and the methods by label."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specbench.config import RunConfig
from specbench.conversation import stop_ids
from specbench.decoding.method import Method
from specbench.errors import SpecbenchError, first_line
from specbench.spec import Spec, convert_options, find_method, options_of, parse_spec

if TYPE_CHECKING:
    from specbench.decoding.draft import Drafter
    from specbench.models.registry import Draft
    from specbench.models.target import Target

VANILLA, AGAIN = "vanilla", "vanilla-again"
PUBLISHED = ("expected_tau", "tau_source", "verified")  # what the registry says of a drafter with a target
# Where the registry keeps the drafters of methods that have no entries of their own name; the preferred first.
DRAFTS_OF = {
    "eagle": ("eagle3", "eagle2", "eagle1"),
    "hf-assisted": ("draft-model",),
}


@dataclass(frozen=True)
class Named:
    """A method under its label, the normalised SPEC; `known`: its drafters that the registry has for the target."""

    label: str
    spec: Spec
    method: Method
    known: tuple[Draft, ...] = ()

    def drafter(self) -> dict[str, Any] | None:
        """Who the drafter is, and what the registry says of it with this target; None without weights."""
        found = self.method.draft_identity()
        if found is None:
            return None
        ids = {str(found.get(key)).lower() for key in ("ref", "hub_id") if found.get(key)}
        entry = next((draft for draft in self.known if draft.id.lower() in ids), None)
        return found if entry is None else found | {field: getattr(entry, field) for field in PUBLISHED}

    def to_json(self) -> dict[str, Any]:
        """What the manifest keeps."""
        return {
            "label": self.label,
            "lossless": self.method.lossless,
            "state": state(self.method),
            "batches": self.method.batches,
            "draft": self.drafter(),
            "draft_costs": dict(self.method.draft_costs),
        }


def state(method: Method) -> str:
    """`warm` if the method keeps what earlier prompts taught it, else `cold`."""
    return "warm" if method.warm else "cold"


def labels(methods: Sequence[str]) -> list[tuple[str, Spec]]:
    """Label and SPEC of each method, `vanilla` first; named on the command line it is `vanilla-again`.

    Raises:
        SpecbenchError: an unknown method or option, or one given twice. Nothing is loaded yet.
    """
    found = [(VANILLA, Spec(VANILLA))]
    for text in methods:
        spec = parse_spec(text)
        _check(spec)
        label = AGAIN if spec.name == VANILLA else spec.label
        if (spec.name, spec.parameters) in [(known.name, known.parameters) for _, known in found[1:]]:
            raise SpecbenchError(f"method {spec.label} is given twice", "give each method once")
        found.append((label, spec))
    return found


def _check(spec: Spec) -> None:
    """Raise SpecbenchError if it, or a SPEC nested in it, names an unknown method or option."""
    for value in convert_options(find_method(spec.name), spec).values():
        if isinstance(value, Spec):
            _check(value)


def open_target(config: RunConfig, notify: Callable[[str], None]) -> Target:
    """Load the target of a config."""
    from specbench.models.gguf import cache_folder
    from specbench.models.load import load
    from specbench.models.target import Target

    loaded = load(
        config.target,
        dtype=config.dtype,
        device=config.device,
        device_map=config.device_map,
        attn=config.attn,
        quantize=config.quantize,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        notify=notify,
    )
    stop = stop_ids(loaded.model, loaded.tokenizer)
    target = Target(loaded.model, loaded.tokenizer, loaded.identity, stop)
    return target.fuse().pack(cache_folder(), notify).accelerate(config.graphs, config.compile)


def build(label: str, spec: Spec, target: Target, config: RunConfig) -> Named:
    """A method ready to run.

    Raises:
        SpecbenchError: options it refuses, or a drafter that cannot be had.
    """
    from specbench.decoding.draft import Drafter
    from specbench.decoding.loop import DraftVerify

    made = make(spec, target, config)
    if getattr(made, "wants_answer", False) and not config.sampling.greedy:
        raise SpecbenchError(
            f"{spec.name} knows the target's greedy answer only, and the temperature is {config.temperature:g}",
            f"leave {spec.name} out, or use --temperature 0",
        )
    method = DraftVerify(target, made) if isinstance(made, Drafter) else made
    return Named(label, spec, method, _registered_drafts(config.target, spec.name))


def make(spec: Spec, target: Target, config: RunConfig) -> Drafter | Method:
    """What a SPEC stands for, ready to run; the SPECs among its options are made in the same way.

    An option `draft` that is not given is the run's, or the registry's preferred one for the target.

    Raises:
        SpecbenchError: options it refuses, or a drafter that cannot be had.
    """
    from specbench.decoding.tree import check_nodes

    cls = find_method(spec.name)
    options = convert_options(cls, spec)
    known = options_of(cls)
    for name, parameter in known.items():
        value = options.get(name, parameter.default)
        if isinstance(value, Spec):
            options[name] = _part(value, spec, target, config)
    if "draft" in known and "draft" not in options:
        from specbench.models.registry import default_draft

        registered = _registered_drafts(config.target, spec.name)
        options["draft"] = config.draft or default_draft(config.target, registered)
    try:
        made = cls(target, **options)
        check_nodes(getattr(made, "max_nodes", 0))
    except SpecbenchError:
        raise
    except (ValueError, TypeError) as error:
        raise SpecbenchError(
            f"{spec.label}: {error}", "see `specbench ls methods` for its options"
        ) from error
    except Exception as error:  # a plug-in may raise anything
        raise SpecbenchError(
            f"{spec.label} cannot be set up: {first_line(error)}", "mend the method, or leave it out"
        ) from error
    return made


def _part(spec: Spec, whole: Spec, target: Target, config: RunConfig) -> Drafter:
    """The drafter that a SPEC nested in `whole` stands for."""
    from specbench.decoding.draft import Drafter

    made = make(spec, target, config)
    if not isinstance(made, Drafter):
        raise SpecbenchError(
            f"{whole.name}: {spec.name} is no drafter, but a loop of its own",
            "nest a method that only proposes, such as (prompt-lookup)",
        )
    return made


def _registered_drafts(target: str, method: str) -> tuple[Draft, ...]:
    """The registry's drafters of a target for a method, the preferred one first."""
    from specbench.models.registry import drafts_for

    return tuple(draft for name in DRAFTS_OF.get(method, (method,)) for draft in drafts_for(target, name))
