"""A model whose passes go around some of its decoder layers (self-speculation)."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch

from specbench.errors import SpecbenchError
from specbench.models.taps import decoder_of


@contextlib.contextmanager
def going_around(model: Any, layers: Collection[int]) -> Iterator[None]:
    """While open, passes leave out the decoder layers `layers` (counted from 0), and their cache alone.

    Raises:
        SpecbenchError: for a model whose decoder has no list of layers, or not these.
    """
    decoder = decoder_of(model)
    whole = getattr(decoder, "layers", None)
    if not isinstance(whole, torch.nn.ModuleList) or not set(layers) <= set(range(len(whole))):
        raise SpecbenchError(
            f"layers {'+'.join(map(str, sorted(layers)))} do not exist in {type(model).__name__}",
            f"name layers from 0 to {len(whole) - 1}"
            if whole
            else "use a target with a list of decoder layers",
        )
    around = _Around()
    # As many entries as before: decoders look up a layer's mask and rotation by its place in the list.
    decoder.layers = torch.nn.ModuleList(
        around if place in layers else layer for place, layer in enumerate(whole)
    )
    try:
        yield
    finally:
        decoder.layers = whole


class _Around(torch.nn.Module):
    """Stands for a decoder layer that is skipped: what goes in comes out."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states
