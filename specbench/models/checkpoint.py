"""A drafter's files: its config and its weights, from a folder or the Hub, never through pickled code."""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from specbench.errors import SpecbenchError
from specbench.models.identity import ModelIdentity, folder_files
from specbench.models.weights import check_safetensors, missing_shards

WEIGHTS = ("*.safetensors", "*.bin", "*.pt")  # the first kind found is taken
NOT_WEIGHTS = {"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.bin", "scheduler.pt"}
UNREADABLE = (OSError, SafetensorError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError)
AGAIN = "download or copy it again"
FOR_TARGET = "was it made for this target?"
SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """What was found at a REF: `config` as written, `state` on the CPU by key."""

    ref: str
    folder: Path
    config: dict[str, Any]
    state: dict[str, torch.Tensor]
    revision: str | None = None

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.state.values())

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each weight, by key."""
        return {key: tuple(tensor.shape) for key, tensor in self.state.items()}

    def identity(self, *notes: str) -> ModelIdentity:
        """Who these weights are, for the manifest; `notes` say what they were recognised as."""
        dtypes = sorted(
            {str(t.dtype).removeprefix("torch.") for t in self.state.values() if t.is_floating_point()}
        )
        return ModelIdentity(
            name=self.ref,
            ref=self.ref,
            source="local" if Path(self.ref).is_dir() else "hub",
            hub_id=None if Path(self.ref).is_dir() else self.ref,
            revision=self.revision,
            dtype="+".join(dtypes),
            quantization=None,
            parameters=sum(tensor.numel() for tensor in self.state.values()),
            bytes=self.bytes,
            files=folder_files(self.folder),
            notes=list(notes),
        )

    def take(self, key: str, *shape: int | None, hint: str = FOR_TARGET) -> torch.Tensor:
        """The tensor `key` of this shape (None: any size).

        Raises:
            SpecbenchError: missing, or misshapen: with what was expected, and `hint`.
        """
        if key not in self.state:
            near = ", ".join([*sorted(self.state)[:4], *["…"] * (len(self.state) > 4)])
            raise SpecbenchError(
                f"{self.ref} has no weight {key} (it has {near or 'none'})", "is it the drafter you mean?"
            )
        tensor = self.state[key]
        fits = len(tensor.shape) == len(shape) and all(
            want is None or want == got for want, got in zip(shape, tensor.shape, strict=True)
        )
        if not fits:
            wanted = " x ".join("any" if n is None else str(n) for n in shape)
            got = " x ".join(map(str, tensor.shape))
            raise SpecbenchError(
                f"{self.ref}: weight {key} is {got or 'one number'}, expected {wanted}", hint
            )
        return tensor


@dataclass(frozen=True)
class Weight:
    """What a file says of one tensor: its shape, torch's name of its dtype, its bytes."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class Listing:
    """What is at a REF without its weights: `config` as written, and what each weight is like, by key."""

    ref: str
    folder: Path
    config: dict[str, Any]
    weights: dict[str, Weight]
    files: list[Path]
    revision: str | None = None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each weight, by key."""
        return {key: weight.shape for key, weight in self.weights.items()}


def open_checkpoint(
    ref: str, revision: str | None = None, prefixes: tuple[str, ...] | None = None
) -> Checkpoint:
    """Read config and weights of the drafter `ref`, a folder or a Hub id.

    Args:
        prefixes: read only weights whose keys begin with one of these (of safetensors nothing else is read).

    Raises:
        SpecbenchError: not there, no config, no weights, unreadable or NaN weights.
    """
    folder, commit = _folder(ref, revision)
    return Checkpoint(ref, folder, _config(ref, folder), _state(ref, folder, prefixes), commit)


def list_checkpoint(ref: str, revision: str | None = None) -> Listing:
    """Read the config of `ref`, a folder or a Hub id, and the names and shapes of its weights.

    Safetensors are not read beyond their headers; PyTorch files have to be, one at a time.

    Raises:
        SpecbenchError: not there, no config, no weights, or a damaged file.
    """
    folder, commit = _folder(ref, revision)
    config, files = _config(ref, folder), _weight_files(ref, folder)
    weights: dict[str, Weight] = {}
    for file in files:
        with _readable(ref, file):
            weights |= _header(file) if file.suffix == ".safetensors" else _described(_unpickled(file))
    if not weights:
        raise _empty(ref, files)
    return Listing(ref, folder, config, weights, files, commit)


def check_finite(listing: Listing) -> None:
    """Raise SpecbenchError if a weight holds NaN or infinity. Reads safetensors one tensor at a time."""
    for file in listing.files:
        with _readable(listing.ref, file):
            if file.suffix == ".safetensors":
                with safe_open(file, "pt") as tensors:
                    for key in tensors.keys():  # noqa: SIM118 (not a mapping)
                        _check_finite(listing.ref, key, tensors.get_tensor(key))
            else:
                for key, tensor in _unpickled(file).items():
                    _check_finite(listing.ref, key, tensor)


def _folder(ref: str, revision: str | None) -> tuple[Path, str | None]:
    path = Path(ref).expanduser()
    if path.is_dir():
        return path, None
    if path.is_file():
        raise SpecbenchError(f"{ref} is a file", "name the folder that holds it and config.json")
    if ref.startswith((".", "/", "~")):
        raise SpecbenchError(
            f"drafter folder {ref} does not exist", "give a folder that holds config.json and weights"
        )
    from specbench.models.hub import fetch

    snapshot = fetch(ref, revision)
    return snapshot.folder, snapshot.revision


def _config(ref: str, folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecbenchError(
            f"{ref} has no config.json", "a drafter's folder holds config.json and weights"
        ) from error
    except ValueError as error:
        raise SpecbenchError(f"{ref}: config.json is not JSON: {error}", AGAIN) from error
    if not isinstance(config, dict):
        raise SpecbenchError(f"{ref}: config.json is not an object", AGAIN)
    return config


def _weight_files(ref: str, folder: Path) -> list[Path]:
    kinds = (sorted(set(folder.glob(kind))) for kind in WEIGHTS)
    found = ([file for file in files if file.name not in NOT_WEIGHTS] for files in kinds)
    files = next((files for files in found if files), [])
    if not files:
        raise SpecbenchError(f"{ref} has no weights", f"a drafter's folder holds one of {', '.join(WEIGHTS)}")
    if missing := missing_shards(folder):
        raise SpecbenchError(f"{ref} lacks weight files, the first {missing[0]}", AGAIN)
    return files


def _empty(ref: str, files: list[Path]) -> SpecbenchError:
    return SpecbenchError(f"{ref}: there are no weights in {', '.join(file.name for file in files)}", AGAIN)


@contextlib.contextmanager
def _readable(ref: str, file: Path) -> Iterator[None]:
    """Whatever a damaged file makes its readers raise, as one line."""
    try:
        if file.suffix == ".safetensors":
            check_safetensors(file)
        yield
    except SpecbenchError:
        raise
    except UNREADABLE as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SpecbenchError(f"{ref}: {file.name} cannot be read: {why}", AGAIN) from error


def _state(ref: str, folder: Path, prefixes: tuple[str, ...] | None) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    files = _weight_files(ref, folder)
    for file in files:
        with _readable(ref, file):
            state |= _read(file, prefixes)
    if not state and prefixes is None:
        raise _empty(ref, files)
    for key, tensor in state.items():
        _check_finite(ref, key, tensor)
    return state


def _read(file: Path, prefixes: tuple[str, ...] | None) -> dict[str, torch.Tensor]:
    if file.suffix != ".safetensors":
        loaded = _unpickled(file)
        return loaded if prefixes is None else {k: v for k, v in loaded.items() if k.startswith(prefixes)}
    if prefixes is None:
        return load_file(file)
    with safe_open(file, "pt") as tensors:
        return {key: tensors.get_tensor(key) for key in tensors.keys() if key.startswith(prefixes)}  # noqa: SIM118


def _check_finite(ref: str, key: str, tensor: torch.Tensor) -> None:
    known = (
        tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
    )  # float8 has no isfinite
    if tensor.is_floating_point() and not known.isfinite().all():
        raise SpecbenchError(
            f"{ref}: weight {key} holds NaN or infinity", "download it again, or train it again"
        )


def _header(file: Path) -> dict[str, Weight]:
    """What a safetensors file says of its tensors, from its header alone."""
    with safe_open(file, "pt") as tensors:
        slices = {key: tensors.get_slice(key) for key in tensors.keys()}  # noqa: SIM118 (not a mapping)
        return {key: _weight(tuple(s.get_shape()), s.get_dtype()) for key, s in slices.items()}


def _weight(shape: tuple[int, ...], code: str) -> Weight:
    dtype = SAFETENSORS_DTYPES.get(code)
    name = str(dtype).removeprefix("torch.") if dtype is not None else code.lower()
    return Weight(shape, name, math.prod(shape) * (dtype.itemsize if dtype is not None else 1))


def _described(state: dict[str, torch.Tensor]) -> dict[str, Weight]:
    return {
        key: Weight(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.nbytes)
        for key, tensor in state.items()
    }


def _unpickled(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a PyTorch file by key; code in it is refused, never run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except PermissionError:
        raise
    except (*UNREADABLE, LookupError, AttributeError, TypeError) as error:
        raise ValueError(_refused(str(error))) from error
    if not isinstance(loaded, dict):
        raise ValueError("it does not hold weights by name")
    return {key: value for key, value in loaded.items() if isinstance(value, torch.Tensor)}


def _refused(text: str) -> str:
    """What torch says of a pickle it will not load, without its advice on how to load it all the same."""
    found = re.search(r"[Uu]nsupported (?:GLOBAL|class) (\S+)|GLOBAL (\S+) was not an allowed", text)
    if found is not None:
        return f"it holds code ({found[1] or found[2]}) and not weights alone, and is not run"
    return "it is damaged, or not a PyTorch file of weights"
