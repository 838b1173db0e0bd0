"""What the config and the keys of an EAGLE draft say: its layers, the target's it reads, how far it looks back.

Spellings read (facts from SafeAILab/EAGLE, sgl-project/SpecForge, NVIDIA/Model-Optimizer, vllm-project/speculators
and vLLM's loaders): plain (`midlayer.*` or `layers.0.*`), `eagle_config` inside, `speculators_model_type` with a
nested `transformer_layer_config`, and vLLM's `model_type: eagle` with a nested `model`. Where config and keys
disagree about what exists, the keys are right.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specbench.errors import SpecbenchError
from specbench.models.checkpoint import FOR_TARGET, Checkpoint
from specbench.models.fields import Fields


@dataclass(frozen=True)
class Keys:
    """The weights of a checkpoint under one spelling: no `model.` prefix, and `layers.0.` for `midlayer.`."""

    checkpoint: Checkpoint

    def spelled(self, name: str) -> str:
        """`name` as this checkpoint writes it."""
        state = self.checkpoint.state
        names = [name, name.replace("layers.0.", "midlayer.", 1)]
        written = [prefix + n for prefix in ("", "model.") for n in names]
        midlayer = any(key.removeprefix("model.").startswith("midlayer.") for key in state)
        return next((key for key in written if key in state), names[midlayer])

    def __contains__(self, name: str) -> bool:
        return self.spelled(name) in self.checkpoint.state

    def take(self, name: str, *shape: int | None, hint: str = FOR_TARGET) -> torch.Tensor:
        """The weight of this shape (see `Checkpoint.take`)."""
        return self.checkpoint.take(self.spelled(name), *shape, hint=hint)

    def not_loaded(self) -> list[str]:
        """Keys that may be there although they are the target's own, computed, or read apart."""
        computed = [key for key in self.checkpoint.state if key.endswith("rotary_emb.inv_freq")]
        return [*map(self.spelled, _NOT_LOADED), *computed]

    def layers(self) -> int:
        """How many decoder layers there are (configs have been wrong about it)."""
        names = (key.removeprefix("model.") for key in self.checkpoint.state)
        numbers = [0 if name.startswith("midlayer.") else _number_in(name) for name in names]
        return max((n for n in numbers if n is not None), default=0) + 1


_NOT_LOADED = ("embed_tokens.weight", "d2t", "t2d", "verifier_norm.weight", "verifier_lm_head.weight")


def _number_in(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[1]) if len(parts) > 1 and parts[0] == "layers" and parts[1].isdigit() else None


def aux_taps(fields: Fields, layers: int) -> tuple[str, ...]:
    """The target's hidden states an EAGLE-3 draft reads, low to high, as taps.

    An id i means the *input* of decoder layer i in SafeAILab's code, in vLLM and in speculators, and its *output* in
    SpecForge and Model-Optimizer, whose pattern is 1, n//2 - 1, n - 4, and in DeepSpec (`target_layer_ids`). So: that
    pattern means outputs, wherever it stands (it survives conversion to speculators); so does any list in
    `eagle_config` that does not start with 2. Without ids: the inputs of layers 2, n//2 and n - 3.
    """
    name = next((n for n in AUX_IDS if fields.integers(n)), None)
    if name is None:
        inputs = [2, layers // 2, layers - 3]
        if len(set(inputs)) < 3 or min(inputs) < 0:
            raise SpecbenchError(
                f"{fields.ref}: EAGLE-3 reads layers 2, n//2 and n - 3 of its target; with {layers} layers these "
                "are not three different ones",
                f"use a target of 7 layers or more, or name them in {AUX_IDS[0]}",
            )
    else:
        inputs = _inputs(fields, name, layers)
    return tuple(f"layer:{i - 1}" if i else "embed" for i in inputs)


AUX_IDS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids")


def _inputs(fields: Fields, name: str, layers: int) -> list[int]:
    """The list `name` of the config as numbers of the layers whose inputs are read (`layers`: the last output)."""
    ids = fields.integers(name)
    nested = name in fields.mapping("eagle_config") and "speculators_model_type" not in fields.config
    outputs = (
        ids == [1, layers // 2 - 1, layers - 4] or (nested and ids[0] != 2) or name == "target_layer_ids"
    )
    inputs = [i + 1 for i in ids] if outputs else ids
    if min(inputs) < 0 or max(inputs) > layers:
        raise SpecbenchError(
            f"{fields.ref}: it reads layers {ids} of its target ({name}), this target has {layers}",
            FOR_TARGET,
        )
    return inputs


def window_of(fields: Fields) -> int | None:
    """How far back the draft's attention looks; None: all the way.

    Raises:
        SpecbenchError: if its layers differ in that.
    """
    kinds, window = fields.words("layer_types"), fields.optional("sliding_window")
    if "sliding_attention" not in kinds or window is None:
        return None
    if len(set(kinds)) > 1:
        raise SpecbenchError(
            f"{fields.ref}: its layers mix full and sliding attention, which is not supported in a draft",
            "use a draft whose layers are all of one type",
        )
    return window
