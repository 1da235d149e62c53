"""The parts of a source, each of which is encoded into a folder of its own, and then joined.

    source ── divide ──► part 0, part 1, …      each of about PART bytes of files
           ── encode_part ──► <work>/part-00000, …     complete or absent
           ── join ──► the prepared corpus, copied as streams

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
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxtrain.config.sources import File, Source
from jaxtrain.data.corpus import CHUNK
from jaxtrain.data.preparing import duplicates, own_filter
from jaxtrain.data.preparing.corpus_writer import INFO, CorpusWriter, ReadingProgress, sha256
from jaxtrain.data.preparing.encode import encode
from jaxtrain.data.reading import documents
from jaxtrain.data.reading.bad_records import Skipped
from jaxtrain.data.reading.extents import extents
from jaxtrain.data.tokenizer import DataError, Tokenizer
from jaxtrain.run import files

PART = 64_000_000  # bytes of files in a part
VERSION = 1  # of parts: another one for another PART, or for other files of a part's folder
BLOCK = 1 << 20  # documents joined at a time
MOST_FILES = 10_000  # whose numbers of documents a corpus has


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


def divide(source: Source) -> list[Part]:
    """The parts of a source of text or records, in the order of the corpus. Reads the places where
    large files may be divided. Raises OSError for a file that has gone."""
    groups: list[tuple[int, list[File]]] = []  # the number of the first file, and the extents
    sizes: list[int] = []
    for number, file in enumerate(source.files):
        for extent, size in extents(file, PART):
            if not groups or sizes[-1] + size > PART:
                groups.append((number, []))
                sizes.append(0)
            groups[-1][1].append(extent)
            sizes[-1] += size
    return [
        Part(
            i, dataclasses.replace(source, files=tuple(group), unreadable=()), first_file, sizes[i]
        )
        for i, (first_file, group) in enumerate(groups)
    ]


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
            texts = duplicates.with_keys(
                texts, data.duplicates, functools.partial(writer.append, "keys")
            )
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
        _finish(
            writer,
            data,
            tokenizer,
            skipped,
            tokens=tokens,
            documents=count,
            text=text,
            documents_by_file=by_file,
            left_out=left_out,
        )


def _finish(
    writer: CorpusWriter, data: Any, tokenizer: Tokenizer, skipped: Skipped | None, **info: Any
) -> None:
    """Writes the corpus.json of a part or of the joined corpus, with `info` and what both say of
    their arrays and, with data.bad_records=skip, of bad records."""
    if skipped and data.bad_records == "skip":
        info["skipped"] = dataclasses.asdict(skipped)
    writer.finish(tokenizer, dtype=dtype_of(tokenizer).str, masked=bool(data.loss_mask), **info)


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
            if os.stat(path).st_ctime_ns > written and sha256(path) != checksum:
                return None
        return StoredPart(part, folder, info) if info["of"] == folder.name else None
    except (AttributeError, OSError, KeyError, TypeError, ValueError):
        return None


def join(
    folder: pathlib.Path,
    stored: Sequence[StoredPart],
    data: Any,
    tokenizer: Tokenizer,
    name: str,
    progress: bool,
) -> None:
    """Writes the corpus of all parts of a source, in their order, into a folder. name: the
    source's, for the line of progress. Raises DataError if there are no documents."""
    types = {"tokens": dtype_of(tokenizer)} | (
        {"mask": np.dtype(np.uint8)} if data.loss_mask else {}
    )
    skipped, tokens, count = Skipped(), 0, 0
    left_out: collections.Counter[str] = collections.Counter()
    by_file: collections.Counter[str] = collections.Counter()  # documents
    size = sum(kind.itemsize for kind in types.values()) * sum(one.info["tokens"] for one in stored)
    with (
        contextlib.closing(CorpusWriter(folder)) as writer,
        contextlib.closing(ReadingProgress(name, size, progress, "joining")) as shown,
    ):
        writer.append("documents", np.zeros(1, "<i8"))
        for one, kept in zip(stored, documents_kept(stored, data, left_out), strict=True):
            for first in range(0, len(kept), BLOCK):
                chosen = kept[first : first + BLOCK]
                places = np.fromfile(
                    one.folder / "documents.bin", "<i8", len(chosen) + 1, offset=8 * first
                )
                ends = np.append(tokens, tokens + np.cumsum(np.diff(places)[chosen]))
                writer.append("documents", ends[1:].astype("<i8"))
                for array, kind in types.items():
                    for items in _items(one.folder / f"{array}.bin", kind, places, chosen):
                        writer.append(array, items)
                        shown.update(items.nbytes, items.nbytes)
                tokens, count = int(ends[-1]), count + len(ends) - 1
            skipped.append(Skipped(**one.info.get("skipped", {})), one.part.first_file)
            left_out.update(one.info["left_out"])
            first = 0
            for file, encoded in one.info["documents_by_file"].items():
                by_file[file] += int(np.count_nonzero(kept[first : first + encoded]))
                first += encoded
        if not count:
            raise _no_documents(stored, data, skipped, left_out["filter"])
        _finish(
            writer,
            data,
            tokenizer,
            skipped,
            tokens=tokens,
            documents=count,
            text=sum(one.info["text"] for one in stored),
            encoded=sum(one.info["tokens"] for one in stored),
            documents_by_file=by_file if len(by_file) <= MOST_FILES else {},
            left_out=left_out,
        )


def documents_kept(
    stored: Sequence[StoredPart], data: Any, left_out: collections.Counter[str]
) -> list[np.ndarray]:
    """For each part bool [documents]: True for those that the corpus has. Counts duplicates."""
    counts = [one.info["documents"] for one in stored]
    if data.duplicates == "keep":
        return [np.ones(count, bool) for count in counts]
    exact, near = duplicates.repeated(
        [one.folder / "keys.bin" for one in stored], duplicates.KEYS[data.duplicates]
    ).T
    left_out["exact"] += int(exact.sum())
    left_out["near"] += int((near & ~exact).sum())
    return np.split(~(exact | near), np.cumsum(counts)[:-1])


def _items(
    path: pathlib.Path, kind: np.dtype, places: np.ndarray, chosen: np.ndarray
) -> Iterator[np.ndarray]:
    """The items of an array's file that belong to chosen documents, of CHUNK items at a time.

    places: [documents + 1] the places of the documents, then that of the end; chosen: bool
    [documents]
    """
    with path.open("rb") as stream:
        stream.seek(int(places[0]) * kind.itemsize)
        for begin in range(int(places[0]), int(places[-1]), CHUNK):
            end = min(begin + CHUNK, int(places[-1]))
            first = np.searchsorted(places, begin, "right") - 1
            last = np.searchsorted(places, end, "left")
            lengths = np.diff(np.clip(places[first : last + 1], begin, end))
            yield np.fromfile(stream, kind, end - begin)[np.repeat(chosen[first:last], lengths)]


def _no_documents(
    stored: Sequence[StoredPart], data: Any, skipped: Skipped, filtered: int
) -> DataError:
    """The error for a source none of whose documents has a text, or is kept."""
    why = "all of its text is empty"
    if filtered:
        why = f"data.filter={data.filter} leaves out all {filtered:,}"
    elif skipped.count:
        why = f"{skipped.count:,} bad records were left out, first {skipped.places[0]}"
    use = f": use {skipped.settings}" if skipped.settings else ""
    return DataError(
        f"{stored[0].part.source.files[0].path}:1: no documents in data.source={data.source}: "
        f"{why}{use}"
    )
