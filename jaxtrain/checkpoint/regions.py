"""The geometry of checkpoints: the region of a stored array that is a device's shard, and the
processes that hold each shard.

A persistent checkpoint must not depend on the mesh, the stages or the units of the run that wrote
it. So every parameter is one stored array with its layers in model order and without padding.
Saving copies a shard into its region of the stored array, restoring copies the region into the
shard, both without a collective.

      in memory (stages 2, 2 units each, 7 layers)                          stored
      params/layers/0/w  [2, 2, 8, 8]   stage 0: 0 1   stage 1: 2 3   ⎫   params/layers/w  [7, 8, 8]
      params/layers/1/w  [2, 2, 8, 8]   stage 0: 4 5   stage 1: 6 –   ⎭
      params/embed/w     [512, 8]       padded in memory                  params/embed/w   [500, 8]

Layers of several forms (config/groups/layer_kinds.py) are an array for each form, in model order:
params/layers/FORM/w.

A local checkpoint (local.py) has the shards as they are on a machine's devices, so only one layout
can restore it. A shard that several processes hold (without ZeRO, parameters have copies over
`data`) survives the loss of all but one of them:

      leaf 3 over stage, copies over data          process 0: (3, stage 0)   process 1: (3, stage 1)
                                                   process 2: (3, stage 0)   process 3: (3, stage 1)

This module touches no file and no device: storage.py copies.

Begin with `stored_arrays`, then `regions` and `writers`; `Shards` at the end is for local
checkpoints alone.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxtrain.devices.state_file import Bounds, DiskArray, block_shape, is_on_disk
from jaxtrain.training.state import Stack, Stored

LAYERS = "layers"

# Bytes of a piece at most: reading any part of a piece costs reading all of it.
PIECE_BYTES = 32 * 2**20


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of the state in memory: a complete stored array, or the layers of one local unit.

    index: its place among the leaves of the flattened state
    unit: None for a leaf outside of stacks
    lead: the number of dimensions before the layers, which are stored as they are: independent
        replicas
    stack: the layers of a stack's leaf
    disk: the leaf itself if its numbers are on disk
    """

    index: int
    unit: int | None
    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    lead: int = 0
    stack: Stack | None = None
    disk: DiskArray | None = None


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """One array of a checkpoint: its name, its stored shape and dtype, and the leaves in memory
    that hold it."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    leaves: tuple[Leaf, ...]


@dataclasses.dataclass(frozen=True)
class SharedRegion:
    """Two indices of the same numbers: `shard[local]` and `stored_array[stored]`. They select
    arrays of the same shape."""

    local: tuple
    stored: tuple


def stored_arrays(state: Any, stored: Any) -> list[StoredArray]:
    """The arrays that a checkpoint of `state` consists of, in the order of the state's leaves.

    Args:
      state: a pytree of jax.Array, DiskArray or jax.ShapeDtypeStruct with shardings. Stacks are
        under a key "layers", after which the next key is the local unit, and are [*lead, stages,
        positions, *layer shape].
      stored: the same tree with a Stored for each leaf.

    Raises:
      ValueError: a leaf without sharding, or whose shape is not what its Stored says; a unit that
        is missing.
    """
    tree: Any
    in_memory, tree = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_on_disk)
    arrays: dict[str, StoredArray] = {}
    for index, ((path, leaf), one) in enumerate(
        zip(in_memory, tree.flatten_up_to(stored), strict=True)
    ):
        # Units of a layer's parameter become one array: it has their leaves, and their layers.
        array = _stored_array(index, path, leaf, one)
        if array.name in arrays:
            before = arrays[array.name]
            if (before.shape, before.dtype) != (array.shape, array.dtype):
                raise ValueError(
                    f"{array.name}: units differ, {before.dtype}{list(before.shape)} and "
                    f"{array.dtype}{list(array.shape)}"
                )
            array = dataclasses.replace(before, leaves=(*before.leaves, *array.leaves))
        arrays[array.name] = array
    for array in arrays.values():
        stacks = [leaf.stack for leaf in array.leaves if leaf.stack]
        count = sum(len(layers) for stack in stacks for layers in stack.held)
        if stacks and count != stacks[0].model:
            raise ValueError(
                f"{array.name}: the units hold {count} of the model's {stacks[0].model} layers"
            )
    return list(arrays.values())


def _stored_array(index: int, path: tuple, leaf: Any, stored: Stored) -> StoredArray:
    """The array that holds one leaf, with that leaf alone. Errors as of `stored_arrays`."""
    keys = [jax.tree_util.keystr((key,), simple=True) for key in path]
    unit = None
    if stored.stack:
        unit = int(keys.pop(keys.index(LAYERS) + 1))
    name, (lead, stack) = "/".join(keys), (stored.lead, stored.stack)
    if getattr(leaf, "sharding", None) is None:
        raise ValueError(
            f"{name}: only arrays with a sharding can be saved or restored, not {leaf!r:.80}"
        )
    if leaf.shape[: len(lead)] != lead:
        raise ValueError(f"{name}: {list(leaf.shape)} does not begin with {list(lead)}")
    shape = leaf.shape[len(lead) :]
    if stack and shape[:2] != stack.shape:
        stages, depth = stack.shape
        raise ValueError(
            f"{name}: {list(shape)} is no stack of {depth} layers on each of {stages} stages"
        )
    shape = shape[2:] if stack else shape
    if len(shape) != len(stored.shape) or any(size > n for n, size in zip(shape, stored.shape)):
        raise ValueError(
            f"{name}: an array of {list(shape)} cannot hold the stored {list(stored.shape)}"
        )
    layers = (stack.model,) if stack else ()
    disk = leaf if is_on_disk(leaf) else None
    in_memory = Leaf(index, unit, tuple(leaf.shape), leaf.sharding, len(lead), stack, disk)
    return StoredArray(name, (*lead, *layers, *stored.shape), np.dtype(leaf.dtype), (in_memory,))


def regions(leaf: Leaf, bounds: Bounds, stored: tuple[int, ...]) -> Iterator[SharedRegion]:
    """The regions of a shard and of the stored array that hold the same numbers. The rest of the
    shard is padding, and zero.

    Args:
      leaf: a leaf in memory.
      bounds: the block of the leaf that is the shard.
      stored: the stored array's shape.
    """
    lead, bounds, stored = bounds[: leaf.lead], bounds[leaf.lead :], stored[leaf.lead :]
    # From the outside in: dimensions of replicas are stored as they are; [stages, positions] become
    # layers in model order, a run of them for each stage; a layer's own dimensions lose their
    # padding, which lies at the end.
    runs = [SharedRegion((), ())]
    if leaf.stack:
        runs = list(_layer_runs(leaf.stack, bounds[0], bounds[1]))
        bounds, stored = bounds[2:], stored[1:]
    clipped = [(start, min(stop, size)) for (start, stop), size in zip(bounds, stored, strict=True)]
    if any(start >= stop for start, stop in clipped):
        return  # the shard is all padding
    for run in runs:
        # The Ellipsis makes the result a view, for scalars too.
        yield SharedRegion(
            (*_from_zero(lead), *run.local, *_from_zero(clipped), ...),
            (*_slices(lead), *run.stored, *_slices(clipped), ...),
        )


def _slices(bounds: Iterable[tuple[int, int]]) -> list[slice]:
    return [slice(start, stop) for start, stop in bounds]


def _from_zero(bounds: Iterable[tuple[int, int]]) -> list[slice]:
    return [slice(0, stop - start) for start, stop in bounds]


def _layer_runs(
    stack: Stack, stages: tuple[int, int], positions: tuple[int, int]
) -> Iterator[SharedRegion]:
    """The layers in a block of a unit's stack [stages, positions], by stage, whose layers are
    consecutive."""
    for stage in range(*stages):
        if layers := stack.held[stage][slice(*positions)]:
            yield SharedRegion(
                (stage - stages[0], slice(0, len(layers))), (slice(layers.start, layers.stop),)
            )


def holders(leaf: Leaf) -> dict[Bounds, list[jax.Device]]:
    """The distinct shards of a leaf and the devices that hold each, on all processes and in the
    same order on each."""
    holding: dict[Bounds, list[jax.Device]] = {}
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        bounds = tuple(i.indices(n)[:2] for i, n in zip(index, leaf.shape, strict=True))
        holding.setdefault(bounds, []).append(device)
    return {bounds: sorted(devices, key=lambda d: d.id) for bounds, devices in holding.items()}


def writers(leaf: Leaf) -> dict[jax.Device, Bounds]:
    """The devices that write a leaf and the shard that each writes: every element once, however
    often it is replicated.

    Replicas take turns, leaf by leaf, so that parameters that all data shards hold are written by
    all.
    """
    # by the leaf's index, so that no device writes all of the replicated leaves
    return {devices[leaf.index % len(devices)]: bounds for bounds, devices in holders(leaf).items()}


def piece_shape(array: StoredArray, limit: int = PIECE_BYTES) -> tuple[int, ...]:
    """The shape of the pieces in which the array is stored; the same on every process.

    A piece must be written by one device, so it never crosses the border of a shard: a layer is a
    piece of its own (a replica's, where each has its own), and where a dimension is sharded the
    piece divides the shard. Pieces over `limit` bytes are cut in two, along unsharded dimensions
    first, or into as few as divide a shard.
    """
    lead, in_layers = array.leaves[0].lead, array.leaves[0].stack is not None
    skip = lead + 2 * in_layers
    full = array.leaves[0].shape[skip:]
    stored = array.shape[lead + in_layers :]
    shards = [leaf.sharding.shard_shape(leaf.shape)[skip:] for leaf in array.leaves]
    unsharded = [all(shard[dim] == size for shard in shards) for dim, size in enumerate(full)]
    # The greatest common divisor, for units may be sharded differently; a border of any of their
    # shards is then a border of a piece. Example: shards of 6 and of 4 rows have pieces of 2.
    piece = [
        size if unsharded[dim] else math.gcd(*(shard[dim] for shard in shards))
        for dim, size in enumerate(stored)
    ]
    piece = cut_piece(piece, array.dtype.itemsize, unsharded, limit)
    return (*[1] * (lead + in_layers), *piece)


def cut_piece(
    shape: Sequence[int],
    itemsize: int,
    unsharded: Sequence[bool] | None = None,
    limit: int = PIECE_BYTES,
) -> list[int]:
    """The shape of a piece of at most `limit` bytes, cut from a larger one.

    unsharded: for each dimension, whether any size will do; otherwise the size divides the shape's.
      None: any will do in all
    """
    piece = list(shape)
    unsharded = [True] * len(piece) if unsharded is None else unsharded
    while math.prod(piece) * itemsize > limit and max(piece, default=1) > 1:
        # The longest unsharded dimension, or the longest; of equal ones the first.
        dims = [dim for dim, size in enumerate(piece) if size > 1]
        dim = max(dims, key=lambda dim: (unsharded[dim], piece[dim]))
        if unsharded[dim]:
            piece[dim] = -(-piece[dim] // 2)
        else:
            piece[dim] //= next(n for n in range(2, piece[dim] + 1) if piece[dim] % n == 0)
    return piece


# --- shards and their processes -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, order=True)
class Shard:
    """A distinct shard: the index of its leaf in the flattened state, and the block of the leaf."""

    leaf: int
    bounds: Bounds

    @property
    def shape(self) -> tuple[int, ...]:
        return block_shape(self.bounds)


class Shards:
    """All distinct shards of a state, with their devices; the same on every process.

    Args:
      arrays: the state's, as of `stored_arrays`.
      process_of: a device's process; tests have others than jax.
    """

    def __init__(
        self,
        arrays: Sequence[StoredArray],
        process_of: Callable[[jax.Device], int] = lambda device: device.process_index,
    ):
        self._array = {leaf.index: array for array in arrays for leaf in array.leaves}
        self.leaves = {leaf.index: leaf for array in arrays for leaf in array.leaves}
        self.devices = {
            Shard(index, bounds): devices
            for index, leaf in self.leaves.items()
            for bounds, devices in sorted(holders(leaf).items())
        }
        self._process_of = process_of

    def dtype(self, leaf: int) -> np.dtype:
        return self._array[leaf].dtype

    def name(self, shard: Shard) -> str:
        """The stored array that a shard is a part of, such as "params/embed/w"."""
        return self._array[shard.leaf].name

    def needed_by(self, process: int) -> list[Shard]:
        """The shards that a process's devices hold, in an order that all processes know."""
        return [
            shard
            for shard, devices in self.devices.items()
            if process in map(self._process_of, devices)
        ]

    def givers(self, lost: Mapping[int, Iterable[Shard]]) -> dict[Shard, jax.Device | None]:
        """Lost shard → the first device that still has it, or None if no device has.

        lost: process → the shards that it needs and does not have.
        """
        losers: dict[Shard, set[int]] = {}
        for process, shards in lost.items():
            for shard in shards:
                losers.setdefault(shard, set()).add(process)
        givers: dict[Shard, jax.Device | None] = {}
        for shard, processes in losers.items():
            holding = [d for d in self.devices[shard] if self._process_of(d) not in processes]
            givers[shard] = holding[0] if holding else None
        return givers

    def fingerprint(self) -> str:
        """A digest that two states share exactly if the shards of one are those of the other: of
        names, shapes, types, blocks and layers."""
        # All that decides which numbers lie at which bytes of a file: two layouts with one
        # fingerprint can read each other's files.
        leaves = [
            (
                self._array[index].name,
                leaf.unit,
                leaf.shape,
                leaf.lead,
                self._array[index].shape,
                str(self._array[index].dtype),
            )
            for index, leaf in sorted(self.leaves.items())
        ]
        blocks = [(shard.leaf, shard.bounds) for shard in sorted(self.devices)]
        # The stacks of a unit are in the order of its leaves, whose names have their forms.
        leaves_in_order = [leaf for _, leaf in sorted(self.leaves.items())]
        stacks = dict.fromkeys((leaf.unit, leaf.stack) for leaf in leaves_in_order if leaf.stack)
        layers = [
            [[*run, *[-1] * (stack.shape[1] - len(run))] for run in stack.held]
            for _, stack in sorted(stacks, key=lambda one: one[0] or 0)
        ]
        return hashlib.sha256(json.dumps([leaves, blocks, layers]).encode()).hexdigest()
