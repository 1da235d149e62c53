"""Extents of large files: bytes of a JSONL file from line to line, or row groups of a Parquet file.

An extent is a `File` whose `first` and `last` say what of it is read. Other formats, and compressed
files, are read from their beginning, so they have one extent.
"""

import functools
import io
import itertools
from collections.abc import Callable, Iterator

from jaxtrain.config.sources import File
from jaxtrain.data.reading.compressed import BLOCK, Reader, is_compressed, open_input

LINE = 1 << 14  # bytes read at a time to find the end of a line


def extents(file: File, size: int) -> list[tuple[File, int]]:
    """The extents of a file, each of about `size` bytes, with their bytes; the file itself where it
    is not larger, or cannot be divided."""
    divide = DIVIDERS.get(file.format)
    if file.size <= size or divide is None or is_compressed(file.path):
        return [(file, file.size)]
    return list(divide(file, size))


def _lines(file: File, size: int) -> Iterator[tuple[File, int]]:
    """Extents that begin with the first line at or behind each multiple of `size`."""
    first = 0
    with io.BufferedReader(open_input(file.path, ahead=0), LINE) as stream:  # type: ignore[type-var]
        while first < file.size:
            stream.seek((first // size + 1) * size - 1)
            while (line := stream.readline(BLOCK)) and not line.endswith(b"\n"):
                pass
            last = min(stream.tell(), file.size)
            yield file._replace(first=first, last=last), last - first
            first = last


def lines_before(file: File) -> int:
    """The number of lines of a JSONL file before an extent of it."""
    blocks = itertools.pairwise([*range(0, file.first, BLOCK), file.first])
    return sum(_line_ends(file.path, *block) for block in blocks)


@functools.cache
def _line_ends(path: str, first: int, last: int) -> int:
    """The number of line ends in bytes [first, last) of a file. The cache lets the extents of a
    file count its lines once together."""
    with Reader(path, first, last) as stream:
        return stream.read().count(b"\n")


def _row_groups(file: File, size: int) -> Iterator[tuple[File, int]]:
    """Extents of consecutive row groups. A file whose footer cannot be read has one extent, and its
    reader says what is wrong."""
    import pyarrow.parquet

    try:
        with open_input(file.path, ahead=0) as stream:
            metadata = pyarrow.parquet.read_metadata(stream)
        groups = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
    except (pyarrow.ArrowException, OSError):
        groups = []
    scale = file.size / max(1, sum(groups))  # bytes of the file for a decoded byte
    first, taken = 0, 0.0
    for group, decoded in enumerate(groups):
        taken += decoded * scale
        if taken >= size or group == len(groups) - 1:
            yield file._replace(first=first, last=group + 1), round(taken)
            first, taken = group + 1, 0.0
    if not groups:
        yield file, file.size


DIVIDERS: dict[str, Callable[[File, int], Iterator[tuple[File, int]]]] = {
    "jsonl": _lines,
    "parquet": _row_groups,
}
