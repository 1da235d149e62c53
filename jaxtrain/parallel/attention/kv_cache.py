"""A cache of keys and values in generation, whose slots the devices of `context` share:

      slots       0 … S/2 − 1              S/2 … S − 1
                 ┌───────────────────────┬──────────────┬─────────┐
                 │ device 0              │ device 1     │ unused  │
                 └───────────────────────┴──────────────┴─────────┘
      scores of the same queries to its own slots, on each device
                       m = max over devices of m_i
                       output = Σ exp(m_i − m) · values_i / Σ exp(m_i − m) · sum_i

The cache of a layer with a window of W tokens is a ring of W slots, or of all if these are fewer:
the token at position p is in slot p mod W. A single new token is written over the one that leaves
the window, and sees all slots. Several tokens of a prompt see the ring, in the order of the text,
and behind it each other; the ring is then made anew from the last of both.

Scores and sums in plain XLA (`attention.attend`) need no code for that: the partitioner makes
all-reduces of the maximum, the sum and the weighted values, which have no dimension of slots
(flash-decoding; Dao et al. 2023, https://crfm.stanford.edu/2023/10/12/flashdecoding.html). This
module has what the partitioner does badly, writing into a split dimension, for which it would
gather the cache; and attention by a kernel, which it cannot split.

Shape suffixes: B batch, T query tokens, S slots, N heads, K key/value heads, H head dimension of
keys, V of values.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.devices.mesh import BATCH_AXES, CONTEXT, MODEL
from jaxtrain.devices.sharding import shards
from jaxtrain.parallel.attention.flash import Inputs, Kernel
from jaxtrain.parallel.attention.heads import on_each_device

SLOT = "slot"  # the logical axis of a cache's slots
RING = "ring_slot"  # of slots in a ring


class Extended(NamedTuple):
    """A layer's cache with T new tokens, and what these attend to.

    cache:   arrays [B, S, …]
    seen:    arrays [B, slots, …], the cache, or a prompt's tokens behind those of a ring
    mask:    bool [1, 1, T, slots], which slots a new token sees
    is_text: bool [slots] where `seen` is in the order of the text, false before its beginning
    """

    cache: tuple[jax.Array, ...]
    seen: tuple[jax.Array, ...]
    mask: jax.Array
    is_text: jax.Array | None = None


def slots_of(tokens: int, window: int) -> tuple[int, str]:
    """(the number, the logical axis) of the slots of a layer's cache, for at most so many tokens.
    window: 0: all tokens are seen"""
    if not window:
        return tokens, SLOT
    parts = shards(RING)
    return -(-min(tokens, window) // parts) * parts, RING


def extended(
    cache: Sequence[jax.Array],
    tokens: Sequence[jax.Array],
    start: jax.Array,
    count: int | jax.Array,
    window: int,
) -> Extended:
    """A layer's cache with new tokens, arrays [B, T, …], at positions from `start` on.

    count: the number of tokens that are no padding; padding is not written to a ring
    window: 0: all tokens are seen; start + T must then not exceed S
    """
    t, slots = tokens[0].shape[1], cache[0].shape[1]
    pairs = list(zip(cache, tokens, strict=True))
    slot, query = jnp.arange(slots), start + jnp.arange(t)[:, None]
    if not window:
        written = tuple(write(old, new, start) for old, new in pairs)
        return Extended(written, written, (slot <= query)[None, None])
    if is_one(count):
        written = tuple(write(old, new[:, :1], start % slots) for old, new in pairs)
        seen = (start - slot) % slots <= jnp.minimum(start, window - 1)
        return Extended(written, written, jnp.broadcast_to(seen, (1, 1, t, slots)))
    in_order = (start + slot) % slots
    seen_tokens = tuple(
        jnp.concatenate([jnp.take(old, in_order, 1), new.astype(old.dtype)], 1)
        for old, new in pairs
    )
    position = start - slots + jnp.arange(slots + t)
    is_text = position >= 0
    mask = is_text & (position <= query) & (position > query - window)
    # the newest position of each slot, and the place of its token
    newest = start + count - 1 - (start + count - 1 - slot) % slots
    written = tuple(jnp.take(all_tokens, newest - start + slots, 1) for all_tokens in seen_tokens)
    return Extended(written, seen_tokens, mask[None, None], is_text)


def is_one(count: int | jax.Array) -> bool:
    """True for a number of tokens that is known to be 1 when the program is traced."""
    return isinstance(count, int) and count == 1


def write(layer: jax.Array, tokens: jax.Array, start: jax.Array) -> jax.Array:
    """A layer's array of a cache, [B, S, …], with tokens [B, T, …] in its slots from `start` on.
    Each device writes those that belong into its slots: nothing is communicated.

    start: int32 scalar; start + T must not exceed S: XLA would silently write the tokens to earlier
        slots.
    """
    tokens = tokens.astype(layer.dtype)
    if shards(SLOT) == 1:
        return lax.dynamic_update_slice_in_dim(layer, tokens, start, 1)

    def device_part(layer, tokens, start):
        slots, count = layer.shape[1], tokens.shape[1]
        lowest, width = _window(slots, count, start)
        slot = lax.axis_index(CONTEXT) * slots + lowest + jnp.arange(width)
        # The window of a device that has only some of the slots, or none, holds others, too: these
        # are written back as they are.
        old = lax.dynamic_slice_in_dim(layer, lowest, width, 1)
        new = jnp.take(tokens, slot - start, 1, mode="clip")
        is_token = (slot >= start) & (slot < start + count)
        is_token = is_token.reshape(-1, *(1,) * (layer.ndim - 2))
        return lax.dynamic_update_slice_in_dim(layer, jnp.where(is_token, new, old), lowest, 1)

    return _on_own_slots(device_part, P(None, CONTEXT), (layer,), tokens, start)


def put_back(
    cache: jax.Array, layer: jax.Array, index: jax.Array, start: jax.Array, count: int
) -> jax.Array:
    """A cache's array [L, B, S, …] with `count` slots of layer `index` from `start` on taken from
    `layer` [B, S, …], whose other slots are those of the cache. Only these are written: an array
    that a loop carries is updated in place, not copied layer by layer."""

    def copied(cache, layer, index, lowest, width):
        window = lax.dynamic_slice_in_dim(layer, lowest, width, 1)[None]
        position = (index, 0, lowest, *(0,) * (cache.ndim - 3))
        return lax.dynamic_update_slice(cache, window, position)

    if shards(SLOT) == 1:
        return copied(cache, layer, index, start, count)

    def device_part(cache, layer, index, start):
        return copied(cache, layer[0], index, *_window(layer.shape[2], count, start))

    # Both as arrays of one rank, so that their slots are the same dimension and have one split.
    return _on_own_slots(device_part, P(None, None, CONTEXT), (cache, layer[None]), index, start)


def _window(slots: int, count: int, start: jax.Array) -> tuple[jax.Array, int]:
    """(lowest, width): a range of this device's `slots` that has all of them that are among the
    `count` slots from `start` on. The width is the same on all devices."""
    # A slice needs a size that is known when the program is compiled: the largest that any device
    # can need.
    width = min(slots, count)
    begin = start - lax.axis_index(CONTEXT) * slots  # may lie before or after this device's slots
    return jnp.clip(begin, 0, slots - width), width


def _on_own_slots(fn: Callable, split: P, arrays: tuple, *same: jax.Array) -> jax.Array:
    """fn(*arrays, *same) on each device's own slots. The partitioner has the other axes."""
    return jax.shard_map(
        fn,
        in_specs=((split,) * len(arrays) + (P(),) * len(same)),
        out_specs=split,
        axis_names={CONTEXT},
        check_vma=False,
    )(*arrays, *same)


def attend_in_order(kernel: Kernel, inputs: Inputs, is_text_S: jax.Array) -> jax.Array:
    """Attention of T queries to the keys of their windows, in the order of the text, whose last T
    are the queries' own → [B, T, N, V]."""

    def attend(q, k, v, is_text_S):
        # keys before the text are of another document
        of_keys = jnp.broadcast_to(jnp.where(is_text_S, 0, -1), k.shape[:2])
        segments = jnp.zeros(q.shape[:2], jnp.int32), of_keys
        return kernel.forward(inputs._replace(q=q, k=k, v=v, segments=segments), v.dtype)[0]

    return on_each_device(attend, inputs[:3], (is_text_S,))


def attend_by_kernel(kernel: Kernel, inputs: Inputs, start) -> jax.Array:
    """Attention of T queries to the slots of a cache → [B, T, N, V]: query t sees slots up to
    start + t. kernel: one that takes `Sight.start` (splash)."""

    def attend(q, k, v, start, dtype):
        sight = dataclasses.replace(inputs.sight, start=start)
        return kernel.forward(inputs._replace(q=q, k=k, v=v, sight=sight), dtype)

    start = jnp.asarray(start, jnp.int32)
    if shards(SLOT) == 1:
        attend_here = lambda q, k, v, start: attend(q, k, v, start, v.dtype)[0]
        return on_each_device(attend_here, inputs[:3], (start,))

    def device_part(q, k, v, start):
        # A device whose slots no query sees yet has a negative start, and a weight of 0.
        start -= lax.axis_index(CONTEXT) * k.shape[1]
        # float32: the outputs of all devices are weighed and summed before they are rounded
        out_BTNV, lse_BTN = attend(q, k, v, start, jnp.float32)
        weight_BTN = jnp.exp(lse_BTN - lax.pmax(lse_BTN, CONTEXT))
        out_BTNV = lax.psum(out_BTNV * weight_BTN[..., None], CONTEXT)
        return (out_BTNV / lax.psum(weight_BTN, CONTEXT)[..., None]).astype(v.dtype)

    queries, slots = P(BATCH_AXES, None, MODEL), P(BATCH_AXES, CONTEXT, MODEL)
    return jax.shard_map(
        device_part, in_specs=(queries, slots, slots, P()), out_specs=queries, check_vma=False
    )(*inputs[:3], start)
