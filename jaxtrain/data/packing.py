"""Rows of a fixed length, cut from a split's documents by random access.

Documents stand one after the other; row r holds tokens r·T to r·T + T of the stream, so that its T
targets are its T inputs moved on by one, and no token but the very last few is left out. With
attend_across_documents=False every document in a row is a segment of its own, a document cut by the
row's beginning starts anew there, and no token is asked to predict the next document's first. Where
there are too few tokens for one row, the documents repeat in it.

    stream      a b c $ d e $ f g h i …           T = 6
    tokens      a b c $ d e                       targets     b c $ d e $
    segments    1 1 1 1 2 2                       weights     1 1 1 0 1 1
    positions   0 1 2 3 0 1

Legend: T the sequence length. Which rows make a batch, and where they go, is in loader.py.
"""

import numpy as np

from jaxtrain.data.split import Stream
from jaxtrain.data.tokens import Corpus, DataError

Row = dict[str, np.ndarray]


class Rows:
    """The rows of a stream of a corpus: `len()` and `[r]`.

    A row is a dict of arrays [T]: `tokens` and `targets` int32, `weights` float32 (0 where the
    target does not count in the loss), and, if attend_across_documents is False, `segments` int32
    (1, 2, … along the row) and `positions` int32.

    With `padded` the stream's rest is a last row too, filled up with targets of weight 0; otherwise
    it is left out, or, where it is all there is, repeated. `repeated` says so.

    Raises DataError for a row with an id that the corpus's tokenizer does not have: what the corpus
    was checked for when it was prepared no longer holds.
    """

    def __init__(
        self,
        corpus: Corpus,
        stream: Stream,
        sequence_length: int,
        attend_across_documents: bool = True,
        padded: bool = False,
    ):
        self._corpus, self._stream, self._length, self._across = (
            corpus,
            stream,
            sequence_length,
            attend_across_documents,
        )
        # Plain views: a memmap's own slicing costs several times as much.
        self._tokens, self._documents = np.asarray(corpus.tokens), np.asarray(corpus.documents)
        self._mask = None if corpus.mask is None else np.asarray(corpus.mask)
        targets = max(0, len(stream) - 1)
        self.repeated = not padded and 0 < len(stream) <= sequence_length
        self._count = (
            -(-targets // sequence_length)
            if padded
            else 1
            if self.repeated
            else targets // sequence_length
        )

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, r: int) -> Row:
        if not 0 <= r < self._count:
            raise IndexError(f"row {r} of {self._count}")
        begin = r * self._length
        end = begin + self._length + 1
        return self._row(begin, end if self.repeated else min(end, len(self._stream)))

    def empty(self) -> Row:
        """A row of padding: all weights 0."""
        return self._row(0, 0)

    def _row(self, begin: int, end: int) -> Row:
        """The row of tokens [begin, end) of the stream, at most T + 1, padded to T + 1."""
        n, window = end - begin, np.zeros(self._length + 1, np.int32)
        ids = self._stream.read(self._tokens, begin, end)
        self._check(ids)
        window[:n] = ids
        counts = np.zeros(self._length + 1, np.float32)
        counts[:n] = 1 if self._mask is None else self._stream.read(self._mask, begin, end)
        row = {"tokens": window[:-1], "targets": window[1:], "weights": counts[1:]}
        if not self._across:
            first = self._starts(begin, end)
            segments = np.cumsum(first, dtype=np.int32)
            index = np.arange(self._length + 1, dtype=np.int32)
            row["weights"] = np.where(first[1:], np.float32(0), row["weights"])
            row["segments"] = segments[:-1]
            row["positions"] = (index - np.maximum.accumulate(np.where(first, index, 0)))[:-1]
        return row

    def _check(self, ids: np.ndarray) -> None:
        size = self._corpus.tokenizer.vocab_size
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < size:
            bad = int(ids.max()) if int(ids.max()) >= size else int(ids.min())
            source, folder = self._corpus.source, self._corpus.folder
            rule = (
                f"token {bad} is beyond the {size} ids of its tokenizer, and was not when the "
                "corpus was prepared"
            )
            raise DataError(
                f"data.source={source}: {rule}: remove {folder}, and it is prepared again"
            )

    def _starts(self, begin: int, end: int) -> np.ndarray:
        """[T + 1] bool: where a segment begins, which is at the row's beginning, at each
        document's, and at the padding's."""
        first, done = np.zeros(self._length + 1, bool), 0
        first[0] = True
        for low, high in self._stream.ranges(begin, end):
            inside = slice(*np.searchsorted(self._documents, np.array([low, high])))
            first[self._documents[inside] - low + done] = True
            first[done] = True
            done += high - low
        first[done : done + 1] = True
        return first
