"""Documents → ids, on all cores, in the order of the documents.

    pieces ── lists of about TASK characters ──► threads: tokenizer
           ──► arrays of ids, in the order of reading

The tokenizers library works outside of Python's lock, so threads are enough: several lists are
encoded at once, while the next ones are read and earlier ones are stored. The result depends
neither on the division into lists nor on the number of threads.
"""

import collections
import concurrent.futures
import dataclasses
import os
from collections.abc import Iterable, Iterator

import numpy as np

from jaxtrain.data.records import Piece
from jaxtrain.data.tokenizer import DataError, Tokenizer

TASK = 1 << 20  # characters encoded by a thread at a time


@dataclasses.dataclass(frozen=True)
class Encoded:
    """The ids of some pieces.

    ids: [n] of the corpus's type, with the end-of-document ids.
    ends: [documents that end here] int64: the place after the end of each.
    mask: [n] uint8, 1 where a token counts in the loss.
    text: bytes of the text in UTF-8.
    size: bytes of the files that the text was read from.
    """

    ids: np.ndarray
    ends: np.ndarray
    mask: np.ndarray
    text: int
    size: int


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def encode(pieces: Iterable[Piece], tokenizer: Tokenizer, dtype: np.dtype) -> Iterator[Encoded]:
    """The ids of pieces, in their order. Raises DataError for a text that the tokenizer cannot
    encode, and whatever `pieces` raises."""
    threads = concurrent.futures.ThreadPoolExecutor(cores(), thread_name_prefix="jaxtrain-encode")
    waiting: collections.deque[concurrent.futures.Future[Encoded]] = collections.deque()
    try:
        begins = True  # a document
        for task in _tasks(pieces):
            waiting.append(threads.submit(_encode, task, begins, tokenizer, dtype))
            begins = task[-1].ends
            if len(waiting) > 2 * cores():
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        threads.shutdown(wait=True, cancel_futures=True)


def _tasks(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces in lists of about TASK characters."""
    task, size = [], 0
    for piece in pieces:
        task.append(piece)
        size += len(piece.text) + 64  # a piece costs something even if it is empty
        if size >= TASK:
            yield task
            task, size = [], 0
    if task:
        yield task


def _encode(task: list[Piece], begins: bool, tokenizer: Tokenizer, dtype: np.dtype) -> Encoded:
    """The ids of pieces, the first of which begins a document if `begins`."""
    parts = tokenizer.encode_batch([piece.text for piece in task])
    flat = np.concatenate(parts)
    if len(flat) and flat.max() >= tokenizer.vocab_size:
        raise DataError(
            f"the tokenizer makes id {flat.max()}, beyond its own {tokenizer.vocab_size}: use "
            "a whole data.tokenizer"
        )
    ends = np.array([piece.ends for piece in task])
    begin, starts = tokenizer.begin_of_document, np.append(begins, ends[:-1])
    lengths = np.array([len(part) for part in parts]) + ends + starts * len(begin)
    stops = np.cumsum(lengths)[ends]
    ids = np.full(lengths.sum(), tokenizer.end_of_document, dtype)
    text = np.ones(len(ids), bool)
    text[stops - 1] = False
    for offset, mark in enumerate(begin):
        places = (np.cumsum(lengths) - lengths)[starts] + offset
        ids[places], text[places] = mark, False
    ids[text] = flat
    mask = np.repeat(np.array([piece.counts for piece in task], np.uint8), lengths)
    size = sum(
        len(piece.text) if piece.text.isascii() else len(piece.text.encode()) for piece in task
    )
    return Encoded(ids, stops, mask, size, sum(piece.size for piece in task))
