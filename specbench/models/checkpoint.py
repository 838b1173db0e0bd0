"""A drafter's files: its config and its weights, from a folder or the Hub, never through pickled code."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from specbench.errors import SpecbenchError
from specbench.models.identity import ModelIdentity, folder_files

WEIGHTS = ("*.safetensors", "*.bin", "*.pt")  # the first kind found is taken


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

    def identity(self, kind: str) -> ModelIdentity:
        """Who these weights are, for the manifest; `kind` says what they were recognised as."""
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
            notes=[kind],
        )

    def take(self, key: str, *shape: int | None) -> torch.Tensor:
        """The tensor `key` of this shape (None: any size).

        Raises:
            SpecbenchError: missing or misshapen, with what was expected.
        """
        if key not in self.state:
            near = ", ".join(sorted(self.state)[:4])
            raise SpecbenchError(
                f"{self.ref} has no weight {key} (it has {near}, …)", "is it the drafter you mean?"
            )
        tensor = self.state[key]
        fits = len(tensor.shape) == len(shape) and all(
            want is None or want == got for want, got in zip(shape, tensor.shape, strict=True)
        )
        if not fits:
            wanted = " x ".join("any" if n is None else str(n) for n in shape)
            got = " x ".join(map(str, tensor.shape))
            raise SpecbenchError(
                f"{self.ref}: weight {key} is {got}, expected {wanted}", "was it made for this target?"
            )
        return tensor


def open_checkpoint(ref: str, revision: str | None = None) -> Checkpoint:
    """Read config and weights of the drafter `ref`, a folder or a Hub id.

    Raises:
        SpecbenchError: not there, no config, no weights, unreadable or NaN weights.
    """
    folder, commit = _folder(ref, revision)
    return Checkpoint(ref, folder, _config(ref, folder), _state(ref, folder), commit)


def _folder(ref: str, revision: str | None) -> tuple[Path, str | None]:
    path = Path(ref).expanduser()
    if path.is_dir():
        return path, None
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
        raise SpecbenchError(
            f"{ref}: config.json is not JSON: {error}", "download or copy it again"
        ) from error
    if not isinstance(config, dict):
        raise SpecbenchError(f"{ref}: config.json is not an object", "download or copy it again")
    return config


def _state(ref: str, folder: Path) -> dict[str, torch.Tensor]:
    files = next((found for kind in WEIGHTS if (found := sorted(folder.glob(kind)))), [])
    if not files:
        raise SpecbenchError(f"{ref} has no weights", f"a drafter's folder holds one of {', '.join(WEIGHTS)}")
    state: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            part = load_file(file) if file.suffix == ".safetensors" else _unpickled(file)
        except (
            OSError,
            SafetensorError,
            RuntimeError,
            EOFError,
            ValueError,
            pickle.UnpicklingError,
        ) as error:
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise SpecbenchError(
                f"{ref}: {file.name} cannot be read: {why}", "download or copy it again"
            ) from error
        state |= {key: value for key, value in part.items() if isinstance(value, torch.Tensor)}
    broken = next((k for k, v in state.items() if v.is_floating_point() and not v.isfinite().all()), None)
    if broken is not None:
        raise SpecbenchError(
            f"{ref}: weight {broken} holds NaN or infinity", "download it again, or train it again"
        )
    return state


def _unpickled(file: Path) -> dict[str, Any]:
    loaded = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(loaded, dict):
        raise ValueError("it does not hold weights by name")
    return loaded
