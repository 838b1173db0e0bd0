"""Making a datastore: texts of files, as token ids, with their suffix array."""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from specbench.errors import SpecbenchError
from specbench.models.datastore import FACTS, SCHEMA, SUFFIXES, TOKENS, tokens_hash, vocabulary_hash
from specbench.models.suffix_array import suffix_array

BATCH_CHARACTERS = 1_000_000  # tokenised at a time, and about as much is read of a text at a time
COLUMNS = ("text", "turns", "messages", "conversations")
ROW = 'a row looks like {"text": "…"} or {"turns": ["…"]}; messages and conversations are read too'


def build(
    files: Iterable[Path],
    tokenizer: Any,
    target: str,
    output: Path,
    notify: Callable[[str], None] = lambda line: None,
    *,
    fresh: bool = False,
) -> int:
    """Build a datastore in the folder `output`, in place of one of the same files; the number of its tokens.

    Args:
        files: plain texts (each a document), or JSONL (`.jsonl`, each row a document); `.gz` is unpacked.
        tokenizer: the target's.
        target: its name, for the record.
        fresh: also take the place of a datastore of other files.

    Raises:
        SpecbenchError: a datastore of other files is there, a file that cannot be read, a row without text, nothing
            to store, or no place to write.
    """
    files = list(files)
    names = [str(file.absolute()) for file in files]
    if output.exists():
        _may_replace(output, names, fresh, notify)
    kind = np.uint16 if len(tokenizer) < np.iinfo(np.uint16).max else np.uint32
    pieces, documents = [], 0
    for ids, ends in _tokenised(files, tokenizer):
        pieces.append(np.array(ids, dtype=kind))
        if ends:
            documents += 1
            pieces.append(np.array([np.iinfo(kind).max], dtype=kind))
    tokens = np.concatenate(pieces) if pieces else np.empty(0, kind)
    del pieces
    if len(tokens) == documents:
        raise SpecbenchError("there is no text in the files", "give files with something to learn from")
    notify(f"sorting the suffixes of {len(tokens):,} tokens…")
    facts = {
        "schema": SCHEMA,
        "target": target,
        "tokenizer": vocabulary_hash(tokenizer),
        "tokens": len(tokens),
        "sha256": tokens_hash(tokens),
        "documents": documents,
        "files": names,
    }
    write(output, tokens, suffix_array(tokens), facts)
    return len(tokens)


def _may_replace(output: Path, files: list[str], fresh: bool, notify: Callable[[str], None]) -> None:
    if not (output / FACTS).is_file():
        raise SpecbenchError(f"{output} exists and is no datastore", "give another --output")
    try:
        known = [str(file) for file in json.loads((output / FACTS).read_text(encoding="utf-8"))["files"]]
    except (OSError, ValueError, KeyError, TypeError):
        known = ["unknown"]
    if known != files and not fresh:
        raise SpecbenchError(
            f"{output} is a datastore of other files: {', '.join(known)}",
            "give another --output, or --fresh to replace it",
        )
    notify(f"replaces {output}, of {'the same' if known == files else 'other'} files")


def _tokenised(files: list[Path], tokenizer: Any) -> Iterator[tuple[list[int], bool]]:
    """Ids of each piece of text, and whether a document ends with it."""
    for batch in _batches(piece for file in files for piece in _pieces(file)):
        texts = [text for text, _ in batch]
        encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        yield from zip(encoded["input_ids"], (ends for _, ends in batch), strict=True)


def _batches(pieces: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[0])
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _pieces(file: Path) -> Iterator[tuple[str, bool]]:
    """The documents of a file; a long text in parts, cut after a line's end."""
    packed = file.name.endswith(".gz")
    rows = file.name.removesuffix(".gz").endswith(".jsonl")
    try:
        with gzip.open(file, "rt", encoding="utf-8") if packed else file.open(encoding="utf-8") as stream:
            if rows:
                yield from ((text, True) for text in _rows(stream, file))
            else:
                yield from _parts(stream)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise SpecbenchError(
            f"{file} cannot be read: {why}", "give plain text or JSONL in UTF-8, or either as .gz"
        ) from error


def _parts(stream: IO[str]) -> Iterator[tuple[str, bool]]:
    rest = ""
    while block := stream.read(BATCH_CHARACTERS // 16):
        rest += block
        end = rest.rfind("\n") + 1
        if end:
            yield rest[:end], False
            rest = rest[end:]
    yield rest, True


def _rows(stream: IO[str], file: Path) -> Iterator[str]:
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            yield _text(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise SpecbenchError(f"{file}, line {number}: {error}", ROW) from error


def _text(row: Any) -> str:
    """The text of a row: its `text`, or all its turns, whoever spoke them. Raises ValueError."""
    column = next((name for name in COLUMNS if isinstance(row, Mapping) and name in row), None)
    if column is None:
        raise ValueError(f"none of {', '.join(COLUMNS)}")
    value = row[column]
    turns = [value] if isinstance(value, str) else value
    if not isinstance(turns, list):
        raise ValueError(f"{column!r} is neither a text nor a list")
    texts = [turn.get("content", turn.get("value")) if isinstance(turn, Mapping) else turn for turn in turns]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{column!r} has a turn that is no text")
    text = "\n".join(texts)
    text.encode()  # half a surrogate pair is valid in JSON and crashes tokenizers
    return text


def write(output: Path, tokens: np.ndarray, suffixes: np.ndarray, facts: dict[str, Any]) -> None:
    """The folder appears whole or not at all."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}-"))
        try:
            np.save(made / TOKENS, tokens)
            np.save(made / SUFFIXES, suffixes)
            (made / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
            made.chmod(0o755)
            shutil.rmtree(output, ignore_errors=True)
            made.rename(output)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise SpecbenchError(
            f"cannot write {output}: {error.strerror or error}", "give a writable folder with --output"
        ) from error
