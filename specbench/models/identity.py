"""Who a model is: name, origin, hashes, size. Written into every manifest, so that runs can be compared."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

HASH_LIMIT_BYTES = 2 * 1024**3
_PARTS = ("*.safetensors", "*.bin", "*.pt", "*.json", "*.model", "*.txt", "*.jinja", "*.py")
_SHA256_HEX, _HEX = 64, set("0123456789abcdef")


@dataclass(frozen=True)
class ModelIdentity:
    """What was loaded, JSON-serialisable.

    Args:
        name: alias, Hub id, folder name, `smollm2-135m@q4_1` or `random:llama-8b`; two models with different
            names are never compared.
        ref: what the user asked for.
        source: `hub`, `local`, `gguf`, `pypi` or `random`.
        hub_id: repository on the Hub, where the weights came from it.
        revision: commit of that repository, if known.
        dtype: of the weights in memory, e.g. `float32`.
        quantization: of the weights (`int8`, `gptq-4bit-g128`), of what they were dequantised from (`q4_1`), or both
            (`q4_1+int8`); None = none.
        parameters: number of parameters, tied ones once; None where an engine reads them and we do not.
        bytes: of parameters and buffers in memory, as stored there.
        files: file name -> sha256, or `size:…,mtime:…` for local files above 2 GB.
        verified: False while the Hub id is only known from a README (registry.toml).
        notes: what a reader of the results should know.
    """

    name: str
    ref: str
    source: str
    hub_id: str | None
    revision: str | None
    dtype: str
    quantization: str | None
    parameters: int | None
    bytes: int
    files: dict[str, str] = field(default_factory=dict)
    verified: bool = True
    notes: list[str] = field(default_factory=list)

    def quantised(self, scheme: str, bytes: int, note: str) -> ModelIdentity:
        """The same weights quantised: another model, by the name of `llama-8b@int8` or `smollm2-135m@q4_1+int8`."""
        return replace(
            self,
            name=f"{self.name}{'+' if '@' in self.name else '@'}{scheme}",
            quantization="+".join(filter(None, (self.quantization, scheme))),
            bytes=bytes,
            notes=[*self.notes, f"{scheme}: {note}"],
        )

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries, lists, strings and numbers."""
        return asdict(self)


def sha256(path: Path) -> str:
    """SHA-256 of a file's content, in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fingerprint(path: Path) -> str:
    """SHA-256 where that is cheap, else size in bytes and modification time.

    The Hub's cache names the blob of a large file by its SHA-256, so a 100 GB model costs nothing.
    """
    blob = path.resolve().name
    if path.is_symlink() and len(blob) == _SHA256_HEX and set(blob) <= _HEX:
        return blob
    stat = path.stat()
    if stat.st_size > HASH_LIMIT_BYTES:
        return f"size:{stat.st_size},mtime:{int(stat.st_mtime)}"
    return sha256(path)


def folder_files(folder: Path) -> dict[str, str]:
    """Fingerprints of the weight, config, tokenizer and code files of a checkpoint folder, by name."""
    paths = {path for pattern in _PARTS for path in folder.glob(pattern) if path.is_file()}
    return {path.name: fingerprint(path) for path in sorted(paths)}
