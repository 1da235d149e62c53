"""Arrays of a corpus that are read by slices: memory-mapped files, and several as one.

An array-like has `len(a)`, `a.dtype`, `a.nbytes` and `a[first:last]`, a numpy array.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxtrain.data.stores.ranges import StoreArray


class Joined:
    """Arrays [n] of one type, memory-mapped or in a store, one after the other, none of which is
    copied."""

    def __init__(self, parts: Sequence[np.memmap | StoreArray]):
        self.parts, self.dtype = parts, parts[0].dtype
        self.nbytes = sum(part.nbytes for part in parts)
        self._begins = np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self._begins[-1])

    def __getitem__(self, where: slice) -> np.ndarray:
        """Elements [first:last]: a view of one part, or a copy from several."""
        first, last, _ = where.indices(len(self))
        pieces = [view(part)[begin:end] for part, begin, end in self.places(first, last)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [self.parts[0][:0]])

    def places(self, first: int, last: int) -> Iterator[tuple[np.memmap | StoreArray, int, int]]:
        """The parts with elements [first:last], and the elements' places in each."""
        number = int(np.searchsorted(self._begins, first, "right")) - 1
        for part, begin in zip(self.parts[number:], self._begins[number:].tolist(), strict=False):
            if begin >= last:
                return
            yield part, max(0, first - begin), min(last - begin, len(part))


# an array that is read by slices
Sliced = np.ndarray | StoreArray | Joined


def parts_of(array: Any) -> Sequence[Any]:
    """The arrays that an array is joined from; the array itself, if it is not."""
    return array.parts if isinstance(array, Joined) else [array]


def view(array: Any) -> Any:
    """A plain view of a memory map, whose own slicing costs several times as much; another array as
    it is."""
    return np.asarray(array) if isinstance(array, np.memmap) else array
