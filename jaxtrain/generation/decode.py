"""The model with a cache: it reads a few tokens at a time, which see those in the cache.

      cache      {layer: arrays [L, B, …] of it and of those at its place in later periods}, most
                 of keys and values, [L, B, S, K, H]; slot s holds the token at position s
                 ┌────────────────┬───────────┬──────────────┐
                 │ 0 … start − 1  │ T tokens  │ unused       │
                 └────────────────┴───────────┴──────────────┘
Every query sees the slots up to its own. So the slots after the newest token, which may hold
padding of an earlier call, are never read, and are overwritten later. A layer with a window has as
many slots as the window has tokens. The devices of `context` share the slots (both in
parallel/attention/kv_cache.py).

A block says what its cache is, and continues from it:

    cache_arrays(batch, slots, dtype)          a pytree of CacheArray (models/spec.py), of a layer
                                               and at most `slots` tokens; `dtype` is that of
                                               activations, a sum over tokens may have its own
    cached(x, positions, cache, start, count)  (output [B, T, D], cache) for x [B, T, D], tokens at
                                               positions `start` and on; behind the first `count`
                                               of them is padding, whose output is not read

`cache` is a pytree like that of `cache_arrays`, of one layer. In an array whose second axis is
kv_cache.SLOT padding may be written behind the tokens; all other arrays, a recurrence's state for
example, have to be as if it were not there. `start` is traced; `count` is an int where it is known
when the program is traced, as 1 of a single token is.

generation/sampling.py chooses the next token. Without a cache, sequences go through
transformer.logits.

Shape suffixes: L layers, B batch, S slots of the cache, T new tokens, K key/value heads,
H head dimension, D width, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxtrain.config.groups.layer_kinds import kinds_of_layers, periods_of, stacked_kinds
from jaxtrain.devices.sharding import constrain, named
from jaxtrain.models.spec import CacheArray
from jaxtrain.models.transformer import ModelParts, through_layers
from jaxtrain.parallel.attention import kv_cache

Cache = dict[str, Any]


def cache_arrays(parts: ModelParts, batch: int, slots: int, dtype: jnp.dtype) -> Cache:
    """The arrays of a cache, with a dimension of layers in front."""
    # A loop's body reads and writes an array once, or XLA copies it: layers of one kind that are in
    # one body have arrays of their own.
    cfg, kinds = parts.cfg, kinds_of_layers(parts.cfg)
    period, trips, rest = periods_of(stacked_kinds(cfg))
    in_loop = range(cfg.dense_layers, cfg.dense_layers + len(period))
    of_layer = {kind: make(batch, slots, dtype) for kind, make in parts.cache_arrays.items()}

    def stacked(number: int) -> Any:
        lead = trips if number in in_loop else 1
        return jax.tree.map(
            lambda a: CacheArray((lead, *a.shape), ("layer", *a.axes), a.dtype),
            of_layer[kinds[number]],
        )

    numbers = (*range(in_loop.stop), *range(len(kinds) - len(rest), len(kinds)))
    return {str(number): stacked(number) for number in numbers}


def cache_shardings(parts: ModelParts, mesh: Mesh) -> Cache:
    """The shardings of a cache, whatever its sizes are."""
    arrays = cache_arrays(parts, 1, 1, jnp.dtype("float32"))
    return jax.tree.map(lambda array: named(mesh, array.axes), arrays)


def empty_cache(parts: ModelParts, batch: int, slots: int, dtype: jnp.dtype) -> Cache:
    """The cache before the first token, of sequences of at most `slots` tokens."""
    return jax.tree.map(
        lambda array: constrain(jnp.zeros(array.shape, array.dtype), array.axes),
        cache_arrays(parts, batch, slots, dtype),
    )


def extend(
    parts: ModelParts,
    params: dict,
    tokens_BT: jax.Array,
    cache: Cache,
    start: jax.Array,
    dtype,
    count: int | jax.Array | None = None,
) -> tuple[jax.Array, Cache]:
    """Returns (the residual stream [B, T, D] after the blocks, the cache with these tokens), for T
    tokens at positions start, start + 1, ….

    params: {"embed", "first" if any, "layers" (leaves [L, ...]), "head"}
    start: int32 scalar. start + T must not exceed S: XLA would silently write the tokens to earlier
        slots. The devices that split the sequence must divide T.
    count: the number of tokens before padding; None: T
    """
    cfg, t = parts.cfg, tokens_BT.shape[1]
    count = t if count is None else count
    positions_1T = start + jnp.arange(t, dtype=jnp.int32)[None]
    if cfg.positions == "learned":
        # Padding may lie beyond the table, and must be finite: a weight of 0 does not hide a NaN.
        positions_1T = jnp.minimum(positions_1T, cfg.max_positions - 1)
    x_BTD = parts.embedder(params["embed"])(tokens_BT, positions_1T, dtype)
    arrays = cache_arrays(parts, tokens_BT.shape[0], 1, dtype)  # for their axes

    def put_back(array: CacheArray, stack: jax.Array, layer: jax.Array, number) -> jax.Array:
        # Not all of an array if some will do: one that a loop carries is updated in place.
        if kv_cache.SLOT in array.axes:
            return kv_cache.put_back(stack, layer, number, start, t)
        if kv_cache.RING in array.axes and kv_cache.is_one(count):
            return kv_cache.put_back(stack, layer, number, start % layer.shape[1], 1)
        return lax.dynamic_update_index_in_dim(stack, layer, number, 0)

    def layer(carry, name: str, trip, block):
        x_BTD, cache = carry
        one_layer = jax.tree.map(
            lambda a: lax.dynamic_index_in_dim(a, trip, 0, keepdims=False), cache[name]
        )
        x_BTD, one_layer = block.cached(x_BTD, positions_1T, one_layer, start, count)
        stacks = jax.tree.map(
            lambda array, stack, part: put_back(array, stack, part, trip),
            *(arrays[name], cache[name], one_layer),
        )
        return x_BTD, {**cache, name: stacks}

    kinds, before = kinds_of_layers(cfg), cfg.dense_layers
    carry = x_BTD, cache
    for i in range(before):
        carry = layer(carry, str(i), 0, parts.dense_blocks[kinds[i]](params["first"][str(i)]))

    def stacked_layer(carry, first, trip, weights):
        return layer(carry, str(before + first), trip, parts.blocks[kinds[before + first]](weights))

    x_BTD, cache = through_layers(cfg, params["layers"], carry, stacked_layer)
    constrained = lambda array, a: constrain(a, array.axes)
    return x_BTD, jax.tree.map(constrained, arrays, cache)


def tied_table(parts: ModelParts, params: dict, dtype) -> jax.Array | None:
    """The embedding table [V, D] as `dtype`, in which the head multiplies with it; None for a head
    that has its own table. A caller makes it once, before its loop over tokens."""
    return params["embed"]["table"].astype(dtype) if parts.cfg.tied_embeddings else None


def next_logits(
    parts: ModelParts, params: dict, x_BTD: jax.Array, table_VD: jax.Array | None
) -> jax.Array:
    """Float32 logits [B, V] of the token that follows position 0 of x_BTD. The other positions only
    fill up T, because the devices that split the sequence must divide it.

    V is the model's vocabulary without padding; it is not split over devices, the batch is.
    table_VD: the result of `tied_table`.
    """
    first_B1D = constrain(x_BTD, ("batch", "token", None))[:, :1]
    logits_B1V = parts.head(params["head"])(first_B1D, table_VD)
    return constrain(logits_B1V, ("batch", "token", None))[:, 0, : parts.cfg.vocab_size]
