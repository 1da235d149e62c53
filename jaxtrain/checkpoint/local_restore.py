"""Restoring from machines' own folders: which step all processes together still have, and its
shards onto the devices.

    each process   reads the indices of the files on its machine, whoever wrote them
    all together   choose the newest step of which no shard is lost everywhere
    each process   reads its shards, and finds the damaged ones by their checksums
    all together   give copies to those who lost theirs: by a sum over the devices that hold copies,
                   to which one adds the numbers, the others zeros (one leaf at a time, over the
                   network that gradients take)

Where a shard is lost everywhere the next older step is tried, and after the last nothing is
restored, on all processes alike.
"""

import dataclasses
import functools
import itertools
import math
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.checkpoint.layout import Part
from jaxtrain.checkpoint.local import DamagedError, Place, files_of, read_index, read_shard
from jaxtrain.checkpoint.shards import Shard, Shards
from jaxtrain.checkpoint.steps import CheckpointError, Meta
from jaxtrain.devices import cluster
from jaxtrain.devices.mesh import psum
from jaxtrain.parallel import host_memory

_exchanges = itertools.count()


@dataclasses.dataclass(frozen=True, order=True)
class Saved:
    """A step, the start of the run that saved it, and its meta once that is known on this
    process."""

    step: int
    start: str
    meta: Meta = dataclasses.field(default_factory=Meta, compare=False)


@dataclasses.dataclass(frozen=True, eq=False)
class Restored:
    """What was restored. leaves: in the order of the flattened state; moved: bytes that came from
    other processes, of all together."""

    step: int
    meta: Meta
    leaves: list[jax.Array]
    moved: int


@dataclasses.dataclass(frozen=True)
class _Here:
    """What this machine has of a step."""

    meta: dict[str, Any]
    places: dict[Shard, Place]


class LocalFiles:
    """What the machines of a run have of it. Every process calls every method, at the same point of
    the program.

    Args:
      folder: the run's on each machine.
      shards: of the state that is wanted.
    """

    def __init__(self, folder: pathlib.Path, shards: Shards):
        self._shards, self._folder = shards, folder
        self._needed = shards.needed_by(jax.process_index())
        self._here = self._look()

    def _look(self) -> dict[Saved, _Here]:
        found: dict[Saved, _Here] = {}
        fingerprint = self._shards.fingerprint()
        for path, step in files_of(self._folder):
            try:
                index = read_index(path)
            except DamagedError as error:
                _say_here(f"passed over: {error}")
                continue
            if index.fingerprint == fingerprint:
                here = found.setdefault(Saved(step, index.start), _Here(index.meta, {}))
                here.places.update(index.places)
        return found

    def candidates(self, after: int, before: int, wrong: Callable[[Meta], str]) -> list[Saved]:
        """The steps between `after` and `before`, both exclusive, that all processes together seem
        to have, newest first.

        wrong: what speaks against going on from a step with this meta, in words, or ""; process 0
        asks it.

        Says why the others that somebody has cannot be used.
        """
        offers = cluster.gather([[saved.step, saved.start] for saved in self._here])
        owners: dict[Saved, int] = {}
        for process, offer in enumerate(offers):
            for saved in offer:
                owners.setdefault(Saved(*saved), process)
        usable = []
        for saved in sorted(
            (saved for saved in owners if after < saved.step < before), reverse=True
        ):
            meta = self._meta(saved, owners[saved])
            why = _lost_everywhere(
                self._shards, self._gather_lost(set(self._needed) - set(self._places(saved)))
            )
            why = why or cluster.from_main(functools.partial(wrong, meta), CheckpointError)
            if why:
                cluster.log(_not_used(saved, why))
            else:
                usable.append(dataclasses.replace(saved, meta=meta))
        return usable

    def restore(self, candidates: list[Saved]) -> Restored | None:
        """The first of the candidates that all processes together have undamaged, on the devices;
        None if there is none, which is said."""
        for saved in candidates:
            arrays, damaged = self._read(saved)
            lost = self._gather_lost(damaged)
            why = _lost_everywhere(self._shards, lost)
            if why:
                cluster.log(_not_used(saved, why))
                continue
            leaves = self._put_together(arrays, lost)
            moved = sum(self._bytes(shard) for shards in lost.values() for shard in shards)
            return Restored(saved.step, saved.meta, leaves, moved)
        return None

    def _places(self, saved: Saved) -> dict[Shard, Place]:
        here = self._here.get(saved)
        return here.places if here else {}

    def _bytes(self, shard: Shard) -> int:
        return math.prod(shard.shape) * self._shards.dtype(shard).itemsize

    def _meta(self, saved: Saved, owner: int) -> Meta:
        """The meta of a step, which process `owner` has, on every process."""
        mine = self._here[saved].meta if jax.process_index() == owner else None
        return Meta(**cluster.gather(mine)[owner])

    def _gather_lost(self, lost: set[Shard]) -> dict[int, list[Shard]]:
        """Process → the shards that it needs and does not have, of all processes that lack some.
        lost: this process's."""
        bits = (
            np.packbits([shard in lost for shard in self._needed]).tobytes().hex() if lost else ""
        )
        gathered: dict[int, list[Shard]] = {}
        for process, text in enumerate(cluster.gather(bits)):
            if text:
                needed = self._shards.needed_by(process)
                flags = np.unpackbits(
                    np.frombuffer(bytes.fromhex(text), np.uint8), count=len(needed)
                )
                gathered[process] = [
                    shard for shard, flag in zip(needed, flags, strict=True) if flag
                ]
        return gathered

    def _read(self, saved: Saved) -> tuple[dict[jax.Device, dict[int, jax.Array]], set[Shard]]:
        """Device → leaf → its shard there, as far as this machine has them undamaged; and the
        shards that it has not."""
        places, lost = self._places(saved), set[Shard]()
        arrays: dict[jax.Device, dict[int, jax.Array]] = {
            device: {} for device in jax.local_devices()
        }
        for shard in self._needed:
            try:
                if shard not in places:
                    raise DamagedError("")
                numbers = read_shard(places[shard], shard, self._shards.dtype(shard))
            except DamagedError as error:
                lost.add(shard)
                if str(error):
                    _say_here(f"passed over: {error}")
                continue
            for device in self._shards.devices[shard]:
                if device in arrays:
                    kind = self._shards.parts[shard.leaf].sharding.memory_kind
                    sharding = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
                    # The buffers live until they are copied: without waiting those of all shards
                    # could pile up.
                    arrays[device][shard.leaf] = jax.block_until_ready(
                        jax.device_put(numbers, sharding)
                    )
        return arrays, lost

    def _put_together(
        self, arrays: dict[jax.Device, dict[int, jax.Array]], lost: dict[int, list[Shard]]
    ) -> list[jax.Array]:
        """The leaves, of which each lost shard comes from a device that still has it. Every process
        gives and takes in the same order."""
        givers = self._shards.givers(lost)
        incomplete = {shard.leaf for shard in givers}
        leaves = []
        for leaf, part in sorted(self._shards.parts.items()):
            mine = {device: shards.pop(leaf) for device, shards in arrays.items() if leaf in shards}
            if leaf in incomplete:
                giving = {
                    givers.get(shard) or devices[0]
                    for shard, devices in self._shards.devices.items()
                    if shard.leaf == leaf
                }
                leaves.append(give_copies(part, self._shards.dtype_of(leaf), mine, giving))
            else:
                shards = [mine[device] for device in part.sharding.addressable_devices]
                leaves.append(
                    jax.make_array_from_single_device_arrays(part.shape, part.sharding, shards)
                )
        return leaves


def give_copies(
    part: Part, dtype: np.dtype, mine: dict[jax.Device, jax.Array], giving: set[jax.Device]
) -> jax.Array:
    """A leaf of which some devices lack their shard, with the numbers that `giving` have: one
    device for each distinct shard.

    All processes call this at the same point. mine: the shards that this process's devices have.
    Room for two more shards is needed on each device meanwhile.
    """
    sharding = part.sharding
    assert isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
    mesh, on_device = sharding.mesh, NamedSharding(sharding.mesh, sharding.spec)
    shape = sharding.shard_shape(part.shape)
    shards = [
        jax.device_put(
            mine[device] if device in mine else np.zeros(shape, dtype),
            jax.sharding.SingleDeviceSharding(device),
        )
        for device in sharding.addressable_devices
    ]
    numbers = jax.make_array_from_single_device_arrays(part.shape, on_device, shards)
    flags = np.array([device in giving for device in mesh.devices.flat], np.uint32)
    flag = jax.make_array_from_callback(
        flags.shape, NamedSharding(mesh, P(mesh.axis_names)), flags.__getitem__
    )
    program = jax.jit(functools.partial(_sum_of_copies, mesh=mesh, spec=sharding.spec)).lower(
        numbers, flag
    )
    whole = cluster.compile_everywhere(f"copies of leaf {part.leaf}, {next(_exchanges)}", program)(
        numbers, flag
    )
    if not host_memory.is_host(sharding):
        return jax.block_until_ready(whole)
    moved = [
        jax.device_put(
            s.data, jax.sharding.SingleDeviceSharding(s.device, memory_kind=host_memory.KIND)
        )
        for s in whole.addressable_shards
    ]
    return jax.block_until_ready(
        jax.make_array_from_single_device_arrays(part.shape, sharding, moved)
    )


def _sum_of_copies(numbers: jax.Array, flag: jax.Array, mesh: Mesh, spec: P) -> jax.Array:
    """Inside jit: the numbers of the devices whose flag is 1, on all devices that have the same
    shard; bit for bit."""
    names = {
        name
        for entry in spec
        if entry is not None
        for name in (entry if isinstance(entry, tuple) else (entry,))
    }
    copies = [axis for axis in mesh.axis_names if axis not in names]

    def on_each(x: jax.Array, flag: jax.Array) -> jax.Array:
        bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
        # In 32 bits: not every backend adds up fewer.
        summed = psum(bits.astype(jnp.uint32) * flag[0], copies)
        return lax.bitcast_convert_type(summed.astype(bits.dtype), x.dtype)

    return jax.shard_map(
        on_each, mesh=mesh, in_specs=(spec, P(mesh.axis_names)), out_specs=spec, check_vma=False
    )(numbers, flag)


def _lost_everywhere(shards: Shards, lost: dict[int, list[Shard]]) -> str:
    """What of the lost shards no process has, in words; "" if nothing."""
    gone = [shard for shard, giver in shards.givers(lost).items() if giver is None]
    if not gone:
        return ""
    process = min(process for process, of_process in lost.items() if gone[0] in of_process)
    parts = (
        f"{len(gone)} parts of the state, {shards.name(gone[0])} first,"
        if len(gone) > 1
        else f"a part of {shards.name(gone[0])}"
    )
    return f"no machine has {parts} for process {process}"


def _not_used(saved: Saved, why: str) -> str:
    return f"the local checkpoint of step {saved.step} is not used: {why}"


def _say_here(line: str) -> None:
    """Says what one machine has found: its own process, not the main one."""
    print(line, file=sys.stderr, flush=True)
