"""Attention that every kernel is held to: all scores at once, and its gradients; and arrays to
attend to."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.parallel.attention.causal import AttentionSettings, attend_cached, grouped_attention
from jaxtrain.parallel.attention.kv_cache import Extended


def arrays(
    batch=2, tokens=256, heads=4, kv_heads=2, key=48, value=32, keys=None, dtype=jnp.float32
) -> tuple[jax.Array, ...]:
    """Queries, keys, values and a gradient of the output, [batch, tokens, heads, size]; `keys`:
    tokens of keys, if not as many."""
    random, s = np.random.default_rng(0), keys or tokens
    shapes = (tokens, heads, key), (s, kv_heads, key), (s, kv_heads, value), (tokens, heads, value)
    return tuple(jnp.asarray(random.normal(size=(batch, *shape)), dtype) for shape in shapes)


def segments(batch=2, tokens=256, documents=5) -> jax.Array:
    """int32 [batch, tokens]: so many documents in the first sequence, fewer in the others, none of
    the same length."""
    random = np.random.default_rng(1)
    starts = [
        np.sort(random.choice(np.arange(1, tokens), max(0, documents - 1 - i), replace=False))
        for i in range(batch)
    ]
    return jnp.asarray(
        [np.searchsorted(of, np.arange(tokens), "right") + 1 for of in starts], jnp.int32
    )


def with_gradients(fn, *arrays) -> list[jax.Array]:
    """[fn of all arrays but the last, and their gradients for that of the output, the last one]."""
    *given, g = arrays
    y, vjp = jax.vjp(fn, *given)
    return [y, *vjp(g.astype(y.dtype))]


def plain(q, k, v, g, last_key=None, of_queries=None, of_keys=None) -> list[jax.Array]:
    """The same of attention in float32 with all its scores. last_key [T]: the last key that a query
    sees by its place, else its own; of_queries, of_keys: segments."""
    last_key = np.arange(q.shape[1]) if last_key is None else last_key
    mask = (np.arange(k.shape[1]) <= np.asarray(last_key)[:, None])[None, None]
    if of_queries is not None:
        mask = mask & np.asarray(of_queries[:, None, :, None] == of_keys[:, None, None, :])
    exact = (a.astype(jnp.float32) for a in (q, k, v, g))
    return jax.jit(
        lambda q, k, v, g: with_gradients(
            lambda q, k, v: grouped_attention(q, k, v, jnp.asarray(mask)), q, k, v, g
        )
    )(*exact)


def dense(q, k, v, sinks=None, *, own=None, window=0, softcap=0.0, scale=0.0) -> jax.Array:
    """Causal attention by its definition: all scores, a softmax, no kernel's order. own: segments;
    sinks [heads]; window, softcap, scale: 0 for none, or 1/sqrt(size of a key)"""
    k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], 2) for a in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * (scale or q.shape[3] ** -0.5)
    scores = softcap * jnp.tanh(scores / softcap) if softcap else scores
    distance = np.arange(q.shape[1])[:, None] - np.arange(k.shape[1])
    seen = jnp.asarray((distance >= 0) & (distance < (window or k.shape[1])))
    if own is not None:
        seen = seen & (own[:, None, :, None] == own[:, None, None, :])
    scores = jnp.where(seen, scores, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, column], -1)
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores, -1)[..., : k.shape[1]], v)


def from_cache(kernel: str, q, k, v) -> jax.Array:
    """Attention of tokens 128 to 256 of a prompt to the keys and values in a cache's slots."""
    sees = jnp.arange(k.shape[1]) <= 128 + jnp.arange(128)[:, None]
    cache = Extended((k, v), (k, v), sees[None, None])
    return attend_cached(q, cache, jnp.int32(128), AttentionSettings(kernel=kernel))
