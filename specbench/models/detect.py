"""What a checkpoint is, from its config and the names and shapes of its weights (never from a folder's name).

The order matters: a DFlash draft's config says `qwen3`, an EAGLE draft's says `llama`, and Medusa configs are wrong
about the number of heads. What the weights are called decides wherever the config is silent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from specbench.errors import SpecbenchError
from specbench.models.detect_settings import SETTINGS, bare, fc_width
from specbench.models.fields import Fields


class Described(Protocol):
    """What is needed to tell: a `Checkpoint`, or a `Listing` of one."""

    @property
    def ref(self) -> str: ...
    @property
    def folder(self) -> Path: ...
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...


@dataclass(frozen=True)
class Kind:
    """A kind of checkpoint in words, and the method that runs it (None: none does)."""

    words: str
    method: str | None


KINDS = {
    "eagle": Kind("an EAGLE-1/2 draft", "eagle2"),
    "eagle3": Kind("an EAGLE-3 draft", "eagle3"),
    "p-eagle": Kind("a P-EAGLE draft", None),
    "medusa": Kind("Medusa heads", "medusa"),
    "medusa-2": Kind("a model with Medusa heads of its own (Medusa-2)", "medusa"),
    "hydra": Kind("Hydra heads", "hydra"),
    "dflash": Kind("a DFlash draft", "dflash"),
    "dspark": Kind("a DSpark draft", "dflash"),
    "domino": Kind("a Domino draft", None),
    "jetspec": Kind("a JetSpec draft (DFlash with a causal head)", None),
    "mtp": Kind("a model with multi-token-prediction layers (MTP)", "mtp"),
    "pard": Kind("a PARD draft model", "pard"),
    "causal-lm": Kind("a language model", "draft-model"),
    "unknown": Kind("nothing that specbench knows", None),
}
SPECULATORS = {
    "eagle": "eagle", "eagle3": "eagle3", "peagle": "p-eagle", "dflash": "dflash", "dspark": "dspark",
    "mtp": "mtp", "medusa": "medusa",
}  # fmt: skip
# What speculators writes and a method here reads.
SPECULATORS_RUN = ("eagle", "eagle3")


@dataclass(frozen=True)
class Recognised:
    """What a checkpoint is.

    kind: a key of `KINDS`.
    spelling: whose layout of files, config and keys it has.
    settings: what matters of this kind, by name; None where neither config nor keys say.
    """

    kind: str
    spelling: str
    settings: dict[str, Any]

    @property
    def words(self) -> str:
        return KINDS[self.kind].words

    @property
    def method(self) -> str | None:
        """The method that runs it; None if none does."""
        if self.spelling == "speculators" and self.kind not in SPECULATORS_RUN:
            return None
        return KINDS[self.kind].method


def recognise(checkpoint: Described) -> Recognised:
    """What `checkpoint` is.

    Raises:
        SpecbenchError: a field its kind cannot do without is missing, one is of a wrong type, or it is of a kind that
            is known by name only.
    """
    kind, spelling = _kind(checkpoint)
    fields = Fields(checkpoint.ref, checkpoint.config)
    settings = SETTINGS[kind](checkpoint, fields) if kind in SETTINGS else {}
    return Recognised(kind, spelling, settings)


def expect(checkpoint: Described, kinds: Sequence[str], method: str) -> Recognised:
    """What `checkpoint` is, if it is one of the `kinds` that `method` runs.

    Raises:
        SpecbenchError: it is something else; says what, and which method runs that.
    """
    kind, _ = _kind(checkpoint)
    if kind in kinds:
        return recognise(checkpoint)
    found, wanted = KINDS[kind], KINDS[kinds[0]].words
    message = f"{checkpoint.ref} is {found.words}, not {wanted}"
    if kind == "unknown":
        raise SpecbenchError(f"{message}: {evidence(checkpoint)}", f"give {method} {wanted}")
    if found.method is None:
        raise SpecbenchError(f"{message}, and no method here runs it", f"give {method} {wanted}")
    raise SpecbenchError(message, f"use --method {found.method}")


def evidence(checkpoint: Described) -> str:
    """What there is to see in a checkpoint that nothing recognises, in a few words."""
    keys = sorted(checkpoint.shapes)
    shown = ", ".join(keys[:3]) + (", …" if len(keys) > 3 else "")
    return f"model type {checkpoint.config.get('model_type')!r}, weights {shown or 'none'}"


def _kind(checkpoint: Described) -> tuple[str, str]:
    """Kind and spelling."""
    fields, keys = Fields(checkpoint.ref, checkpoint.config), bare(checkpoint.shapes)
    named = checkpoint.config.get("speculators_model_type")
    if named is not None:
        return _speculators(fields, str(named)), "speculators"
    return (
        _heads(checkpoint, keys)
        or _dflash(fields, keys)
        or _eagle(fields, keys)
        or _language_model(checkpoint.config, keys)
        or ("unknown", "unknown")
    )


def _speculators(fields: Fields, named: str) -> str:
    if named not in SPECULATORS:
        raise SpecbenchError(
            f"{fields.ref} is a speculators draft of type {named!r}, which no method here runs",
            f"types that are run: {', '.join(SPECULATORS_RUN)}",
        )
    domino = fields.get("projector_type") == "domino"
    return "domino" if named == "dflash" and domino else SPECULATORS[named]


def _heads(checkpoint: Described, keys: Mapping[str, tuple[int, ...]]) -> tuple[str, str] | None:
    """Medusa and Hydra, by fields, files or keys."""
    fields = checkpoint.config.keys()
    files = {file.name for file in checkpoint.folder.glob("*_lm_head.*")}
    if any(k.startswith("hydra_") for k in fields) or any(k.startswith("hydra_mlp.") for k in keys):
        return "hydra", "Hydra"
    if any(k.startswith("medusa_head.") for k in keys):
        return ("medusa-2" if _is_whole(keys) else "medusa"), "Medusa"
    if any(re.fullmatch(r"\d+\.\d+\.(linear\.)?weight", k) for k in keys):
        return "medusa", "Medusa"
    if any(name.startswith("hydra_") for name in files):
        return "hydra", "Hydra"
    said = any(k.startswith("medusa_") for k in fields) or any(n.startswith("medusa_") for n in files)
    return ("medusa", "Medusa") if said and not _is_whole(keys) else None


def _dflash(fields: Fields, keys: Mapping[str, tuple[int, ...]]) -> tuple[str, str] | None:
    """DFlash and what was built on it. DeepSpec's EAGLE-3 has `target_layer_ids` too, and is none."""
    eagle = any("hidden_norm" in k and k != "hidden_norm.weight" for k in keys)
    config = fields.config
    marked = "dflash_config" in config or "target_layer_ids" in config
    markov = any(k.startswith("markov_head.") for k in keys)
    looks = "hidden_norm.weight" in keys and "fc.weight" in keys and any("q_norm" in k for k in keys)
    if eagle or not (marked or markov or looks):
        return None
    spelling = "z-lab" if "dflash_config" in config else "DeepSpec"
    projector = fields.get("projector_type")
    if projector == "domino" or any("gru" in k.split(".") for k in keys):
        return "domino", spelling
    if fields.flag("causal_head"):
        return "jetspec", spelling
    return ("dspark" if markov or projector == "dspark" else "dflash"), spelling


def _eagle(fields: Fields, keys: Mapping[str, tuple[int, ...]]) -> tuple[str, str] | None:
    ratio = fc_width(keys)
    own_keys = "d2t" in keys or any(
        k.startswith("midlayer.") or k.endswith(".hidden_norm.weight") for k in keys
    )
    # EAGLE-1/2 ends without a norm, and a whole model has no fc.
    normed = ratio is not None and "norm.weight" in keys
    wide = ratio is not None and ratio > 2
    if own_keys or normed or wide or _reads_two_widths(keys):
        return "eagle3", _eagle3_spelling(fields, keys)
    if fields.config.get("model_type") == "eagle":
        return "eagle", "vLLM"
    # An `fc` of another width is a damaged one: opening it then says which weight is misshapen.
    attends = any(k.startswith("layers.0.self_attn.") for k in keys)
    return ("eagle", "SafeAILab") if ratio is not None and (ratio == 2 or attends) else None


def _eagle3_spelling(fields: Fields, keys: Mapping[str, tuple[int, ...]]) -> str:
    config, architecture = fields.config, " ".join(fields.words("architectures"))
    if config.get("model_type") == "eagle":
        return "vLLM"
    if "target_layer_ids" in config:
        return "DeepSpec"
    if "LlamaForCausalLMEagle3" in architecture:
        return "SpecForge"
    if "Eagle3" in architecture and "midlayer." in " ".join(keys):
        return "AngelSlim"
    return "SafeAILab" if any(k.startswith("midlayer.") for k in keys) else "ModelOpt"


def _reads_two_widths(keys: Mapping[str, tuple[int, ...]]) -> bool:
    """An attention that reads twice the width it writes: embedding and hidden state side by side."""
    q, o = keys.get("layers.0.self_attn.q_proj.weight"), keys.get("layers.0.self_attn.o_proj.weight")
    return q is not None and o is not None and len(q) == len(o) == 2 and q[1] == 2 * o[0]


def _language_model(config: Mapping[str, Any], keys: Mapping[str, tuple[int, ...]]) -> tuple[str, str] | None:
    """A whole model: with MTP layers, made for PARD, or plain."""
    if any(k.startswith("mtp.") for k in keys):
        return "mtp", "Qwen"
    if any(".eh_proj." in k or k.startswith("eh_proj.") for k in keys):
        return "mtp", "DeepSeek"
    if not _is_whole(keys):
        return None
    if "pard_token" in config:
        return "pard", "PARD"
    return "causal-lm", "transformers"


def _is_whole(keys: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether there are embeddings and layers: a model that can be run on its own."""
    embeddings = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings")
    has_embeddings = any(name in k.split(".") for k in keys for name in embeddings)
    has_layers = any(re.match(r"(.*\.)?(layers|h|blocks)\.\d+\.", k) for k in keys)
    return has_embeddings and has_layers
