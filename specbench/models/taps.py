"""Hidden states of a model's passes, taken by forward hooks on its modules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from specbench.errors import SpecbenchError
from specbench.models.routers import PREFIX, choice, routers


class Taps:
    """What is hooked of `model` now, and what the last pass left there.

    Attributes:
        names: of the taps, in the order in which they were opened.
        routers: the model's routers, one a MoE layer.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._found: dict[str, torch.Tensor] = {}
        self.names: tuple[str, ...] = ()
        self.routers = routers(model)

    @contextlib.contextmanager
    def open(self, names: Sequence[str]) -> Iterator[None]:
        """While open, every pass leaves the hidden states `names`: "embed", "layer:i", "final", "router:i".

        Raises:
            SpecbenchError: for a name this model has no module for.
        """
        handles = [self._module(name).register_forward_hook(self._hook(name)) for name in names]
        before, self.names = self.names, (*self.names, *names)
        try:
            yield
        finally:
            self.names = before
            for handle in handles:
                handle.remove()
            self._found.clear()

    def take(self) -> dict[str, torch.Tensor]:
        """Of the pass just made, by name."""
        taken, self._found = self._found, {}
        return taken

    def _module(self, name: str) -> torch.nn.Module:
        decoder = decoder_of(self._model)
        try:
            if name == "embed":
                return self._model.get_input_embeddings()
            if name == "final":
                return decoder.norm
            if name.startswith(PREFIX):
                return self.routers[int(name.removeprefix(PREFIX))]
            return decoder.layers[int(name.removeprefix("layer:"))]
        except (AttributeError, ValueError, IndexError) as error:
            raise SpecbenchError(
                f"hidden state {name!r} does not exist in {type(self._model).__name__}",
                "ask for embed, final or layer:i with i below the number of layers",
            ) from error

    def _hook(self, name: str) -> Any:
        def hook(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            self._found[name] = output[0] if isinstance(output, tuple) else output

        def router_hook(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            if (chosen := choice(output)) is not None:
                self._found[name] = chosen

        return router_hook if name.startswith(PREFIX) else hook


def decoder_of(model: Any) -> Any:
    """The part of a causal language model that has the layers and the final norm."""
    return model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
