"""The parts of a source, each of which is encoded into a folder of its own.

    source ── divide ──► part 0, part 1, …      each of about PART bytes of files
           ── encode_part ──► <work>/part-00000, …     complete or absent
           ── join.py ──► the prepared corpus

The division depends on the source alone, neither on shards nor on cores. Files of at most PART
bytes are put together; a larger file is divided at its lines or row groups if its format allows it,
and is a part by itself otherwise. So a killed preparation loses the part in hand, several machines
take parts of one source, and the joined bytes are always the same.

A part's folder has the files of a prepared corpus. Documents pass through here in this order:

    files ──► pieces of documents ──► own_filter.py ──► duplicates.py ──► ids ──► the part's files
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import os
import pathlib
from typing import Any

import numpy as np

from jaxtrain.config.sources import Source
from jaxtrain.data.preparing import duplicates, own_filter
from jaxtrain.data.preparing.corpus_writer import INFO, CorpusWriter, ReadingProgress
from jaxtrain.data.preparing.encode import encode
from jaxtrain.data.reading import documents
from jaxtrain.data.reading.bad_records import Skipped
from jaxtrain.data.reading.extents import extents
from jaxtrain.data.tokenizer import Tokenizer
from jaxtrain.run import files

PART = 64_000_000  # bytes of files in a part
VERSION = 1  # of parts: another one for another PART, or for other files of a part's folder


@dataclasses.dataclass(frozen=True)
class Part:
    """Consecutive files of a source, or an extent of one.

    number: its place among the parts
    source: the source with these files alone, and without unreadable ones
    first_file: the number of its first file in the whole source
    size: bytes of files
    """

    number: int
    source: Source
    first_file: int
    size: int

    def folder(self, work: pathlib.Path) -> pathlib.Path:
        """Its folder below the working folder of its source."""
        return work / f"part-{self.number:05}"


@dataclasses.dataclass(frozen=True)
class StoredPart:
    """An encoded part. info: the content of its corpus.json"""

    part: Part
    folder: pathlib.Path
    info: dict[str, Any]

    @property
    def array_bytes(self) -> int:
        """The bytes of its tokens and of their mask."""
        return self.info["tokens"] * (np.dtype(self.info["dtype"]).itemsize + self.info["masked"])


def divide(source: Source) -> list[Part]:
    """The parts of a source of text or records, in the order of the corpus. Reads the places where
    large files may be divided. Raises OSError for a file that has gone."""
    parts: list[Part] = []
    for number, file in enumerate(source.files):
        for extent, size in extents(file, PART):
            last = parts[-1] if parts else None
            if last and last.size + size <= PART:
                together = (*last.source.files, extent)
                alone = dataclasses.replace(source, files=together, unreadable=())
                parts[-1] = dataclasses.replace(last, source=alone, size=last.size + size)
            else:
                alone = dataclasses.replace(source, files=(extent,), unreadable=())
                parts.append(Part(len(parts), alone, number, size))
    return parts


def encode_part(
    folder: pathlib.Path,
    part: Part,
    data: Any,
    tokenizer: Tokenizer,
    any_read: bool,
    shown: ReadingProgress,
) -> None:
    """Encodes the documents of a part into a folder.

    any_read: records of the source were read before. shown: is told what is read.
    """
    dtype = dtype_of(tokenizer)
    skipped = Skipped() if data.bad_records == "skip" else None
    texts = documents.pieces(
        part.source, tuple(data.text_fields), tuple(data.loss_mask), folder, skipped, any_read
    )
    left_out: collections.Counter[str] = collections.Counter()
    if data.filter:
        texts = own_filter.kept(texts, data.filter, left_out)
    names = [os.path.relpath(file.path, part.source.root.parent) for file in part.source.files]
    by_file = collections.Counter(dict.fromkeys(names, 0))  # documents, in the files' order
    tokens = count = text = 0
    with contextlib.closing(CorpusWriter(folder)) as writer:
        if data.duplicates != "keep":
            store = functools.partial(writer.append, "keys")
            texts = duplicates.with_keys(texts, data.duplicates, store)
        writer.append("documents", np.zeros(1, "<i8"))
        writer.append("tokens", np.zeros(0, dtype))
        for encoded in encode(texts, tokenizer, dtype):
            writer.append("tokens", encoded.ids)
            writer.append("documents", (tokens + encoded.ends).astype("<i8"))
            if data.loss_mask:
                writer.append("mask", encoded.mask)
            by_file.update(names[piece.file] for piece in encoded.pieces if piece.ends)
            tokens, count = tokens + len(encoded.ids), count + len(encoded.ends)
            text += encoded.text
            shown.update(encoded.size, encoded.text)
        writer.finish(
            tokenizer,
            dtype=dtype.str,
            tokens=tokens,
            documents=count,
            masked=bool(data.loss_mask),
            text=text,
            documents_by_file=by_file,
            left_out=left_out,
            **({"skipped": dataclasses.asdict(skipped)} if skipped else {}),
        )


def dtype_of(tokenizer: Tokenizer) -> np.dtype:
    """The type of the ids of a prepared corpus."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


def open_part(part: Part, folder: pathlib.Path) -> StoredPart | None:
    """The part that a folder has; None if it is missing or damaged. Files that were written since,
    or copied, are compared with their checksums."""
    try:
        info = files.read_json(folder / INFO)
        written = os.stat(folder / INFO).st_mtime_ns
        for name, checksum in info["parts"].items():
            path = folder / f"{name}.bin"
            if os.stat(path).st_ctime_ns > written and _sha256(path) != checksum:
                return None
        return StoredPart(part, folder, info) if info["of"] == folder.name else None
    except (AttributeError, OSError, KeyError, TypeError, ValueError):
        return None


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
