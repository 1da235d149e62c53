"""Checks of parameters on the devices that hold them: they are finite, and copies are equal.

The programs are small, and read each parameter once. They are compiled when they are first needed.
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
    """A check that all numbers of a pytree of arrays are finite.

    mesh: the devices that hold them, all of which get the result.
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
    # Zero times a finite number is zero, and times another NaN. Sums compile in a fifth of the time
    # of isfinite and all.
    return sum((0 * a).sum() for a in jax.tree.leaves(arrays)) == 0


# --- copies ---------------------------------------------------------------------------------------


# waits for a text about copies that differ; "" if none do
Comparison = Callable[[], str]


class Copies:
    """A comparison of the copies of parameters that several devices hold, bit by bit, by a sum that
    each device computes of its copy.

    A parameter's spec has the mesh axes over which it is sharded; devices that differ only in other
    axes hold the same numbers. Parameters of independent replicas are sharded over `replica`, so
    they are compared inside each replica, and the anchor across all.

    state: as arrays or ShapeDtypeStructs with NamedShardings on the mesh.
    """

    def __init__(self, mesh: Mesh, state: TrainState):
        self._mesh = mesh
        # What ops read, and the anchor. With ZeRO masters and moments have no copies.
        leaves = jax.tree.leaves((state.read, state.anchor))
        splits = [
            tuple(a for part in leaf.sharding.spec for a in mesh_axes(part) if mesh.shape[a] > 1)
            for leaf in leaves
        ]
        copied = [math.prod(mesh.shape[axis] for axis in split) < mesh.size for split in splits]
        self._copied = [i for i, is_copied in enumerate(copied) if is_copied]
        self._specs = [leaves[i].sharding.spec for i in self._copied]
        # One sum for all parameters of a split: the result has a number for each device and split,
        # and does not grow with the model.
        self._splits = sorted({splits[i] for i in self._copied})
        self._of_split = [self._splits.index(splits[i]) for i in self._copied]
        self._compiled: Compiled | None = None

    def compare(self, state: TrainState) -> Comparison:
        """A function that waits for the result. The devices begin at once, and `state` may be
        donated when this returns.

        Every process must call this, at the same point of the program.
        """
        if not self._copied:  # no parameter is on several devices
            return lambda: ""
        leaves = jax.tree.leaves((state.read, state.anchor))
        arrays = [leaves[i] for i in self._copied]
        if self._compiled is None:
            everywhere = NamedSharding(self._mesh, PartitionSpec())
            self._compiled = cluster.compile_everywhere(
                "copies", jax.jit(self._sums, out_shardings=everywhere).lower(arrays)
            )
        sums = self._compiled(arrays)
        return lambda: self._differences(np.asarray(sums))

    def _differences(self, sums: np.ndarray) -> str:
        """A text about sums, [splits, devices of the mesh in its order], that should be equal."""
        wrong: dict[jax.Device, int] = {}  # → the number of devices that agree with each other
        undecided: dict[jax.Device, None] = {}
        for split, of_devices in zip(
            self._splits, sums.reshape(-1, *self._mesh.devices.shape), strict=True
        ):
            # Devices with the same place along the axes of the split hold the same shards.
            for place in np.ndindex(*(self._mesh.shape[axis] for axis in split)):
                index = tuple(
                    place[split.index(axis)] if axis in split else slice(None) for axis in AXES
                )
                devices = self._mesh.devices[index].ravel()
                copies = of_devices[index].ravel().tolist()
                (most, count), *rest = collections.Counter(copies).most_common()
                # The majority is right. With two copies, or two equal groups, nobody can tell.
                if rest and rest[0][1] == count:
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
            # Each parameter's sum times another odd number: two that are exchanged change the
            # total.
            sums = [jnp.uint32(0)] * len(self._splits)
            for number, (of, part) in enumerate(zip(self._of_split, parts, strict=True)):
                sums[of] = sums[of] + (2 * number + 1) * bit_sum(part)
            return jnp.stack(sums).reshape(-1, *[1] * len(AXES))

        # Manual over all axes, so that each device sums its own copy: to the partitioner copies are
        # one array, and it would read any of them.
        specs = {"in_specs": (self._specs,), "out_specs": PartitionSpec(None, *AXES)}
        sums = jax.shard_map(own, mesh=self._mesh, **specs, axis_names=set(AXES), check_vma=False)(
            arrays
        )
        return sums.reshape(len(self._splits), -1)


def bit_sum(x: jax.Array) -> jax.Array:
    """The sum of the bit patterns of an array of 16 or 32 bits, each times an odd number by its
    index, modulo 2³²; uint32. A change of any one number changes it, since odd numbers have
    inverses."""
    bits = lax.bitcast_convert_type(x.reshape(-1), jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    bits = bits.astype(jnp.uint32)
    return (bits * (2 * lax.iota(jnp.uint32, x.size) + 1)).sum(dtype=jnp.uint32)


def _name(device: jax.Device) -> str:
    return f"{device.platform}:{device.id} (process {device.process_index})"


def _others(count: int) -> str:
    return f"the {count} others that hold them" if count > 1 else "the other that holds them"
