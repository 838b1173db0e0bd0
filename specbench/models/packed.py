"""Checkpoints whose weights are quantised already: what config.json says of them, and what loading them needs.

They are loaded as transformers loads them, with the packages that it wants for each method (`NEEDS`).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specbench.errors import SpecbenchError

if TYPE_CHECKING:
    import torch

    from specbench.models.checkpoint import Weight

# Method -> packages that transformers asks for; kernels of GPTQ and AWQ are gptqmodel's, no longer autoawq's.
NEEDS = {
    "gptq": ("gptqmodel", "optimum"),
    "awq": ("gptqmodel", "accelerate"),
    "compressed-tensors": ("compressed-tensors",),
    "bitsandbytes": ("bitsandbytes", "accelerate"),
    "fp8": ("accelerate",),
    "torchao": ("torchao",),
}
BYTES_A_WEIGHT = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.625}
"""By dtype, or by what `models.quantize` makes: int4's scale and zero point of 2 bytes each serve 32 weights."""
MXFP4 = "mxfp4"
BITS = {"fp8": 8, "fbgemm_fp8": 8, MXFP4: 4}  # of methods whose configs need not say
BESIDE = (
    "scales", "qzeros", "g_idx", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_global_scale",
    "weight_shape", "weight_g_idx", "input_scale", "SCB", "weight_format",
)  # fmt: skip
"""Tensors that are no weights: what their matrix is unpacked with."""
MIXES = "bitsandbytes-8bit"
"""LLM.int8() takes the outlier columns of a whole pass out of its product, so that a token's logits depend on the
others in the pass: a lossless method may differ from vanilla beyond rounding (by 0.2 in tiny models' logits)."""
NONE = "none"


@dataclass(frozen=True)
class Packed:
    """How the weights of a checkpoint are stored: the method, bits a weight, weights that share a scale; None = not
    said."""

    method: str
    bits: int | None = None
    group: int | None = None

    @property
    def words(self) -> str:
        """For people: `gptq, 4 bits, groups of 128`."""
        bits = None if self.bits is None else f"{self.bits} bits"
        return ", ".join(filter(None, (self.method, bits, f"groups of {self.group}" if self.group else None)))

    @property
    def bytes_a_weight(self) -> float | None:
        """With its share of a scale of 16 bits (mxfp4: 8); zero points, where there are any, are left out.

        None if the bits are not said.
        """
        if self.method == MXFP4:
            return (4 + 8 / 32) / 8
        return None if self.bits is None else (self.bits + (16 / self.group if self.group else 0)) / 8

    @property
    def experts_only(self) -> bool:
        """Whether what is not a routed expert is stored plainly."""
        return self.method == MXFP4

    @property
    def computes_in(self) -> str | None:
        """The numbers that are multiplied, where they are not the checkpoint's dtype."""
        return "fp8" if self.method in ("fp8", "fbgemm_fp8") else None

    @property
    def name(self) -> str:
        """As results name it: `gptq-4bit-g128`, `fp8`, `mxfp4`."""
        bits = None if self.bits is None or str(self.bits) in self.method else f"{self.bits}bit"
        group = f"g{self.group}" if self.group else None
        return "-".join(filter(None, (self.method, bits, group)))


def read(config: Mapping[str, Any]) -> Packed | None:
    """What a config.json says, or None if the weights are not quantised."""
    facts = config.get("quantization_config")
    if not isinstance(facts, Mapping) or not facts:
        return None
    method = facts.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in facts else "unknown")
    method = str(getattr(method, "value", method))
    if method == "compressed-tensors":
        facts = _first_group(facts)
    bits = BITS.get(method) or _number(facts, "bits", "w_bit", "num_bits")
    if method == "bitsandbytes":
        bits = 4 if facts.get("load_in_4bit") else 8
    return Packed(method, bits, _number(facts, "group_size", "q_group_size"))


def check_field(config: Mapping[str, Any], name: str) -> None:
    """Raise SpecbenchError if a config.json speaks of quantisation in a form that transformers cannot read."""
    facts = config.get("quantization_config")
    if facts is not None and not isinstance(facts, Mapping):
        raise SpecbenchError(
            f"{name}: quantization_config in config.json is {facts!r}, not an object",
            "leave the field out if the weights are plain; else copy config.json again from where they were made",
        )


def parameters(weights: Mapping[str, Weight], stored: Packed | None) -> int:
    """Parameters of a checkpoint by what its files say of their tensors: packed ones as many as they stand for."""
    return sum(_stands_for(key, weight, stored) for key, weight in weights.items())


def _stands_for(key: str, weight: Weight, stored: Packed | None) -> int:
    plain = "float" in weight.dtype
    if stored is None:
        return math.prod(weight.shape) if plain else 0
    leaf = key.rpartition(".")[2]
    if ".weight." in key or leaf in BESIDE or leaf.endswith("_scales"):
        return 0
    return math.prod(weight.shape) if plain else weight.bytes * 8 // (stored.bits or 8)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds numbers as they are, and not codes for them: floating point, of two bytes at least."""
    return tensor.is_floating_point() and tensor.itemsize > 1


def is_packed(layer: Any) -> bool:
    """Whether a layer of a loaded model is a linear one whose weight is kept packed: what is there is no matrix."""
    if not (hasattr(layer, "in_features") and hasattr(layer, "out_features")):
        return False
    weight = getattr(layer, "weight", None)
    shape = (layer.out_features, layer.in_features)
    return weight is None or not is_plain(weight) or tuple(weight.shape) != shape


def check(packed: Packed, name: str, quantize: str) -> None:
    """Raise SpecbenchError if a package that loading needs is missing, or if it is to be quantised once more."""
    if quantize != NONE:
        raise SpecbenchError(
            f"{name} is quantised already ({packed.name}), and cannot be quantised to {quantize}",
            "leave the option out, or name the checkpoint it was made from",
        )
    wanted = NEEDS.get(packed.method, ())
    missing = [package for package in wanted if importlib.util.find_spec(package.replace("-", "_")) is None]
    if missing:
        raise SpecbenchError(
            f"{name} is quantised ({packed.name}), and to load it needs {' and '.join(missing)}",
            f"pip install {' '.join(missing)}",
        )


def note(packed: Packed, model: Any) -> str | None:
    """What a reader of the results must know of how it was loaded, or None."""
    if getattr(model.config, "quantization_config", None) is None:
        dtype = str(model.dtype).removeprefix("torch.")
        return f"its {packed.name} weights were expanded to {dtype} to be loaded here"
    if packed.name == MIXES:
        return "logits depend on the other tokens of a pass: methods may differ from vanilla beyond rounding"
    return None


def prepare(packed: Packed, config: Any) -> None:
    """Have compressed-tensors expand its weights when it loads them, and not within the first pass, as it would."""
    if packed.method == "compressed-tensors":
        config.quantization_config["dequantize"] = True


def _first_group(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """How compressed-tensors stores the weights of the first group of layers it names."""
    groups = facts.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    return weights if isinstance(weights, Mapping) else {}


def _number(facts: Mapping[str, Any], *names: str) -> int | None:
    """The first of these fields that is a whole number above 0 (a group of -1 is a whole row)."""
    found = (facts.get(name) for name in names)
    return next((n for n in found if isinstance(n, int) and not isinstance(n, bool) and n > 0), None)
