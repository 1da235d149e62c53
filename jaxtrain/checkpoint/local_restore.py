"""The restoration of local checkpoints: the step that all processes together still have, and its
shards on the devices.

    each process   reads the indices of the files on its machine, whoever wrote them
    all together   choose the newest step of which no shard is lost everywhere
    each process   reads its shards, and finds the damaged ones by their checksums
    all together   give copies to the processes that have lost theirs: by a sum over the devices
                   that hold a shard, to which one contributes the numbers and the others zeros (one
                   leaf at a time, over the network that gradients take)

If a shard is lost everywhere, all processes try the next older step; if none is left, no process
restores anything.

Begin with `LocalFiles.candidates`, then `LocalFiles.restore`. Example: of four processes, 0 and 2
hold the shards of stage 0, and 1 and 3 those of stage 1. The machine of process 2 is replaced. Its
`lost` are all of its shards; process 0 has them; so the first device of process 0 with such a shard
contributes it to the sum, and all others add zeros.
"""

import dataclasses
import functools
import itertools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxtrain.checkpoint.local import DamagedError, ShardBytes, files_of, read_index, read_shard
from jaxtrain.checkpoint.regions import Leaf, Shard, Shards
from jaxtrain.checkpoint.steps import CheckpointError, Meta
from jaxtrain.devices import cluster, host_memory
from jaxtrain.devices.mesh import psum
from jaxtrain.devices.sharding import mesh_axes
from jaxtrain.run import streams

_copies = itertools.count()


@dataclasses.dataclass(frozen=True, order=True)
class LocalStep:
    """A step, the start of the run that saved it, and its meta once that is known on this
    process."""

    step: int
    start: str
    meta: Meta = dataclasses.field(default_factory=Meta, compare=False)


@dataclasses.dataclass(frozen=True, eq=False)
class Restored:
    """A restored state. leaves: in the order of the flattened state; source: the folder on the
    machines, and the bytes that other processes gave, in words."""

    step: int
    meta: Meta
    leaves: list[jax.Array]
    source: str


class LocalFiles:
    """The files that the machines of a run have of it. Every process calls every method, at the
    same point of the program.

    Args:
      folder: the run's on each machine.
      shards: of the state that is wanted.
    """

    def __init__(self, folder: pathlib.Path, shards: Shards):
        self.folder, self.shards = folder, shards
        self._needed = shards.needed_by(jax.process_index())
        # of this machine, by step
        self._metas: dict[LocalStep, dict[str, Any]] = {}
        self._places: dict[LocalStep, dict[Shard, ShardBytes]] = {}
        self._of_others: set[int] = set()  # steps of another layout or model
        fingerprint = shards.fingerprint()
        for path, step in files_of(folder):
            try:
                index = read_index(path)
            except DamagedError as error:
                streams.remark(f"passed over: {error}")
                continue
            if index.fingerprint == fingerprint:
                saved = LocalStep(step, index.start)
                self._metas.setdefault(saved, index.meta)
                self._places.setdefault(saved, {}).update(index.places)
            else:
                self._of_others.add(step)

    def candidates(self, after: int, before: int, wrong: Callable[[Meta], str]) -> list[LocalStep]:
        """The steps between `after` and `before`, both exclusive, that all processes together seem
        to have, newest first.

        wrong: the reason not to resume from a step with this meta, in words, or ""; process 0 asks
        it.

        Logs why other steps that some process has cannot be used.
        """
        # Every process takes part in every exchange below, with files or without, and goes through
        # the same steps in the same order: otherwise one would wait for the others for ever.
        others = {step for of_one in cluster.gather([*self._of_others]) for step in of_one}
        for step in sorted(step for step in others if after < step < before):
            cluster.log(
                f"the local checkpoint of step {step} is not used: it is of another mesh or model"
            )
        offers = cluster.gather([[saved.step, saved.start] for saved in self._places])
        owners: dict[LocalStep, int] = {}
        for process, offer in enumerate(offers):
            for saved in offer:
                owners.setdefault(LocalStep(*saved), process)
        usable = []
        for saved in sorted(owners, reverse=True):
            if not after < saved.step < before:
                continue
            # A replaced machine has no meta of this step: the first process that has one gives it.
            owner = owners[saved]
            mine = self._metas[saved] if jax.process_index() == owner else None
            meta = Meta(**cluster.gather(mine)[owner])
            missing = set(self._needed) - set(self._places.get(saved, {}))
            why = self._lost_everywhere(self._gather_lost(missing))
            why = why or cluster.from_main(functools.partial(wrong, meta), CheckpointError)
            if why:
                cluster.log(f"the local checkpoint of step {saved.step} is not used: {why}")
            else:
                usable.append(dataclasses.replace(saved, meta=meta))
        return usable

    def restore(self, candidates: list[LocalStep]) -> Restored | None:
        """The first of the candidates that all processes together have undamaged, on the devices;
        None if there is none, which is told by a line."""
        for saved in candidates:
            # Read before it is known whether the others have their shards: checksums show damage
            # only now, and a process may be the only one to see it.
            arrays, damaged = self._read(saved)
            lost = self._gather_lost(damaged)
            if why := self._lost_everywhere(lost):
                cluster.log(f"the local checkpoint of step {saved.step} is not used: {why}")
                continue
            leaves = self._complete(arrays, lost)
            moved = sum(
                math.prod(shard.shape) * self.shards.dtype(shard.leaf).itemsize
                for shards in lost.values()
                for shard in shards
            )
            machines = (
                "this machine still has" if jax.process_count() == 1 else "the machines still have"
            )
            source = f"which {machines} in {self.folder}"
            if moved:
                source += f"; {moved:,} bytes of it came from other processes"
            return Restored(saved.step, saved.meta, leaves, source)
        return None

    def _gather_lost(self, lost: set[Shard]) -> dict[int, list[Shard]]:
        """Process → the shards that it needs and does not have, for all processes that lack some.
        lost: this process's."""
        # As numbers in an order that all processes know, so that the message is short.
        missing = [number for number, shard in enumerate(self._needed) if shard in lost]
        gathered: dict[int, list[Shard]] = {}
        for process, numbers in enumerate(cluster.gather(missing)):
            if numbers:
                needed = self.shards.needed_by(process)
                gathered[process] = [needed[number] for number in numbers]
        return gathered

    def _lost_everywhere(self, lost: dict[int, list[Shard]]) -> str:
        """The lost shards that no process has, in words; "" if there is none."""
        gone = [shard for shard, giver in self.shards.givers(lost).items() if giver is None]
        if not gone:
            return ""
        process = min(process for process, of_process in lost.items() if gone[0] in of_process)
        name = self.shards.name(gone[0])
        parts = (
            f"{len(gone)} parts of the state, {name} first,"
            if len(gone) > 1
            else f"a part of {name}"
        )
        return f"no machine has {parts} for process {process}"

    def _read(self, saved: LocalStep) -> tuple[dict[jax.Device, dict[int, jax.Array]], set[Shard]]:
        """Device → leaf → its shard there, as far as this machine has them undamaged; and the
        shards that it has not."""
        places, lost = self._places.get(saved, {}), set[Shard]()
        arrays: dict[jax.Device, dict[int, jax.Array]] = {
            device: {} for device in jax.local_devices()
        }
        for shard in self._needed:
            if shard not in places:
                lost.add(shard)
                continue
            try:
                numbers = read_shard(places[shard], shard, self.shards.dtype(shard.leaf))
            except DamagedError as error:
                lost.add(shard)
                streams.remark(f"passed over: {error}")
                continue
            kind = self.shards.leaves[shard.leaf].sharding.memory_kind
            for device in self.shards.devices[shard]:
                if device in arrays:
                    sharding = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
                    # The buffers live until they are copied: without waiting those of all shards
                    # could pile up.
                    arrays[device][shard.leaf] = jax.block_until_ready(
                        jax.device_put(numbers, sharding)
                    )
        return arrays, lost

    def _complete(
        self, arrays: dict[jax.Device, dict[int, jax.Array]], lost: dict[int, list[Shard]]
    ) -> list[jax.Array]:
        """The leaves; each lost shard comes from a device that still has it. Every process gives
        and takes in the same order."""
        givers = self.shards.givers(lost)
        incomplete = {shard.leaf for shard in givers}
        leaves = []
        for index, leaf in sorted(self.shards.leaves.items()):
            # popped, so that a leaf's old shards are freed once the sum has replaced them
            mine = {
                device: shards.pop(index) for device, shards in arrays.items() if index in shards
            }
            if index in incomplete:
                # One device gives each distinct shard, also those that nobody has lost: the sum
                # replaces the shards of all devices of the leaf.
                giving = {
                    givers.get(shard) or devices[0]
                    for shard, devices in self.shards.devices.items()
                    if shard.leaf == index
                }
                leaves.append(give_copies(leaf, self.shards.dtype(index), mine, giving))
            else:
                shards = [mine[device] for device in leaf.sharding.addressable_devices]
                leaves.append(
                    jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)
                )
        return leaves


def give_copies(
    leaf: Leaf, dtype: np.dtype, mine: dict[jax.Device, jax.Array], giving: set[jax.Device]
) -> jax.Array:
    """A leaf of which some devices lack their shard, with the numbers of the devices in `giving`:
    one for each distinct shard.

    All processes call this at the same point. mine: the shards that this process's devices have.
    Memory for two more shards is needed on each device meanwhile.
    """
    # The sum is a program of the devices: a leaf in the host's memory is moved to theirs and back.
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
    mesh, on_device = sharding.mesh, NamedSharding(sharding.mesh, sharding.spec)
    shape = sharding.shard_shape(leaf.shape)
    shards = [
        jax.device_put(
            mine[device] if device in mine else np.zeros(shape, dtype),
            jax.sharding.SingleDeviceSharding(device),
        )
        for device in sharding.addressable_devices
    ]
    numbers = jax.make_array_from_single_device_arrays(leaf.shape, on_device, shards)
    flags = np.array([device in giving for device in mesh.devices.flat], np.uint32)
    flag = jax.make_array_from_callback(
        flags.shape, NamedSharding(mesh, P(mesh.axis_names)), flags.__getitem__
    )
    program = jax.jit(functools.partial(_sum_of_copies, mesh=mesh, spec=sharding.spec)).lower(
        numbers, flag
    )
    compiled = cluster.compile_everywhere(f"copies of leaf {leaf.index}, {next(_copies)}", program)
    complete = compiled(numbers, flag)
    if not host_memory.is_host(sharding):
        return jax.block_until_ready(complete)
    moved = [
        jax.device_put(
            s.data, jax.sharding.SingleDeviceSharding(s.device, memory_kind=host_memory.KIND)
        )
        for s in complete.addressable_shards
    ]
    return jax.block_until_ready(
        jax.make_array_from_single_device_arrays(leaf.shape, sharding, moved)
    )


def _sum_of_copies(numbers: jax.Array, flag: jax.Array, mesh: Mesh, spec: P) -> jax.Array:
    """Inside jit: the numbers of the devices whose flag is 1, on all devices that hold the same
    shard; bit for bit."""
    names = {name for part in spec for name in mesh_axes(part)}
    copies = [axis for axis in mesh.axis_names if axis not in names]

    def on_each(x: jax.Array, flag: jax.Array) -> jax.Array:
        # As integers: −0.0 + 0.0 is 0.0, and a NaN or an infinity times the flag 0 is NaN.
        bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
        # In 32 bits: not every backend adds up fewer.
        summed = psum(bits.astype(jnp.uint32) * flag[0], copies)
        return lax.bitcast_convert_type(summed.astype(bits.dtype), x.dtype)

    return jax.shard_map(
        on_each, mesh=mesh, in_specs=(spec, P(mesh.axis_names)), out_specs=spec, check_vma=False
    )(numbers, flag)
