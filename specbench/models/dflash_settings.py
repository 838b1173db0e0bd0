"""What a DFlash checkpoint's config says, in the spellings of z-lab and of DeepSpec, and whether it fits a target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specbench.errors import SpecbenchError
from specbench.models.checkpoint import Checkpoint
from specbench.models.draft_net import LayerShape
from specbench.models.dspark import KINDS
from specbench.models.target import ATTENTION_KINDS, Target

# Variants that change what is computed: better refused than run as something they are not.
OTHERS = {
    "projector_type": "another projector",
    "selector_rank": "DFlash 2's candidate selector",
    "conv_kernel_size": "DFlash 2's convolutions",
    "draft_vocab_size": "a vocabulary of its own",
}


@dataclass(frozen=True)
class DFlashSettings:
    """A DFlash draft's numbers.

    block: places of a block, the root's included.
    shifted: DeepSpec's blocks, whose places guess the token after them: the root's the first one.
    layer_ids: target layers whose outputs are the context, -1 the embeddings.
    layer_types: attention of each draft layer.
    causal: the layer types whose block places see only those before them.
    markov: kind of the Markov head, or None.
    """

    layer: LayerShape
    layers: int
    layer_ids: tuple[int, ...]
    layer_types: tuple[str, ...]
    causal: tuple[str, ...]
    window: int | None
    block: int
    mask_token: int
    shifted: bool
    markov: str | None
    markov_rank: int
    embedding_scale: float
    output_multiplier: float
    softcap: float | None

    @property
    def drafts(self) -> int:
        """Tokens one block proposes."""
        return self.block if self.shifted else self.block - 1

    def taps(self, target: Target) -> tuple[str, ...]:
        """The target's hidden states these are: transformers counts the last layer's output after the final norm."""
        last = target.config.num_hidden_layers - 1
        names = {-1: "embed", last: "final"}
        return tuple(names.get(i, f"layer:{i}") for i in self.layer_ids)


def read_settings(checkpoint: Checkpoint, target: Target) -> DFlashSettings:
    """The settings of a DFlash or DSpark draft.

    Raises:
        SpecbenchError: another kind of drafter, a variant that is not built, or one for another target.
    """
    config = checkpoint.config
    _refuse_variants(checkpoint)
    layers = _integer(checkpoint, "num_hidden_layers")
    types = tuple(_field(config, "layer_types") or ["full_attention"] * layers)
    if len(types) != layers or set(types) - set(ATTENTION_KINDS):
        raise _unfit(checkpoint, f"has {layers} layers and layer types {', '.join(map(str, types))}")
    explicit = _field(config, "is_causal")
    causal = tuple(t for t in set(types) if (t == "sliding_attention" if explicit is None else explicit))
    settings = DFlashSettings(
        layer=_shape(checkpoint),
        layers=layers,
        layer_ids=_layer_ids(checkpoint, target, layers),
        layer_types=types,
        causal=causal,
        window=_field(config, "sliding_window"),
        block=_integer(checkpoint, "block_size"),
        mask_token=_integer(checkpoint, "mask_token_id"),
        shifted=_is_deepspec(config),
        markov=_markov(checkpoint),
        markov_rank=int(config.get("markov_rank") or 0),
        embedding_scale=float(_field(config, "input_embedding_scale", 1.0)),
        output_multiplier=float(_field(config, "output_multiplier", 1.0)),
        softcap=_field(config, "final_logit_softcapping") or None,
    )
    _check_fit(checkpoint, settings, target)
    return settings


def default_layer_ids(target_layers: int, layers: int) -> list[int]:
    """Where the config names no target layers: spread evenly over 1 … n-3, or the middle one."""
    if layers == 1:
        return [target_layers // 2]
    span = target_layers - 3 - 1
    return [round(1 + index * span / (layers - 1)) for index in range(layers)]


def _field(config: dict[str, Any], name: str, default: Any = None) -> Any:
    """A field of `dflash_config`, else of the config itself."""
    nested = config.get("dflash_config") or {}
    value = nested.get(name, config.get(name))
    return default if value is None else value


def _integer(checkpoint: Checkpoint, name: str) -> int:
    value = _field(checkpoint.config, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise SpecbenchError(
            f"{checkpoint.ref}: config.json has {name} = {value!r}, expected a whole number",
            "is it the drafter you mean, and is its config.json whole?",
        )
    return value


def _is_deepspec(config: dict[str, Any]) -> bool:
    named = any("DSpark" in str(name) for name in config.get("architectures") or ())
    return named or "num_anchors" in config or "markov_rank" in config


def _refuse_variants(checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    if "speculators_model_type" in config:
        raise _unfit(checkpoint, "is written by speculators, whose layout of DFlash is not built")
    for name, words in OTHERS.items():
        value = _field(config, name)
        if value not in (None, False, 0, "", "dflash"):
            raise _unfit(checkpoint, f"has {words} ({name} = {value!r}), a variant that is not built")
    if any(key.startswith("markov_head.") for key in checkpoint.state) and not _is_deepspec(config):
        raise _unfit(
            checkpoint, "has a Markov head but not DeepSpec's config (markov_rank, markov_head_type)"
        )


def _markov(checkpoint: Checkpoint) -> str | None:
    if not checkpoint.config.get("markov_rank"):
        return None
    kind = str(checkpoint.config.get("markov_head_type")).lower()
    if kind not in KINDS:
        raise _unfit(checkpoint, f"has markov_head_type {kind!r}, expected one of {', '.join(KINDS)}")
    return kind


def _shape(checkpoint: Checkpoint) -> LayerShape:
    config = checkpoint.config
    hidden, heads = _integer(checkpoint, "hidden_size"), _integer(checkpoint, "num_attention_heads")
    return LayerShape(
        hidden_size=hidden,
        intermediate_size=_integer(checkpoint, "intermediate_size"),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        input_size=hidden,
        eps=float(config.get("rms_norm_eps", 1e-6)),
        qkv_bias=bool(config.get("attention_bias", False)),
        qk_norm=True,
    )


def _layer_ids(checkpoint: Checkpoint, target: Target, layers: int) -> tuple[int, ...]:
    there = target.config.num_hidden_layers
    made_for = _field(checkpoint.config, "num_target_layers", there)
    if made_for != there:
        raise _unfit(checkpoint, f"was made for a target of {made_for} layers, this one has {there}")
    ids = _field(checkpoint.config, "target_layer_ids")
    ids = default_layer_ids(there, layers) if ids is None else ids
    strange = [i for i in ids if not isinstance(i, int) or not -1 <= i < there]
    if strange or not ids:
        raise _unfit(
            checkpoint, f"reads target layer {strange[:1] or 'none'}, this target has 0 to {there - 1}"
        )
    return tuple(ids)


def _check_fit(checkpoint: Checkpoint, settings: DFlashSettings, target: Target) -> None:
    hidden, wanted = settings.layer.hidden_size, target.config.hidden_size
    if hidden != wanted:
        raise _unfit(checkpoint, f"has hidden size {hidden}, the target {wanted}")
    rows = int(target.embeddings.weight.shape[0])  # type: ignore[index]
    if settings.mask_token >= rows:
        raise _unfit(
            checkpoint, f"has mask_token_id {settings.mask_token}, the target's embeddings have {rows} rows"
        )
    if settings.drafts < 1:
        raise _unfit(checkpoint, f"has block_size {settings.block}, which leaves nothing to draft")


def _unfit(checkpoint: Checkpoint, why: str) -> SpecbenchError:
    return SpecbenchError(
        f"{checkpoint.ref} {why}", "give dflash a DFlash draft that was made for this target"
    )
