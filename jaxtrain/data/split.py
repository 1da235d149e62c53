"""The held-out split, and a split's documents as one stream of tokens with random access.

The held-out documents depend on their indices and the fraction alone. Documents are taken in a
fixed pseudo-random order until the number of tokens is nearest to the fraction. Where documents are
too long for that (one text file, or a few books), the last tokens of the corpus are held out
instead.

    corpus       | d0 | d1 | d2 | d3 | d4 |
    validation             | d2 |              ranges [d2)             → stream of d2
    train        | d0 | d1 |    | d3 | d4 |    ranges [d0 d1) [d3 d4)  → stream of d0 d1 d3 d4
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jaxtrain.data.reading.joined import Sliced

CHUNK = 1 << 20  # documents examined at a time


@dataclasses.dataclass(frozen=True, eq=False)
class Stream:
    """Ranges of a corpus, one after the other.

    `starts` [n] int64: the place of each range in the corpus. `offsets` [n + 1] int64: its place in
    the stream, then the length of the stream.
    """

    starts: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def ranges(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """The ranges [first, last) of the corpus with tokens [begin, end) of the stream."""
        while begin < end:
            i = int(np.searchsorted(self.offsets, begin, "right")) - 1
            stop = min(end, int(self.offsets[i + 1]))
            place = int(self.starts[i]) - int(self.offsets[i])
            yield place + begin, place + stop
            begin = stop

    def in_corpus(self, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """The ranges of the corpus with these ranges of the stream."""
        return [each for one in ranges for each in self.ranges(*one)]

    def edges(self, documents: np.ndarray, begin: int, end: int) -> np.ndarray:
        """[n + 1] int64: the places in the stream of the documents, or parts of one, that have
        tokens [begin, end) of it, at least one, and the end of the last. documents: the corpus's"""
        i = slice(
            int(np.searchsorted(self.offsets, begin, "right")) - 1,
            int(np.searchsorted(self.offsets, end)),
        )
        starts, offsets, ends = self.starts[i], self.offsets[i], self.offsets[1:][i]
        places = starts - offsets
        first = np.searchsorted(documents, places + np.maximum(offsets, begin), "right") - 1
        last = np.searchsorted(documents, places + np.minimum(ends, end))
        inside = np.concatenate([documents[a:b] for a, b in zip(first, last, strict=True)])
        counts = last - first
        edges = np.maximum(inside, np.repeat(starts, counts)) - np.repeat(places, counts)
        return np.append(edges, min(documents[last[-1]] - places[-1], ends[-1]))

    def read(self, array: Sliced, begin: int, end: int) -> np.ndarray:
        """Elements [end − begin] of a per-token array of the corpus."""
        return read_ranges(array, [*self.ranges(begin, end)])


def read_ranges(array: Sliced, ranges: Sequence[tuple[int, int]]) -> np.ndarray:
    """The elements [first, last) of an array, range after range: a view of one, or a copy of
    several."""
    parts = [array[first:last] for first, last in ranges]
    return parts[0] if len(parts) == 1 else np.concatenate(parts or [array[:0]])


def make_stream(starts: np.ndarray, ends: np.ndarray) -> Stream:
    """The stream of ascending ranges [start, end), two arrays [n] int64. Ranges that touch are
    merged, and empty ones dropped."""
    keep = ends > starts
    starts, ends = starts[keep], ends[keep]
    separate = starts[1:] != ends[:-1]
    starts = starts[np.append(True, separate)[: len(starts)]]
    ends = ends[np.append(separate, True)[: len(ends)]]
    return Stream(starts, np.append(0, np.cumsum(ends - starts)))


def split(documents: np.ndarray, fraction: float) -> tuple[Stream, Stream]:
    """The streams (train, validation) of a corpus with document offsets `documents` [n + 1] int64;
    validation has about `fraction` of the tokens."""
    total = int(documents[-1])
    target = round(fraction * total)
    held = _choose(documents, target)
    starts, ends = np.asarray(documents[held]), np.asarray(documents[held + 1])
    if 2 * int((ends - starts).sum()) < target:
        starts, ends = np.array([total - target]), np.array([total])
    return make_stream(np.append(0, ends), np.append(starts, total)), make_stream(starts, ends)


def _choose(documents: np.ndarray, target: int) -> np.ndarray:
    """Ascending indices [k] int64 of documents of at most `target` tokens each, whose sum is as
    near to `target` as the fixed order allows."""
    n, total = len(documents) - 1, int(documents[-1])
    # the beginning of the order is nearly always enough, and far less to sort
    for cutoff in (min(1.0, 2 * target / total), 1.0):
        chosen, keys = _candidates(documents, target, cutoff)
        chosen = chosen[np.argsort(keys, kind="stable")]
        sums = np.cumsum(documents[chosen + 1] - documents[chosen])
        if len(sums) and sums[-1] > target:
            break
    k = int(np.searchsorted(sums, target, "right"))
    if k < len(sums) and sums[k] - target < target - (sums[k - 1] if k else 0):
        k += 1
    return np.sort(chosen[: min(k, n - 1)])


def _candidates(
    documents: np.ndarray, longest: int, cutoff: float
) -> tuple[np.ndarray, np.ndarray]:
    """Indices (int64) and keys (uint64) of the documents of at most `longest` tokens in the first
    `cutoff` of the fixed order."""
    indices, keys = [], []
    limit = np.uint64(min(int(cutoff * 2.0**64), 2**64 - 1))
    for first in range(0, len(documents) - 1, CHUNK):
        offsets = np.asarray(documents[first : first + CHUNK + 1])
        index = np.arange(first, first + len(offsets) - 1, dtype=np.int64)
        key = mix(index.astype(np.uint64))
        keep = (np.diff(offsets) <= longest) & (key <= limit)
        indices.append(index[keep])
        keys.append(key[keep])
    return np.concatenate(indices), np.concatenate(keys)


def mix(x: np.ndarray) -> np.ndarray:
    """A bijection uint64 → uint64 that looks random: a step of splitmix64 (Steele, Lea, Flood
    2014), written out because a library's generator may change."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
