"""`--quantize` and `draft.quantize=`: the linear layers of a loaded model quantised in memory, by torchao.

What is quantised is the weight of every linear layer but the head. Embeddings, head (tied to them or not), norms and
biases stay as they are, so that drafters that borrow embeddings and head find what they would find otherwise. Of
Medusa's heads all layers are quantised: those to the vocabulary hold nine tenths of their weights.

Why torchao (0.18) and not bitsandbytes (0.50): it has all three schemes, in 3 MB without dependencies, and in each a
token's numbers are its own, whatever else is in the pass. bitsandbytes has no float8, and its int8 mixes tokens
(`models.packed.MIXES`), so that no method could be lossless.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.nn.functional import linear

from specbench.errors import SpecbenchError, first_line
from specbench.models import packed
from specbench.models.placement import pick_dtype
from specbench.models.routers import routers

Quantize = Literal["none", "int8", "int4", "fp8"]
NONE = "none"
SCHEMES = tuple(scheme for scheme in get_args(Quantize) if scheme != NONE)
WORDS = {
    "int8": "int8, one scale an output channel",
    "int4": "int4, a scale and a zero point for each group of 32",
    "fp8": "float8 (e4m3), one scale an output channel, and activations float8 too, one scale a token",
}
INSTALL = 'pip install "specbench-llm[quantize]" (or torchao alone)'
GROUP = 32  # weights that share a scale in int4; it divides the sizes of layers where 128 often does not
MULTIPLE = {"int8": (1, 1), "int4": (16, GROUP), "fp8": (16, 16)}  # of rows and columns: what kernels take
CAPABILITY = {"int4": (8, 0), "fp8": (8, 9)}  # CUDA compute capability that kernels need
FEW = 16  # tokens up to which torch's bfloat16 kernel for int8 weights beats a product with expanded ones
BLOCK = 2**20  # numbers expanded at once: what stays in a processor's cache


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight is a torchao tensor.

    Made by giving a layer this class, so that names and hooks stay what they are; and what looks for plain linear
    layers (`models.kernels`) leaves it alone.
    """

    scheme: str

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scheme != "int8" or x.device.type != "cpu" or torch.compiler.is_compiling():
            return linear(x, self.weight, self.bias)
        weight: Any = self.weight
        out = _int8(x.reshape(-1, self.in_features), weight.qdata, weight.scale.flatten().to(x.dtype))
        out = out.unflatten(0, x.shape[:-1])
        return out if self.bias is None else out + self.bias


def _int8(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`x` `[T, in]` by int8 `weight` `[out, in]` scaled by `scale` `[out]`, on a processor.

    torchao's own way expands the whole weight in each pass: 32 ms for 4096 x 4096 where this takes 2.
    """
    if x.dtype == torch.bfloat16 and len(x) <= FEW:
        return torch._weight_int8pack_mm(x.contiguous(), weight, scale)
    rows = max(1, BLOCK // weight.shape[1])
    return torch.cat([linear(x, part.to(x.dtype)) for part in weight.split(rows)], -1) * scale


def scheme_of(model: nn.Module) -> str:
    """What `quantise` made of a model, or "none"."""
    return next((layer.scheme for layer in model.modules() if isinstance(layer, QuantizedLinear)), NONE)


def in_float8(model: Any) -> bool:
    """Whether its linear layers multiply float8 numbers: made so by `quantise`, or stored so (and not expanded)."""
    stored = packed.read(model.config.to_dict())
    return scheme_of(model) == "fp8" or (stored is not None and stored.computes_in == "fp8")


def quantise(model: Any, scheme: str) -> str:
    """Quantise a model's linear layers in place; a line that says what was done.

    Raises:
        SpecbenchError: a mixture of experts, or a model without a layer that the scheme fits.
    """
    kind, heads = type(model).__name__, _heads(model)
    if routers(model):
        raise SpecbenchError(
            f"{scheme}: the experts of a {kind} are no linear layers, and hold most of its weights",
            "leave the option out, or name a dense model or a checkpoint that is quantised already",
        )
    layers = [layer for layer in model.modules() if type(layer) is nn.Linear and layer not in heads]
    chosen = [layer for layer in layers if _fits(layer, scheme)]
    if not chosen:
        rows, columns = MULTIPLE[scheme]
        raise SpecbenchError(
            f"{scheme}: none of the {len(layers)} linear layers of a {kind} has a multiple of {rows} outputs and of "
            f"{columns} inputs",
            "quantise to int8, or not at all",
        )
    from torchao.quantization import quantize_

    ids, dtype, device = {id(layer) for layer in chosen}, chosen[0].weight.dtype, chosen[0].weight.device
    quantize_(model, _config(scheme, device), lambda layer, name: id(layer) in ids)
    for layer in chosen:
        layer.__class__ = QuantizedLinear
        layer.scheme = scheme  # type: ignore[assignment]
    version = importlib.metadata.version("torchao")
    with_weights = (
        module for module in model.modules() if next(module.parameters(recurse=False), None) is not None
    )
    left = "biases" if all(module in layers for module in with_weights) else "embeddings, head and norms"
    return (
        f"the weights of {len(chosen)} of {len(layers)} linear layers are {WORDS[scheme]} (torchao {version}); "
        f"{left} are not quantised{_slow(scheme, dtype, device)}"
    )


def _heads(model: Any) -> Sequence[nn.Module | None]:
    """What makes logits of a model's hidden states, or of those of a drafter's network that has heads of its own."""
    of_model = getattr(model, "get_output_embeddings", None)
    if of_model is not None:
        return [of_model()]
    return getattr(model, "lm_heads", None) or [getattr(model, "lm_head", None)]


def _slow(scheme: str, dtype: torch.dtype, device: torch.device) -> str:
    """What must be known of a scheme's speed here."""
    if scheme == "int8" and device.type == "cuda":
        return "; each pass expands them, so that int8 saves memory here and no time"
    if scheme == "int4" and dtype == torch.float32:
        return "; torch's int4 kernel for float32 is slow, the one for bfloat16 is not"
    return ""


def quantise_network(network: nn.Module, scheme: str, dtype: torch.dtype, device: torch.device) -> str:
    """Quantise the network of a drafter, which computes in `dtype`, in place; a line that says what was done.

    Raises:
        SpecbenchError: it cannot be quantised so, here or at all.
    """
    check(scheme, device)
    compute_dtype(scheme, str(dtype).removeprefix("torch."), device)
    return quantise(network, scheme)


def check(scheme: str, device: torch.device) -> None:
    """Raise SpecbenchError if models cannot be quantised so on this device."""
    if scheme == NONE:
        return
    if scheme not in SCHEMES:
        raise SpecbenchError(f"unknown quantisation {scheme!r}", f"use {NONE}, {', '.join(SCHEMES)}")
    if (why_not := unavailable(scheme, device)) is None:
        return
    others = [other for other in SCHEMES if unavailable(other, device) is None]
    hint = f"quantise to {' or '.join(others)}, or take another --device" if others else INSTALL
    raise SpecbenchError(f"no {scheme} on {device}: {why_not}", hint)


def unavailable(scheme: str, device: torch.device) -> str | None:
    """Why a scheme cannot be had on a device, or None."""
    if (why_not := library()[1]) is not None:
        return why_not
    if scheme == "int8" or (scheme == "int4" and device.type == "cpu"):
        return None
    if device.type != "cuda":
        return f"it needs a CUDA device, and this is a {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability >= CAPABILITY[scheme]:
        return None
    needed, found = (".".join(map(str, numbers)) for numbers in (CAPABILITY[scheme], capability))
    return f"it needs a GPU of compute capability {needed} or more, and this one has {found}"


def library() -> tuple[str | None, str | None]:
    """The version of torchao, and why it cannot be used."""
    if importlib.util.find_spec("torchao") is None:
        return None, "torchao is not installed"
    version = importlib.metadata.version("torchao")
    try:
        import torchao.quantization  # noqa: F401
    except Exception as error:  # noqa: BLE001 - made for another torch, it fails in any way
        return version, f"torchao {version} cannot be imported: {first_line(error)}"
    return version, None


def compute_dtype(scheme: str, dtype: str, device: torch.device) -> torch.dtype | None:
    """The dtype activations have: `dtype`, or what the scheme's kernels take if that is auto. None: the checkpoint's.

    Raises:
        SpecbenchError: an unknown dtype, or one that they do not take.
    """
    wanted, taken = pick_dtype(dtype, device), _dtypes(scheme, device)
    if taken and dtype == "auto":
        return taken[0]
    if not taken or wanted in taken:
        return wanted
    words = " or ".join(str(each).removeprefix("torch.") for each in taken)
    raise SpecbenchError(
        f"{scheme} computes in {words} on a {device.type} device, not in {dtype}",
        "leave --dtype out, or quantise to int8",
    )


def draft_dtype(scheme: str, target: torch.dtype) -> str:
    """The dtype to load a draft model in: the target's, unless the scheme's kernels have one of their own."""
    return str(target).removeprefix("torch.") if scheme in (NONE, "int8") else "auto"


def _dtypes(scheme: str, device: torch.device) -> tuple[torch.dtype, ...]:
    """The dtypes of activations that a scheme's kernels take, the best first; empty: any."""
    if scheme == "int4" and device.type == "cpu":
        return torch.bfloat16, torch.float32
    return () if scheme in (NONE, "int8") else (torch.bfloat16,)


def _fits(layer: nn.Linear, scheme: str) -> bool:
    rows, columns = MULTIPLE[scheme]
    return layer.out_features % rows == 0 and layer.in_features % columns == 0


def _config(scheme: str, device: torch.device) -> Any:
    """What torchao calls a scheme. Its settings of the compiler, TF32 among them, are left alone."""
    from torchao import quantization as ao
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization.quantize_.common import KernelPreference

    if scheme == "int8":
        return ao.Int8WeightOnlyConfig(set_inductor_config=False)
    if scheme == "fp8":
        return ao.Float8DynamicActivationFloat8WeightConfig(
            granularity=ao.PerRow(), kernel_preference=KernelPreference.TORCH, set_inductor_config=False
        )
    if device.type == "cpu":
        return PrototypeInt4WeightOnlyConfig(group_size=GROUP, set_inductor_config=False)
    return ao.Int4WeightOnlyConfig(
        group_size=GROUP, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
    )
