"""Writes folders of safetensors: one file, or several with an index. A tensor's numbers are written
some rows at a time, so a file may be larger than the memory.

A file is the length of its header (8 bytes, little endian), the header (JSON, padded with spaces to
a multiple of 8 bytes) and the numbers. Tensors are in the order of their types and then of their
names, as the library safetensors writes them.
"""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jaxtrain.hf.safetensors_folder import DTYPES, INDEX, SINGLE

ORDER = ("F32", "BF16", "F16")  # of types in a file


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """A tensor's name, its type such as "BF16", and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


# Yields a tensor's numbers, some rows at a time, in the tensor's type.
Rows = Callable[[TensorEntry], Iterable[np.ndarray]]


def write_tensors(
    folder: pathlib.Path, entries: Sequence[TensorEntry], rows: Rows, largest: int
) -> None:
    """Writes tensors into files of at most `largest` bytes of numbers, or of one tensor, and their
    index where there are several. Everything is on the disk when this returns."""
    groups: list[list[TensorEntry]] = [[]]  # of each file, in the given order
    filled = 0
    for entry in entries:
        if groups[-1] and filled + entry.nbytes > largest:
            groups.append([])
            filled = 0
        groups[-1].append(entry)
        filled += entry.nbytes
    if len(groups) == 1:
        _write_file(folder / SINGLE, entries, rows)
        return
    files = {
        f"model-{n:05}-of-{len(groups):05}.safetensors": group for n, group in enumerate(groups, 1)
    }
    for file, group in files.items():
        _write_file(folder / file, group, rows)
    index = {
        "metadata": {"total_size": sum(entry.nbytes for entry in entries)},
        "weight_map": {entry.name: file for file, group in files.items() for entry in group},
    }
    write_synced(folder / INDEX, json.dumps(index, indent=2, sort_keys=True).encode() + b"\n")


def _write_file(path: pathlib.Path, entries: Sequence[TensorEntry], rows: Rows) -> None:
    ordered = sorted(entries, key=lambda entry: (ORDER.index(entry.dtype), entry.name))
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in ordered:
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": [offset, offset := offset + entry.nbytes],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in ordered:
            written = 0
            for block in rows(entry):
                # Arrays that are not contiguous, such as transposed ones, are put in order.
                numbers = np.ascontiguousarray(block, DTYPES[entry.dtype])
                file.write(numbers.reshape(-1).view(np.uint8).data)
                written += numbers.nbytes
            if written != entry.nbytes:
                raise ValueError(f"{entry.name} has {written} bytes, not {entry.nbytes}")
        _sync(file)


def write_synced(path: pathlib.Path, content: bytes) -> None:
    """Writes a file, which is on the disk when this returns."""
    with path.open("wb") as file:
        file.write(content)
        _sync(file)


def sync_folder(path: pathlib.Path) -> None:
    """Returns when the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync(file) -> None:
    file.flush()
    os.fsync(file.fileno())
