"""Copies between device memory and the arrays of an Orbax checkpoint; regions.py says which numbers
go where.

Orbax writes a jax.Array only if every process holds a shard of it and all its shards are alike. A
layer on one stage is no such array. So saving gives Orbax numbers that are already on the host, as
`HostArray`s: a shard is copied from device memory once, entirely, and cut on the host, so that
saving takes no device memory. The result is an ordinary Orbax checkpoint (zarr 3 arrays in an
OCDBT database), and any Orbax program restores it. Every piece is stored with its checksum (the
codec crc32c of zarr 3), which TensorStore compares whenever it reads the piece.

Restoring goes straight from the files into host buffers shaped like the shards that this process
needs, one leaf at a time, and from there onto the devices: no array but the result ever exists in
device memory.

Begin with `host_tree` for a save and with `read_tree` for a restoration. Orbax calls
HostArrayHandler.serialize, and that `_write`, when saving.py saves the tree.
"""

import asyncio
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from jaxtrain.checkpoint.regions import (
    Bounds,
    Leaf,
    StoredArray,
    holders,
    piece_shape,
    regions,
    writers,
)
from jaxtrain.checkpoint.steps import CheckpointError, DamageError
from jaxtrain.checkpoint.stores import no_damage
from jaxtrain.devices import host_memory
from jaxtrain.devices.state_file import DiskArray, block_shape, is_on_disk

# Views of this process's shards, each with its index in the stored array (regions.SharedRegion)
Views = list[tuple[np.ndarray, tuple]]

WRITE_BYTES = 128 * 2**20  # written at a time
# The types of parameters and moments, of which a run may read one as another.
FLOATS = {np.dtype("float32"), np.dtype(jnp.bfloat16)}

# The stored form of a piece's numbers: bytes, then four more that are their checksum.
CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]


@dataclasses.dataclass(frozen=True, eq=False)
class HostArray:
    """A stored array in pieces of the shape `piece`, and the blocks of it that this process writes:
    (index in the stored array, numbers)."""

    shape: tuple[int, ...]
    dtype: np.dtype
    piece: tuple[int, ...]
    blocks: list[tuple[tuple, Any]]


class HostArrayHandler(ocp.type_handlers.ArrayHandler):
    """Teaches Orbax to write a HostArray, as an array like any other."""

    async def serialize(
        self, values: Sequence[HostArray], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> list[ocp.future.Future]:
        """Begins to write in the background. The numbers must not change until the futures are
        done."""
        return [
            ocp.future.CommitFutureAwaitingContractedSignals(
                _write(values, infos), name="host_arrays"
            )
        ]


async def _write(values: Sequence[HostArray], infos: Sequence[Any]):
    """Writes this process's blocks in transactions: without one, each write would rewrite the
    database's index. A transaction copies what it writes, so each has about WRITE_BYTES."""
    for info in infos:
        await info.await_path_creation()
    # One context: TensorStore shares the database's cache by it.
    context = infos[0].ts_context
    specs = [_write_spec(value, info) for value, info in zip(values, infos, strict=True)]
    # The description of an array is written once, by process 0. The others must not look for it: it
    # is in process 0's database, which is joined with theirs at the end (`assume_metadata`).
    if jax.process_index() == 0:
        async with ts.Transaction(atomic=True) as transaction:
            opening = {"create": True, "open": True, "context": context, "transaction": transaction}
            await asyncio.gather(*[ts.open(spec, **opening) for spec in specs])

    written = [(spec, value) for spec, value in zip(specs, values, strict=True) if value.blocks]
    arrays = await asyncio.gather(
        *[ts.open(spec, open=True, assume_metadata=True, context=context) for spec, _ in written]
    )
    blocks = [
        (array, *block)
        for array, (_, value) in zip(arrays, written, strict=True)
        for block in value.blocks
    ]
    while blocks:
        async with ts.Transaction(atomic=True) as transaction:
            writes, size = [], 0
            while blocks and size < WRITE_BYTES:
                array, index, numbers = blocks.pop()
                size += numbers.nbytes
                # Only here is a block on disk read, by asarray, so few of them are in memory.
                writes.append(
                    array.with_transaction(transaction)[index].write(
                        np.asarray(numbers), can_reference_source_data_indefinitely=True
                    )
                )
            await asyncio.gather(*writes)


def _write_spec(value: HostArray, info: Any) -> ts.Spec:
    # Each process writes to a database of its own, which Orbax joins at the end.
    spec = ocp.type_handlers.get_json_tspec_write(
        info,
        use_ocdbt=True,
        global_shape=value.shape,
        local_shape=value.piece,
        dtype=value.dtype,
        process_index=jax.process_index(),
    )
    spec["metadata"]["codecs"] = CODECS  # instead of Orbax's, which have no checksum of the numbers
    return ts.Spec(spec)


def tree_handler() -> ocp.PyTreeCheckpointHandler:
    """Orbax's handler for a tree of HostArrays."""
    handler = HostArrayHandler()
    registry = ocp.type_handlers.create_type_handler_registry(
        (HostArray, handler), (jax.Array, handler)
    )
    # Compressing trained weights saves 8 % and costs more processor time than writing them.
    return ocp.PyTreeCheckpointHandler(
        type_handler_registry=registry, use_compression=False, use_zarr3=True
    )


def host_tree(arrays: list[StoredArray], state: Any) -> dict:
    """The nested dict of HostArrays that Orbax writes for `state`.

    Returns when the copies are made: the state may be changed or donated then.
    """
    leaves = jax.tree.leaves(state, is_leaf=is_on_disk)
    # By leaf, the shards that this process writes. Replicas are written once, and `writers` shares
    # them out over the processes without a message.
    written: dict[int, list[tuple[Bounds, jax.Array]]] = {}
    for leaf in [leaf for array in arrays for leaf in array.leaves if not leaf.disk]:
        shards = {shard.device: shard.data for shard in leaves[leaf.index].addressable_shards}
        written[leaf.index] = [
            (bounds, shards[device]) for device, bounds in writers(leaf).items() if device in shards
        ]
        # All copies are under way before the first is waited for.
        for _, data in written[leaf.index]:
            data.copy_to_host_async()

    stored = {}
    for array in arrays:
        blocks: list[tuple[tuple, Any]] = []
        for leaf in array.leaves:
            if leaf.disk:
                blocks += _blocks_on_disk(leaf, leaf.disk, array.shape)
                continue
            for bounds, data in written.pop(leaf.index):
                numbers = to_host(data)
                blocks += [
                    (region.stored, numbers[region.local])
                    for region in regions(leaf, bounds, array.shape)
                ]
        stored[array.name] = HostArray(array.shape, array.dtype, piece_shape(array), blocks)
    return nested(stored)


@dataclasses.dataclass(frozen=True, eq=False)
class DeferredBlock:
    """Part of a block on disk, which is read when it is written. It has what TensorStore and
    `_write` ask of an array."""

    disk: DiskArray
    block: Bounds
    local: tuple
    dtype: np.dtype
    nbytes: int

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.disk.read(self.block)[self.local]


@dataclasses.dataclass(frozen=True, eq=False)
class DeferredPiece:
    """A piece of a stored array that is read when it is written. It has what TensorStore and
    `_write` ask of an array. read: fills an array with the numbers of a window"""

    read: Callable[[Sequence[range], np.ndarray], None]
    window: Sequence[range]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(map(len, self.window)) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        piece = np.empty([len(span) for span in self.window], self.dtype)
        self.read(self.window, piece)
        return piece


def zeros(array: StoredArray) -> HostArray:
    """An array of zeros, which take no memory."""
    numbers = np.broadcast_to(np.zeros((), array.dtype), array.shape)
    return HostArray(array.shape, array.dtype, piece_shape(array), [((...,), numbers)])


def _blocks_on_disk(
    leaf: Leaf, disk: DiskArray, stored: tuple[int, ...]
) -> Iterator[tuple[tuple, DeferredBlock]]:
    """The blocks of a leaf on disk that this process writes, layer by layer."""
    for device, shard in writers(leaf).items():
        if device.process_index != jax.process_index():
            continue
        for layer in range(disk.layers):
            block = disk.block(shard, layer)
            size = disk.bytes_of(block)
            for region in regions(leaf, block, stored):
                yield region.stored, DeferredBlock(disk, block, region.local, disk.dtype, size)


def nested(arrays: Mapping[str, HostArray]) -> dict:
    """The nested dict of arrays by name, such as "params/embed/w"."""
    tree: dict = {}
    for path, array in arrays.items():
        *folders, name = path.split("/")
        at = tree
        for folder in folders:
            at = at.setdefault(folder, {})
        at[name] = array
    return tree


def to_host(data: jax.Array) -> np.ndarray:
    # asarray may return a view of what lies in the host's memory, as all does on CPU, and the next
    # step overwrites that.
    on_cpu = {device.platform for device in data.devices()} == {"cpu"}
    return np.array(data) if on_cpu or host_memory.is_host(data.sharding) else np.asarray(data)


def read_tree(directory: epath.Path, arrays: list[StoredArray]) -> list[jax.Array | DiskArray]:
    """Reads `arrays` from the state's folder of a step. Returns the leaves of the state, in the
    order of the flattened state. Each process reads the regions that its devices hold.

    float32 and bfloat16 are converted into each other, to the nearest number; other dtypes have to
    agree.

    Raises:
      CheckpointError: before anything is read, if an array is not stored, or has another shape or
        dtype; while an array is read, if the storage refuses it or does not answer, or memory does
        not suffice.
      DamageError: an array is damaged, or a piece of it is missing.
    """
    sources = _open(directory, arrays)
    # One leaf at a time, whose copy to the devices is waited for: the host never holds more than
    # the shards of one leaf.
    leaves: dict[int, jax.Array | DiskArray] = {}
    for array, source in zip(arrays, sources, strict=True):
        for leaf in array.leaves:
            try:
                leaves[leaf.index] = _read_leaf(source, array, leaf)
            except ValueError as error:  # TensorStore's for whatever is wrong with the data
                raise _error(directory, array, error) from error
    return [leaves[i] for i in sorted(leaves)]


def _open(directory: epath.Path, arrays: list[StoredArray]) -> list[ts.TensorStore]:
    context = ocp.type_handlers.get_ts_context(use_ocdbt=True)

    # All are being opened before the first is waited for: each takes a round trip to a store.
    openings = []
    for array in arrays:
        name = array.name.replace("/", ".")  # Orbax's name for the path in the tree
        info = ocp.type_handlers.ParamInfo(
            name=name, parent_dir=directory, ts_context=context, use_zarr3=True
        )
        spec = ts.Spec(ocp.type_handlers.get_json_tspec_read(info, use_ocdbt=True))
        openings.append(ts.open(spec, open=True, context=context))
    sources = []
    for array, opening in zip(arrays, openings, strict=True):
        expected = f"{array.dtype}{list(array.shape)} is wanted"
        try:
            source = opening.result()
        except ValueError as error:
            if not str(error).startswith("NOT_FOUND"):
                raise _error(directory, array, error) from error
            raise CheckpointError(f"{directory}: {array.name} is not stored; {expected}") from error
        dtype = source.dtype.numpy_dtype
        are_floats = {dtype, array.dtype} <= FLOATS
        if source.shape != array.shape or (dtype != array.dtype and not are_floats):
            stored = f"{source.dtype.name}{list(source.shape)}"
            raise CheckpointError(f"{directory}: {array.name} is stored as {stored}; {expected}")
        sources.append(source if dtype == array.dtype else ts.cast(source, array.dtype))
    return sources


def _error(directory: epath.Path, array: StoredArray, error: ValueError) -> CheckpointError:
    """The error of an array that is stored, by TensorStore's error, which begins with a code."""
    if why := no_damage(error):
        return CheckpointError(f"{directory}: {array.name} {why}")
    damage = (
        "a piece of it is missing" if str(error).startswith("NOT_FOUND") else "its data is damaged"
    )
    return DamageError(directory, f"{array.name} cannot be read: {damage}")


def _read_leaf(source: ts.TensorStore, array: StoredArray, leaf: Leaf) -> jax.Array | DiskArray:
    """One leaf, read and laid on this process's devices."""

    def read(views: Views) -> None:
        # TensorStore writes into the buffers themselves: there is no copy on the way. All reads are
        # under way before the first is waited for.
        for reading in [ts.array(view).write(source[index]) for view, index in views]:
            reading.result()

    return on_devices(array, leaf, read)


def on_devices(
    array: StoredArray, leaf: Leaf, fill: Callable[[Views], None]
) -> jax.Array | DiskArray:
    """One leaf on this process's devices or disk, whose shards are filled on the host; the rest is
    zero.

    fill: fills views of zeros with the numbers that the stored array has at their indices
    """
    if leaf.disk:
        return _on_disk(array, leaf, leaf.disk, fill)
    buffers: list[tuple[np.ndarray, list[jax.Device]]] = []
    views: Views = []
    for bounds, devices in holders(leaf).items():
        if local_devices := [
            device for device in devices if device.process_index == jax.process_index()
        ]:
            # Zeros, since what no region covers is padding, and padding has to be zero.
            buffer = np.zeros(block_shape(bounds), array.dtype)
            buffers.append((buffer, local_devices))
            for region in regions(leaf, bounds, array.shape):
                views.append((buffer[region.local], region.stored))
    fill(views)
    kind = leaf.sharding.memory_kind
    shards = [
        jax.device_put(b, jax.sharding.SingleDeviceSharding(d, memory_kind=kind))
        for b, devices in buffers
        for d in devices
    ]
    # The buffers live until they are copied: without waiting those of all leaves could pile up.
    return jax.block_until_ready(
        jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)
    )


def _on_disk(
    array: StoredArray, leaf: Leaf, disk: DiskArray, fill: Callable[[Views], None]
) -> DiskArray:
    """A leaf on disk, filled block by block; `fill` as for `on_devices`."""
    for shard in disk.shards():
        for layer in range(disk.layers):
            block = disk.block(shard, layer)
            buffer = np.zeros(block_shape(block), array.dtype)
            fill([(buffer[r.local], r.stored) for r in regions(leaf, block, array.shape)])
            disk.write(block, buffer)
    return disk
