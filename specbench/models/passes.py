"""The fixed passes of each model (`fixed_pass`), made as shapes come up or ahead of that, and bounded in number."""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from specbench.errors import first_line
from specbench.models.acceleration import compilations
from specbench.models.buckets import bucket_of
from specbench.models.fixed_pass import WIDEST, CapturedPass, Compute, FixedPass, Results, Tensors

MOST = 384  # passes kept, the least recently used goes first: 7 kinds at 8192 tokens are 280
MOST_KINDS = 48  # remembered, to make their passes ahead
ONCE = 1  # a kind of pass that comes up only so often is not worth a capture

Make = Callable[[Compute, Tensors, int], FixedPass]


@dataclass(frozen=True)
class Kind:
    """What passes have in common that differ in the slots they read alone: variant, rows and columns."""

    variant: Hashable
    rows: int
    width: int


@dataclass
class _Asked:
    """How often a kind was asked for, and how to make it: its inputs as (shape, dtype, device).

    `reads`: whether its passes read slots, and so differ by the context's length.
    """

    compute: Compute
    inputs: dict[str, tuple[tuple[int, ...], torch.dtype, torch.device]]
    reads: bool
    times: int = 0

    def buffers(self, width: int, length: int) -> Tensors:
        """Zeros."""
        made = {}
        for name, (shape, dtype, device) in self.inputs.items():
            full = (shape[0], width, *shape[2:]) if len(shape) < 4 else (*shape[:2], width, length)
            made[name] = torch.zeros(full, dtype=dtype, device=device)
        return made


class Passes:
    """The fixed passes of one model, each made when its shape comes up, or ahead of that.

    A kind of pass that comes up for the first time runs as it is: what happens once is not worth a capture.

    Args:
        name: of the model, for messages and the manifest.
        make: makes a pass; None captures CUDA graphs.
        off: why every pass runs as it is, or None.
        most: how many passes are kept.

    Attributes:
        off: the reason, once there is one: the first pass that cannot be captured ends it for all.
        made: passes made so far.
    """

    made_by_all: ClassVar[int] = 0

    def __init__(self, name: str, make: Make | None = None, off: str | None = None, most: int = MOST) -> None:
        self.name, self.off, self.made = name, off, 0
        self._make, self._most = make, most
        self._kept: OrderedDict[tuple[Kind, int], FixedPass] = OrderedDict()
        self._asked: OrderedDict[Kind, _Asked] = OrderedDict()
        self._shapes: set[tuple[int, int, int]] = set()
        self._version: Hashable = None
        self._pool: Any = None
        self._reserved = 0  # by captures, for the pool, which no graph gives back as long as there is another
        self._told = False
        self._results = Results()
        _everyone.add(self)

    def like(self, name: str) -> Passes:
        """As these, for another model."""
        return Passes(name, self._make, self.off, self._most)

    @torch.inference_mode()
    def run(
        self,
        variant: Hashable,
        version: Hashable,
        compute: Compute,
        inputs: Tensors,
        length: int,
        *,
        bucket: bool = True,
    ) -> Tensors:
        """The outputs of `compute(inputs, length)`, the caller's to keep.

        Args:
            variant: what `compute` does differently at the same shapes.
            version: of what `compute` reads and writes besides; another one makes all passes worthless.
            inputs: tokens and the like `[B, T, …]`, `slots` `[B, T]`, masks `[B, 1, T, length]`.
            length: the slots that attention reads; 0: none, however long the context is.
            bucket: pad T to a power of two (outputs then are `[B, T, …]`); otherwise every T has its own passes.
        """
        rows, width = next(iter(inputs.values())).shape[:2]
        if self.off is not None or width > WIDEST:
            return compute(inputs, length)
        self._check(version)
        kind = Kind(variant, rows, bucket_of(width) if bucket else width)
        asked = self._ask(kind, compute, inputs, length)
        found = self._find(kind, length, inputs) if asked.times > ONCE else None
        if found is None:
            return compute(inputs, length)
        found.prepare(inputs)
        outputs = found.run()
        if kind.width == width:
            return {name: tensor.clone() for name, tensor in outputs.items()}
        return {name: tensor[:, :width].clone() for name, tensor in outputs.items()}

    def variants(self, rows: int) -> list[Any]:
        """The variants that passes of so many rows have come up in."""
        return list(dict.fromkeys(kind.variant for kind in self._asked if kind.rows == rows))

    @torch.inference_mode()  # caches written in a batch are inference tensors: nothing else may write to them
    def ahead(
        self,
        rows: int,
        version: Hashable,
        lengths: Iterable[int],
        opening: Callable[[Any], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Make the passes of the kinds that have come up, for reading so many slots.

        Untimed, and before a batch begins: while they are made they run, on zeros, and write where those say. No
        more are made than are kept, else each would push out one that was just made: of the kinds used most.

        Args:
            opening: with a variant, what its passes are made in.
        """
        self._check(version)
        every = list(lengths)
        kinds = sorted(self._asked.items(), key=lambda item: -item[1].times)
        wanted = [
            (kind, length)
            for kind, asked in kinds
            if kind.rows == rows and asked.times > ONCE
            for length in (every if asked.reads else (0,))
        ]
        self._tell(len(wanted))
        for variant in self.variants(rows):
            with opening(variant):
                for kind, length in wanted[: self._most]:
                    if kind.variant == variant and self.off is None:
                        self._find(kind, length)

    def clear(self) -> None:
        """Drop all passes and their memory, and forget what has come up."""
        self._asked.clear()
        self._drop()

    def _drop(self) -> None:
        self._kept.clear()
        self._results.clear()
        self._pool, self._reserved = None, 0

    def nbytes(self) -> int:
        """Bytes held for passes while none is running."""
        return sum(each.nbytes() for each in self._kept.values()) + self._results.nbytes() + self._reserved

    def facts(self) -> dict[str, Any]:
        """For the manifest: the shapes made, as rows x columns x slots, and why passes run as they are."""
        return {
            "model": self.name,
            "shapes": ["x".join(map(str, shape)) for shape in sorted(self._shapes)],
            "eager": self.off,
        }

    def _tell(self, wanted: int) -> None:
        if wanted > self._most and self.off is None and not self._told:
            self._told = True
            _log.warning(
                "the %s has %d passes of fixed shape to make for contexts as long as these and keeps %d: others are "
                "made while the clock runs",
                self.name, wanted, self._most,
            )  # fmt: skip

    def _check(self, version: Hashable) -> None:
        if version != self._version:
            self._drop()
            self._version = version

    def _ask(self, kind: Kind, compute: Compute, inputs: Tensors, length: int) -> _Asked:
        asked = self._asked.get(kind)
        if asked is None:
            specs = {name: (tuple(t.shape), t.dtype, t.device) for name, t in inputs.items()}
            asked = self._asked[kind] = _Asked(compute, specs, reads=length > 0)
            if len(self._asked) > MOST_KINDS:
                self._asked.popitem(last=False)
        self._asked.move_to_end(kind)
        asked.times += 1
        return asked

    def _find(self, kind: Kind, length: int, inputs: Tensors | None = None) -> FixedPass | None:
        """The pass for these shapes; None where it cannot be made, and from then on there are none.

        While it is made it runs: in the middle of a batch on these `inputs`, which write what belongs there.
        """
        key = kind, length
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        try:
            made = self._new(self._asked[kind], kind.width, length, inputs)
        except Exception as error:  # noqa: BLE001 - a model's code, the driver and compilers fail in many ways
            self._drop()
            self.off = _reason(error)
            _log.warning("the %s runs without CUDA graphs: %s", self.name, self.off)
            return None
        self.made += 1
        Passes.made_by_all += 1
        self._shapes.add((kind.rows, kind.width, length))
        self._kept[key] = made
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return made

    def _new(self, asked: _Asked, width: int, length: int, inputs: Tensors | None) -> FixedPass:
        buffers = asked.buffers(width, length)
        if inputs is not None:
            FixedPass(asked.compute, buffers, length).prepare(inputs)
        return (self._make or self._capture)(asked.compute, buffers, length)

    def _capture(self, compute: Compute, inputs: Tensors, length: int) -> FixedPass:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        made = CapturedPass(compute, inputs, length, self._pool, self._results)
        self._reserved += made.reserved
        return made


_log = logging.getLogger("specbench")
_everyone: weakref.WeakSet[Passes] = weakref.WeakSet()


def made() -> int:
    """Passes made and models compiled in this process so far: a trial in which one was made paid for it."""
    return Passes.made_by_all + compilations()


def facts() -> list[dict[str, Any]]:
    """What the manifest says of all models' passes."""
    return sorted((each.facts() for each in _everyone), key=lambda fact: fact["model"])


def _reason(error: Exception) -> str:
    """Why a pass could not be made: of a capture that something broke, what broke it."""
    broken = error.__context__ if "during capture" in str(error) else None
    return first_line(broken if isinstance(broken, Exception) else error)
