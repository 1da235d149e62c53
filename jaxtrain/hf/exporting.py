"""A checkpoint as a published model: a folder of safetensors and config.json.

    .NAME.unfinished/   has the files until all of them are on the disk
    NAME/               is its name then

A tensor is read and written some rows at a time, and their numbers a piece at a time.
"""

import contextlib
import fcntl
import itertools
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import tensorstore as ts

from jaxtrain.checkpoint import reading
from jaxtrain.checkpoint.steps import CheckpointError
from jaxtrain.checkpoint.stores import no_damage
from jaxtrain.hf.fields import HfError
from jaxtrain.hf.safetensors_folder import DTYPES
from jaxtrain.hf.safetensors_writer import TensorEntry, sync_folder, write_synced, write_tensors
from jaxtrain.hf.source_files import CONFIG
from jaxtrain.hf.tensor_rules import PublishedTensor, TensorRule

BLOCK_BYTES = 2**25  # of a tensor in memory
PIECE_BYTES = 2**25  # of a checkpoint's array, read at a time; pieces have at most that many


def export_folder(
    target: pathlib.Path,
    config: Mapping[str, Any],
    tensors: Sequence[PublishedTensor],
    arrays: Mapping[str, ts.TensorStore],
    dtypes: Mapping[str, str],
    largest: int,
    files: Mapping[str, bytes],
    progress: Callable[[int, int], object] = lambda done, total: None,
    log: Callable[[str], object] = lambda line: None,
) -> None:
    """Writes a published model's folder, which appears complete or not at all.

    config: its config.json; tensors: in order; arrays: the checkpoint's, without "params/";
    dtypes: tensor → its type, such as "BF16"; largest: bytes of a file;
    files: name → content of other files; progress: called with the MB that are written, and
    all; log: gets a line about a folder that an export left unfinished

    Raises HfError for a target that exists or cannot be written, and for numbers that are not
    finite or that the type does not have; CheckpointError for an array that cannot be read.
    """
    entries = [TensorEntry(each.name, dtypes[each.name], each.shape) for each in tensors]
    by_name = {tensor.name: tensor for tensor in tensors}
    total, done = sum(entry.nbytes for entry in entries), 0

    def rows(entry: TensorEntry) -> Iterator[np.ndarray]:
        nonlocal done
        for block in tensor_rows(by_name[entry.name], arrays, DTYPES[entry.dtype]):
            yield block
            done += block.nbytes
            progress(done // 10**6, total // 10**6)

    try:
        with _unfinished(target, log) as folder:
            write_tensors(folder, entries, rows, largest)
            for name, content in files.items():
                write_synced(folder / name, content)
            write_synced(folder / CONFIG, json.dumps(config, indent=2).encode() + b"\n")
            sync_folder(folder)
            folder.rename(target)
        sync_folder(target.parent)
    except OSError as error:
        raise HfError(f"{target} cannot be written ({error.strerror})") from None


@contextlib.contextmanager
def _unfinished(target: pathlib.Path, log: Callable[[str], object]) -> Iterator[pathlib.Path]:
    """A new folder beside the target, locked for this process; removed at the end unless it has got
    another name. What a process that was killed has left in it is removed.

    Raises HfError if the target exists, or another process writes it.
    """
    folder = target.with_name(f".{target.name}.unfinished")
    _check_absent(target)
    missing = [parent for parent in target.absolute().parents if not parent.exists()]
    if folder.is_symlink():
        folder.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HfError(f"{target} is being written by another process") from None
        _check_absent(target)  # by a process that had the lock until now
        if any(folder.iterdir()):
            log(f"{folder} was left by an export that did not finish: it is removed")
            for path in folder.iterdir():
                path.unlink()
        try:
            yield folder
        finally:
            # a name that is gone is the target's now
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # of a folder that is not empty
                for parent in missing:
                    parent.rmdir()
    finally:
        os.close(lock)


def _check_absent(target: pathlib.Path) -> None:
    """Raises HfError if the target exists."""
    if os.path.lexists(target):
        raise HfError(f"{target} exists already: name a folder that does not")


def tensor_rows(
    tensor: PublishedTensor, arrays: Mapping[str, ts.TensorStore], dtype: np.dtype
) -> Iterator[np.ndarray]:
    """Yields a tensor's numbers, some rows at a time, in BLOCK_BYTES or one row.

    Raises HfError for numbers that are not finite or that the type does not have; CheckpointError
    for an array that cannot be read.
    """
    count, *row = tensor.shape or (1,)
    most = max(BLOCK_BYTES // max(math.prod(row) * dtype.itemsize, 1), 1)
    for start in range(0, count, most):
        rows = range(start, min(start + most, count))
        block = np.empty((len(rows), *row), dtype)
        for rule in tensor.rules:
            array = arrays[rule.array]
            for window in _windows(rule, rows, array):
                numbers = _read(rule, window, array)
                largest = np.abs(numbers).max(initial=0)  # NaN if there is one
                if not np.isfinite(largest):
                    raise HfError(
                        f"{tensor.name} has numbers that are not finite: use the --step of another"
                    )
                if largest > ml_dtypes.finfo(dtype).max:
                    raise HfError(
                        f"{tensor.name} has {largest:g}, which {dtype} does not have: use "
                        "--dtype=bfloat16"
                    )
                rule.publish(numbers, window, block, rows)
        yield block.reshape(tensor.shape) if not tensor.shape else block


def _windows(rule: TensorRule, rows: range, array: ts.TensorStore) -> Iterator[tuple[range, ...]]:
    """The windows of an array that hold a rule's part of some rows of its tensor. Each has pieces
    of the array as they are stored, as many as PIECE_BYTES allow, and one at least."""
    window = rule.window(rows, array.shape)
    sizes = list(reading.piece_shape(array)[len(rule.index) :])
    itemsize = array.dtype.numpy_dtype.itemsize
    for dim in reversed(range(len(sizes))):
        sizes[dim] *= max(PIECE_BYTES // max(math.prod(sizes) * itemsize, 1), 1)
    spans = []
    for span, size in zip(window, sizes, strict=True):
        starts = range(span.start - span.start % size, span.stop, size)
        spans.append([range(max(at, span.start), min(at + size, span.stop)) for at in starts])
    yield from itertools.product(*spans)


def _read(rule: TensorRule, window: Sequence[range], array: ts.TensorStore) -> np.ndarray:
    """The numbers in a window of the rule's layer and expert. Raises CheckpointError if they cannot
    be read."""
    index: Any = (*rule.index, *(slice(span.start, span.stop) for span in window))
    try:
        return array[index].read().result()
    except ValueError as error:
        why = no_damage(error) or "is damaged"
        raise CheckpointError(f"the checkpoint's {rule.array} {why}") from None
