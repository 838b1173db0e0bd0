"""A checkpoint's config.json, read with types: whatever is wrong with a field is one line that names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbench.errors import SpecbenchError

# Configs inside a config: speculators', multimodal models', Model-Optimizer's and z-lab's.
PARTS = ("transformer_layer_config", "text_config", "eagle_config", "dflash_config")
CURE = "is config.json the one that belongs to these weights?"


class Fields:
    """The fields of a config and of the configs inside it, which come first: they say what the layers are like.

    A field that is null is one that is not there.

    Args:
        ref: what to call the checkpoint in an error.
        config: config.json as written.

    Raises:
        SpecbenchError: a part that is no object.
    """

    def __init__(self, ref: str, config: Mapping[str, Any]) -> None:
        self.ref, self.config = ref, config
        nested = ("model",) if config.get("model_type") == "eagle" else ()  # vLLM's EAGLE
        inside = [self._mapping(config, name) for name in (*PARTS, *nested)]
        self._places: list[Mapping[str, Any]] = [*filter(None, inside), config]

    def get(self, *names: str) -> Any:
        """The first of the fields that is there, whatever it holds; None if none is."""
        found = (place.get(name) for name in names for place in self._places)
        return next((value for value in found if value is not None), None)

    def integer(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`.

        Raises:
            SpecbenchError: not such a number, or missing without a default.
        """
        value = self.get(*names)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(names, value, f"a whole number, {least} or more")
        return value

    def optional(self, *names: str) -> int | None:
        """A whole number above 0, or None if it is not there. Raises SpecbenchError if it is something else."""
        return None if self.get(*names) is None else self.integer(*names)

    def number(self, *names: str, default: float) -> float:
        """Any number. Raises SpecbenchError if it is something else."""
        value = self.get(*names)
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise self.wrong(names, value, "a number")
        return default if value is None else float(value)

    def flag(self, *names: str, default: bool = False) -> bool:
        """True or false (or 1 or 0). Raises SpecbenchError if it is something else."""
        value = self.get(*names)
        if value not in (None, 0, 1):
            raise self.wrong(names, value, "true or false")
        return default if value is None else bool(value)

    def integers(self, *names: str) -> list[int]:
        """A list of whole numbers, empty if it is not there. Raises SpecbenchError if it is something else."""
        return self._list(names, int, "a list of whole numbers")

    def words(self, *names: str) -> list[str]:
        """A list of words, empty if it is not there. Raises SpecbenchError if it is something else."""
        return self._list(names, str, "a list of words")

    def mapping(self, name: str) -> Mapping[str, Any]:
        """An object, empty if it is not there. Raises SpecbenchError if it is something else."""
        return next(filter(None, (self._mapping(place, name) for place in self._places)), {})

    def activation(self) -> str:
        """transformers' name of the activation in the layers' feed-forward part.

        Raises:
            SpecbenchError: one that transformers does not know.
        """
        from transformers.activations import ACT2FN

        names = ("hidden_act", "hidden_activation")
        value = self.get(*names)
        if value is None:
            return "silu"
        if not isinstance(value, str) or value not in ACT2FN:
            raise self.wrong(names, value, "an activation that transformers knows (silu, gelu, …)")
        return value

    def heads(self) -> tuple[int, int, int]:
        """Attention heads, key-value heads, and the width of one.

        Raises:
            SpecbenchError: numbers of heads that do not go together.
        """
        heads = self.integer("num_attention_heads")
        kv_heads = self.integer("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise SpecbenchError(
                f"{self.ref}: config.json has {heads} attention heads, expected a multiple of its {kv_heads} "
                "key-value heads",
                CURE,
            )
        return heads, kv_heads, self.optional("head_dim") or max(self.integer("hidden_size") // heads, 1)

    def wrong(self, names: tuple[str, ...], value: Any, expected: str) -> SpecbenchError:
        """What to say of the field called by the first of `names` that is there, or by the first if none is."""
        found = next((name for name in names if self.get(name) is not None), names[0])
        what = f"has no {found}" if value is None else f"has {value!r} as {found}"
        return SpecbenchError(f"{self.ref}: config.json {what}, expected {expected}", CURE)

    def _list(self, names: tuple[str, ...], kind: type, expected: str) -> list[Any]:
        value = self.get(*names)
        if value is None:
            return []
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise self.wrong(names, value, expected)
        return value

    def _mapping(self, place: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        value = place.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise SpecbenchError(f"{self.ref}: config.json has {value!r} as {name}, expected an object", CURE)
        return value or {}
