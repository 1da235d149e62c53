"""Sequences of a fixed length, made of a split's documents by random access.

The documents follow each other in a stream. Packing `stream` cuts it where a sequence is full:
sequence s has tokens s·T to s·T + T, its T inputs, and as targets the same shifted by one. Only the
last few tokens of the stream are left out. If the stream is too short for one sequence, the
documents repeat in it. Packing `best_fit` is in best_fit.py.

With attend_across_documents=False every document in a sequence is a segment. A document that is cut
by the beginning of the sequence starts a segment there, and no token has the first token of the
next document as its target.

    stream      a b c $ d e $ f g h i …           T = 6
    tokens      a b c $ d e                       targets     b c $ d e $
    segments    1 1 1 1 2 2                       weights     1 1 1 0 1 1
    positions   0 1 2 3 0 1

Legend: T the sequence length. loader.py puts sequences into batches and batches onto devices.
"""

import numpy as np

from jaxtrain.data.best_fit import GROUP, BestFit
from jaxtrain.data.corpus import Corpus
from jaxtrain.data.reading.joined import view
from jaxtrain.data.split import Stream, read_ranges
from jaxtrain.data.tokenizer import DataError

SequenceArrays = dict[str, np.ndarray]


class StreamPacking:
    """Sequences that follow each other in the stream. The rest of the stream is shorter than a
    sequence. With `padded` it is the last one; otherwise it is left out, or repeated if it is the
    entire stream.

    firsts: [groups + 1] int64, the first sequence of each group, then the number of sequences. The
        sequences of a group have neighbouring tokens, about GROUP of them.
    repeated: the stream is too short for one sequence, and repeats in it
    """

    def __init__(self, tokens: int, sequence_length: int, padded: bool):
        self._tokens, self._length = tokens, sequence_length
        self.repeated = not padded and 0 < tokens <= sequence_length
        targets = max(0, tokens - 1)
        sequences = -(-targets // sequence_length) if padded else targets // sequence_length
        sequences = max(sequences, int(self.repeated))
        self.firsts = np.arange(0, sequences, max(1, GROUP // sequence_length), dtype=np.int64)
        self.firsts = np.append(self.firsts, sequences)

    def ranges(self, s: int) -> list[tuple[int, int]]:
        """The tokens [begin, end) of the stream in sequence s, at most T + 1 of them."""
        size, begin = self._length + 1, s * self._length
        if self.repeated:
            times, rest = divmod(size, self._tokens)
            return [(0, self._tokens)] * times + [(0, rest)] * (rest > 0)
        return [(begin, min(begin + size, self._tokens))]

    def group_range(self, group: int) -> tuple[int, int]:
        """The tokens [begin, end) of the stream in the sequences of a group."""
        begin, end = (self.firsts[group : group + 2] * self._length).tolist()
        return begin, min(end + 1, self._tokens)


class Sequences:
    """The sequences of a stream of a corpus: `len()` and `[s]`.

    A sequence is a dict of arrays [T]: `tokens` and `targets` int32, `weights` float32 (0 where the
    target does not count in the loss), and, if attend_across_documents is False, `segments` int32
    (1, 2, … along the sequence) and `positions` int32. What is shorter than a sequence is filled up
    with targets of weight 0.

    padded: as in StreamPacking; packing: as data.packing

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
        packing: str = "stream",
    ):
        self.corpus, self.stream = corpus, stream
        self.length, self._across = sequence_length, attend_across_documents
        self._tokens, self._documents = view(corpus.tokens), view(corpus.documents)
        self._mask = view(corpus.mask)
        self.packing: StreamPacking | BestFit = (
            BestFit(corpus, stream, sequence_length)
            if packing == "best_fit"
            else StreamPacking(len(stream), sequence_length, padded)
        )

    def __len__(self) -> int:
        return int(self.packing.firsts[-1])

    def __getitem__(self, s: int) -> SequenceArrays:
        return self.read(self.ranges(s))

    def ranges(self, s: int) -> list[tuple[int, int]]:
        """The ranges of the corpus with the tokens of a sequence, at most T + 1 of them."""
        if not 0 <= s < len(self):
            raise IndexError(f"sequence {s} of {len(self)}")
        return self.stream.in_corpus(self.packing.ranges(s))

    def read(self, ranges: list[tuple[int, int]]) -> SequenceArrays:
        """The sequence of at most T + 1 tokens, ranges of the corpus; without any, all weights are
        0."""
        window = np.zeros(self.length + 1, np.int32)
        ids = read_ranges(self._tokens, ranges)
        n, size = len(ids), self.corpus.tokenizer.vocab_size
        if n and not 0 <= int(ids.min()) <= int(ids.max()) < size:
            bad = int(ids.max()) if int(ids.max()) >= size else int(ids.min())
            raise DataError(
                f"data.source={self.corpus.source}: token {bad} is beyond the {size} ids of its "
                "tokenizer, and was not when the corpus was prepared: remove "
                f"{self.corpus.folder}, and it is prepared again"
            )
        window[:n] = ids
        counts = np.zeros(self.length + 1, np.float32)
        counts[:n] = 1 if self._mask is None else read_ranges(self._mask, ranges)
        lows, highs = np.array(ranges, np.int64).reshape(-1, 2).T
        begins = np.cumsum(highs - lows) - (highs - lows)  # the places of the ranges
        first, last = (np.searchsorted(self._documents, edges) for edges in (lows, highs))
        inside = read_ranges(self._documents, [*zip(first, last, strict=True)])
        starts = np.zeros(self.length + 1, bool)  # True where a document begins
        starts[inside + np.repeat(begins - lows, last - first)] = True
        # Where a part of a document follows on another text, its first token is only read: it is
        # the target of the part before.
        counts[begins[~starts[begins]]] = 0
        arrays = {"tokens": window[:-1], "targets": window[1:], "weights": counts[1:]}
        if not self._across:
            starts[begins] = True
            starts[n : n + 1] = True  # of the padding
            index = np.arange(self.length + 1, dtype=np.int32)
            arrays["weights"] = np.where(starts[1:], np.float32(0), arrays["weights"])
            arrays["segments"] = np.cumsum(starts, dtype=np.int32)[:-1]
            arrays["positions"] = (index - np.maximum.accumulate(np.where(starts, index, 0)))[:-1]
        return arrays
