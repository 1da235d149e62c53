"""Best-fit packing: sequences in which no document is cut that fits (Ding et al. 2024,
arXiv:2404.10830).

A document of at most T + 1 tokens, which are T inputs and one more target, is one piece. A longer
one is cut into pieces of T + 1 that share one token, the last target of a piece and the first input
of the next, so each token but a document's first is predicted once. A sequence has room for T + 1
tokens of pieces, and what is left of it is padding.

    document    a b c d e f g h $   T = 4
    pieces      a b c d e
                        e f g h $

The pieces that begin in the same GROUP of the stream are packed together by best fit decreasing:
the longest first, each into the sequence with the least room that is enough. Groups keep the pieces
of a sequence near each other, and bound the work: where a sequence's pieces lie is computed when it
is read. Only the number of sequences in each group is computed before.

Legend: T the sequence length.
"""

import bisect
import functools
import hashlib

import numpy as np

from jaxtrain.data.corpus import Corpus, stored
from jaxtrain.data.split import Stream

GROUP = 1 << 20  # tokens of a group at least
SEQUENCES = 256  # of a group at least: with few of them more is padding
STORED = 64  # groups from which on their sequences are counted once, and stored
PACKED = 128  # groups in memory: those of a window of the order, and of the next one


class BestFit:
    """The best-fit packing of a stream of a corpus: attributes and methods as of
    document_packing.StreamPacking."""

    def __init__(self, corpus: Corpus, stream: Stream, sequence_length: int):
        self._documents, self._stream = np.asarray(corpus.documents), stream
        self._length, self.repeated = sequence_length, False
        self._tokens = max(GROUP, SEQUENCES * sequence_length)
        self._packed = functools.lru_cache(PACKED)(self._pack)
        groups = -(-len(stream) // self._tokens)
        count = lambda: [pack(np.diff(self._pieces(i)), self._length + 1)[1] for i in range(groups)]
        if groups > STORED:
            key = hashlib.sha256(f"{corpus.checksum} {sequence_length}".encode())
            key.update(np.append(stream.starts, stream.offsets).tobytes())
            counts = stored(corpus.folder / f"best-fit-{key.hexdigest()[:16]}.txt", count)
        else:
            counts = count()
        self.firsts = np.append(0, np.cumsum(counts, dtype=np.int64))

    def ranges(self, s: int) -> list[tuple[int, int]]:
        group = int(np.searchsorted(self.firsts, s, "right")) - 1
        pieces, bounds = self._packed(group)
        first, last = bounds[s - self.firsts[group] :][:2]
        return list(map(tuple, pieces[first:last].tolist()))

    def group_range(self, group: int) -> tuple[int, int]:
        pieces = self._pieces(group)
        end = min((group + 1) * self._tokens, len(self._stream))  # also of a group without pieces
        return int(pieces[:, 0].min(initial=end)), int(pieces[:, 1].max(initial=end))

    def _pack(self, group: int) -> tuple[np.ndarray, np.ndarray]:
        """The pieces of a group, as `_pieces`, by sequence and in the order of the stream in each;
        and [sequences + 1] the first piece of each sequence, then their number."""
        pieces = self._pieces(group)
        sequences, count = pack(np.diff(pieces), self._length + 1)
        order = np.argsort(sequences, kind="stable")
        return pieces[order], np.searchsorted(sequences[order], np.arange(count + 1))

    def _pieces(self, group: int) -> np.ndarray:
        """[pieces, 2] int64: the tokens [begin, end) of the stream in each piece that begins in a
        group, ascending."""
        low = group * self._tokens
        high = min(low + self._tokens, len(self._stream))
        edges = self._stream.edges(self._documents, low, high)
        starts, ends = edges[:-1], edges[1:]
        # Only those of a document that begin in this group: one document may be the entire stream.
        first = np.maximum(0, -((starts - low) // self._length))
        last = np.maximum(1, -((starts - ends + 1) // self._length))
        last = np.minimum(last, -((starts - high) // self._length))
        counts = last - first
        index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - first, counts)
        begins = np.repeat(starts, counts) + self._length * index
        return np.stack(
            [begins, np.minimum(begins + self._length + 1, np.repeat(ends, counts))], axis=1
        )


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Best fit decreasing. Returns the bin of each item, [items] int64, and the number of bins.

    lengths: those of the items, at least 1 and at most `capacity`, which is that of a bin

    >>> pack(np.array([3, 4, 2, 1]), 5)
    (array([1, 0, 1, 0]), 2)
    """
    lengths = lengths.ravel()
    order = np.argsort(-lengths, kind="stable")
    # Items longer than half a bin have one each, so the loop below is about the others alone. The
    # bins with room are sorted by their room, then by their number.
    count = int((2 * lengths > capacity).sum())
    rooms = (capacity - lengths[order[:count]]).tolist()
    bins = [(room, i) for i, room in enumerate(rooms) if room]
    chosen, items = list(range(count)), [1] * count
    negative, repeats = np.unique(-lengths[order[count:]], return_counts=True)
    for length, left in zip((-negative).tolist(), repeats.tolist(), strict=True):
        while left:
            at = bisect.bisect_left(bins, (length, 0))
            room, number = bins.pop(at) if at < len(bins) else (capacity, count)
            count = max(count, number + 1)
            # The next item of this length goes into the same bin: it has the least room now.
            together = min(left, room // length)
            chosen.append(number)
            items.append(together)
            left, room = left - together, room - together * length
            if room:
                bisect.insort(bins, (room, number))
    result = np.empty(len(lengths), np.int64)
    result[order] = np.repeat(np.array(chosen, np.int64), items)
    return result, count
