"""What a DFlash checkpoint's config says, in the spellings of z-lab and of DeepSpec, and whether it fits a target."""

from __future__ import annotations

from dataclasses import dataclass

from specbench.errors import SpecbenchError
from specbench.models.checkpoint import Checkpoint
from specbench.models.draft_net import LayerShape, read_shape
from specbench.models.dspark import KINDS
from specbench.models.fields import Fields
from specbench.models.fits import check_hidden_size, check_vocabulary
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
    fields = Fields(checkpoint.ref, checkpoint.config)
    _refuse_variants(checkpoint, fields)
    layers = fields.integer("num_hidden_layers")
    types = tuple(fields.words("layer_types") or ["full_attention"] * layers)
    if len(types) != layers or set(types) - set(ATTENTION_KINDS):
        raise _unfit(fields, f"has {layers} layers and layer types {', '.join(types)}")
    # Unless it says otherwise, sliding layers alone are causal inside a block.
    causal = tuple(t for t in set(types) if fields.flag("is_causal", default=t == "sliding_attention"))
    settings = DFlashSettings(
        layer=read_shape(fields, qkv_bias=fields.flag("attention_bias"), qk_norm=True),
        layers=layers,
        layer_ids=_layer_ids(fields, target, layers),
        layer_types=types,
        causal=causal,
        window=fields.optional("sliding_window"),
        block=fields.integer("block_size"),
        mask_token=fields.integer("mask_token_id", least=0),
        shifted=_is_deepspec(fields),
        markov=_markov(fields),
        markov_rank=fields.integer("markov_rank", default=0, least=0),
        embedding_scale=fields.number("input_embedding_scale", default=1.0),
        output_multiplier=fields.number("output_multiplier", default=1.0),
        softcap=fields.number("final_logit_softcapping", default=0.0) or None,
    )
    _check_fit(fields, settings, target)
    return settings


def default_layer_ids(target_layers: int, layers: int) -> list[int]:
    """Where the config names no target layers: spread evenly over 1 … n-3, or the middle one."""
    if layers == 1:
        return [target_layers // 2]
    span = target_layers - 3 - 1
    return [round(1 + index * span / (layers - 1)) for index in range(layers)]


def _is_deepspec(fields: Fields) -> bool:
    named = any("DSpark" in name for name in fields.words("architectures"))
    return named or "num_anchors" in fields.config or "markov_rank" in fields.config


def _refuse_variants(checkpoint: Checkpoint, fields: Fields) -> None:
    if "speculators_model_type" in fields.config:
        raise _unfit(fields, "is written by speculators, whose layout of DFlash is not built")
    for name, words in OTHERS.items():
        value = fields.get(name)
        if value not in (None, False, 0, "", "dflash"):
            raise _unfit(fields, f"has {words} ({name} = {value!r}), a variant that is not built")
    if any(key.startswith("markov_head.") for key in checkpoint.state) and not _is_deepspec(fields):
        raise _unfit(fields, "has a Markov head but not DeepSpec's config (markov_rank, markov_head_type)")


def _markov(fields: Fields) -> str | None:
    if not fields.integer("markov_rank", default=0, least=0):
        return None
    kind = str(fields.get("markov_head_type")).lower()
    if kind not in KINDS:
        raise _unfit(fields, f"has markov_head_type {kind!r}, expected one of {', '.join(KINDS)}")
    return kind


def _layer_ids(fields: Fields, target: Target, layers: int) -> tuple[int, ...]:
    there = target.config.num_hidden_layers
    made_for = fields.integer("num_target_layers", default=there)
    if made_for != there:
        raise _unfit(fields, f"was made for a target of {made_for} layers, this one has {there}")
    ids = fields.integers("target_layer_ids") or default_layer_ids(there, layers)
    strange = [i for i in ids if not -1 <= i < there]
    if strange:
        raise _unfit(fields, f"reads target layer {strange[0]}, this target has 0 to {there - 1}")
    return tuple(ids)


def _check_fit(fields: Fields, settings: DFlashSettings, target: Target) -> None:
    check_hidden_size(fields.ref, "hidden_size", settings.layer.hidden_size, target.config.hidden_size)
    vocab = fields.optional("vocab_size")
    if vocab is not None:
        check_vocabulary(fields.ref, "vocab_size", vocab, target.vocab_size)
    rows = int(target.embeddings.weight.shape[0])  # type: ignore[index]
    if settings.mask_token >= rows:
        raise _unfit(
            fields, f"has mask_token_id {settings.mask_token}, the target's embeddings have {rows} rows"
        )
    if settings.drafts < 1:
        raise _unfit(fields, f"has block_size {settings.block}, which leaves nothing to draft")


def _unfit(fields: Fields, why: str) -> SpecbenchError:
    return SpecbenchError(f"{fields.ref} {why}", "give dflash a DFlash draft that was made for this target")
