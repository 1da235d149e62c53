"""Encoded parts → the files of a prepared corpus, copied as streams."""

import collections
import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxtrain.data.corpus import CHUNK
from jaxtrain.data.preparing import duplicates
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
    left_out: collections.Counter[str] = collections.Counter()
    by_file: collections.Counter[int] = collections.Counter()  # kept documents
    with contextlib.closing(CorpusWriter(folder)) as writer:
        writer.append("documents", np.zeros(1, "<i8"))
        for one, kept in zip(stored, documents_kept(stored, data, left_out), strict=True):
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
            left_out.update(one.info["left_out"])
            before = np.append(0, np.cumsum(kept))[np.cumsum([0, *one.info["files"]])]
            by_file.update(dict(enumerate(np.diff(before).tolist(), one.part.first_file)))
        if not count:
            raise _no_documents(stored, data, skipped, left_out["filter"])
        writer.finish(
            tokenizer,
            dtype=dtype.str,
            tokens=tokens,
            documents=count,
            masked=bool(data.loss_mask),
            text=sum(one.info["text"] for one in stored),
            encoded=sum(one.info["tokens"] for one in stored),
            files=[by_file[number] for number in range(max(by_file) + 1)],
            left_out=left_out,
            **({"skipped": dataclasses.asdict(skipped)} if data.bad_records == "skip" else {}),
        )


def documents_kept(
    stored: Sequence[StoredPart], data: Any, left_out: collections.Counter[str]
) -> list[np.ndarray]:
    """For each part bool [documents]: True for those that the corpus has. Counts duplicates."""
    counts = [one.info["documents"] for one in stored]
    if data.duplicates == "keep":
        return [np.ones(count, bool) for count in counts]
    files = [one.folder / "keys.bin" for one in stored]
    exact, near = duplicates.repeated(files, duplicates.KEYS[data.duplicates]).T
    left_out["exact"] += int(exact.sum())
    left_out["near"] += int((near & ~exact).sum())
    return np.split(~(exact | near), np.cumsum(counts)[:-1])


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
    path = stored[0].part.source.files[0].path
    return DataError(f"{path}:1: no documents in data.source={data.source}: {why}{use}")
