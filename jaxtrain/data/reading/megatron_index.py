"""The index (.idx) beside Megatron's token files (.bin): the type of their ids, and where their
documents end.

    bytes 0 to 8     "MMIDIDX" and two zeros
    9 to 16          the version, 1
    17               the type of the ids, a key of DTYPES
    18 to 33         n and d, the numbers of sequences and of documents' bounds
    then             int32 [n]: the sequences' lengths in tokens; int64 [n]: the byte of the .bin
                     where each begins; int64 [d]: the sequence that each document begins with, then
                     n; with images, which are not read, also int8 [n]: the sequences' modes

Source: _IndexWriter in Megatron-LM (megatron.core.datasets.indexed_dataset).
"""

import os
import struct
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from jaxtrain.data.reading.bad_records import BadFile
from jaxtrain.data.reading.compressed import open_input

MAGIC, HEADER = b"MMIDIDX\0\0", struct.Struct("<9sQBQQ")
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
BLOCK = 1 << 20  # entries read at a time


def index_path(tokens: str) -> str:
    """The path of the index beside a .bin."""
    return tokens.removesuffix(".bin") + ".idx"


def read_header(stream: BinaryIO, path: str) -> tuple[np.dtype, int, int]:
    """What the index that lies at a path says: the little-endian type of the ids, and the numbers
    of sequences and of documents' bounds. Raises BadFile for another file, for ids that are no
    integers, and for arrays that do not fill the file."""
    head = stream.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise BadFile(
            f"{path}: not the index of a Megatron token file: it begins with {head[:9]!r}, and "
            f"must with {MAGIC!r} and {HEADER.size - len(MAGIC)} bytes more"
        )
    _, version, code, sequences, bounds = HEADER.unpack(head)
    if version != 1 or code not in DTYPES:
        raise BadFile(
            f"{path}: an index of version {version} for ids of type {code}, and is read with "
            f"version 1 and {', '.join(f'{key} ({name})' for key, name in DTYPES.items())}"
        )
    size, needed = stream.seek(0, os.SEEK_END), HEADER.size + 12 * sequences + 8 * bounds
    if size != needed or not sequences or not bounds:
        raise BadFile(
            f"{path}: {size:,} bytes for {sequences:,} sequences and {bounds:,} bounds of "
            f"documents, which take {needed:,}: it is cut short, damaged, or has images"
        )
    return np.dtype(DTYPES[code]).newbyteorder("<"), sequences, bounds


def document_ends(tokens: str) -> Iterator[np.ndarray]:
    """The places after the last tokens of the documents of a Megatron file, whose .bin is `tokens`,
    ascending, in arrays of int64. A document without tokens is none.

    Raises BadFile if the sequences are not one after the other, or end elsewhere than the .bin,
    and if the documents are not made of them.
    """
    path = index_path(tokens)
    with open_input(tokens, ahead=0) as stream:
        size = stream.seek(0, os.SEEK_END)
    with open_input(path, ahead=0) as stream:
        dtype, count, bounds_count = read_header(stream, path)

        def read(start: int, kind: str, first: int, most: int) -> np.ndarray:
            """Up to BLOCK of the entries [first, most) of the array that begins at byte `start`."""
            width = np.dtype(kind).itemsize
            stream.seek(start + first * width)
            content = stream.read(min(BLOCK, most - first) * width)
            if len(content) < min(BLOCK, most - first) * width:
                raise BadFile(f"{path}: the file was cut short while it was read")
            return np.frombuffer(content, kind).astype(np.int64)

        lengths_at, pointers_at = HEADER.size, HEADER.size + 4 * count
        end = 0  # the byte after the sequences examined so far
        for first in range(0, count, BLOCK):
            lengths = read(lengths_at, "<i4", first, count)
            begins = read(pointers_at, "<i8", first, count)
            ends = end + np.cumsum(lengths * dtype.itemsize)
            expected = np.append(end, ends[:-1])
            is_bad = (lengths < 0) | (begins != expected) | (ends > size)
            is_bad[-1] |= first + len(ends) == count and ends[-1] != size
            if is_bad.any():
                i = int(np.argmax(is_bad))
                raise BadFile(
                    f"{path}: sequence {first + i} has {lengths[i]:,} tokens from byte "
                    f"{begins[i]:,} on, and the one before ends at byte {expected[i]:,} of the "
                    f"{size:,} of {tokens}: one of the two files is damaged or cut short, or the "
                    "index of another one"
                )
            end = int(ends[-1])
        last = place = 0  # of the bounds examined so far, the last one and its byte
        for first in range(0, bounds_count, BLOCK):
            bounds = read(pointers_at + 8 * count, "<i8", first, bounds_count)
            is_bad = (bounds < np.append(last, bounds[:-1])) | (bounds > count)
            is_bad[0] |= first == 0 and bounds[0] != 0
            is_bad[-1] |= first + len(bounds) == bounds_count and bounds[-1] != count
            if is_bad.any():
                i = int(np.argmax(is_bad))
                raise BadFile(
                    f"{path}: document {first + i} begins with sequence {bounds[i]:,}, and must "
                    f"follow the one before: documents go from sequence 0 to {count:,}, the end"
                )
            last = int(bounds[-1])
            places = np.full(len(bounds), size)
            for block in range(int(bounds[0]), min(last + 1, count), BLOCK):
                begins = read(pointers_at, "<i8", block, count)
                inside = slice(*np.searchsorted(bounds, [block, block + len(begins)]))
                places[inside] = begins[bounds[inside] - block]
            yield places[places != np.append(place, places[:-1])] // dtype.itemsize
            place = int(places[-1])
