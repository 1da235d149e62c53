"""Encoded parts → the files of a prepared corpus, copied as streams."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxtrain.data.corpus import CHUNK
from jaxtrain.data.preparing.corpus_writer import CorpusWriter, ReadingProgress
from jaxtrain.data.preparing.parts import StoredPart, dtype_of
from jaxtrain.data.reading.bad_records import Skipped
from jaxtrain.data.tokenizer import DataError, Tokenizer


def join(
    folder: pathlib.Path,
    stored: Sequence[StoredPart],
    data: Any,
    tokenizer: Tokenizer,
    shown: ReadingProgress,
) -> None:
    """Writes the corpus of all parts of a source, in their order, into a folder. `shown` is told
    how many bytes are copied. Raises DataError if there are no documents."""
    dtype = dtype_of(tokenizer)
    types = {"tokens": dtype} | ({"mask": np.dtype(np.uint8)} if data.loss_mask else {})
    skipped, tokens, count = Skipped(), 0, 0
    with contextlib.closing(CorpusWriter(folder)) as writer:
        writer.append("documents", np.zeros(1, "<i8"))
        for one, kept in zip(stored, documents_kept(stored, data), strict=True):
            places = np.fromfile(one.folder / "documents.bin", "<i8")
            ends = tokens + np.cumsum(np.diff(places)[kept])
            writer.append("documents", ends.astype("<i8"))
            for name, kind in types.items():
                for first, last in _ranges(places, kept):
                    for items in _items(one.folder / f"{name}.bin", kind, first, last):
                        writer.append(name, items)
                        shown.update(items.nbytes, items.nbytes)
            tokens, count = int(ends[-1]) if len(ends) else tokens, count + len(ends)
            skipped.append(Skipped(**one.info.get("skipped", {})), one.part.first_file)
        if not count:
            raise _no_documents(stored, data, skipped)
        writer.finish(
            tokenizer,
            dtype=dtype.str,
            tokens=tokens,
            documents=count,
            masked=bool(data.loss_mask),
            **({"skipped": dataclasses.asdict(skipped)} if data.bad_records == "skip" else {}),
        )


def documents_kept(stored: Sequence[StoredPart], data: Any) -> list[np.ndarray]:
    """For each part bool [documents]: True for those that the corpus has."""
    return [np.ones(one.info["documents"], bool) for one in stored]


def _ranges(places: np.ndarray, kept: np.ndarray) -> list[tuple[int, int]]:
    """The ranges of tokens of consecutive documents that are kept."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], kept, [False]]).astype(np.int8)))
    return [(int(first), int(last)) for first, last in places[edges].reshape(-1, 2)]


def _items(path: pathlib.Path, kind: np.dtype, first: int, last: int) -> Iterator[np.ndarray]:
    """The items [first, last) of an array's file, CHUNK at a time."""
    with path.open("rb") as stream:
        stream.seek(first * kind.itemsize)
        for begin in range(first, last, CHUNK):
            yield np.fromfile(stream, kind, min(CHUNK, last - begin))


def _no_documents(stored: Sequence[StoredPart], data: Any, skipped: Skipped) -> DataError:
    """The error for a source none of whose documents has a text."""
    why = "all of its text is empty"
    if skipped.count:
        why = f"{skipped.count:,} bad records were left out, first {skipped.places[0]}"
    use = f": use {skipped.settings}" if skipped.settings else ""
    path = stored[0].part.source.files[0].path
    return DataError(f"{path}:1: no documents in data.source={data.source}: {why}{use}")
