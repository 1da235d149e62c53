"""Whether parameters are what they should be, asked on the devices that hold them: finite, and the
same on all that have copies.

The programs are small, and read each parameter once. They are compiled when they are asked for
first.
"""

import collections
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled

from jaxtrain.devices import cluster
from jaxtrain.devices.mesh import AXES
from jaxtrain.devices.sharding import mesh_axes
from jaxtrain.training.state import TrainState


class Finiteness:
    """Says whether all numbers of a pytree of arrays are finite.

    mesh: the devices that hold them, all of which get the answer.
    """

    def __init__(self, mesh: Mesh):
        self._sharding = NamedSharding(mesh, PartitionSpec())
        self._compiled: Compiled | None = None

    def __call__(self, arrays: Any) -> bool:
        """Waits for the devices. Every process must call this, at the same point of the program."""
        if self._compiled is None:
            self._compiled = cluster.compile_everywhere(
                "finite parameters", jax.jit(_finite, out_shardings=self._sharding).lower(arrays)
            )
        return bool(self._compiled(arrays))


def _finite(arrays: Any) -> jax.Array:
    # Zero times a number is a number if that is finite. Sums compile in a fifth of the time that
    # isfinite and all take.
    return sum((0 * a).sum() for a in jax.tree.leaves(arrays)) == 0


# --- copies ---------------------------------------------------------------------------------------


# waits for what is wrong with the copies, in words; "" if nothing is
Comparison = Callable[[], str]


class Copies:
    """Compares the copies of parameters that several devices hold, bit by bit, by sums that each
    device makes of its own.

    A parameter's spec says over which mesh axes it is split; devices that differ in the other axes
    alone hold the same numbers. So replicas that train apart, whose parameters are split over
    `replica`, are compared inside each, and their anchor across all.

    state: as arrays or ShapeDtypeStructs with NamedShardings on the mesh.
    """

    def __init__(self, mesh: Mesh, state: TrainState):
        self._mesh = mesh
        leaves = jax.tree.leaves((state.params, state.anchor))
        splits = [
            tuple(a for part in leaf.sharding.spec for a in mesh_axes(part) if mesh.shape[a] > 1)
            for leaf in leaves
        ]
        copied = [math.prod(mesh.shape[axis] for axis in split) < mesh.size for split in splits]
        self._places = [place for place, copy in enumerate(copied) if copy]
        self._specs = [leaves[place].sharding.spec for place in self._places]
        self._splits = sorted({splits[place] for place in self._places})
        self._of_split = [self._splits.index(splits[place]) for place in self._places]
        self._compiled: Compiled | None = None

    def compare(self, state: TrainState) -> Comparison:
        """A function that waits for the result; the devices begin at once, and `state` may be
        donated then.

        Every process must call this, at the same point of the program.
        """
        if not self._places:  # no parameter is on several devices
            return lambda: ""
        leaves = jax.tree.leaves((state.params, state.anchor))
        arrays = [leaves[place] for place in self._places]
        if self._compiled is None:
            whole = NamedSharding(self._mesh, PartitionSpec())
            self._compiled = cluster.compile_everywhere(
                "copies", jax.jit(self._sums, out_shardings=whole).lower(arrays)
            )
        sums = self._compiled(arrays)
        return lambda: self._differences(np.asarray(sums))

    def _differences(self, sums: np.ndarray) -> str:
        """What the sums say, [splits, devices of the mesh in its order], in words."""
        wrong: dict[jax.Device, int] = {}  # how many others have the same
        undecided: dict[jax.Device, None] = {}
        for split, of_devices in zip(
            self._splits, sums.reshape(-1, *self._mesh.devices.shape), strict=True
        ):
            for place in np.ndindex(*(self._mesh.shape[axis] for axis in split)):
                index = tuple(
                    place[split.index(axis)] if axis in split else slice(None) for axis in AXES
                )
                devices, copies = (
                    self._mesh.devices[index].ravel(),
                    of_devices[index].ravel().tolist(),
                )
                (most, count), *rest = collections.Counter(copies).most_common()
                if rest and rest[0][1] == count:  # as many say one thing as another
                    undecided |= dict.fromkeys(devices)
                elif rest:
                    wrong |= {
                        device: count
                        for device, copy in zip(devices, copies, strict=True)
                        if copy != most
                    }
        parts = [
            f"{_name(device)} has parameters that are not those of {_others(count)}"
            for device, count in wrong.items()
        ]
        if unclear := [_name(device) for device in undecided if device not in wrong]:
            parts.append(
                f"{' and '.join(unclear)} have parameters that should be the same and are not"
            )
        return "; ".join(parts)

    def _sums(self, arrays: list[jax.Array]) -> jax.Array:
        def own(parts: list[jax.Array]) -> jax.Array:
            sums = [jnp.uint32(0)] * len(self._splits)
            for number, (of, part) in enumerate(zip(self._of_split, parts, strict=True)):
                sums[of] = sums[of] + (2 * number + 1) * bit_sum(part)
            return jnp.stack(sums).reshape(-1, *[1] * len(AXES))

        specs = {"in_specs": (self._specs,), "out_specs": PartitionSpec(None, *AXES)}
        sums = jax.shard_map(own, mesh=self._mesh, **specs, axis_names=set(AXES), check_vma=False)(
            arrays
        )
        return sums.reshape(len(self._splits), -1)


def bit_sum(x: jax.Array) -> jax.Array:
    """uint32: the sum of a 32-bit array's bit patterns, each times an odd number by its place,
    modulo 2³². A change of any one number changes it, since odd numbers have inverses."""
    bits = lax.bitcast_convert_type(x.reshape(-1), jnp.uint32)
    return (bits * (2 * lax.iota(jnp.uint32, x.size) + 1)).sum(dtype=jnp.uint32)


def _name(device: jax.Device) -> str:
    return f"{device.platform}:{device.id} (process {device.process_index})"


def _others(count: int) -> str:
    return f"the {count} others that hold them" if count > 1 else "the other that holds them"
