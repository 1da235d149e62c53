"""ZeRO (Rajbhandari et al. 2020): what the data axis shares out, and the collectives that this
takes.

    stage 0   nothing
    stage 1   the optimizer's state
    stage 2   the gradients' sums too: every microbatch's gradients are reduced as they are made
    stage 3   the parameters too: gathered layer by layer inside an op, or all of them once a step

A parameter is shared out along one of its own dimensions. Where embedding and head are the same on
every stage, their optimizer state is shared out over `stage` as well. The functions below run
inside the runtime's manual region, on a device's part of one parameter (with or without the leading
dimensions of a stack of layers).
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxtrain.devices.mesh import DATA, MODEL, STAGE, SUM_AXES, over_model, psum_scatter
from jaxtrain.devices.sharding import is_split, mesh_axes, spec
from jaxtrain.parallel.replicas import sum_inside_first


@dataclasses.dataclass(frozen=True)
class Zero:
    """What is done when. stage: 0 to 3; gather: parameters of stage 3, by "layer" inside ops or all
    once a "step"; reduce: gradients once a "step", or each "microbatch"; dtype: of gradients on
    their way."""

    stage: int = 1
    gather: str = "layer"
    reduce: str = "step"
    dtype: jnp.dtype = jnp.dtype("float32")

    @property
    def gathers_in_ops(self) -> bool:
        return self.stage == 3 and self.gather == "layer"

    @property
    def reduces_in_ops(self) -> bool:
        return self.reduce == "microbatch"


@dataclasses.dataclass(frozen=True)
class Reduction:
    """Where a parameter's gradient and optimizer state lie, and how the gradient gets there.

    sum_axes:     mesh axes over which the gradient is only summed
    scatter_axes: mesh axes over which the sum is left scattered, along dimension `dim` of the
        parameter's own; data comes first
    lead:         dimensions before the parameter's own (stage, layer)
    whole:        the parameter's sharding if nothing is shared out
    sharded:      its sharding if it is shared out over data
    storage:      shared out over all of `scatter_axes`, as the optimizer's state is
    counts:       the gradient is a number of tokens, which no other type than float32 may round
    """

    sum_axes: tuple[str, ...]
    scatter_axes: tuple[str, ...]
    dim: int
    lead: int
    whole: PartitionSpec
    sharded: PartitionSpec
    storage: PartitionSpec
    counts: bool = False

    @property
    def over_data(self) -> bool:
        return DATA in self.scatter_axes

    def axis(self, ndim: int) -> int:
        """The dimension that is shared out of an array with so many, a stack's or a layer's."""
        return self.dim + ndim - (len(self.whole) - self.lead)


def reduction_of(
    axes: tuple[str | None, ...],
    shape: tuple[int, ...],
    lead: int,
    mesh: Mesh,
    zero: int,
    sum_axes: tuple[str, ...] = SUM_AXES,
    counts: bool = False,
) -> Reduction:
    """The reduction of a gradient, or of `counts`, with logical `axes` and `shape`, whose first
    `lead` dimensions are not the parameter's own (stage, layer), over `sum_axes`, and `stage` where
    all stages hold it. Where no dimension divides, it is summed and stays whole."""
    whole = spec(axes)
    taken = {name for part in whole for name in mesh_axes(part)}
    copies = tuple(name for name in (*sum_axes, STAGE) if name not in taken)
    candidates: list[tuple[str, ...]] = (
        [(DATA, STAGE), (DATA,), (STAGE,)] if STAGE in copies else [(DATA,)]
    )

    def shared(dim: int, names: tuple[str, ...]) -> PartitionSpec:
        parts = list(whole)
        parts[dim] = names[0] if len(names) == 1 else names or None
        return PartitionSpec(*parts)

    for names in candidates if zero else []:
        names = tuple(n for n in names if mesh.shape[n] > 1)
        size = math.prod(mesh.shape[n] for n in names)
        for dim in range(lead, len(shape)):
            if size > 1 and whole[dim] is None and shape[dim] % size == 0:
                rest = tuple(a for a in copies if a not in names)
                sharded = shared(dim, tuple(n for n in names if n == DATA))
                return Reduction(
                    rest, names, dim - lead, lead, whole, sharded, shared(dim, names), counts
                )
    return Reduction(copies, (), 0, lead, whole, whole, whole, counts)


def _on_parts(fn: Callable, split: PartitionSpec, x: jax.Array) -> jax.Array:
    return over_model(fn, (split,), split)(x)


def _model_split(reduction: Reduction, x: jax.Array) -> PartitionSpec:
    """How `model` splits a parameter's array, a stack's or a layer's."""
    return PartitionSpec(
        *(
            MODEL if MODEL in mesh_axes(part) else None
            for part in reduction.whole[len(reduction.whole) - x.ndim :]
        )
    )


def gather(part: jax.Array, reduction: Reduction) -> jax.Array:
    """A parameter of stage 3, whole on each data shard."""
    if not reduction.over_data:
        return part
    dim = reduction.axis(part.ndim)
    return _on_parts(
        lambda a: lax.all_gather(a, DATA, axis=dim, tiled=True), _model_split(reduction, part), part
    )


def reduce(
    gradient: jax.Array, reduction: Reduction, dtype, axes: tuple[str, ...] | None = None
) -> jax.Array:
    """This device's sum → float32, the sum over all devices, this device's part where that is
    scattered; over these mesh `axes` alone.

    Inside a replica first, so that only the scattered part crosses to others."""
    scatter = tuple(a for a in reduction.scatter_axes if axes is None or a in axes)
    sums = tuple(a for a in reduction.sum_axes if axes is None or a in axes)

    def move(part):
        part = part.astype(jnp.float32 if reduction.counts else dtype)
        if scatter:
            part = psum_scatter(part, scatter, reduction.axis(part.ndim))
        return sum_inside_first(part, sums).astype(jnp.float32)

    return _on_parts(move, _model_split(reduction, gradient), gradient)


def reduce_in_op(gradient: jax.Array, reduction: Reduction, dtype) -> jax.Array:
    """A microbatch's gradient, summed over `data`: this device's part of it. What is not shared out
    over `data` stays as it is."""
    return reduce(gradient, reduction, dtype, (DATA,)) if reduction.over_data else gradient


def reduce_rest(gradient: jax.Array, reduction: Reduction, dtype) -> jax.Array:
    """After the step, what `reduce_in_op` left to do."""
    rest = tuple(
        a
        for a in (*reduction.scatter_axes, *reduction.sum_axes)
        if not (reduction.over_data and a == DATA)
    )
    return reduce(gradient, reduction, dtype, rest)


def whole_shape(shape: tuple[int, ...], reduction: Reduction, shards: int) -> tuple[int, ...]:
    """The shape on a device of a parameter that is whole over `data`, from that of one of its
    `shards` parts."""
    return _resized(shape, reduction, lambda size: size * shards)


def part_shape(shape: tuple[int, ...], reduction: Reduction, shards: int) -> tuple[int, ...]:
    """The opposite: that of one of `shards` parts, from that of the whole."""
    return _resized(shape, reduction, lambda size: size // shards)


def _resized(
    shape: tuple[int, ...], reduction: Reduction, resize: Callable[[int], int]
) -> tuple[int, ...]:
    dim = reduction.axis(len(shape))
    return (*shape[:dim], resize(shape[dim]), *shape[dim + 1 :]) if reduction.over_data else shape


# --- a table shared out by columns: the tokens' rows travel, not the table ------------------------


def all_sequences(x: jax.Array) -> jax.Array:
    """[batch, …] of each data shard → [shards · batch, …]."""
    return lax.all_gather(x, DATA, axis=0, tiled=True)


def _activation(x: jax.Array) -> PartitionSpec:
    return PartitionSpec(None, MODEL if is_split("sequence") else None)


def to_own_sequences(x: jax.Array) -> jax.Array:
    """This device's columns of all shards' sequences → all columns of its own: [shards · batch, T,
    D/shards] → [batch, T, D]."""
    return _on_parts(lambda a: lax.all_to_all(a, DATA, 0, 2, tiled=True), _activation(x), x)


def to_own_columns(x: jax.Array) -> jax.Array:
    """The opposite: [batch, T, D] → [shards · batch, T, D/shards]."""
    return _on_parts(lambda a: lax.all_to_all(a, DATA, 2, 0, tiled=True), _activation(x), x)
