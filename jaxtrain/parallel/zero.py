"""ZeRO: which dimension of a parameter's gradient and optimizer state is shared out over the data axis, and the reduction
that leaves it so (Rajbhandari et al. 2020; stage 1: optimizer state).

Where embedding and head are the same on every stage, their optimizer state is shared out over `stage` as well.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxtrain.mesh import BATCH_AXES, DATA, MODEL, STAGE, psum, psum_scatter
from jaxtrain.sharding import mesh_axes, spec


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How one gradient leaves the devices that made parts of it.

    sum_axes:     mesh axes over which it is only summed
    scatter_axes: mesh axes over which the sum is left scattered, along `dim` of the array
    storage:      its sharding with those axes (the optimizer state's); `unscattered` is the parameter's own
    """

    sum_axes: tuple[str, ...]
    scatter_axes: tuple[str, ...]
    dim: int
    storage: PartitionSpec
    unscattered: PartitionSpec


def plan(axes: tuple[str | None, ...], shape: tuple[int, ...], own: int, mesh: Mesh, zero: int) -> Reduction:
    """The reduction of a gradient with logical `axes` and `shape`, whose first `own` dimensions are not the parameter's own
    (stage, layer). Where no dimension divides, it is summed and stays whole."""
    parameter = spec(axes)
    copies = BATCH_AXES if any(STAGE in mesh_axes(part) for part in parameter) else (*BATCH_AXES, STAGE)
    candidates = [(STAGE, DATA), (DATA,)] if STAGE in copies else [(DATA,)]
    for names in candidates if zero else []:
        size = math.prod(mesh.shape[n] for n in names)
        for dim in range(own, len(shape)):
            if size > 1 and parameter[dim] is None and shape[dim] % size == 0:
                parts = list(parameter)
                parts[dim] = names if len(names) > 1 else names[0]
                rest = tuple(a for a in copies if a not in names)
                return Reduction(rest, names, dim, PartitionSpec(*parts), parameter)
    return Reduction(copies, (), 0, parameter, parameter)


def reduce(gradient: jax.Array, how: Reduction, dtype) -> jax.Array:
    """Inside the manual region: this device's sum → the sum over all, its own part of it where it is scattered."""

    def move(part):
        part = part.astype(dtype)
        if how.scatter_axes:
            part = psum_scatter(part, how.scatter_axes, how.dim)
        return psum(part, how.sum_axes).astype(jnp.float32)

    # Each device of `model` reduces its own part: the partitioner would gather the whole gradient over `model` first, whatever the
    # constraints around the reduce-scatter.
    split = PartitionSpec(*(MODEL if MODEL in mesh_axes(part) else None for part in how.unscattered))
    return jax.shard_map(move, in_specs=(split,), out_specs=split, axis_names={MODEL}, check_vma=False)(gradient)
