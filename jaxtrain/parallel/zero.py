"""ZeRO (Rajbhandari et al. 2020): the arrays that are sharded over the data axis, and the
collectives for that.

    stage 0   none
    stage 1   the optimizer's state
    stage 2   also the gradients' sums: the gradients of a microbatch are reduced in its W
    stage 3   also the parameters: gathered layer by layer inside an op, or all of them once a step

A parameter is sharded along one of its own dimensions, not along those of the stack of layers. If
every stage has the same embedding and head, their optimizer state is sharded over `stage` as well.
With `parallel.ends=sharded` what stands before and after the layers is sharded as in stage 3, over
all devices of a stage that have a copy: `data`, `context` and `expert`.

Begin with `Reduction`, the plan for one parameter, and `reduction_of`, which makes it; `gather` and
`reduce` carry it out. They run inside the runtime's manual region, on a device's part of one
parameter (with or without the leading dimensions of a stack of layers).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxtrain.config.sizes import scattered
from jaxtrain.devices.mesh import (
    AXES,
    DATA,
    MODEL,
    STAGE,
    SUM_AXES,
    over_model,
    psum,
    psum_scatter,
)
from jaxtrain.devices.sharding import is_split, mesh_axes, spec
from jaxtrain.parallel.attention.heads import row_major
from jaxtrain.parallel.fp8 import Quantized, mapped
from jaxtrain.parallel.replicas import sum_inside_first


@dataclasses.dataclass(frozen=True)
class Zero:
    """The stage of ZeRO of layers, or of what stands before and after them, and the time of its
    collectives.

    stage:  0 to 3
    gather: parameters of stage 3 are gathered by "layer" inside ops, or all once a "step"
    reduce: gradients are reduced after a "step", in each "microbatch", or in the "last" one, where
        embedding and head are reduced after it
    dtype:  of gradients in collectives
    """

    stage: int = 1
    gather: str = "layer"
    reduce: str = "step"
    dtype: jnp.dtype = jnp.dtype("float32")

    @property
    def gathers_in_ops(self) -> bool:
        return self.stage == 3 and self.gather == "layer"

    @property
    def gathers_once(self) -> bool:
        return self.stage == 3 and self.gather == "step"

    @property
    def reduces_in_ops(self) -> bool:
        return self.reduce == "microbatch"

    @property
    def reduces_in_last(self) -> bool:
        return self.reduce == "last"

    def held(self, reduction: "Reduction") -> PartitionSpec:
        """The sharding of a parameter that ops read."""
        return reduction.sharded if self.stage == 3 else reduction.unsharded


@dataclasses.dataclass(frozen=True)
class Reduction:
    """The sharding of a parameter's gradient and optimizer state, and the collectives of the
    gradient.

    sum_axes:     mesh axes over which the gradient is only summed
    scatter_axes: mesh axes over which the sum is scattered, along dimension `dim` of a parameter
                  without leading dimensions; the first ones are the outermost
    shard_axes:   the first ones of these, over which an op gathers a parameter of stage 3, or
                  scatters the gradient of a microbatch
    lead:         the number of leading dimensions (stage, layer)
    unsharded:    the parameter's sharding without ZeRO
    sharded:      its sharding over `shard_axes`
    storage:      the sharding over all of `scatter_axes`, which the optimizer's state has
    counts:       the gradient is a number of tokens, which no other type than float32 may round
    """

    sum_axes: tuple[str, ...]
    scatter_axes: tuple[str, ...]
    shard_axes: tuple[str, ...]
    dim: int
    lead: int
    unsharded: PartitionSpec
    sharded: PartitionSpec
    storage: PartitionSpec
    counts: bool = False

    def axis(self, ndim: int) -> int:
        """The scattered dimension of an array of `ndim` dimensions, a stack's or a layer's."""
        return self.dim + ndim - (len(self.unsharded) - self.lead)


@dataclasses.dataclass(frozen=True)
class ParameterArray:
    """A parameter's array on all devices.

    axes:   the logical axis of each dimension
    shape:  its sizes
    lead:   the number of leading dimensions (stage, layer), which are not sharded
    counts: its gradient is a number of tokens
    """

    axes: tuple[str | None, ...]
    shape: tuple[int, ...]
    lead: int = 0
    counts: bool = False


def reduction_of(
    array: ParameterArray,
    mesh: Mesh,
    zero: int,
    sum_axes: tuple[str, ...] = SUM_AXES,
    shard_axes: tuple[str, ...] = (DATA,),
) -> Reduction:
    """The reduction of a parameter's gradient. One none of whose dimensions divides is summed and
    stays unsharded.

    zero: the stage of ZeRO
    sum_axes: mesh axes whose devices have other tokens; `stage` is added where all stages have the
        parameter
    shard_axes: the mesh axes over which ZeRO shards inside a stage
    """
    unsharded, lead = spec(array.axes), array.lead
    # An axis that splits the parameter has other numbers on each device, and nothing to sum.
    splitting = {name for part in unsharded for name in mesh_axes(part)}
    copies = tuple(name for name in (*sum_axes, STAGE) if name not in splitting)
    unsplit = [part is None for part in unsharded[lead:]]
    inside = tuple(name for name in shard_axes if name in copies)
    scatter_axes: tuple[str, ...] = ()
    dim = 0
    if zero:
        scatter_axes, dim = scattered(
            array.shape[lead:], unsplit, inside, STAGE in copies, mesh.shape
        )
    # Ops gather and scatter inside a stage alone: other stages run other ops at that time.
    sharded = tuple(name for name in scatter_axes if name in inside)

    def split_over(names: tuple[str, ...]) -> PartitionSpec:
        parts = list(unsharded)
        if names:
            parts[lead + dim] = names[0] if len(names) == 1 else names
        return PartitionSpec(*parts)

    return Reduction(
        sum_axes=tuple(axis for axis in copies if axis not in scatter_axes),
        scatter_axes=scatter_axes,
        shard_axes=sharded,
        dim=dim,
        lead=lead,
        unsharded=unsharded,
        sharded=split_over(sharded),
        storage=split_over(scatter_axes),
        counts=array.counts,
    )


# Collectives over `data` run on each device's part over `model`. With the partitioner in charge of
# `model` one of these would first gather the array over `model` (devices/mesh.py: over_model).
def _on_parts(fn: Callable, split: PartitionSpec, x: jax.Array) -> jax.Array:
    return over_model(fn, (split,), split)(x)


def _model_split(reduction: Reduction, x: jax.Array) -> PartitionSpec:
    """The sharding over `model` of a parameter's array, a stack's or a layer's."""
    return PartitionSpec(
        *(
            MODEL if MODEL in mesh_axes(part) else None
            for part in reduction.unsharded[len(reduction.unsharded) - x.ndim :]
        )
    )


def in_memory_order(reduction: Reduction, part):
    """A parameter; if it is quantized, it lies in memory in the order of its dimensions."""
    # cuBLASLt multiplies FP8 along the last dimension of both operands, so F and B read a matrix in
    # two orders. Without this XLA's GPU compiler transposes the stack of all layers for one of
    # them, outside of the op and so in every tick. Tensors in blocks have a copy for each order.
    if not isinstance(part, Quantized) or part.use.blocks:
        return part
    split = _model_split(reduction, part.bits)
    return dataclasses.replace(part, bits=row_major(part.bits, split))


def in_order(sums: jax.Array, reduction: Reduction) -> jax.Array:
    """A layer's gradient sums, which lie in memory in the order of their dimensions."""
    # Without this XLA gives the sums of all layers the layout that the reduce-scatter prefers, and
    # transposes them in every tick.
    return row_major(sums, _model_split(reduction, sums))


def gather(part, reduction: Reduction):
    """A parameter of stage 3, an array or quantized, all-gathered over its `shard_axes`."""
    return mapped(lambda array: _gathered(array, reduction, reduction.shard_axes), part)


def gather_stored(part: jax.Array, reduction: Reduction) -> jax.Array:
    """An array laid out by `storage`, all-gathered: laid out by `unsharded`."""
    return _gathered(part, reduction, reduction.scatter_axes)


def _gathered(part: jax.Array, reduction: Reduction, axes: tuple[str, ...]) -> jax.Array:
    if not axes:
        return part
    dim = reduction.axis(part.ndim)
    all_gather = lambda a: lax.all_gather(a, axes, axis=dim, tiled=True)
    return _on_parts(all_gather, _model_split(reduction, part), part)


def reduce(
    gradient: jax.Array, reduction: Reduction, dtype, axes: tuple[str, ...] | None = None
) -> jax.Array:
    """The gradient of this device → the sum over all devices, float32, this device's shard where it
    is scattered. axes: the only mesh axes to reduce over; None: all"""
    scatter = tuple(a for a in reduction.scatter_axes if axes is None or a in axes)
    sums = tuple(a for a in reduction.sum_axes if axes is None or a in axes)

    def move(part):
        # bfloat16 halves the message but rounds counts of tokens above 256, so they stay float32.
        part = part.astype(jnp.float32 if reduction.counts else dtype)
        # Inside a replica first: only shards then cross `replica`, the slowest network.
        if scatter:
            part = psum_scatter(part, scatter, reduction.axis(part.ndim))
        return sum_inside_first(part, sums).astype(jnp.float32)

    return _on_parts(move, _model_split(reduction, gradient), gradient)


def sum_of_squares(shard: jax.Array, storage: PartitionSpec, sizes: Mapping[str, int]) -> jax.Array:
    """The float32 sum of the squares of a device's shard, divided by the number of devices that
    have the same shard. storage: the array's sharding; sizes: of the axes over which the sums of
    all devices are then added up"""
    # An axis that does not split the array has the same shard on all of its devices; a sum over
    # all devices counts it once for each.
    split = {a for part in storage for a in mesh_axes(part)}
    copies = math.prod(size for axis, size in sizes.items() if axis not in split)
    return jnp.sum(jnp.square(shard.astype(jnp.float32))) / copies


def stored_squares(part: jax.Array, reduction: Reduction) -> jax.Array:
    """`sum_of_squares` over all axes of a shard laid out by `storage`, in the manual region:
    float32 [devices of `model`]."""

    def local(shard: jax.Array) -> jax.Array:
        sizes = {axis: lax.axis_size(axis) for axis in AXES}
        return sum_of_squares(shard, reduction.storage, sizes)[None]

    return over_model(local, (_model_split(reduction, part),), PartitionSpec(MODEL))(part)


def norms_of(squares: Sequence[jax.Array]) -> jax.Array:
    """The l2 norms of several trees from the `stored_squares` of their arrays, float32 [trees].
    squares: for each array [trees, devices of `model`]"""
    trees = squares[0].shape[0]

    def total(*squares: jax.Array) -> jax.Array:
        sums = [jnp.stack([of_array[i, 0] for of_array in squares]).sum() for i in range(trees)]
        # as scalars, which XLA joins: where processes add up, a number's place in an array decides
        # in which order
        return jnp.stack([psum(of_tree, AXES) for of_tree in sums])

    specs = (PartitionSpec(None, MODEL),) * len(squares)
    return jnp.sqrt(over_model(total, specs, PartitionSpec())(*squares))


def reduce_in_op(gradient: jax.Array, reduction: Reduction, dtype) -> jax.Array:
    """A microbatch's gradient, summed over its `shard_axes`: this device's shard. Without such axes
    it stays as it is."""
    # Only these axes are inside a stage: devices of one stage are in the same op at the same time.
    axes = reduction.shard_axes
    return reduce(gradient, reduction, dtype, axes) if axes else gradient


def reduce_rest(gradient: jax.Array, reduction: Reduction, dtype) -> jax.Array:
    """The reduction after the step, over the axes that `reduce_in_op` leaves out."""
    rest = tuple(
        a for a in (*reduction.scatter_axes, *reduction.sum_axes) if a not in reduction.shard_axes
    )
    return reduce(gradient, reduction, dtype, rest)


def unsharded_shape(
    shape: tuple[int, ...], reduction: Reduction, sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """The shape on a device of a parameter that is not sharded over `shard_axes`, from that of a
    shard. sizes: of the mesh's axes"""
    return _resized(shape, reduction, lambda size: size * _shards(reduction, sizes))


def shard_shape(
    shape: tuple[int, ...], reduction: Reduction, sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """The shape of a shard over `shard_axes`, from that of the unsharded parameter. sizes: of the
    mesh's axes"""
    return _resized(shape, reduction, lambda size: size // _shards(reduction, sizes))


def _shards(reduction: Reduction, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis in reduction.shard_axes)


def _resized(
    shape: tuple[int, ...], reduction: Reduction, resize: Callable[[int], int]
) -> tuple[int, ...]:
    if not reduction.shard_axes:  # a scalar has no dimension to shard
        return shape
    dim = reduction.axis(len(shape))
    return (*shape[:dim], resize(shape[dim]), *shape[dim + 1 :])


# --- a table sharded by columns: the tokens' rows travel, not the table ---------------------------

# A vocabulary of 128,256 rows is larger than the activations of a microbatch. So each device looks
# up its columns for the sequences of all shards, and an all-to-all brings each sequence's columns
# together.


def gather_sequences(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """[batch, …] of each shard over `axes` → [shards · batch, …]."""
    return lax.all_gather(x, axes, axis=0, tiled=True)


def _activation_split() -> PartitionSpec:
    return PartitionSpec(None, MODEL if is_split("sequence") else None)


def columns_to_sequences(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """This device's columns of all sequences → all columns of this device's sequences: [shards ·
    batch, T, D/shards] → [batch, T, D]."""
    return _on_parts(lambda a: lax.all_to_all(a, axes, 0, 2, tiled=True), _activation_split(), x)


def sequences_to_columns(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The inverse of `columns_to_sequences`: [batch, T, D] → [shards · batch, T, D/shards]."""
    return _on_parts(lambda a: lax.all_to_all(a, axes, 2, 0, tiled=True), _activation_split(), x)
