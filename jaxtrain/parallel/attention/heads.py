"""Attention's functions that the partitioner cannot split, such as kernels, run on each device's
own heads (`by_heads`); and arrays with a fixed layout in memory (`row_major`, and on TPUs
`heads_first`).

A layout is fixed where an array is read in another op, or another tick, than it is written in. XLA
chooses the layout that suits the writer. A slot of a pool has one layout, so the array is then
transposed in every tick.

Shape suffixes: B batch, T tokens, N heads, H head dimension, X tokens of the batch.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P

from jaxtrain.devices.mesh import (
    BATCH_AXES,
    MODEL,
    STAGE,
    in_manual_region,
    manual_size,
    on_tpu,
    over_model,
    partitioned,
)

HEADS = P(None, None, MODEL)
# names of arrays that are saved from op to op in this order in memory, and not in the one before:
# of those that B reads, and those that W reads
KEPT_BY_HEADS, KEPT_BY_TOKENS = "kept_by_heads", "kept_by_tokens"


def by_heads(fn: Callable, arrays: tuple, same: tuple = ()):
    """Runs fn(*arrays, *same) on each device's own heads, and returns its arrays.

    arrays: heads are the third dimension of each, and of each result
    same: pytrees without heads, the same on all devices of `model`
    """
    # Also where `model` has one device fn runs so: all axes of the runtime are then manual, so a
    # kernel with a partitioning rule (cuDNN's attention) is lowered without the partitioner.
    return over_model(fn, ((HEADS,) * len(arrays) + (P(),) * len(same)), HEADS)(*arrays, *same)


def on_each_device(fn: Callable, arrays: tuple, same: tuple = ()):
    """`by_heads` for code outside of the runtime's manual region, where the partitioner has all
    axes: fn runs on each device's own sequences (dimension 0) and heads."""
    # XLA's TPU compiler refuses a kernel that the partitioner would have to split, even along axes
    # of one device.
    if jax.sharding.get_abstract_mesh().empty:
        return fn(*arrays, *same)
    split = P(BATCH_AXES, None, MODEL)
    return jax.shard_map(
        fn, in_specs=((split,) * len(arrays) + (P(),) * len(same)), out_specs=split, check_vma=False
    )(*arrays, *same)


def as_written(x: jax.Array) -> jax.Array:
    """The value x of a slot, laid out in memory in the order of its dimensions, unless the
    partitioner splits it."""
    # Without this, sums over tokens would read it column by column, and XLA's GPU compiler would
    # transpose the entire pool for them in every tick.
    return x if partitioned() else row_major_part(x)


def row_major_part(x: jax.Array) -> jax.Array:
    """Returns x, which the partitioner does not split, laid out in memory in the order of its
    dimensions."""
    if not isinstance(x, jax.core.Tracer):
        return x  # an array outside of a compiled program has its layout
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _row_major(x: jax.Array, split: P) -> jax.Array:
    return over_model(row_major_part, (split,), split)(x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def row_major(x: jax.Array, split: P = HEADS) -> jax.Array:
    """Returns x. It and its gradient lie in memory in the order of their dimensions.

    split: the PartitionSpec of x over `model`
    """
    # Without this, XLA lays out attention's results by heads. An array that outlives its op, such
    # as a gradient that waits for W, then gets another layout where it is read, and is transposed
    # in every tick (seen in programs compiled ahead of time for GPU and TPU). A custom_vjp, since
    # jax's gradient of a layout constraint constrains nothing.
    return _row_major(x, split)


row_major.defvjp(
    lambda x, split: (_row_major(x, split), None), lambda split, _, g: (_row_major(g, split),)
)


SUBLANES = 8  # rows of a tile of a TPU's memory


def _by_heads(x_BTNH: jax.Array) -> jax.Array:
    """[B, T, N, H], tokens first in memory → the same heads first, by moves of tiles alone."""
    # A TPU stores an array in tiles of SUBLANES rows. Cut at tiles, the transpose moves entire
    # tiles and changes nothing inside one.
    b, t, n, h = x_BTNH.shape
    tiles = _in_tiles(x_BTNH.reshape(b, t // SUBLANES, SUBLANES, n, h))
    x_NBTH = row_major_part(jnp.moveaxis(tiles, 3, 0).reshape(n, b, t, h))
    return jnp.moveaxis(x_NBTH, 0, 2)


def _by_tokens(x_BTNH: jax.Array) -> jax.Array:
    """The inverse of `_by_heads`."""
    b, t, n, h = x_BTNH.shape
    x_NBTH = row_major_part(jnp.moveaxis(x_BTNH, 2, 0))
    tiles = jnp.moveaxis(x_NBTH.reshape(n, b, t // SUBLANES, SUBLANES, h), 0, 3)
    return _in_tiles(tiles).reshape(b, t, n, h)


def _in_tiles(x: jax.Array) -> jax.Array:
    """[B, T / SUBLANES, SUBLANES, N, H], in memory as [B, T, N · H] is."""
    return with_layout_constraint(x, Layout((0, 1, 3, 2, 4)))


def _on_own_heads(fn: Callable, x: jax.Array) -> jax.Array:
    if not isinstance(x, jax.core.Tracer) or x.shape[1] % SUBLANES:
        return x
    return over_model(fn, (HEADS,), HEADS)(x)


def orders_by_heads() -> bool:
    """True where queries, keys and values go from their products to a TPU's kernel in one pass, by
    `heads_first`: where the runtime or one device has all axes but `model`, and with several stages
    that one, too (`kept_by_heads`)."""
    if not on_tpu() or (manual_size(STAGE) > 1 and partitioned()):
        return False
    return in_manual_region() or not partitioned()


def kept_by_heads(x_BTNH: jax.Array) -> jax.Array:
    """Returns x of `heads_first`. Where it outlives its op, the saved array's dimensions have the
    order of its memory."""
    # With another order in memory than that of their slots entire pools would be transposed in
    # every tick (seen in programs compiled ahead of time).
    b, t, n, h = x_BTNH.shape
    x_NXH = checkpoint_name(jnp.moveaxis(x_BTNH, 2, 0).reshape(n, b * t, h), KEPT_BY_HEADS)
    return jnp.moveaxis(x_NXH.reshape(n, b, t, h), 0, 2)


@jax.custom_vjp
def heads_first(x_BTNH: jax.Array) -> jax.Array:
    """Returns x, in memory by heads, [N, B, T, H], as kernels of TPUs want it; its gradient comes
    in that order and leaves in the order of its dimensions. Numbers can then be changed in one pass
    between such an array and a kernel."""
    return _on_own_heads(_by_heads, x_BTNH)


heads_first.defvjp(
    lambda x: (_on_own_heads(_by_heads, x), None),
    lambda _, g: (checkpoint_name(_on_own_heads(_by_tokens, g), KEPT_BY_TOKENS),),
)
