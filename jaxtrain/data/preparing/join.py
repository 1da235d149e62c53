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

BLOCK = 1 << 20  # documents joined at a time
MOST_FILES = 10_000  # whose numbers of documents a corpus has


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
    by_file: collections.Counter[str] = collections.Counter()  # documents
    with contextlib.closing(CorpusWriter(folder)) as writer:
        writer.append("documents", np.zeros(1, "<i8"))
        for one, kept in zip(stored, documents_kept(stored, data, left_out), strict=True):
            for first in range(0, len(kept), BLOCK):
                chosen = kept[first : first + BLOCK]
                places = np.fromfile(
                    one.folder / "documents.bin", "<i8", len(chosen) + 1, offset=8 * first
                )
                ends = np.append(tokens, tokens + np.cumsum(np.diff(places)[chosen]))
                writer.append("documents", ends[1:].astype("<i8"))
                for name, kind in types.items():
                    for items in _items(one.folder / f"{name}.bin", kind, places, chosen):
                        writer.append(name, items)
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
        writer.finish(
            tokenizer,
            dtype=dtype.str,
            tokens=tokens,
            documents=count,
            masked=bool(data.loss_mask),
            text=sum(one.info["text"] for one in stored),
            encoded=sum(one.info["tokens"] for one in stored),
            documents_by_file=by_file if len(by_file) <= MOST_FILES else {},
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
    path = stored[0].part.source.files[0].path
    return DataError(f"{path}:1: no documents in data.source={data.source}: {why}{use}")
