"""Which part of a stored array lies where on the devices: the geometry of a checkpoint, both ways.

A checkpoint must not know the mesh, the stages or the units that wrote it. So every parameter is
one stored array with its layers in order and nothing padded, and this file says, for the shard that
a device holds of an array in memory, which region of which stored array it is. Saving copies one
way along these pairs, restoring the other. No collective is needed for either.

      in memory (stages 2, 2 units each, 7 layers)                          stored
      params/layers/0/w  [2, 2, 8, 8]   stage 0: 0 1   stage 1: 2 3   ⎫   params/layers/w  [7, 8, 8]
      params/layers/1/w  [2, 2, 8, 8]   stage 0: 4 5   stage 1: 6 –   ⎭
      params/embed/w     [512, 8]       padded in memory                  params/embed/w   [500, 8]

Nothing here touches a file or a device: see storage.py for the copying.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jaxtrain.schedule.placement import Placement

LAYERS = "layers"

# (start, stop) in each dimension.
Bounds = tuple[tuple[int, int], ...]

# A bigger array is stored in pieces of at most this many bytes, because reading any part of a piece
# costs reading all of it.
PIECE_BYTES = 32 * 2**20


@dataclasses.dataclass(frozen=True)
class Part:
    """One leaf in memory: the whole of a stored array, or the layers of one local unit.

    leaf: its place among the leaves of the flattened state
    unit: None for a leaf outside the layers
    lead: the number of dimensions before the layers, which are stored as they are: independent
        replicas
    """

    leaf: int
    unit: int | None
    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    lead: int = 0


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """One array of a checkpoint: its name, its stored shape and dtype, and the leaves in memory
    that hold it."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    parts: tuple[Part, ...]


@dataclasses.dataclass(frozen=True)
class Region:
    """Two indices of the same numbers: `shard[local]` and `stored_array[stored]`. They select
    arrays of the same shape."""

    local: tuple
    stored: tuple


def stored_arrays(state: Any, stored_shapes: Any, placement: Placement) -> list[StoredArray]:
    """The arrays that a checkpoint of `state` consists of, in the order of the state's leaves.

    Args:
      state: a pytree of jax.Array or of jax.ShapeDtypeStruct with shardings. Under a key "layers"
        the next key is the local unit, and leaves are [stages, rows(unit), *layer shape].
      stored_shapes: the same tree with the true shape of each leaf, as a tuple or as anything with
        a `shape`: of one layer under "layers", without padding elsewhere. What has a `lead` too has
        dimensions of these sizes in front.
      placement: which layer is in which row.

    Raises:
      ValueError: a leaf without sharding, or whose shape is not what placement and stored shape
        make it.
    """
    tree: Any
    leaves, tree = jax.tree_util.tree_flatten_with_path(state)
    arrays: dict[str, StoredArray] = {}
    for number, ((path, leaf), shape) in enumerate(
        zip(leaves, tree.flatten_up_to(stored_shapes), strict=True)
    ):
        array = _stored_array(number, path, leaf, shape, placement)
        if array.name in arrays:
            before = arrays[array.name]
            if (before.shape, before.dtype) != (array.shape, array.dtype):
                raise ValueError(
                    f"{array.name}: units differ, {before.dtype}{list(before.shape)} and "
                    f"{array.dtype}{list(array.shape)}"
                )
            array = dataclasses.replace(before, parts=(*before.parts, *array.parts))
        arrays[array.name] = array
    for array in arrays.values():
        if array.parts[0].unit is not None and len(array.parts) != placement.units_per_stage:
            raise ValueError(
                f"{array.name}: {len(array.parts)} units are not the "
                f"{placement.units_per_stage} of {placement.describe()}"
            )
    return list(arrays.values())


def _stored_array(
    number: int, path: tuple, leaf: Any, shape: Any, placement: Placement
) -> StoredArray:
    """The array that holds one leaf, with that leaf alone as its part. Arguments and errors as of
    `stored_arrays`."""
    name, unit = _stored_name(path)
    lead, shape = tuple(getattr(shape, "lead", ())), tuple(getattr(shape, "shape", shape))
    if getattr(leaf, "sharding", None) is None:
        raise ValueError(
            f"{name}: only arrays with a sharding can be saved or restored, not {leaf!r:.80}"
        )
    if leaf.shape[: len(lead)] != lead:
        raise ValueError(f"{name}: {list(leaf.shape)} does not begin with {list(lead)}")
    _check(name, leaf.shape[len(lead) :], shape, placement, unit)
    layers = () if unit is None else (placement.layers,)
    part = Part(number, unit, tuple(leaf.shape), leaf.sharding, len(lead))
    return StoredArray(name, (*lead, *layers, *shape), np.dtype(leaf.dtype), (part,))


def _stored_name(path: tuple) -> tuple[str, int | None]:
    """The stored name of a leaf's path, and its local unit if the path goes through "layers"."""
    keys = [jax.tree_util.keystr((key,), simple=True) for key in path]
    if LAYERS not in keys[:-1]:
        return "/".join(keys), None
    at = keys.index(LAYERS) + 1
    return "/".join(keys[:at] + keys[at + 1 :]), int(keys[at])


def _check(
    name: str,
    shape: tuple[int, ...],
    stored: tuple[int, ...],
    placement: Placement,
    unit: int | None,
) -> None:
    """Raises ValueError unless `shape` holds `stored` as the placement says."""
    if unit is not None:
        if unit >= placement.units_per_stage or shape[:2] != (
            placement.stages,
            placement.stack_size(unit),
        ):
            raise ValueError(f"{name}: {list(shape)} is not unit {unit} of {placement.describe()}")
        shape = shape[2:]
    if len(shape) != len(stored) or any(size > n for n, size in zip(shape, stored)):
        raise ValueError(f"{name}: an array of {list(shape)} cannot hold the stored {list(stored)}")


def regions(
    part: Part, bounds: Bounds, stored: tuple[int, ...], placement: Placement
) -> Iterator[Region]:
    """The regions of a shard and of the stored array that hold the same numbers. What none covers
    is padding or an unused row, and zero.

    Args:
      part: a leaf in memory.
      bounds: the block of the leaf that is the shard.
      stored: the stored array's shape.
    """
    lead, bounds, stored = bounds[: part.lead], bounds[part.lead :], stored[part.lead :]
    runs = [Region((), ())]
    if part.unit is not None:
        runs = list(_layer_runs(part.unit, bounds[0], bounds[1], placement))
        bounds, stored = bounds[2:], stored[1:]
    clipped = [(start, min(stop, size)) for (start, stop), size in zip(bounds, stored, strict=True)]
    if any(start >= stop for start, stop in clipped):
        return
    for run in runs:
        # The Ellipsis makes the result a view, for scalars too.
        yield Region(
            (*_from_zero(lead), *run.local, *_from_zero(clipped), ...),
            (*_slices(lead), *run.stored, *_slices(clipped), ...),
        )


def _slices(bounds: Iterable[tuple[int, int]]) -> list[slice]:
    return [slice(start, stop) for start, stop in bounds]


def _from_zero(bounds: Iterable[tuple[int, int]]) -> list[slice]:
    return [slice(0, stop - start) for start, stop in bounds]


def _layer_runs(
    unit: int, stages: tuple[int, int], rows: tuple[int, int], placement: Placement
) -> Iterator[Region]:
    """The used rows in a block of [stages, rows], by stage, and the layers that they are; a stage's
    layers are consecutive."""
    for stage in range(*stages):
        first, stop = (
            placement.first_layer(unit, stage),
            min(rows[1], placement.layer_count(unit, stage)),
        )
        if rows[0] < stop:
            yield Region(
                (stage - stages[0], slice(0, stop - rows[0])),
                (slice(first + rows[0], first + stop),),
            )


def holders(part: Part) -> dict[Bounds, list[jax.Device]]:
    """The distinct shards of a leaf and the devices that hold each, on all processes and in the
    same order on each."""
    held: dict[Bounds, list[jax.Device]] = {}
    for device, index in part.sharding.devices_indices_map(part.shape).items():
        held.setdefault(
            tuple(i.indices(n)[:2] for i, n in zip(index, part.shape, strict=True)), []
        ).append(device)
    return {bounds: sorted(devices, key=lambda d: d.id) for bounds, devices in held.items()}


def writers(part: Part) -> dict[jax.Device, Bounds]:
    """The devices that write a leaf and the shard that each writes: every element once, however
    often it is replicated.

    Replicas take turns, leaf by leaf, so that parameters that all data shards hold are written by
    all.
    """
    return {devices[part.leaf % len(devices)]: bounds for bounds, devices in holders(part).items()}


def piece_shape(array: StoredArray, limit: int = PIECE_BYTES) -> tuple[int, ...]:
    """The shape of the pieces in which the array is stored; the same on every process.

    A piece must be written by one device, so it never crosses the border of a shard: a layer is a
    piece of its own (a replica's, where each has its own), and where a dimension is sharded the
    piece divides the shard. Pieces over `limit` bytes are cut in two, along whole dimensions first,
    or into as few as divide a shard.
    """
    lead, in_layers = array.parts[0].lead, array.parts[0].unit is not None
    skip = lead + 2 * in_layers
    full = array.parts[0].shape[skip:]
    stored = array.shape[lead + in_layers :]
    shards = [part.sharding.shard_shape(part.shape)[skip:] for part in array.parts]
    whole = [all(shard[dim] == size for shard in shards) for dim, size in enumerate(full)]
    piece = [
        size if whole[dim] else math.gcd(*(shard[dim] for shard in shards))
        for dim, size in enumerate(stored)
    ]
    while math.prod(piece) * array.dtype.itemsize > limit and max(piece, default=1) > 1:
        # The longest whole dimension, or the longest; of equal ones the first.
        dim = max(
            (dim for dim, size in enumerate(piece) if size > 1),
            key=lambda dim: (whole[dim], piece[dim]),
        )
        parts = (
            2 if whole[dim] else next(n for n in range(2, piece[dim] + 1) if piece[dim] % n == 0)
        )
        piece[dim] = -(-piece[dim] // parts)
    return (*[1] * (lead + in_layers), *piece)
