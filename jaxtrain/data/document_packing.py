"""Sequences of a fixed length, cut from a split's documents by random access.

The documents follow each other in a stream. Sequence s has tokens s·T to s·T + T of the stream: its
T inputs, and as targets the same shifted by one. Only the last few tokens of the stream are left
out. With attend_across_documents=False every document in a sequence is a segment. A document that
is cut by the beginning of the sequence starts a segment there, and no token has the first token of
the next document as its target. If the stream is too short for one sequence, the documents repeat
in it.

Where the sequence length changes in the middle of an epoch, the inputs that are left of it are cut
anew: ranges of the stream, one after the other. Targets are always the next tokens of the stream.

    stream      a b c $ d e $ f g h i …           T = 6
    tokens      a b c $ d e                       targets     b c $ d e $
    segments    1 1 1 1 2 2                       weights     1 1 1 0 1 1
    positions   0 1 2 3 0 1

Legend: T the sequence length. loader.py puts sequences into batches and batches onto devices.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from jaxtrain.data.corpus import Corpus
from jaxtrain.data.split import Stream, make_stream
from jaxtrain.data.tokenizer import DataError

SequenceArrays = dict[str, np.ndarray]
GROUP = 1 << 20  # tokens of a group, whose sequences are near each other in the stream


class Sequences:
    """The sequences of a stream of a corpus: `len()` and `[s]`.

    A sequence is a dict of arrays [T]: `tokens` and `targets` int32, `weights` float32 (0 where the
    target does not count in the loss), and, if attend_across_documents is False, `segments` int32
    (1, 2, … along the sequence) and `positions` int32.

    The rest of the stream is shorter than a sequence. With `padded` it is the last one, filled up
    with targets of weight 0. Otherwise it is left out, or repeated if it is the entire stream:
    `repeated` is then True.

    inputs: the tokens that are inputs, as ranges of the stream; None: all but the stream's last

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
        inputs: Stream | None = None,
    ):
        self._corpus, self._stream = corpus, stream
        self._length, self._across = sequence_length, attend_across_documents
        self._tokens, self._documents = _plain(corpus.tokens), _plain(corpus.documents)
        self._mask = None if corpus.mask is None else _plain(corpus.mask)
        targets = max(0, len(stream) - 1)
        self.repeated = not padded and inputs is None and 0 < len(stream) <= sequence_length
        all_inputs = np.array([0, sequence_length if self.repeated else targets])
        self.inputs = Stream(all_inputs[:1], all_inputs) if inputs is None else inputs
        whole, rest = divmod(len(self.inputs), sequence_length)
        self._count = whole + bool(padded and rest)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, s: int) -> SequenceArrays:
        return self._arrays(self.ranges(s))

    def ranges(self, s: int) -> list[tuple[int, int]]:
        """The ranges [first, last) of the stream with the inputs of a sequence."""
        if not 0 <= s < self._count:
            raise IndexError(f"sequence {s} of {self._count}")
        begin = s * self._length
        return [*self.inputs.ranges(begin, min(begin + self._length, len(self.inputs)))]

    def in_corpus(self, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """The ranges of the corpus with these ranges of the stream."""
        return [each for one in ranges for each in self._stream.ranges(*one)]

    def group_sizes(self) -> np.ndarray:
        """[groups] int64: the sequences of each group of about GROUP tokens."""
        size = max(1, GROUP // self._length)
        return np.diff(np.append(np.arange(0, self._count, size), self._count))

    def inputs_of(self, runs: Iterable[Sequence[int]]) -> Stream:
        """The inputs of runs [first, last) of sequences, ascending. Those after the last sequence
        are among them if a run goes up to it."""
        bounds = [
            (first * self._length, len(self.inputs) if last == self._count else last * self._length)
            for first, last in runs
        ]
        ranges = [each for begin, end in bounds for each in self.inputs.ranges(begin, end)]
        return make_stream(*np.array(ranges, np.int64).reshape(-1, 2).T)

    def empty(self) -> SequenceArrays:
        """A sequence of padding: all weights 0."""
        return self._arrays([])

    def _arrays(self, ranges: Sequence[tuple[int, int]]) -> SequenceArrays:
        """The sequence with these inputs, at most T, padded to T."""
        inputs, targets = np.zeros(self._length + 1, np.int32), np.zeros(self._length, np.int32)
        counts, starts = np.zeros(self._length, np.float32), np.zeros(self._length + 1, bool)
        begin, starts[0] = 0, True
        for first, last in ranges:
            end = begin + last - first
            ids = self._read_ids(first, last + 1)
            inputs[begin : begin + len(ids)], targets[begin:end] = ids, ids[1:]
            counts[begin:end] = (
                1 if self._mask is None else self._stream.read(self._mask, first + 1, last + 1)
            )
            if not self._across:
                starts[begin : end + 1] = self._starts(first, last + 1)
                counts[begin:end][starts[begin + 1 : end + 1]] = 0
            begin = end
        arrays = {"tokens": inputs[:-1], "targets": targets, "weights": counts}
        if not self._across:
            starts[begin + bool(ranges) :][:1] = True  # the padding
            index = np.arange(self._length + 1, dtype=np.int32)
            arrays["segments"] = np.cumsum(starts, dtype=np.int32)[:-1]
            arrays["positions"] = (index - np.maximum.accumulate(np.where(starts, index, 0)))[:-1]
        return arrays

    def _read_ids(self, first: int, last: int) -> np.ndarray:
        """The ids of tokens [first, last) of the stream."""
        ids = self._stream.read(self._tokens, first, last)
        size = self._corpus.tokenizer.vocab_size
        if not 0 <= int(ids.min()) <= int(ids.max()) < size:
            bad = int(ids.max()) if int(ids.max()) >= size else int(ids.min())
            raise DataError(
                f"data.source={self._corpus.source}: token {bad} is beyond the {size} ids of its "
                "tokenizer, and was not when the corpus was prepared: remove "
                f"{self._corpus.folder}, and it is prepared again"
            )
        return ids

    def _starts(self, first: int, last: int) -> np.ndarray:
        """[last − first] bool: True where a segment begins, which is at the beginning of the tokens
        [first, last) of the stream and of each document."""
        starts, done = np.zeros(last - first, bool), 0
        for low, high in self._stream.ranges(first, last):
            inside = slice(*np.searchsorted(self._documents, np.array([low, high])))
            starts[self._documents[inside] - low + done] = True
            starts[done] = True
            done += high - low
        return starts


def _plain(array: np.ndarray) -> np.ndarray:
    """A plain view of a memmap, whose own slicing costs several times as much; any other array as
    it is."""
    return np.asarray(array) if isinstance(array, np.memmap) else array
