"""Context parallelism: the sequence split over the `context` axis, and attention over all of it.

Device i of c holds chunks i and 2c − 1 − i of the 2c that a sequence is cut into (zigzag, as for
Llama 3, Dubey et al. 2024, section 3.3.2), so that under a causal mask all have the same work.
Everything but attention is local to a token. Three ways to attend:

    all_gather  keys and values of the whole sequence come to every device, whose queries stay;
                again in the backward, so that no device keeps them. The first chunk's queries see
                the first half of the sequence at most: three quarters of the scores are computed
    ulysses     queries, keys and values are exchanged for all tokens of a part of the heads, and
                the results back (Jacobs et al. 2023)
    ring        keys and values go round (parallel/ring.py)

Inside the runtime's manual region these functions speak of the device's own part; where the context
has one device, and outside of the region, sequences are whole and they do nothing.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.devices.mesh import CONTEXT, all_gather, manual_size
from jaxtrain.parallel.heads import by_heads


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["whole", "start"],
    meta_fields=["pairs", "diagonal"],
)
@dataclasses.dataclass(frozen=True)
class Sight:
    """Which keys queries see, both in the order of chunks of one length: of each chunk of queries,
    the first `whole` chunks of keys, and with `diagonal`, of the next one the keys up to each
    query's own place.

    whole: int32 [chunks of queries], as an array or numbers; pairs: their sum, which is the same on
        every device
    start: int32, keys before those, which all queries see; for splash alone
    """

    whole: jax.Array | tuple[int, ...]
    pairs: int = 0
    diagonal: bool = True
    start: jax.Array | None = None


CAUSAL = Sight((0,))  # of a whole sequence


def size() -> int:
    """Into how many parts sequences are split here."""
    return manual_size(CONTEXT)


def zigzag(x: jax.Array, parts: int) -> jax.Array:
    """[…, T] in the order of the text → in the order of the devices."""
    order = np.stack([np.arange(parts), 2 * parts - 1 - np.arange(parts)], 1).reshape(-1)
    return x.reshape(*x.shape[:-1], 2 * parts, -1)[..., order, :].reshape(x.shape)


def positions(tokens: int) -> jax.Array:
    """int32 [1, T] of this device's tokens."""
    parts = size()
    if parts == 1:
        return jnp.arange(tokens, dtype=jnp.int32)[None]
    chunk, i = tokens // 2, lax.axis_index(CONTEXT)
    first = jnp.stack([i, 2 * parts - 1 - i]).astype(jnp.int32) * chunk
    return (first[:, None] + jnp.arange(chunk, dtype=jnp.int32)).reshape(1, -1)


def in_text_order(x: jax.Array, parts: int, dim: int = 1) -> jax.Array:
    """Whole sequences in the order of the devices → of the text."""
    chunks = jnp.split(x, 2 * parts, dim)
    return jnp.concatenate([*chunks[0::2], *reversed(chunks[1::2])], dim)


def sum_over(x: jax.Array) -> jax.Array:
    """The sum over the parts of the sequences; not to be differentiated."""
    return lax.stop_gradient(lax.psum(lax.stop_gradient(x), CONTEXT) if size() > 1 else x)


def own_chunks(x: jax.Array, parts: int, dim: int = 1) -> jax.Array:
    """Of something for each chunk, in the order of the text: that of this device's two."""
    i = lax.axis_index(CONTEXT)
    return jnp.take(x, jnp.stack([i, 2 * parts - 1 - i]), axis=dim)


def _in_device_order(x: jax.Array, parts: int, dim: int = 1) -> jax.Array:
    chunks = jnp.split(x, 2 * parts, dim)
    return jnp.concatenate([chunks[n] for i in range(parts) for n in (i, 2 * parts - 1 - i)], dim)


def _gathered(x: jax.Array, dim: int = 1) -> jax.Array:
    return all_gather(x, CONTEXT, dim)


def _whole(k, v, segments):
    """Keys, values and segments of the whole sequence, in the order of the text."""
    parts = size()
    k, v = (by_heads(lambda a: in_text_order(_gathered(a), parts), (a,)) for a in (k, v))
    return k, v, None if segments is None else (segments, in_text_order(_gathered(segments), parts))


def attend_by_gather(attend: Callable, q, k, v, segments):
    """attend(q, k, v, sight, segments of queries and of keys) with the whole sequence's keys; q, k,
    v are this device's [B, T, heads, head dimension]."""
    parts, i = size(), lax.axis_index(CONTEXT)
    k, v, documents = _whole(k, v, segments)
    return attend(q, k, v, Sight(jnp.stack([i, 2 * parts - 1 - i]), 2 * parts - 1), documents)


def attend_by_halves(attend: Callable, q, k, v, segments) -> jax.Array:
    """The same for attend(q, k, v, mask): each chunk of queries by itself, the first with the keys
    that it sees on any device."""
    t, query_positions = q.shape[1], positions(q.shape[1])
    k, v, documents = _whole(k, v, segments)
    out = []
    for first, keys in ((0, k.shape[1] // 2), (t // 2, k.shape[1])):
        rows = slice(first, first + t // 2)
        at = jnp.arange(keys, dtype=jnp.int32)[None]
        mask = query_positions[:, None, rows, None] >= at[:, None, None, :]
        if documents is not None:
            mask &= documents[0][:, None, rows, None] == documents[1][:, None, None, :keys]
        out.append(attend(q[:, rows], k[:, :keys], v[:, :keys], mask))
    return jnp.concatenate(out, 1)


def attend_by_heads(attend: Callable, q, k, v, segments) -> jax.Array:
    """attend(q, k, v, segments) over whole sequences of a part of the heads."""
    parts = size()
    to_heads = lambda a: in_text_order(lax.all_to_all(a, CONTEXT, 2, 1, tiled=True), parts)
    to_tokens = lambda a: lax.all_to_all(_in_device_order(a, parts), CONTEXT, 1, 2, tiled=True)
    q, k, v = (by_heads(to_heads, (a,)) for a in (q, k, v))
    whole = None if segments is None else in_text_order(_gathered(segments), parts)
    return by_heads(to_tokens, (attend(q, k, v, whole),))
