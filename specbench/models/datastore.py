"""Datastores of REST: a text as token ids with its suffix array, mapped from disk and never read whole.

Two forms are read. Ours is a folder: `tokens.npy` (uint16, or uint32 for vocabularies that need it), documents
divided by the largest number of that type; `suffixes.npy` (int32), the suffix array; `datastore.json`, what it was
made of, and the tokens' SHA-256. The official one (FasterDecoding/REST) is a file of shards, each [u32 bytes][tokens
u16][u32 bytes][suffix array i32], little-endian; where its tokens are u32, as its README advises for large
vocabularies, that is seen.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from specbench.errors import SpecbenchError
from specbench.models.gguf import cache_folder

SCHEMA = 1
FACTS, TOKENS, SUFFIXES = "datastore.json", "tokens.npy", "suffixes.npy"
REBUILD = "build it again with `specbench datastore build`"
SAMPLE = 1024  # places of a suffix array that are looked at when it is opened


@dataclass(frozen=True)
class Shard:
    """A text, `tokens` unsigned `[N]`, and the places of its suffixes in rising order, `suffixes` int `[N]`.

    Whatever reads a place raises SpecbenchError if it lies outside the text: a file may be damaged anywhere.
    """

    tokens: np.ndarray
    suffixes: np.ndarray

    def find(self, pattern: list[int]) -> range:
        """The entries of `suffixes` that begin with `pattern`."""
        length = len(pattern)

        def head(entry: int) -> list[int]:
            start = self.suffixes.item(entry)
            if not 0 <= start < len(self.tokens):
                raise _outside(start)
            return self.tokens[start : start + length].tolist()

        entries = range(len(self.suffixes))
        low = bisect_left(entries, pattern, key=head)
        return range(low, bisect_right(entries, pattern, lo=low, key=head))

    def continues(self, entries: range, length: int, vocab: int) -> bool:
        """Whether a token of the vocabulary follows any of these matches of `length` tokens.

        The least token stands first, after the one match that may end the text.
        """
        after = self._places(entries[:2]) + length
        return any(place < len(self.tokens) and self.tokens[place] < vocab for place in after)

    def check(self) -> None:
        """Look at a sample of the suffix array, its ends included."""
        self._places(np.linspace(0, len(self.suffixes) - 1, SAMPLE, dtype=np.int64))

    def _places(self, entries: range | np.ndarray) -> np.ndarray:
        """Where the suffixes of these entries begin, int64 `[M]`."""
        wanted = slice(entries.start, entries.stop) if isinstance(entries, range) else entries
        places = self.suffixes[wanted].astype(np.int64)
        if len(places) and not 0 <= places.min() <= places.max() < len(self.tokens):
            raise _outside(places.min() if places.min() < 0 else places.max())
        return places

    def following(self, entries: range, length: int, depth: int, vocab: int) -> np.ndarray:
        """What follows these matches, int64 `[M, depth]`, -1 from the end of the document or vocabulary on."""
        start = self._places(entries) + length
        places = start[:, None] + np.arange(depth)
        tokens = self.tokens[np.minimum(places, len(self.tokens) - 1)].astype(np.int64)
        ended = (places >= len(self.tokens)) | (tokens >= vocab)
        return np.where(np.logical_or.accumulate(ended, axis=1), -1, tokens)

    def first_following(self, entries: range, length: int, depth: int, vocab: int) -> list[int]:
        """What follows the earliest of these matches that anything follows, up to `depth` tokens of its document."""
        after = self._places(entries) + length
        after = after[after < len(self.tokens)]
        after = after[self.tokens[after] < vocab]
        if not len(after):
            return []
        tokens = self.tokens[after.min() :][:depth].tolist()
        return list(takewhile(lambda token: token < vocab, tokens))


def _outside(place: int) -> SpecbenchError:
    return SpecbenchError(
        f"a datastore is damaged: its suffix array has a place outside its text ({place})", REBUILD
    )


@dataclass(frozen=True)
class Datastore:
    """An open datastore.

    Args:
        path: where it lies.
        shards: searched one by one.
        facts: of `datastore.json`; empty for the official form, which says nothing of itself.
    """

    path: Path
    shards: tuple[Shard, ...]
    facts: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(len(shard.tokens) for shard in self.shards)

    def search(
        self, text: Sequence[int], *, longest: int, shortest: int, matches: int, depth: int, vocab: int
    ) -> np.ndarray:
        """What followed the longest end of `text` that occurs with anything following it.

        Args:
            text: ids; only its last `longest` count.
            longest, shortest: lengths of the ends looked for.
            matches: continuations taken from a shard; the first ones by their ids.
            depth: length of a continuation.
            vocab: ids from this on are never proposed; a continuation ends before one.

        Returns:
            int64 `[M, depth]`, -1 from where a row has ended; rows that begin alike stand together, the smaller
            ids first.
        """
        length, best = self.longest_end(text, longest, shortest, vocab)
        rows = [shard.following(entries[:matches], length, depth, vocab) for shard, entries in best]
        if not rows:
            return np.empty((0, depth), dtype=np.int64)
        together = np.concatenate(rows)
        return together if len(rows) == 1 else together[np.lexsort(together.T[::-1])]

    def longest_end(
        self, text: Sequence[int], longest: int, shortest: int, vocab: int
    ) -> tuple[int, list[tuple[Shard, range]]]:
        """Length and places of the longest end of `text` that `search` finds; 0 and nothing if there is none."""
        best: list[tuple[Shard, range]] = []
        length, known, most = 0, shortest - 1, min(longest, len(text))
        while known < most:  # an end that occurs contains all shorter ones
            tried = (known + most + 1) // 2
            found = self._find(list(text[-tried:]), vocab)
            if found:
                best, length, known = found, tried, tried
            else:
                most = tried - 1
        return length, best

    def _find(self, pattern: list[int], vocab: int) -> list[tuple[Shard, range]]:
        found = [(shard, shard.find(pattern)) for shard in self.shards]
        some = any(shard.continues(entries, len(pattern), vocab) for shard, entries in found)
        return [(shard, entries) for shard, entries in found if entries] if some else []

    def check_target(self, target: Any) -> None:
        """Raise SpecbenchError unless the ids mean the same to `target` (the official form cannot be checked)."""
        if not self.facts:
            return
        made = f"the datastore {self.path} was built for {self.facts['target']}"
        hint = "build one for this target with `specbench datastore build FILE --target T`"
        if target.tokenizer is None:
            raise SpecbenchError(f"{made} and this target has no tokenizer", hint)
        if vocabulary_hash(target.tokenizer) != self.facts["tokenizer"]:
            raise SpecbenchError(f"{made}, whose tokenizer is another one", hint)

    def identity(self) -> dict[str, Any]:
        """Who it is, for the manifest."""
        known = {"name": self.path.name, "ref": str(self.path), "kind": "datastore", "tokens": len(self)}
        return known | self.facts | {"sha256": self.sha256}

    @cached_property
    def sha256(self) -> str:
        """Of the tokens: as the file says, else the whole text is read for it."""
        return self.facts.get("sha256") or tokens_hash(*(shard.tokens for shard in self.shards))


def tokens_hash(*texts: np.ndarray) -> str:
    """SHA-256 over the bytes of token ids, text after text."""
    digest = hashlib.sha256()
    for tokens in texts:
        digest.update(np.ascontiguousarray(tokens).data)
    return digest.hexdigest()


def vocabulary_hash(tokenizer: Any) -> str:
    """SHA-256 over all tokens by id: equal where ids mean the same."""
    by_id = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(by_id).encode()).hexdigest()


def datastores_folder() -> Path:
    """Where datastores lie that are named without a path."""
    return cache_folder() / "datastores"


def open_datastore(ref: str) -> Datastore:
    """Open a datastore by its path, or by the name of one in `datastores_folder()`.

    Raises:
        SpecbenchError: there is none, or it is damaged.
    """
    path = Path(ref).expanduser()
    if not path.exists() and len(path.parts) == 1:
        path = datastores_folder() / ref
    if path.is_dir():
        return _open_folder(path)
    if path.is_file():
        return _open_official(path)
    known = sorted(p.name for p in datastores_folder().glob("*") if (p / FACTS).is_file())
    raise SpecbenchError(
        f"there is no datastore {ref}",
        (f"known ones: {', '.join(known)}; or " if known else "")
        + "make one: `specbench datastore build --help`",
    )


def _open_folder(path: Path) -> Datastore:
    try:
        facts = json.loads((path / FACTS).read_text(encoding="utf-8"))
        newer = facts["schema"] > SCHEMA
        # As plain arrays: indexing a memmap costs several times as much.
        tokens, suffixes = (np.asarray(np.load(path / name, mmap_mode="r")) for name in (TOKENS, SUFFIXES))
        sound = tokens.shape == suffixes.shape == (facts["tokens"],) and facts["tokens"] > 0
        whole = sound and {"target", "tokenizer"} <= set(facts)
    except FileNotFoundError as error:
        missing = Path(error.filename).name
        raise SpecbenchError(f"{path} is no datastore: there is no {missing} in it", REBUILD) from error
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise SpecbenchError(f"{path} is no datastore: {type(error).__name__}: {error}", REBUILD) from error
    if newer:
        raise SpecbenchError(
            f"the datastore {path} is of a newer form ({facts['schema']})", "update specbench"
        )
    if not whole or tokens.dtype not in (np.uint16, np.uint32) or suffixes.dtype.kind != "i":
        raise SpecbenchError(f"the datastore {path} is damaged: its parts do not fit together", REBUILD)
    return _checked(Datastore(path, (Shard(tokens, suffixes),), facts))


def _open_official(path: Path) -> Datastore:
    damaged = SpecbenchError(f"{path} is no datastore of REST, or is cut off", "copy or build it again")
    try:
        with path.open("rb") as stream:
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise damaged from error
    shards, place = [], 0
    while place < len(data):
        texts, place = _block(data, place)
        places, place = _block(data, place)
        count = len(places) // 4
        if not count or len(places) != 4 * count or len(texts) not in (2 * count, 4 * count):
            raise damaged
        shards.append(Shard(texts.view("<u2" if len(texts) == 2 * count else "<u4"), places.view("<i4")))
    return _checked(Datastore(path, tuple(shards)))


def _checked(store: Datastore) -> Datastore:
    for shard in store.shards:
        shard.check()
    return store


def _block(data: mmap.mmap, place: int) -> tuple[np.ndarray, int]:
    """The bytes of a length-prefixed block, and where the next begins; empty where the file ends before it does."""
    start = place + 4
    size = int.from_bytes(data[place:start], "little")
    if start + size > len(data):
        return np.empty(0, dtype=np.uint8), len(data)
    return np.frombuffer(data, np.uint8, size, start), start + size
