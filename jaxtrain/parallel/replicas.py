"""Replicas: copies of the model across slow links, and collectives over `replica` that send little.

Of the devices of a replica that hold the same numbers, each sends a share of them to the other
replicas, and they all-gather the result inside the replica. So a number crosses the slow links once
each way, whatever the replica's layout. Replicas may also train independently, each with its own
parameters in arrays with a leading dimension [replicas]; only an exchange then averages them
(Douillard et al. 2023; in int8: Douillard et al. 2025).
"""

import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxtrain.config.sizes import OUTER_BLOCK
from jaxtrain.devices.mesh import AXES, REPLICA, SUM_AXES, psum, psum_scatter
from jaxtrain.devices.sharding import mesh_axes


def count(mesh: Mesh) -> int:
    return mesh.shape[REPLICA]


def sum_axes(independent_replicas: bool) -> tuple[str, ...]:
    """The mesh axes over which losses and gradients are summed."""
    return tuple(a for a in SUM_AXES if a != REPLICA) if independent_replicas else SUM_AXES


def leading(spec: PartitionSpec) -> PartitionSpec:
    """The spec of arrays [replicas, …], from the spec of one replica's."""
    return PartitionSpec(REPLICA, *spec)


def each(one: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The array of all replicas, [replicas, …], from one replica's, which has a NamedSharding."""
    sharding = one.sharding.update(spec=leading(one.sharding.spec))
    return jax.ShapeDtypeStruct(
        (count(one.sharding.mesh), *one.shape), one.dtype, sharding=sharding
    )


def copies(tree, mesh: Mesh):
    """One replica's arrays copied to all replicas, [replicas, …]."""
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (count(mesh), *a.shape)), tree)


def in_each(fn: Callable) -> Callable:
    """fn of one replica's arrays → fn of all replicas' arrays, each on its own devices."""
    return jax.vmap(fn, spmd_axis_name=REPLICA)


# --- inside a manual region -----------------------------------------------------------------------


def sum_inside_first(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """The sum over mesh axes: inside each replica, then a share of each device across `replica`."""
    # One all-reduce over everything would send complete arrays across the slow links. After a
    # reduce-scatter inside, each device sends a share, and an all-gather restores the array.
    inside = _wide([a for a in axes if a != REPLICA])
    if not (inside and _wide([a for a in axes if a == REPLICA])):
        return psum(x, axes)
    return _gathered(
        psum(psum_scatter(_padded(x, _size(inside)), inside, 0), (REPLICA,)), inside, x
    )


def _wide(axes: Sequence[str]) -> tuple[str, ...]:
    """The axes among these that have several devices."""
    return tuple(a for a in axes if lax.axis_size(a) > 1)


def _size(axes: Sequence[str]) -> int:
    return math.prod(lax.axis_size(a) for a in axes)


def _padded(x: jax.Array, multiple: int) -> jax.Array:
    """The numbers of x in one dimension, with zeros behind, to a multiple."""
    return jnp.pad(x.reshape(-1), (0, -x.size % multiple))


def _gathered(share: jax.Array, axes: tuple[str, ...], like: jax.Array) -> jax.Array:
    """The array shaped as `like` of which devices along `axes` have equal shares, padded."""
    padded = lax.all_gather(share, axes, tiled=True) if axes else share
    return padded[: like.size].reshape(like.shape)


# --- the exchange ---------------------------------------------------------------------------------


def mean_across(tree, like, dtype: str):
    """The means over replicas of float32 arrays [replicas, …], sharded as `like`: abstract arrays
    whose shardings do not name `replica`.

    dtype: of numbers that cross `replica`: "float32", or "int8" with a float32 scale for each block
        of numbers, before the sum and after it
    """
    specs = jax.tree.map(lambda a: a.sharding.spec, like)
    mean = (
        _mean_int8
        if dtype == "int8"
        else lambda shares: [psum(x, (REPLICA,)) / lax.axis_size(REPLICA) for x in shares]
    )

    # Devices of a replica that have the same numbers share the work: of an array with n copies in a
    # replica each device averages an n-th across `replica`, and the copies all-gather the means.
    def body(tree):
        parts = [a[0] for a in jax.tree.leaves(tree)]
        copies = [
            _wide([a for a in AXES if a not in {REPLICA, *itertools.chain(*map(mesh_axes, s))}])
            for s in jax.tree.leaves(specs)
        ]
        shares = [
            _padded(x, _size(axes)).reshape(_size(axes), -1)
            for x, axes in zip(parts, copies, strict=True)
        ]
        device_shares = [
            x[lax.axis_index(axes) if axes else 0] for x, axes in zip(shares, copies, strict=True)
        ]
        return jax.tree.unflatten(
            jax.tree.structure(tree), map(_gathered, mean(device_shares), copies, parts)
        )

    mesh = jax.tree.leaves(like)[0].sharding.mesh
    each_spec = jax.tree.map(leading, specs)
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(each_spec,),
        out_specs=specs,
        axis_names=set(AXES),
        check_vma=False,
    )(tree)


def _mean_int8(shares: list[jax.Array]) -> list[jax.Array]:
    """The means over replicas of arrays [n], in int8 on the slow links."""
    # Each replica sums a part of every array: an all-to-all and an all-gather of int8, which are a
    # quarter of a float32 all-reduce's bytes. Sums are float32: int8 would overflow.
    n = lax.axis_size(REPLICA)
    parts = [
        _padded(x, n * block).reshape(n, -1, block)
        for x in shares
        for block in [min(OUTER_BLOCK, -(-x.size // n))]
    ]
    sums = _in_int8(lambda a: lax.all_to_all(a, REPLICA, 0, 0, tiled=True), parts)
    means = _in_int8(
        lambda a: lax.all_gather(a, REPLICA, tiled=True), [a.mean(0, keepdims=True) for a in sums]
    )
    return [a.reshape(-1)[: x.size] for a, x in zip(means, shares, strict=True)]


def _in_int8(move: Callable, parts: list[jax.Array]) -> list[jax.Array]:
    """The results of a collective over dimension 0 of arrays [replicas or 1, blocks, block], in
    int8, all arrays in one message."""
    kinds = zip(*map(quantise, parts), strict=True)
    numbers, scales = ([*kind] for kind in kinds)
    arrived = []
    # One message for the numbers of all arrays and one for their scales: slow links cost time for
    # each message.
    for arrays in (numbers, scales):
        ends = np.cumsum([a[0].size for a in arrays])[:-1]
        pieces = jnp.split(
            move(jnp.concatenate([a.reshape(a.shape[0], -1) for a in arrays], 1)), ends, 1
        )
        arrived.append(
            [piece.reshape(-1, *a.shape[1:]) for piece, a in zip(pieces, arrays, strict=True)]
        )
    return [x * scale for x, scale in zip(*arrived, strict=True)]


def quantise(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32 [..., block] → (int8, the scale of each block, float32 [..., 1]); a block's largest
    value becomes ±127."""
    # A block of zeros has the scale 0, and is divided by 1.
    scale = jnp.abs(x).max(-1, keepdims=True) / 127
    return jnp.round(x / jnp.where(scale > 0, scale, 1)).astype(jnp.int8), scale
