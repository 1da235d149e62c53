"""The index (.idx) beside Megatron's token files (.bin): the type of their ids, and where their
documents end.

    bytes 0 to 8     "MMIDIDX" and two zeros
    9 to 16          the version, 1
    17               the type of the ids, a key of DTYPES
    18 to 33         n and d, the numbers of sequences and of documents' bounds
    then             int32 [n]: the sequences' lengths in tokens; int64 [n]: the byte of the .bin
                     where each begins; int64 [d]: the sequence that each document begins with, then
                     n; with images also int8 [n]: the sequences' modes

Source: _IndexWriter in megatron/core/datasets/indexed_dataset.py.
"""

import dataclasses
import os
import pathlib
import struct
from collections.abc import Iterator

import numpy as np

from jaxtrain.config.sources import File
from jaxtrain.data.reading.bad_records import FileError
from jaxtrain.data.reading.compressed import open_input

MAGIC, HEADER = b"MMIDIDX\0\0", struct.Struct("<9sQBQQ")
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
BLOCK = 1 << 20  # entries examined at a time
MISMATCH = "one of the two files is damaged or cut short, or the index of another one"


@dataclasses.dataclass(frozen=True)
class MegatronIndex:
    """An index; its arrays, whose sizes are checked, are memory-mapped.

    tokens: the path of the .bin, and size: its bytes.
    dtype: the type of its ids, little-endian.
    lengths, pointers: [sequences] tokens of each, and the byte where it begins.
    bounds: [documents + 1] the sequence that each document begins with, then their number.
    """

    path: str
    tokens: str
    size: int
    dtype: np.dtype
    lengths: np.ndarray
    pointers: np.ndarray
    bounds: np.ndarray

    def document_ends(self) -> Iterator[np.ndarray]:
        """The places after the documents' last tokens, ascending, in arrays of int64.

        Raises FileError if the sequences are not one after the other, end elsewhere than the .bin,
        or the documents are not made of them.
        """
        count, size = len(self.lengths), self.size
        end = 0  # the byte after the sequences examined so far
        for first in range(0, count, BLOCK):
            sizes = self.lengths[first : first + BLOCK].astype(np.int64) * self.dtype.itemsize
            ends = end + np.cumsum(sizes)
            begins = self.pointers[first : first + BLOCK]
            bad = np.flatnonzero((sizes < 0) | (begins != ends - sizes) | (ends > size))
            if len(bad):
                i = int(bad[0])
                raise FileError(
                    f"{self.path}: sequence {first + i} has {self.lengths[first + i]:,} tokens "
                    f"from byte {begins[i]:,} on, and the one before ends at byte "
                    f"{ends[i] - sizes[i]:,} of the {size:,} of {self.tokens}: {MISMATCH}"
                )
            end = int(ends[-1])
        if end != size:
            raise FileError(
                f"{self.path}: sequence {count - 1}, the last one, ends at byte {end:,}, and "
                f"{self.tokens} has {size:,}: {MISMATCH}"
            )
        last = 0
        for first in range(0, len(self.bounds), BLOCK):
            bounds = np.array(self.bounds[first : first + BLOCK])
            bad = np.flatnonzero((np.diff(bounds, prepend=last) < 0) | (bounds > count))
            if len(bad):
                raise FileError(
                    f"{self.path}: document {first + bad[0]} begins with sequence "
                    f"{bounds[bad[0]]:,}, and must with one of the {count:,} from the one before on"
                )
            last = int(bounds[-1])
            begins = self.pointers[np.minimum(bounds, count - 1)]
            places = np.where(bounds < count, begins, size) // self.dtype.itemsize
            yield places[1:] if first == 0 else places


def index_path(tokens: str) -> str:
    """The path of the index of the Megatron file whose .bin is `tokens`."""
    return tokens.removesuffix(".bin") + ".idx"


def read_dtype(tokens: str) -> np.dtype:
    """The little-endian type of the ids of a Megatron file, by its index. Raises FileError for an
    index of another format, and for ids that are no integers."""
    return _read_header(index_path(tokens))[0]


def _read_header(path: str) -> tuple[np.dtype, int, int]:
    """The type of the ids, the number of sequences, and that of the bounds of documents."""
    with open_input(path, ahead=0) as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise FileError(
            f"{path}: not the index of a Megatron token file: it begins with {header[:9]!r}, and "
            f"must with {MAGIC!r} and {HEADER.size - len(MAGIC)} bytes more"
        )
    _, version, code, sequences, bounds = HEADER.unpack(header)
    if version != 1 or code not in DTYPES:
        raise FileError(
            f"{path}: an index of version {version} for ids of type {code}, and is read with "
            f"version 1 and {', '.join(f'{key} ({name})' for key, name in DTYPES.items())}"
        )
    return np.dtype(DTYPES[code]).newbyteorder("<"), sequences, bounds


def read_index(tokens: File, content: pathlib.Path) -> MegatronIndex:
    """The index of a Megatron file whose .bin is `tokens`; `content` is the index, or a local copy
    of it. Raises FileError as `read_dtype`, and for arrays that do not fill the file."""
    path = index_path(tokens.path)
    dtype, sequences, bounds = _read_header(path)
    size, needed = os.path.getsize(content), HEADER.size + 12 * sequences + 8 * bounds
    what = f"{path}: {size:,} bytes for {sequences:,} sequences and {bounds:,} bounds of documents"
    if sequences and size == needed + sequences:
        raise FileError(f"{what}, with a mode for each sequence: write it without images")
    if size != needed or not sequences or not bounds:
        raise FileError(f"{what}, which take {needed:,}: it is cut short or damaged")
    lengths = np.memmap(content, "<i4", "r", HEADER.size, (sequences,))
    pointers = np.memmap(content, "<i8", "r", HEADER.size + 4 * sequences, (sequences,))
    starts = np.memmap(content, "<i8", "r", HEADER.size + 12 * sequences, (bounds,))
    if starts[0] != 0 or starts[-1] != sequences:
        raise FileError(
            f"{path}: its documents go from sequence {starts[0]:,} to {starts[-1]:,}, and must "
            f"from 0 to {sequences:,}: it is damaged"
        )
    return MegatronIndex(path, tokens.path, tokens.size, dtype, lengths, pointers, starts)
