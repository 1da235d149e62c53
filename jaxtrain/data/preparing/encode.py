"""Documents → ids, on all cores, in the order of the documents.

    pieces ── lists of about TASK characters ──► threads: tokenizer
           ──► arrays of ids, in the order of reading

The tokenizers library works outside of Python's lock, so threads are enough: several lists are
encoded at once, while the next ones are read and earlier ones are stored. The result depends
neither on the division into lists nor on the number of threads.

A long text is encoded in windows, and has the ids that it has as a whole. A tokenizer looks over a
cut: it puts a space before a text, takes spaces together, joins letters. So windows overlap, and
the characters that two of them share are encoded once more:

    window         ───────────────────┐
    shared             ├──────────────┤
    next window        └──────────────────────────────

The window ends with the last three quarters of the shared ids, and the next one begins with their
first three quarters. The half between stands with all the text before it and with all the text
behind it, and the windows are joined in its middle. For BPE this is a proof, since ids are BPE's
result if each two neighbours are; also for what goes from left to right, since both windows go on
from the same place. Windows that do not agree are encoded as one, so memory grows for a text that
no place divides.
"""

import collections
import concurrent.futures
import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator

import numpy as np

from jaxtrain.data.reading.records import TextPiece
from jaxtrain.data.tokenizer import DataError, FileTokenizer, Tokenizer

# Characters encoded by a thread at a time: a multiple of the numbers to 16, so that tokens of a
# fixed length are the same in all windows.
TASK = 720_720
SHARED = 1 << 13  # characters that two windows share
LEAST = 16  # known ids in the middle without which windows do not agree
LONGEST = 1 << 25  # characters that are encoded as one, in some 4 GB


@dataclasses.dataclass(frozen=True)
class Encoded:
    """The ids of some pieces.

    pieces: the texts; `begins`: True if a document begins with the first one.
    ids: [n] of the corpus's type, with the end-of-document ids.
    ends: [documents that end here] int64: the place after the end of each.
    mask: [n] uint8, 1 where a token counts in the loss.
    shared: [m] the ids of the last SHARED characters alone, if the last piece goes on.
    text: bytes of the text in UTF-8, without what the next piece has, too.
    size: bytes of the files that the text was read from.
    """

    pieces: list[TextPiece]
    begins: bool
    ids: np.ndarray
    ends: np.ndarray
    mask: np.ndarray
    shared: np.ndarray
    text: int
    size: int

    def part(self, begin: int, end: int) -> "Encoded":
        """The ids [begin, end), outside of which no document ends."""
        return dataclasses.replace(
            self, ids=self.ids[begin:end], mask=self.mask[begin:end], ends=self.ends - begin
        )


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def encode(pieces: Iterable[TextPiece], tokenizer: Tokenizer, dtype: np.dtype) -> Iterator[Encoded]:
    """The ids of pieces, in their order. Raises DataError for a text that the tokenizer cannot
    encode, and whatever `pieces` raises."""
    threads = concurrent.futures.ThreadPoolExecutor(cores(), thread_name_prefix="jaxtrain-encode")
    waiting: collections.deque[concurrent.futures.Future[Encoded]] = collections.deque()
    texts = (
        _windows(pieces)
        if isinstance(tokenizer, FileTokenizer)
        else (piece._replace(goes_on=False) for piece in pieces)  # bytes may be cut anywhere
    )

    def results() -> Iterator[Encoded]:
        begins = True  # a document
        for task in _tasks(texts):
            waiting.append(threads.submit(_encode, task, begins, tokenizer, dtype))
            begins = task[-1].ends
            if len(waiting) > 2 * cores():
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    try:
        yield from _joined(results(), tokenizer)
    finally:
        threads.shutdown(wait=True, cancel_futures=True)


def _windows(pieces: Iterable[TextPiece]) -> Iterator[TextPiece]:
    """TextPieces that go on in the next one are joined; texts of more than TASK + SHARED characters
    come in windows of so many, each of which goes on in the next one."""
    text, size = "", 0
    for piece in pieces:
        if not (text or size or piece.goes_on) and len(piece.text) <= TASK + SHARED:
            yield piece  # a short document: most are
            continue
        text, size, at = text + piece.text, size + piece.size, 0
        while len(text) - at > TASK + SHARED:
            yield TextPiece(text[at : at + TASK + SHARED], piece.counts, False, size, goes_on=True)
            at, size = at + TASK, 0
        text = text[at:]
        if not piece.goes_on:
            yield piece._replace(text=text, size=size)
            text, size = "", 0


def _tasks(pieces: Iterable[TextPiece]) -> Iterator[list[TextPiece]]:
    """TextPieces in lists of about TASK characters; a window that goes on ends its list."""
    task, size = [], 0
    for piece in pieces:
        task.append(piece)
        size += len(piece.text) + 64  # a piece costs something even if it is empty
        if size >= TASK or piece.goes_on:
            yield task
            task, size = [], 0
    if task:
        yield task


def _joined(results: Iterator[Encoded], tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Results without the ids of a window that the next one has, too."""
    begin = 0
    for left in results:
        while left.pieces[-1].goes_on:
            right = next(results)
            shared, most = left.shared, 3 * len(left.shared) // 4
            known = shared != getattr(tokenizer, "unknown", None)  # the others say nothing
            if (
                np.count_nonzero(known[len(shared) // 4 : most]) >= LEAST
                and np.array_equal(left.ids[-most:], shared[-most:])
                and np.array_equal(right.ids[:most], shared[:most])
            ):
                yield left.part(begin, len(left.ids) - len(shared) + len(shared) // 2)
                left, begin = right, len(shared) // 2
            else:
                left = _grown(left, begin, itertools.chain([right], results), tokenizer)
        yield left.part(begin, len(left.ids))
        begin = 0


def _grown(left: Encoded, begin: int, results: Iterator[Encoded], tokenizer: Tokenizer) -> Encoded:
    """One window in place of those that disagree, twice as long, or to the end of the text.

    begin: the number of its first ids that the window before has

    Raises DataError if it is longer than LONGEST, or contradicts the window before.
    """
    piece = left.pieces[-1]
    while piece.goes_on and len(piece.text) < 2 * len(left.pieces[-1].text):
        right = next(results)
        following = right.pieces[0]
        piece = following._replace(
            text=piece.text + following.text[SHARED:], size=piece.size + following.size
        )
    if len(piece.text) <= LONGEST:
        pieces, agreed = [*left.pieces[:-1], piece, *right.pieces[1:]], 3 * begin // 2
        grown = _encode(pieces, left.begins, tokenizer, left.ids.dtype)
        if np.array_equal(grown.ids[:agreed], left.ids[:agreed]):
            return grown
    raise DataError(
        f"data.tokenizer makes other ids of {len(piece.text):,} characters of a document than of "
        f"its parts, and at most {LONGEST:,} are encoded as one: divide it into shorter documents"
    )


def _encode(task: list[TextPiece], begins: bool, tokenizer: Tokenizer, dtype: np.dtype) -> Encoded:
    """The ids of pieces, the first of which begins a document if `begins`."""
    texts, goes_on = [piece.text for piece in task], task[-1].goes_on
    all_ids, counts = tokenizer.encode_batch([*texts, texts[-1][-SHARED:] * goes_on])
    flat, shared = np.split(all_ids, [len(all_ids) - counts[-1]])
    if len(flat) and flat.max() >= tokenizer.vocab_size:
        raise DataError(
            f"the tokenizer makes id {flat.max()}, beyond its own {tokenizer.vocab_size}: use "
            "a whole data.tokenizer"
        )
    ends = np.array([piece.ends for piece in task])
    begin, starts = tokenizer.begin_of_document, np.append(begins, ends[:-1])
    lengths = np.array(counts[:-1]) + ends + starts * len(begin)
    stops = np.cumsum(lengths)[ends]
    ids = np.full(lengths.sum(), tokenizer.end_of_document, dtype)
    is_text = np.ones(len(ids), bool)
    is_text[stops - 1] = False
    for offset, mark in enumerate(begin):
        places = (np.cumsum(lengths) - lengths)[starts] + offset
        ids[places], is_text[places] = mark, False
    ids[is_text] = flat
    mask = np.repeat(np.array([piece.counts for piece in task], np.uint8), lengths)
    texts[-1] = texts[-1][: -SHARED if goes_on else None]
    return Encoded(
        task,
        begins,
        ids,
        stops,
        mask,
        shared,
        text=sum(len(text) if text.isascii() else len(text.encode()) for text in texts),
        size=sum(piece.size for piece in task),
    )
