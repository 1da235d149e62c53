"""Which part of a stored array lies where on the devices: the geometry of a checkpoint, both ways.

A checkpoint must not know the mesh, the stages or the chunks that wrote it. So every parameter is one stored array with its
layers in order and nothing padded, and this file says, for the shard that a device holds of an array in memory, which region of
which stored array it is. Saving copies one way along these pairs, restoring the other. No collective is needed for either.

      in memory (stages 2, chunks 2, 7 layers)                            stored
      params/layers/0/w  [2, 2, 8, 8]   stage 0: 0 1   stage 1: 2 3   ⎫   params/layers/w  [7, 8, 8]
      params/layers/1/w  [2, 2, 8, 8]   stage 0: 4 5   stage 1: 6 –   ⎭
      params/embed/w     [512, 8]       padded in memory                  params/embed/w   [500, 8]

Nothing here touches a file or a device: see storage.py for the copying.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxtrain.schedule.placement import Placement

LAYERS = "layers"

# (start, stop) in each dimension.
Bounds = tuple[tuple[int, int], ...]

# A bigger array is split into chunks of at most this many bytes, because reading any part of a chunk costs reading all of it.
CHUNK_BYTES = 32 * 2**20


@dataclasses.dataclass(frozen=True)
class Part:
    """One leaf in memory: the whole of a stored array, or the layers of one chunk.

    `leaf` counts the leaves of the flattened state, `chunk` is None for a leaf outside the layers, `lead` is the number of dimensions
    before the layers, which are stored as they are: replicas that train apart.
    """

    leaf: int
    chunk: int | None
    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    lead: int = 0


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """One array of a checkpoint: its name, its stored shape and dtype, and the leaves in memory that hold it."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    parts: tuple[Part, ...]


def stored_arrays(state: Any, stored_shapes: Any, placement: Placement) -> list[StoredArray]:
    """The arrays that a checkpoint of `state` consists of, in the order of the state's leaves.

    Args:
      state: a pytree of jax.Array or of jax.ShapeDtypeStruct with shardings. Under a key "layers" the next key is the chunk, and
        leaves are [stages, rows(chunk), *layer shape].
      stored_shapes: the same tree with the true shape of each leaf, as a tuple or as anything with a `shape`: of one layer under
        "layers", without padding elsewhere. What has a `lead` too has dimensions of these sizes in front.
      placement: which layer is in which row.

    Raises:
      ValueError: a leaf without sharding, or whose shape is not what placement and stored shape make it.
    """
    tree: Any
    leaves, tree = jax.tree_util.tree_flatten_with_path(state)
    found: dict[str, StoredArray] = {}
    for i, ((path, leaf), shape) in enumerate(zip(leaves, tree.flatten_up_to(stored_shapes), strict=True)):
        name, chunk = _stored_name(path)
        lead, shape = tuple(getattr(shape, "lead", ())), tuple(getattr(shape, "shape", shape))
        if getattr(leaf, "sharding", None) is None:
            raise ValueError(f"{name}: only arrays with a sharding can be saved or restored, not {leaf!r:.80}")
        if leaf.shape[: len(lead)] != lead:
            raise ValueError(f"{name}: {list(leaf.shape)} does not begin with {list(lead)}")
        _check(name, leaf.shape[len(lead) :], shape, placement, chunk)
        part = Part(i, chunk, tuple(leaf.shape), leaf.sharding, len(lead))
        if chunk is not None:
            shape = (placement.layers, *shape)
        new = StoredArray(name, (*lead, *shape), np.dtype(leaf.dtype), (part,))
        old = found.setdefault(name, new)
        if old is not new:
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                raise ValueError(f"{name}: chunks differ, {old.dtype}{list(old.shape)} and {new.dtype}{list(new.shape)}")
            found[name] = dataclasses.replace(old, parts=(*old.parts, part))
    for array in found.values():
        if array.parts[0].chunk is not None and len(array.parts) != placement.units_per_stage:
            raise ValueError(f"{array.name}: {len(array.parts)} chunks are not the {placement.units_per_stage} of {placement.describe()}")
    return list(found.values())


def _stored_name(path: tuple) -> tuple[str, int | None]:
    """The stored name of a leaf's path, and its chunk if the path goes through "layers"."""
    keys = [jax.tree_util.keystr((k,), simple=True) for k in path]
    if LAYERS not in keys[:-1]:
        return "/".join(keys), None
    at = keys.index(LAYERS) + 1
    return "/".join(keys[:at] + keys[at + 1 :]), int(keys[at])


def _check(name: str, shape: tuple[int, ...], stored: tuple[int, ...], placement: Placement, chunk: int | None):
    """Raises ValueError unless `shape` holds `stored` as the placement says."""
    if chunk is not None:
        if chunk >= placement.units_per_stage or shape[:2] != (placement.stages, placement.stack_size(chunk)):
            raise ValueError(f"{name}: {list(shape)} is not chunk {chunk} of {placement.describe()}")
        shape = shape[2:]
    if len(shape) != len(stored) or any(s > n for n, s in zip(shape, stored)):
        raise ValueError(f"{name}: an array of {list(shape)} cannot hold the stored {list(stored)}")


def regions(part: Part, bounds: Bounds, stored: tuple[int, ...], placement: Placement) -> Iterator[tuple[tuple, tuple]]:
    """Pairs (local, region): `shard[local]` is the same numbers as `stored_array[region]`.

    What no pair covers is padding or an unused row, and zero. Local and region have the same shape.

    Args:
      part: a leaf in memory.
      bounds: the block of the leaf that is the shard.
      stored: the stored array's shape.
    """
    runs: list[tuple[tuple, tuple]] = [((), ())]
    first, bounds, stored = bounds[: part.lead], bounds[part.lead :], stored[part.lead :]
    if part.chunk is not None:
        runs = list(_layer_runs(part.chunk, bounds[0], bounds[1], placement))
        bounds, stored = bounds[2:], stored[1:]
    stops = [min(stop, n) for (_, stop), n in zip(bounds, stored, strict=True)]
    if any(start >= stop for (start, _), stop in zip(bounds, stops)):
        return
    local = [slice(0, stop - start) for (start, _), stop in zip(bounds, stops)]
    region = [slice(start, stop) for (start, _), stop in zip(bounds, stops)]
    mine, theirs = [slice(0, stop - start) for start, stop in first], [slice(*each) for each in first]
    for rows, layers in runs:
        # The Ellipsis makes the result a view, for scalars too.
        yield (*mine, *rows, *local, ...), (*theirs, *layers, *region, ...)


def _layer_runs(chunk: int, stages: tuple[int, int], rows: tuple[int, int], placement: Placement) -> Iterator[tuple[tuple, tuple]]:
    """Pairs ((stage, rows), (layers,)) of the used rows in a block of [stages, rows]; a stage's layers are consecutive."""
    for stage in range(*stages):
        first, stop = placement.first_layer(chunk, stage), min(rows[1], placement.layer_count(chunk, stage))
        if rows[0] < stop:
            yield (stage - stages[0], slice(0, stop - rows[0])), (slice(first + rows[0], first + stop),)


def holders(part: Part) -> dict[Bounds, list[jax.Device]]:
    """The distinct shards of a leaf and the devices that hold each, on all processes and in the same order on each."""
    held: dict[Bounds, list[jax.Device]] = {}
    for device, index in part.sharding.devices_indices_map(part.shape).items():
        held.setdefault(tuple(i.indices(n)[:2] for i, n in zip(index, part.shape, strict=True)), []).append(device)
    return {bounds: sorted(devices, key=lambda d: d.id) for bounds, devices in held.items()}


def writers(part: Part) -> dict[jax.Device, Bounds]:
    """The devices that write a leaf and the shard that each writes: every element once, however often it is replicated.

    Replicas take turns, leaf by leaf, so that parameters that all data shards hold are written by all.
    """
    return {devices[part.leaf % len(devices)]: bounds for bounds, devices in holders(part).items()}


def chunk_shape(array: StoredArray, limit: int = CHUNK_BYTES) -> tuple[int, ...]:
    """The shape of the pieces in which the array is stored; the same on every process.

    A piece must be written by one device, so it never crosses the border of a shard: a layer is a piece of its own (a replica's, where each
    has its own), and where a dimension is sharded the piece divides the shard. Pieces over `limit` bytes are cut in two, along whole
    dimensions first, or into as few as divide a shard.
    """
    lead, layer = array.parts[0].lead, array.parts[0].chunk is not None
    skip = lead + 2 * layer
    full = array.parts[0].shape[skip:]
    stored = array.shape[lead + layer :]
    shards = [p.sharding.shard_shape(p.shape)[skip:] for p in array.parts]
    whole = [all(s[d] == n for s in shards) for d, n in enumerate(full)]
    piece = [n if whole[d] else math.gcd(*(s[d] for s in shards)) for d, n in enumerate(stored)]
    while math.prod(piece) * array.dtype.itemsize > limit and max(piece, default=1) > 1:
        d = max((d for d, n in enumerate(piece) if n > 1), key=lambda d: (whole[d], piece[d]))
        parts = 2 if whole[d] else next(n for n in range(2, piece[d] + 1) if piece[d] % n == 0)
        piece[d] = -(-piece[d] // parts)
    return (*[1] * (lead + layer), *piece)
