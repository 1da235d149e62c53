"""Arrays of a corpus that are read by slices: memory-mapped files, and several as one.

An array-like has `len(a)`, `a.dtype`, `a.nbytes` and `a[first:last]`, a numpy array.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxtrain.data.reading.bad_records import FileError
from jaxtrain.data.stores.ranges import StoreArray


class Joined:
    """Arrays [n] of one type, memory-mapped or in a store, one after the other, none of which is
    copied."""

    def __init__(self, parts: Sequence[np.memmap | StoreArray]):
        self.parts, self.dtype = parts, parts[0].dtype
        self.nbytes = sum(part.nbytes for part in parts)
        self._views = [view(part) for part in parts]
        self._begins = np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self._begins[-1])

    def __getitem__(self, where: slice) -> np.ndarray:
        """Elements [first:last]: a view of one part, or a copy from several."""
        first, last, _ = where.indices(len(self))
        pieces = [self._views[part][begin:end] for part, begin, end in self._places(first, last)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [self._views[0][:0]])

    def prefetch(self, first: int, last: int, is_needed: bool) -> None:
        """As that of StoreArray."""
        for part, begin, end in self._places(first, min(last, len(self))):
            prefetch(self.parts[part], begin, end, is_needed)

    def _places(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """The numbers of the parts with elements [first:last], and their places in each."""
        part = max(0, int(np.searchsorted(self._begins, first, "right")) - 1)
        while first < last:
            begin, end = self._begins[part : part + 2].tolist()
            yield part, first - begin, min(last, end) - begin
            part, first = part + 1, end


# an array that is read by slices
Sliced = np.ndarray | StoreArray | Joined


def parts_of(array: Any) -> Sequence[Any]:
    """The arrays that an array is joined from; the array itself, if it is not."""
    return array.parts if isinstance(array, Joined) else [array]


def view(array: Any) -> Any:
    """A plain view of a memory map, whose own slicing costs several times as much; another array as
    it is."""
    return np.asarray(array) if isinstance(array, np.memmap) else array


def in_store(array: Any) -> bool:
    """True if a part of an array lies in a store."""
    return any(isinstance(part, StoreArray) for part in parts_of(array))


def prefetch(array: Any, first: int, last: int, is_needed: bool) -> None:
    """Begins to read [first:last] of an array ahead, where it lies in a store. is_needed: it will
    be read at once."""
    if isinstance(array, StoreArray | Joined):
        array.prefetch(first, last, is_needed)


def check_whole(array: Any) -> None:
    """Raises FileError if a mapped file was cut short since it was opened. Reading the missing part
    of the map would kill the process without a message."""
    for part in parts_of(array):
        if isinstance(part, np.memmap):
            file: Any = part.base
            if file.size() < part.offset + part.nbytes:
                raise FileError(
                    f"{part.filename}: the file was cut short while it was in use, and "
                    f"{file.size():,} bytes are left: put it back as it was, and start again"
                )
