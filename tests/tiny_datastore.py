"""Small datastores in memory and in the official file format."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specbench.models.datastore import Datastore, Shard
from specbench.models.suffix_array import suffix_array


def shard(tokens: Sequence[int], kind: type = np.uint16) -> Shard:
    text = np.array(tokens, dtype=kind)
    return Shard(text, suffix_array(text))


def store(*texts: Sequence[int], kind: type = np.uint16) -> Datastore:
    """Documents in one shard, as `specbench datastore build` lays them out."""
    end = int(np.iinfo(kind).max)
    return Datastore(Path("in-memory"), (shard([t for text in texts for t in [*text, end]], kind),))


def write_official(path: Path, shards: Sequence[Sequence[int]], kind: str = "<u2") -> Path:
    """The layout of FasterDecoding/REST's DraftRetriever, its suffixes sorted the plain way."""
    with path.open("wb") as stream:
        for tokens in shards:
            places = sorted(range(len(tokens)), key=lambda place, tokens=tokens: list(tokens[place:]))
            for values, dtype in ((tokens, kind), (places, "<i4")):
                data = np.array(values, dtype=dtype).tobytes()
                stream.write(struct.pack("<I", len(data)) + data)
    return path
