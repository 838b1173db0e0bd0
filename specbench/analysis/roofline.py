"""The limit: what a pass of a target must read and compute, and the floor of its seconds that follows (design §6).

After Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model" (CACM 52(4)):

    floor = max(bytes / memory bandwidth, operations / matmul rate)
    bytes = weights that every token needs, once whatever the number of tokens
          + the routed experts that the tokens choose, once each
          + keys and values of the tokens that each row's attention sees
    operations = 2 a weight and token, and 2 a multiply-add of attention

Left out, so that it stays a floor: activations, logits, the few rows read of the embeddings, launches, and what
several devices say to each other. Everything is in bytes, operations and seconds; arguments may be numpy arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

MOST_ROWS = 2**17  # the largest batch that is looked at for where speculation stops paying


@dataclass(frozen=True)
class Architecture:
    """A target's numbers, as far as a pass's cost goes. `specbench.models.architecture` reads them off a model.

    Args:
        tied: the embeddings are the head, so that every pass reads them.
        windows: (tokens a layer's attention looks back, None = all of them; layers that do).
        cached: numbers that a token leaves in one layer's cache: 2 x kv_heads x head_dim, or MLA's latent.
        attended: multiply-adds of one layer's attention for one token and one token it sees.
        dense_parameters, dense_bytes: weights that every token goes through: attention, MLPs, shared experts,
            routers, norms and the head; not the embeddings. Bytes as stored.
        expert_parameters, expert_bytes: of one routed expert of one layer.
        number_bytes: of one number in the cache.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    windows: tuple[tuple[int | None, int], ...]
    cached: int
    attended: int
    dense_parameters: float
    dense_bytes: float
    moe_layers: int = 0
    experts: int = 0
    active_experts: int = 0
    expert_parameters: float = 0
    expert_bytes: float = 0
    number_bytes: float = 2

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Architecture:
        """Back from `to_json`, as manifests keep it."""
        known = {name: value for name, value in facts.items() if name in cls.__dataclass_fields__}
        return cls(**(known | {"windows": tuple((window, layers) for window, layers in facts["windows"])}))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def in_bytes(self, weight: float, number: float, dense: float | None = None) -> Architecture:
        """The same with `weight` bytes a weight.

        Args:
            number: bytes of what it computes with: the cache's numbers, and the head's, which nobody quantises.
            dense: bytes a weight that is neither the head's nor a routed expert's, where they are others.
        """
        head = self.vocab * self.hidden
        others = (self.dense_parameters - head) * (weight if dense is None else dense)
        return replace(
            self,
            dense_bytes=others + head * number,
            expert_bytes=self.expert_parameters * weight,
            number_bytes=number,
        )

    @property
    def all_bytes(self) -> float:
        """Weights of all experts too; not the embeddings, unless tied."""
        return self.dense_bytes + self.moe_layers * self.experts * self.expert_bytes

    def unique_experts(self, tokens: Any) -> Any:
        """Experts a layer that `tokens` tokens choose, expected where each chooses at random: E (1 - (1 - k/E)^n).

        Trained routers send neighbouring tokens to fewer; what a run recorded is better.
        """
        if not self.experts:
            return np.zeros_like(tokens, dtype=float)
        missed = (1 - self.active_experts / self.experts) ** np.asarray(tokens, dtype=float)
        return self.experts * (1 - missed)

    def weight_bytes(self, tokens: Any, experts: Any = None) -> Any:
        """Weights that a pass over `tokens` tokens in all reads; `experts`: how many a layer, where it is known."""
        chosen = self.unique_experts(tokens) if experts is None else experts
        return self.dense_bytes + self.moe_layers * self.expert_bytes * chosen

    def cache_bytes(self, query: Any, context: Any) -> Any:
        """Keys and values that one row's pass reads: `query` new tokens over `context` cached ones."""
        return sum(layers * self._seen(window, context, query) for window, layers in self.windows) * (
            self.cached * self.number_bytes
        )

    def operations(self, query: Any, context: Any) -> Any:
        """Floating-point operations of one row's pass."""
        weights = self.dense_parameters + self.moe_layers * self.active_experts * self.expert_parameters
        seen = sum(layers * self._seen(window, context, 1) for window, layers in self.windows)
        return 2 * query * (weights + self.attended * seen)

    def _seen(self, window: int | None, context: Any, query: Any) -> Any:
        seen = np.asarray(context, dtype=float)  # integers would overflow in `operations`
        return (seen if window is None else np.minimum(seen, window)) + query


@dataclass(frozen=True)
class Device:
    """What reads and computes: `bandwidth` bytes a second, `rate` operations a second in the target's numbers."""

    name: str
    bandwidth: float
    rate: float
    memory_bytes: float | None = None

    @classmethod
    def measured(cls, speed: Mapping[str, Any]) -> Device:
        """Of a `specbench.measure.speed.Speed` as JSON. The faster of copying and reading counts: the memory can."""
        bandwidth = max(speed["copy_gb_s"], speed["read_gb_s"])
        return cls(f"{speed['device']} (measured)", bandwidth * 1e9, speed["matmul_tflop_s"] * 1e12)

    def floor_s(self, read: Any, operations: Any) -> Any:
        """The least seconds in which so many bytes are read and so many operations done."""
        return np.maximum(np.asarray(read) / self.bandwidth, np.asarray(operations) / self.rate)


@dataclass(frozen=True)
class Cost:
    """A pass of a batch: what it must read and compute, its floor, and which of the two sets it."""

    bytes: float
    operations: float
    seconds: float
    bound: str


def cost(
    target: Architecture, device: Device, rows: int, query: int, context: int, experts: float | None = None
) -> Cost:
    """The floor of a pass of `rows` rows over `query` tokens each, each with `context` tokens cached."""
    read = float(target.weight_bytes(rows * query, experts) + rows * target.cache_bytes(query, context))
    operations = float(rows * target.operations(query, context))
    bound = "memory" if read / device.bandwidth >= operations / device.rate else "compute"
    return Cost(read, operations, float(device.floor_s(read, operations)), bound)


def most_rows(target: Architecture, device: Device, query: int, context: int) -> int | None:
    """The largest batch whose keys and values fit beside the weights; None where the memory is not known."""
    if device.memory_bytes is None:
        return None
    room = device.memory_bytes - target.all_bytes
    return max(0, int(room // target.cache_bytes(query, context)))


@dataclass(frozen=True)
class Speculation:
    """How a method speculates.

    Args:
        query: tokens a row of its verify pass: drafted + 1.
        tau: tokens a round it gains, bonus included.
        draft: seconds of drafting a round over vanilla's pass.
    """

    query: int
    tau: float
    draft: float = 0.0

    def limit(self, target: Architecture, device: Device, rows: int, context: int) -> float:
        """The decode speedup that the floors allow: τ / (draft + floor(query) / floor(1))."""
        one, many = (cost(target, device, rows, n, context).seconds for n in (1, self.query))
        return self.tau / (self.draft + many / one)


def by_batch(
    target: Architecture, device: Device, how: Speculation, batches: tuple[int, ...], context: int
) -> Iterator[dict[str, Any]]:
    """One entry a batch size: vanilla's pass, the verify pass, its inflation and the limit, in plain JSON values."""
    for rows in batches:
        one, many = (cost(target, device, rows, n, context) for n in (1, how.query))
        yield {
            "batch_size": rows,
            "vanilla": asdict(one),
            "verify": asdict(many),
            "experts": [float(target.unique_experts(rows * n)) for n in (1, how.query)] if target.experts else None,
            "inflation": many.seconds / one.seconds,
            "limit": how.limit(target, device, rows, context),
            "vanilla_tokens_per_s": rows / one.seconds,
        }  # fmt: skip


def pays_at(
    target: Architecture, device: Device, how: Speculation, context: int
) -> list[tuple[int, int | None]]:
    """The ranges of batch sizes (first, last) at which the limit is above 1; last None: up to MOST_ROWS at least.

    A dense target has one at most; a mixture's limit can fall below 1, while each token still wakes experts of its
    own, and rise again once nearly all are awake.
    """

    def pays(rows: int) -> bool:
        return how.limit(target, device, rows, context) > 1

    looked_at = [*range(1, 64), *(2**power for power in range(6, MOST_ROWS.bit_length()))]
    ranges: list[tuple[int, int | None]] = []
    first = 1 if pays(1) else None
    for before, rows in pairwise(looked_at):
        if pays(rows) == (first is not None):
            continue
        low, high = before, rows  # they differ: where between them?
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if pays(middle) == pays(before) else (low, middle)
        if first is None:
            first = high
        else:
            ranges.append((first, low))
            first = None
    return ranges if first is None else [*ranges, (first, None)]
