"""Stored arrays read as numpy, piece by piece, by this process: to verify a step, to describe its
arrays, or to compare those of two steps. No jax, and no device.

Begin with `open_arrays` and `read`; the others say what is done with the numbers.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import tensorstore as ts
from etils import epath

from jaxtrain.checkpoint import manifest, retention, steps
from jaxtrain.checkpoint.stores import kvstore, no_damage
from jaxtrain.config import StoredConfig

READ_BYTES = 2**27  # the most bytes of pieces that are being read at a time

PieceIndex = tuple[slice, ...]  # of a piece in its array


@dataclasses.dataclass(frozen=True)
class Statistics:
    """The least and the greatest finite number of an array, their Euclidean norm, and the count of
    numbers that are not finite."""

    least: float
    greatest: float
    norm: float
    not_finite: int


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference of two arrays of one shape: the largest |a − b|, the largest
    |a − b| / max(|a|, |b|), and the count of numbers that differ.

    A number that is finite in only one of the arrays differs by infinity; NaN in both does not
    differ.
    """

    absolute: float
    relative: float
    count: int


@dataclasses.dataclass(frozen=True, eq=False)
class OpenedStep:
    """A step whose arrays are read: its folder, meta, config, and arrays by name."""

    folder: epath.Path
    meta: steps.Meta
    config: StoredConfig
    arrays: Mapping[str, ts.TensorStore]


def open_step(folder: epath.Path) -> OpenedStep:
    """A step's meta, config and arrays. Raises CheckpointError for one that cannot be read."""
    meta = steps.look_at(folder)
    if isinstance(meta, steps.UnrecognizedEntry):
        raise steps.CheckpointError(f"{folder} is no complete checkpoint: {meta.why}")
    try:
        arrays = open_arrays(folder, manifest.read_database(folder / manifest.STATE))
        return OpenedStep(folder, meta, meta.stored_config(), arrays)
    except manifest.DatabaseError as error:
        raise steps.CheckpointError(f"{folder}: its state {error}") from None


def open_arrays(folder: epath.Path, database: manifest.Database) -> dict[str, ts.TensorStore]:
    """Opens the arrays of a step, by name; their numbers are not read yet.

    Raises DatabaseError for a damaged description, CheckpointError for one that cannot be read.
    """
    # Without a cache: every piece is read once, and a cache would keep a model in memory.
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    opening = {}
    for value in database.values:
        key, _, description = value.key.rpartition("/")
        if description == "zarr.json":
            store = {"driver": "ocdbt", "base": kvstore(folder / manifest.STATE), "path": f"{key}/"}
            # By default TensorStore fills a missing piece with zeros; here that is damage.
            spec = {"driver": "zarr3", "kvstore": store, "fill_missing_data_reads": False}
            opening[key.replace(".", "/")] = ts.open(spec, open=True, context=context)
    try:
        return {name: opening[name].result() for name in sorted(opening)}
    except ValueError as error:
        if why := no_damage(error):
            raise steps.CheckpointError(f"{folder}: an array {why}") from None
        raise manifest.DatabaseError(f"is damaged: {' '.join(str(error).split())[:200]}") from None


def piece_shape(array: ts.TensorStore) -> tuple[int, ...]:
    """The shape of the pieces in which an array is stored."""
    return tuple(max(size or 1, 1) for size in array.chunk_layout.read_chunk.shape or ())


def pieces(array: ts.TensorStore) -> Iterator[PieceIndex]:
    """The indices of the pieces in which an array is stored."""
    size = piece_shape(array)
    ranges = [range(0, n, step) for n, step in zip(array.shape, size, strict=True)]
    for corner in itertools.product(*ranges):
        yield tuple(
            slice(at, min(at + step, n))
            for at, step, n in zip(corner, size, array.shape, strict=True)
        )


def read(array: ts.TensorStore) -> Iterator[tuple[PieceIndex, np.ndarray | None]]:
    """Yields (index, numbers) of each piece of an array, reading several at a time; None instead of
    the numbers of a piece that is damaged or missing. Raises CheckpointError for one that cannot be
    read for another reason."""
    bytes_each = math.prod(piece_shape(array)) * array.dtype.numpy_dtype.itemsize
    most = max(READ_BYTES // max(bytes_each, 1), 1)
    indices = pieces(array)
    # So many pieces are read ahead that the disk or the store is busy, but no more bytes than
    # READ_BYTES are in memory.
    under_way = collections.deque(
        (index, array[index].read()) for index in itertools.islice(indices, most)
    )
    while under_way:
        index, reading = under_way.popleft()
        try:
            numbers = reading.result()
        except ValueError as error:
            if why := no_damage(error):
                raise steps.CheckpointError(f"an array {why}") from None
            numbers = None
        yield index, numbers
        under_way += ((index, array[index].read()) for index in itertools.islice(indices, 1))


def nbytes(array: ts.TensorStore) -> int:
    """Bytes of an array's numbers."""
    return math.prod(array.shape) * array.dtype.numpy_dtype.itemsize


def verify(folder: epath.Path, progress: Callable[[int, int], object]) -> list[str] | None:
    """Reads every byte of a step. Returns a text for each damage, [] for none; None if a run has
    deleted the step meanwhile. progress: as in `damages`."""
    # Asked first: a run deletes a step's manifest before its other files, so a step that had one
    # and lacks something now may be under deletion, which is no damage.
    had_manifest, meta = (folder / manifest.FILE).exists(), steps.look_at(folder)
    if isinstance(meta, steps.UnrecognizedEntry):
        damage = [meta.why]
    else:
        damage = list(damages(folder, progress))
    return None if damage and retention.was_deleted(folder, had_manifest) else damage


def in_units(size: int) -> str:
    """A text with a number of bytes in the largest unit that fits: "1.5 GiB"."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size} B"


def damages(folder: epath.Path, progress: Callable[[int, int], object]) -> Iterator[str]:
    """Reads every byte of a step, and yields a text for each damage, which names a path, or an
    array and a piece of it.

    progress: called with (the bytes of arrays read so far, the bytes of all arrays)
    """
    files: manifest.Files = {}
    try:
        files = manifest.read(folder)
    except manifest.ManifestError as error:
        yield str(error)
    yield from manifest.damages(folder, files)
    try:
        database = manifest.read_database(folder / manifest.STATE)
        arrays = open_arrays(folder, database)
    except manifest.DatabaseError as error:
        yield f"{manifest.STATE} {error}"
        return
    yield from manifest.damages_between_pieces(folder, files, database)
    total, done = sum(map(nbytes, arrays.values())), 0
    for name, array in arrays.items():
        for index, numbers in read(array):
            if numbers is None:
                yield f"{manifest.STATE}: {name}{_in_brackets(index)} is damaged"
            else:
                done += numbers.nbytes
            progress(done, total)


def _in_brackets(index: PieceIndex) -> str:
    return f"[{', '.join(f'{part.start}:{part.stop}' for part in index)}]" if index else ""


def statistics(array: ts.TensorStore) -> Statistics:
    """The statistics of an array, which is read. Raises DatabaseError if it is damaged."""
    least, greatest, squares, not_finite = math.inf, -math.inf, 0.0, 0
    for _, numbers in _undamaged(array):
        numbers = numbers.astype(np.float64)
        finite = numbers[np.isfinite(numbers)]
        not_finite += numbers.size - finite.size
        if finite.size:
            least, greatest = min(least, float(finite.min())), max(greatest, float(finite.max()))
            squares += float(np.square(finite).sum())
    return Statistics(least, greatest, math.sqrt(squares), not_finite)


def difference(a: ts.TensorStore, b: ts.TensorStore) -> Difference:
    """The difference of two arrays of one shape, which are read; it is computed in float64.

    Raises DatabaseError if one of them is damaged, or if `b` cannot be read; CheckpointError if `a`
    cannot be read.
    """
    absolute, relative, count = 0.0, 0.0, 0
    for index, ours in _undamaged(a):
        try:
            theirs = b[index].read().result()
        except ValueError as error:
            raise manifest.DatabaseError(no_damage(error) or "is damaged") from None
        x, y = ours.astype(np.float64), theirs.astype(np.float64)
        differs = (x != y) & ~(np.isnan(x) & np.isnan(y))
        if differs.any():
            x, y = x[differs], y[differs]
            count += x.size
            # a NaN in one array alone gives NaN, which counts as infinite below
            with np.errstate(invalid="ignore", over="ignore"):
                distance = np.abs(x - y)
                share = distance / np.maximum(np.abs(x), np.abs(y))
            absolute = max(absolute, float(np.nan_to_num(distance, nan=np.inf).max()))
            relative = max(relative, float(np.nan_to_num(share, nan=np.inf).max()))
    return Difference(absolute, relative, count)


def _undamaged(array: ts.TensorStore) -> Iterator[tuple[PieceIndex, np.ndarray]]:
    """Yields (index, numbers) like `read`, but raises DatabaseError for a damaged piece."""
    for index, numbers in read(array):
        if numbers is None:
            raise manifest.DatabaseError(f"is damaged: {_in_brackets(index)}")
        yield index, numbers
