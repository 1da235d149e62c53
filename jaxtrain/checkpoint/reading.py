"""Arrays of a stored step as numpy, piece by piece, on this host alone: for looking at checkpoints.
No jax, and no device."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import tensorstore as ts
from etils import epath

from jaxtrain.checkpoint import database, keeping, manifest, steps
from jaxtrain.checkpoint.database import STATE, DatabaseError, Value
from jaxtrain.checkpoint.manifest import ManifestError
from jaxtrain.checkpoint.steps import CheckpointError
from jaxtrain.checkpoint.stores import kvstore, no_damage, size_of

READ_BYTES = 2**27  # of pieces that are being read at a time

Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class StoredStep:
    """A step whose database can be read: its folder, the database's values, and its arrays by name,
    which are not read."""

    folder: epath.Path
    values: Sequence[Value]
    arrays: Mapping[str, ts.TensorStore]


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Of the finite numbers of an array: the least, the greatest, and the Euclidean norm; and how
    many others there are."""

    least: float
    greatest: float
    norm: float
    not_finite: int


@dataclasses.dataclass(frozen=True)
class Difference:
    """Between two arrays of one shape: the largest |a − b|, the largest |a − b| / max(|a|, |b|),
    and how many numbers differ in bits.

    A number that is finite in one alone differs by infinity.
    """

    absolute: float
    relative: float
    count: int


def open_step(folder: epath.Path) -> StoredStep:
    """Opens a step for reading. DatabaseError where its state cannot be read."""
    values = database.read(folder / STATE)
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    opening = {}
    for value in values:
        key, _, description = value.key.rpartition("/")
        driver = {"zarr.json": "zarr3", ".zarray": "zarr"}.get(description)
        if driver:
            store = {"driver": "ocdbt", "base": kvstore(folder / STATE), "path": f"{key}/"}
            spec = {"driver": driver, "kvstore": store, "fill_missing_data_reads": False}
            opening[key.replace(".", "/")] = ts.open(spec, open=True, context=context)
    try:
        return StoredStep(
            folder, values, {name: opening[name].result() for name in sorted(opening)}
        )
    except ValueError as error:
        if why := no_damage(error):
            raise CheckpointError(f"{folder}: an array {why}") from None
        raise DatabaseError(f"is damaged: {' '.join(str(error).split())[:200]}") from None


def pieces(array: ts.TensorStore) -> Iterator[Index]:
    """The indices of the pieces in which an array is stored."""
    size = _piece_shape(array)
    ranges = [range(0, n, step) for n, step in zip(array.shape, size, strict=True)]
    for corner in itertools.product(*ranges):
        yield tuple(
            slice(at, min(at + step, n))
            for at, step, n in zip(corner, size, array.shape, strict=True)
        )


def _piece_shape(array: ts.TensorStore) -> tuple[int, ...]:
    return tuple(max(size or 1, 1) for size in array.chunk_layout.read_chunk.shape or ())


def read(array: ts.TensorStore) -> Iterator[tuple[Index, np.ndarray | None]]:
    """All pieces of an array with their indices, several read at a time; None for one that is
    damaged or missing."""
    under_way: collections.deque = collections.deque()
    bytes_each = math.prod(_piece_shape(array)) * array.dtype.numpy_dtype.itemsize
    indices = pieces(array)
    while True:
        while (
            len(under_way) < max(READ_BYTES // max(bytes_each, 1), 1)
            and (index := next(indices, None)) is not None
        ):
            under_way.append((index, array[index].read()))
        if not under_way:
            return
        index, reading = under_way.popleft()
        try:
            yield index, reading.result()
        except ValueError as error:
            if why := no_damage(error):
                raise CheckpointError(f"an array {why}") from None
            yield index, None


def nbytes(array: ts.TensorStore) -> int:
    """The size of an array's numbers."""
    return math.prod(array.shape) * array.dtype.numpy_dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Verified:
    """A step of which every byte was read. damage: all that is wrong with it; checked: whether it
    was saved with checksums."""

    folder: epath.Path
    size: int
    damage: tuple[str, ...]
    checked: bool

    def lines(self) -> list[str]:
        """For people."""
        without = (
            ""
            if self.checked
            else "; it has no checksums, so damage inside of numbers is not known"
        )
        result = (
            f"{len(self.damage)} damaged"
            if self.damage
            else f"whole, {in_units(self.size)} read{without}"
        )
        return [*(f"{self.folder}: {why}" for why in self.damage), f"{self.folder.name}: {result}"]


def verify(folder: epath.Path, progress: Callable[[int, int], object]) -> Verified | None:
    """Reads every byte of a step; None where a run has deleted it meanwhile. progress: as of
    `damages`."""
    size, had_manifest, meta = (
        size_of(folder),
        (folder / manifest.FILE).exists(),
        steps.look_at(folder),
    )
    checked = isinstance(meta, steps.Stranger) or meta.version >= steps.MANIFEST_SINCE
    found = (
        (meta.why,)
        if isinstance(meta, steps.Stranger)
        else tuple(damages(folder, progress, checked))
    )
    if found and keeping.was_deleted(folder, had_manifest):
        return None
    return Verified(folder, size, found, checked)


def in_units(size: int) -> str:
    """A number of bytes for people."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size} B"


def damages(
    folder: epath.Path, progress: Callable[[int, int], object], checked: bool = True
) -> Iterator[str]:
    """All that is wrong with a step, each by its path or by its array and piece: every byte is
    read.

    progress: called with bytes of arrays that are read, and all of them; checked: whether it was
    saved with a manifest.
    """
    try:
        listed = manifest.read(folder)
        if checked and listed is None:
            yield f"it has no {manifest.FILE}"
    except ManifestError as error:
        yield str(error)
        listed = None
    if listed:
        yield from listed.damages(folder)
    try:
        step = open_step(folder)
    except DatabaseError as error:
        yield f"{STATE} {error}"
        return
    if listed:
        yield from listed.damages_beside(folder, step.values)
    total, done = sum(map(nbytes, step.arrays.values())), 0
    for name, array in step.arrays.items():
        for index, numbers in read(array):
            if numbers is None:
                yield f"{STATE}: {name}{_in_brackets(index)} is damaged"
            else:
                done += numbers.nbytes
            progress(done, total)


def _in_brackets(index: Index) -> str:
    return f"[{', '.join(f'{part.start}:{part.stop}' for part in index)}]" if index else ""


def statistics(array: ts.TensorStore) -> Statistics:
    """Reads an array. DatabaseError if it is damaged."""
    least, greatest, squares, others = math.inf, -math.inf, 0.0, 0
    for _, numbers in _whole(array):
        numbers = numbers.astype(np.float64)
        finite = numbers[np.isfinite(numbers)]
        others += numbers.size - finite.size
        if finite.size:
            least, greatest = min(least, float(finite.min())), max(greatest, float(finite.max()))
            squares += float(np.square(finite).sum())
    return Statistics(least, greatest, math.sqrt(squares), others)


def difference(a: ts.TensorStore, b: ts.TensorStore) -> Difference:
    """Reads two arrays of one shape. DatabaseError if one is damaged."""
    absolute, relative, count = 0.0, 0.0, 0
    for index, ours in _whole(a):
        try:
            theirs = b[index].read().result()
        except ValueError as error:
            raise DatabaseError(no_damage(error) or "is damaged") from None
        x, y = ours.astype(np.float64), theirs.astype(np.float64)
        differs = (x != y) & ~(np.isnan(x) & np.isnan(y))
        if differs.any():
            x, y = x[differs], y[differs]
            count += x.size
            with np.errstate(invalid="ignore", over="ignore"):
                distance = np.abs(x - y)
                share = distance / np.maximum(np.abs(x), np.abs(y))
            absolute = max(absolute, float(np.nan_to_num(distance, nan=np.inf).max()))
            relative = max(relative, float(np.nan_to_num(share, nan=np.inf).max()))
    return Difference(absolute, relative, count)


def _whole(array: ts.TensorStore) -> Iterator[tuple[Index, np.ndarray]]:
    for index, numbers in read(array):
        if numbers is None:
            raise DatabaseError(f"is damaged: {_in_brackets(index)}")
        yield index, numbers
