"""The weight files of a checkpoint folder: which there are, and whether they are whole. Headers only."""

from __future__ import annotations

import json
from pathlib import Path

from specbench.errors import SpecbenchError

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
PICKLED = ("*.bin", "*.pt")
AGAIN = "download or copy the model again"
_HEADER_LENGTH_BYTES = 8


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a folder, or its PyTorch files if it has none."""
    found = sorted(folder.glob("*.safetensors"))
    return found or sorted(path for pattern in PICKLED for path in folder.glob(pattern))


def missing_shards(folder: Path) -> list[str]:
    """Names an index file lists that are not there. Raises SpecbenchError for an unreadable index."""
    index = next((folder / name for name in INDEXES if (folder / name).is_file()), None)
    if index is None:
        return []
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise SpecbenchError(f"{index} is not a weight index", AGAIN) from error
    return sorted(name for name in names if not (folder / name).is_file())


def is_complete(folder: Path) -> bool:
    """Whether a folder holds a config and every weight file that belongs to it."""
    return (folder / "config.json").is_file() and bool(weight_files(folder)) and not missing_shards(folder)


def check_folder(folder: Path) -> None:
    """Raise SpecbenchError unless a folder looks like a whole checkpoint."""
    if not (folder / "config.json").is_file():
        gguf = sorted(folder.glob("*.gguf"))
        hint = f"name the file itself: {gguf[0]}" if gguf else "a model folder holds config.json and weights"
        raise SpecbenchError(f"{folder} has no config.json", hint)
    if missing := missing_shards(folder):
        raise SpecbenchError(
            f"{folder} lacks {len(missing)} of its weight files, the first {missing[0]}",
            AGAIN,
        )
    files = weight_files(folder)
    if not files:
        raise SpecbenchError(
            f"{folder} has a config.json but no weights", "expected *.safetensors or pytorch_model*.bin"
        )
    for path in files:
        if path.suffix == ".safetensors":
            check_safetensors(path)


def check_safetensors(path: Path) -> None:
    """Raise SpecbenchError if a safetensors file is shorter or longer than its own header says."""
    size = path.stat().st_size
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(_HEADER_LENGTH_BYTES), "little")
            if not 0 < length <= size - _HEADER_LENGTH_BYTES:
                raise ValueError("no header")
            tensors = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpecbenchError(f"{path} is not a safetensors file", AGAIN) from error
    expected = _HEADER_LENGTH_BYTES + length + max(ends, default=0)
    if size != expected:
        raise SpecbenchError(
            f"{path} is damaged: {size:,} bytes, its header says {expected:,}",
            AGAIN,
        )
