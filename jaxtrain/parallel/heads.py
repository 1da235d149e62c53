"""What the partitioner cannot split, run on each device's own heads: kernels, and a fixed layout in
memory."""

import functools
from collections.abc import Callable

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P

from jaxtrain.devices.mesh import BATCH_AXES, MODEL, over_model, partitioned

HEADS = P(None, None, MODEL)


def by_heads(fn: Callable, arrays: tuple, same: tuple = ()):
    """fn(*arrays, *same) → arrays, on each device's own heads: they are the third dimension of all
    `arrays` and results; `same` are pytrees without heads."""
    return over_model(fn, ((HEADS,) * len(arrays) + (P(),) * len(same)), HEADS)(*arrays, *same)


def on_each_device(fn: Callable, arrays: tuple, same: tuple = ()):
    """The same outside of the runtime's manual region, where the partitioner has all axes: on each
    device's own sequences as well, which are the first dimension. XLA's TPU compiler leaves a
    kernel to no partitioner, not even along axes of one device."""
    if jax.sharding.get_abstract_mesh().empty:
        return fn(*arrays, *same)
    split = P(BATCH_AXES, None, MODEL)
    return jax.shard_map(
        fn, in_specs=((split,) * len(arrays) + (P(),) * len(same)), out_specs=split, check_vma=False
    )(*arrays, *same)


def over_heads(
    kernel: Callable, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None
) -> jax.Array:
    """kernel(q, k, v, mask) → like q, on arrays [batch, token, heads, head dimension] whose heads
    are split over `model`; the mask ([batch or 1, 1, T, S] or None) is the same for all heads.

    Also where `model` has one device: inside the runtime all axes are manual then, and a kernel
    with a partitioning rule of its own (cuDNN's attention) is lowered as it is instead of through
    the partitioner.
    """
    return by_heads(kernel, (q, k, v), (mask,))


def as_written(x: jax.Array) -> jax.Array:
    """What is read from a slot, in the order of its dimensions where the partitioner has no part in
    it: XLA's GPU compiler would have sums over tokens read it column by column, and transpose the
    whole pool for that in every tick."""
    return x if partitioned() else _in_order(x)


def _in_order(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _row_major(x: jax.Array, split: P) -> jax.Array:
    if not isinstance(x, jax.core.Tracer):
        return x  # outside of a compiled program there is nothing to decide
    return over_model(_in_order, (split,), split)(x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def row_major(x: jax.Array, split: P = HEADS) -> jax.Array:
    """x, which `model` splits so, as it is; it and its gradient lie in memory in the order of their
    dimensions.

    Left to itself XLA lays what attention makes out by heads, and an array that outlives its op,
    such as a gradient that waits for the weight's, gets another layout where it is read: it is then
    transposed whole in every tick (seen ahead of time for GPU and TPU).
    """
    return _row_major(x, split)


row_major.defvjp(
    lambda x, split: (_row_major(x, split), None), lambda split, _, g: (_row_major(g, split),)
)
