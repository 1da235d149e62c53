"""The held-out split, and a split's documents as one stream of tokens with random access.

Which documents are held out depends on the document index and the fraction alone. Documents are
taken in a fixed pseudo-random order until the wanted number of tokens is nearest. Where documents
are too long for that (one text file, or a few books), the last tokens of the corpus are held out
instead.

    corpus       | d0 | d1 | d2 | d3 | d4 |
    validation             | d2 |              ranges [d2)             → stream of d2
    train        | d0 | d1 |    | d3 | d4 |    ranges [d0 d1) [d3 d4)  → stream of d0 d1 d3 d4
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

CHUNK = 1 << 20  # documents looked at together


@dataclasses.dataclass(frozen=True, eq=False)
class Stream:
    """Ranges of a corpus, one after the other.

    `starts` [n] int64: where each range begins in the corpus; `offsets` [n + 1] int64: where it
    begins in the stream, then the length.
    """

    starts: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def ranges(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """The corpus's ranges [first, last) that make tokens [begin, end) of the stream; behind its
        last one stands its first again."""
        while begin < end:
            at = begin % len(self)
            i = int(np.searchsorted(self.offsets, at, "right")) - 1
            count = min(end - begin, int(self.offsets[i + 1]) - at)
            first = int(self.starts[i]) + at - int(self.offsets[i])
            yield first, first + count
            begin += count

    def read(self, array: np.ndarray, begin: int, end: int) -> np.ndarray:
        """[end − begin] of a per-token array of the corpus: a view where one range has it all, else
        a copy."""
        parts = [array[first:last] for first, last in self.ranges(begin, end)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [array[:0]])


def make_stream(starts: np.ndarray, ends: np.ndarray) -> Stream:
    """The stream of ranges [start, end), [n] int64 each, ascending; those that touch are merged,
    empty ones dropped."""
    keep = ends > starts
    starts, ends = starts[keep], ends[keep]
    joined = starts[1:] == ends[:-1]
    starts, ends = (
        starts[np.append(True, ~joined)[: len(starts)]],
        ends[np.append(~joined, True)[: len(ends)]],
    )
    return Stream(starts, np.append(0, np.cumsum(ends - starts)))


def split(documents: np.ndarray, fraction: float) -> tuple[Stream, Stream]:
    """(train, validation) of a corpus with document offsets `documents` [n + 1] int64, about
    `fraction` of the tokens held out."""
    total = int(documents[-1])
    target = round(fraction * total)
    held = _choose(documents, target)
    starts, ends = np.asarray(documents[held]), np.asarray(documents[held + 1])
    if 2 * int((ends - starts).sum()) < target:
        starts, ends = np.array([total - target]), np.array([total])
    return make_stream(np.append(0, ends), np.append(starts, total)), make_stream(starts, ends)


def _choose(documents: np.ndarray, target: int) -> np.ndarray:
    """Ascending indices [k] int64 of documents of at most `target` tokens each, together as near to
    it as the fixed order allows."""
    n, total = len(documents) - 1, int(documents[-1])
    # the order's head is nearly always enough, and far less to sort
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
    """(indices int64, keys uint64) of documents of at most `longest` tokens whose place in the
    fixed order is before `cutoff` of all."""
    indices, keys = [], []
    limit = np.uint64(min(int(cutoff * 2.0**64), 2**64 - 1))
    for first in range(0, len(documents) - 1, CHUNK):
        offsets = np.asarray(documents[first : first + CHUNK + 1])
        index = np.arange(first, first + len(offsets) - 1, dtype=np.int64)
        key = _mix(index.astype(np.uint64))
        keep = (np.diff(offsets) <= longest) & (key <= limit)
        indices.append(index[keep])
        keys.append(key[keep])
    return np.concatenate(indices), np.concatenate(keys)


def _mix(x: np.ndarray) -> np.ndarray:
    """uint64 → uint64, a bijection that looks random: a step of splitmix64 (Steele, Lea, Flood
    2014). A library's generator may change."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
