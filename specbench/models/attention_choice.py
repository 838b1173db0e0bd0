"""Which attention a captured pass uses: measured once a shape, on the device, and kept (same kernels, same tokens).

With a mask torch gives each key head of a sequence to one multiprocessor of a GPU, which walks over the context alone
while a hundred others idle. What else there is spreads over the context but takes several kernels, or plans for long:
what is fastest depends on the shape and the device. Only passes that are captured as CUDA graphs choose. Others wait
for the host, which a single kernel serves best, and so compute the same whatever has been measured before them. The
first implementation stays in float32, where outputs must be identical, and in compiled passes, which are the
compiler's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from specbench.models.attention_speed import Implementation, fastest
from specbench.models.gguf import cache_folder
from specbench.models.kept import keep, kept

FOLDER = "attention"  # in the cache
VERSION = 1  # raise when the way of measuring, or an implementation, changes
DTYPES = (torch.bfloat16, torch.float16)

Choices = dict[str, dict[str, str]]  # "rows x key heads x queries x head size dtype" -> slots read -> name


class AttentionChoices:
    """The choices of this process, for vanilla, methods and drafters alike.

    Args:
        folder: where they are kept; None: in the user's cache.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._choosing = False
        self._known: dict[Path, Choices] = {}
        self._used: Choices = {}

    @contextmanager
    def choosing(self) -> Iterator[None]:
        """While open (before a capture), shapes that come up for the first time are measured."""
        before, self._choosing = self._choosing, True
        try:
            yield
        finally:
            self._choosing = before

    def pick(
        self,
        implementations: Mapping[str, Implementation],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        scaling: float | None = None,
    ) -> str:
        """The name of the implementation for these inputs: the first, unless another was clearly faster.

        Args:
            implementations: functions of the other arguments, by name.
            query, key, value, mask: `[B, H_kv, g·T, D]`, `[B, H_kv, L, D]` twice, and `[B, 1, T, L]`.
        """
        default = next(iter(implementations))
        half = query.dtype in DTYPES and mask.dtype == query.dtype
        if torch.compiler.is_compiling() or not half or not self._captures(query):
            return default
        file, (kind, slots) = self._file(query.device), _shape(query, key, value)
        if file not in self._known:
            self._known[file] = _read(file)
        known = self._known[file].setdefault(kind, {})
        if known.get(slots) not in implementations:
            if not self._choosing:
                return default
            try:
                known[slots] = fastest(implementations, (query, key, value, mask), scaling)
            except RuntimeError:  # no memory to measure in: another time, perhaps
                return default
            keep(file, self._known[file])
        name = known[slots]
        self._used.setdefault(kind, {})[slots] = name
        return name

    def facts(self) -> dict[str, dict[str, list[int]]]:
        """What this process has used, for the manifest: by shape and name, the numbers of slots read."""
        said: dict[str, dict[str, list[int]]] = {}
        for kind, by_slots in sorted(self._used.items()):
            for slots, name in sorted((int(slots), name) for slots, name in by_slots.items()):
                said.setdefault(kind, {}).setdefault(name, []).append(slots)
        return said

    def _captures(self, query: torch.Tensor) -> bool:
        return query.is_cuda and (self._choosing or torch.cuda.is_current_stream_capturing())

    def _file(self, device: torch.device) -> Path:
        cudnn = torch.backends.cudnn.version()
        said = f"{VERSION} {torch.cuda.get_device_name(device)} {torch.__version__} {cudnn}"
        folder = cache_folder() if self._folder is None else self._folder
        return folder / FOLDER / f"{hashlib.sha256(said.encode()).hexdigest()[:16]}.json"


choices = AttentionChoices()


def _shape(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[str, str]:
    rows, heads, queries, width = query.shape
    sizes = f"{width}" if value.shape[-1] == width else f"{width}+{value.shape[-1]}"
    dtype = str(query.dtype).removeprefix("torch.")
    return f"{rows}x{heads}x{queries}x{sizes} {dtype}", str(key.shape[2])


def _read(file: Path) -> Choices:
    found = kept(file)
    whole = isinstance(found, dict) and all(isinstance(by_slots, dict) for by_slots in found.values())
    return found if whole else {}
