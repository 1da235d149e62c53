"""The model with a key/value cache: it reads a few tokens at a time, which see those in the cache.

      cache      keys and values, [L, B, S, K, H] each, or latents [L, B, S, C]; slot s holds the
                 token at position s
                 ┌────────────────┬───────────┬──────────────┐
                 │ 0 … start − 1  │ T tokens  │ unused       │
                 └────────────────┴───────────┴──────────────┘
Every query sees the slots up to its own. So the slots after the newest token, which may hold
padding of an earlier call, are never read, and are overwritten later. The devices of `context`
share the slots (parallel/attention/kv_cache.py).

generation/sampling.py chooses the next token. Without a cache, sequences go through
transformer.logits.

Shape suffixes: L layers, B batch, S slots of the cache, T new tokens, K key/value heads, H head
dimension, C latent and rotated key, D width, V vocabulary.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.config.groups.layer_kinds import kinds_of_layers
from jaxtrain.devices.sharding import Axes, constrain
from jaxtrain.models.rotary import layer_positions
from jaxtrain.models.transformer import ModelParts
from jaxtrain.parallel.attention import kv_cache

Cache = tuple[jax.Array, ...]


def cache_axes(parts: ModelParts) -> tuple[Axes, ...]:
    """The logical axes of the arrays of a cache."""
    return tuple(("layer", "batch", kv_cache.SLOT, *slot.axes) for slot in parts.cache_slots())


def empty_cache(parts: ModelParts, batch: int, slots: int, dtype: jnp.dtype) -> Cache:
    """An empty cache of `dtype`."""
    lead = (parts.cfg.dense_layers + parts.cfg.layers, batch, slots)
    return tuple(
        constrain(jnp.zeros((*lead, *slot.shape), dtype), axes)
        for slot, axes in zip(parts.cache_slots(), cache_axes(parts), strict=True)
    )


def extend(
    parts: ModelParts, params: dict, tokens_BT: jax.Array, cache: Cache, start: jax.Array, dtype
) -> tuple[jax.Array, Cache]:
    """Returns (the residual stream [B, T, D] after the blocks, the cache with these tokens), for T
    tokens at positions start, start + 1, ….

    params: {"embed", "first" if any, "layers" (leaves [L, ...]), "head"}
    start: int32 scalar. start + T must not exceed S: XLA would silently write the tokens to earlier
        slots. The devices that split the sequence must divide T.
    """
    t = tokens_BT.shape[1]
    positions_1T = start + jnp.arange(t, dtype=jnp.int32)[None]
    if parts.cfg.positions == "learned":
        # Padding may lie beyond the table, and must be finite: a weight of 0 does not hide a NaN.
        positions_1T = jnp.minimum(positions_1T, parts.cfg.max_positions - 1)
    x_BTD = parts.embedder(params["embed"])(tokens_BT, positions_1T, dtype)

    (stacked,), kinds = parts.blocks.values(), kinds_of_layers(parts.cfg)

    def layer(carry, index_and_weights, block=stacked):
        x_BTD, cache = carry
        index, weights = index_and_weights
        one_layer = [lax.dynamic_index_in_dim(array, index, 0, keepdims=False) for array in cache]
        positions = layer_positions(parts.cfg, index, positions_1T)
        x_BTD, one_layer = block(weights).cached(x_BTD, positions, one_layer, start)
        cache = tuple(
            kv_cache.put_back(array, part, index, start, t)
            for array, part in zip(cache, one_layer, strict=True)
        )
        return (x_BTD, cache), None

    for index in range(parts.cfg.dense_layers):
        (x_BTD, cache), _ = layer(
            (x_BTD, cache), (index, params["first"][str(index)]), parts.dense_blocks[kinds[index]]
        )
    indices = parts.cfg.dense_layers + jnp.arange(parts.cfg.layers)
    (x_BTD, cache), _ = lax.scan(layer, (x_BTD, cache), (indices, params["layers"]))
    return x_BTD, tuple(map(constrain, cache, cache_axes(parts)))


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
