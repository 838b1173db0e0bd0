"""Rotary positions of drafters' own networks: frequencies from a config, and queries and keys turned by them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from specbench.errors import SpecbenchError
from specbench.models.fields import CURE, Fields

if TYPE_CHECKING:
    from specbench.models.target import Target

Rope = tuple[torch.Tensor, torch.Tensor]  # cosines and sines `[B, 1, T, D]`
Frequencies = tuple[
    torch.Tensor, float
]  # float32 `[D / 2]`, and a factor on cosines and sines (1 but for YaRN)
SCALED = ("linear", "llama3", "yarn")
BASE = 10000.0


def read_frequencies(fields: Fields, head_dim: int, base: float = BASE) -> Frequencies:
    """What a draft's config says of its rotary positions: `rope_theta`, `rope_scaling`, `rope_parameters`.

    Args:
        base: where the config has no `rope_theta`. Official EAGLE-3 checkpoints have none and mean 10000, whatever
            the target's is.

    Raises:
        SpecbenchError: a scaling that depends on the length of the text, or an unknown one.
    """
    said: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        found = fields.mapping(name)
        said |= Fields(fields.ref, found).mapping("full_attention") or found
    own = Fields(fields.ref, said)
    theta = own.number("rope_theta", default=fields.number("rope_theta", default=base))
    if theta <= 0:
        raise fields.wrong(("rope_theta",), theta, "a number above 0")
    kind = own.get("rope_type", "type") or "default"
    partial = own.number("partial_rotary_factor", default=fields.number("partial_rotary_factor", default=1.0))
    if partial != 1 or kind not in ("default", "mrope", *SCALED):
        what = f"rotary positions of type {kind}" if partial == 1 else "partial rotary positions"
        raise SpecbenchError(
            f"{fields.ref}: {what} are not supported in a draft", f"supported: default, {', '.join(SCALED)}"
        )
    if kind in SCALED:
        return _scaled(fields, {**said, "rope_type": kind, "rope_theta": theta}, head_dim)
    return plain_frequencies(theta, head_dim)


def plain_frequencies(base: float, head_dim: int) -> Frequencies:
    """Unscaled ones."""
    return 1.0 / base ** (torch.arange(0, head_dim, 2).float() / head_dim), 1.0


def target_base(target: Target) -> float:
    """The rotary base of the target's full-attention layers; transformers 5 keeps it in `rope_parameters`."""
    parameters = getattr(target.config, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    return float(parameters.get("rope_theta") or getattr(target.config, "rope_theta", None) or BASE)


def rope_at(frequencies: Frequencies, positions: torch.Tensor, dtype: torch.dtype) -> Rope:
    """Cosines and sines of positions int64 `[B, T]` (halves are rotated, not pairs)."""
    inverse, scale = frequencies
    angles = positions[..., None].float() * inverse
    angles = torch.cat([angles, angles], -1)[:, None]
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """`x` `[B, H, T, D]` rotated by its positions."""
    cos, sin = rope
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


def _scaled(fields: Fields, parameters: dict[str, Any], head_dim: int) -> Frequencies:
    """By transformers' own functions."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters.pop("type", None)
    kind = parameters["rope_type"]
    heads = fields.integer("num_attention_heads")
    try:
        llama = LlamaConfig(
            hidden_size=head_dim * heads,
            num_attention_heads=heads,
            head_dim=head_dim,
            max_position_embeddings=fields.integer("max_position_embeddings", default=2048),
            rope_parameters=parameters,
        )
        inverse, factor = ROPE_INIT_FUNCTIONS[kind](llama, torch.device("cpu"))
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise SpecbenchError(
            f"{fields.ref}: rotary positions of type {kind} lack a field: {error}", CURE
        ) from error
    return inverse.float(), float(factor)
