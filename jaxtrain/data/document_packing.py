"""Sequences of a fixed length, cut from a split's documents by random access.

The documents follow each other in a stream. Sequence s has tokens s·T to s·T + T of the stream: its
T inputs, and as targets the same shifted by one. Only the last few tokens of the stream are left
out. With attend_across_documents=False every document in a sequence is a segment. A document that
is cut by the beginning of the sequence starts a segment there, and no token has the first token of
the next document as its target. If the stream is too short for one sequence, the documents repeat
in it.

    stream      a b c $ d e $ f g h i …           T = 6
    tokens      a b c $ d e                       targets     b c $ d e $
    segments    1 1 1 1 2 2                       weights     1 1 1 0 1 1
    positions   0 1 2 3 0 1

Legend: T the sequence length. loader.py puts sequences into batches and batches onto devices.
"""

import numpy as np

from jaxtrain.data.corpus import Corpus
from jaxtrain.data.reading.joined import view
from jaxtrain.data.split import Stream
from jaxtrain.data.tokenizer import DataError

SequenceArrays = dict[str, np.ndarray]


class Sequences:
    """The sequences of a stream of a corpus: `len()` and `[s]`.

    A sequence is a dict of arrays [T]: `tokens` and `targets` int32, `weights` float32 (0 where the
    target does not count in the loss), and, if attend_across_documents is False, `segments` int32
    (1, 2, … along the sequence) and `positions` int32.

    The rest of the stream is shorter than a sequence. With `padded` it is the last one, filled up
    with targets of weight 0. Otherwise it is left out, or repeated if it is the entire stream:
    `repeated` is then True.

    Raises DataError for an id that the corpus's tokenizer does not have. The corpus was checked for
    such ids when it was prepared, so its files have changed since.
    """

    def __init__(
        self,
        corpus: Corpus,
        stream: Stream,
        sequence_length: int,
        attend_across_documents: bool = True,
        padded: bool = False,
    ):
        self._corpus, self._stream = corpus, stream
        self._length, self._across = sequence_length, attend_across_documents
        self._tokens, self._documents = view(corpus.tokens), view(corpus.documents)
        self._mask = view(corpus.mask)
        targets = max(0, len(stream) - 1)
        self.repeated = not padded and 0 < len(stream) <= sequence_length
        if padded:
            self._count = -(-targets // sequence_length)
        else:
            self._count = 1 if self.repeated else targets // sequence_length

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, s: int) -> SequenceArrays:
        if not 0 <= s < self._count:
            raise IndexError(f"sequence {s} of {self._count}")
        begin = s * self._length
        end = begin + self._length + 1
        return self._sequence(begin, end if self.repeated else min(end, len(self._stream)))

    def empty(self) -> SequenceArrays:
        """A sequence of padding: all weights 0."""
        return self._sequence(0, 0)

    def _sequence(self, begin: int, end: int) -> SequenceArrays:
        """The sequence of tokens [begin, end) of the stream, at most T + 1, padded to T + 1."""
        n, window = end - begin, np.zeros(self._length + 1, np.int32)
        ids = self._stream.read(self._tokens, begin, end)
        size = self._corpus.tokenizer.vocab_size
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < size:
            bad = int(ids.max()) if int(ids.max()) >= size else int(ids.min())
            raise DataError(
                f"data.source={self._corpus.source}: token {bad} is beyond the {size} ids of its "
                "tokenizer, and was not when the corpus was prepared: remove "
                f"{self._corpus.folder}, and it is prepared again"
            )
        window[:n] = ids
        counts = np.zeros(self._length + 1, np.float32)
        counts[:n] = 1 if self._mask is None else self._stream.read(self._mask, begin, end)
        arrays = {"tokens": window[:-1], "targets": window[1:], "weights": counts[1:]}
        if not self._across:
            starts = self._starts(begin, end)
            index = np.arange(self._length + 1, dtype=np.int32)
            arrays["weights"] = np.where(starts[1:], np.float32(0), arrays["weights"])
            arrays["segments"] = np.cumsum(starts, dtype=np.int32)[:-1]
            arrays["positions"] = (index - np.maximum.accumulate(np.where(starts, index, 0)))[:-1]
        return arrays

    def _starts(self, begin: int, end: int) -> np.ndarray:
        """[T + 1] bool: True where a segment begins, which is at the beginning of the sequence, of
        each document, and of the padding."""
        starts, done = np.zeros(self._length + 1, bool), 0
        starts[0] = True
        for low, high in self._stream.ranges(begin, end):
            inside = slice(*np.searchsorted(self._documents, np.array([low, high])))
            starts[self._documents[inside] - low + done] = True
            starts[done] = True
            done += high - low
        starts[done : done + 1] = True
        return starts
