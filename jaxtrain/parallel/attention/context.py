"""Context parallelism: sequences split over the `context` axis, and attention over all their
tokens.

Device i of c holds chunks i and 2c − 1 − i of the 2c that a sequence is cut into (zigzag, as for
Llama 3, Dubey et al. 2024, section 3.3.2), so that under a causal mask all have the same work.
Everything but attention is local to a token. There are three ways to attend:

    all_gather  keys and values are all-gathered to every device, in the forward and again in the
                backward, so that no device saves them; queries stay. The lower chunk's queries see
                at most half of the sequence, so three quarters of the scores are computed
    ulysses     an all-to-all of queries, keys and values gives a device all tokens of some of the
                heads, and another one returns the results (Jacobs et al. 2023)
    ring        keys and values pass from device to device in a ring (parallel/attention/ring.py)

Begin with `Sight` and one of the functions `attend_by_…`.

Inside the runtime's manual region these functions take a device's tokens. With one device along
`context`, and outside of the region, sequences are not split and the functions return what they
get.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.devices.mesh import CONTEXT, all_gather, manual_size
from jaxtrain.parallel.attention.heads import by_heads
from jaxtrain.parallel.dropout import WeightDropout


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["full_chunks", "start"],
    meta_fields=["pairs", "diagonal"],
)
@dataclasses.dataclass(frozen=True)
class Sight:
    """The keys that queries see. Both are cut into chunks of one length. A chunk of queries sees
    the lowest `full_chunks` chunks of keys in full, and with `diagonal`, the keys of the next chunk
    up to each query's position.

    full_chunks: int32 [chunks of queries], as an array or numbers; pairs: their sum, which is the
        same on every device
    start: int32, the number of keys before these chunks, which all queries see; negative where the
        keys begin after the queries do; for splash alone
    """

    full_chunks: jax.Array | tuple[int, ...]
    pairs: int = 0
    diagonal: bool = True
    start: jax.Array | None = None


CAUSAL = Sight((0,))  # of an unsplit sequence


def size() -> int:
    """The number of parts that sequences are split into; 1 outside of the manual region."""
    return manual_size(CONTEXT)


def zigzag(x: jax.Array, parts: int) -> jax.Array:
    """[…, T] in the order of the text → in the order of the devices."""
    # Device i has chunks i and 2c − 1 − i: of four devices 0 7 | 1 6 | 2 5 | 3 4.
    order = np.stack([np.arange(parts), 2 * parts - 1 - np.arange(parts)], 1).reshape(-1)
    return x.reshape(*x.shape[:-1], 2 * parts, -1)[..., order, :].reshape(x.shape)


def positions(tokens: int) -> jax.Array:
    """int32 [1, T] of this device's tokens."""
    parts = size()
    if parts == 1:
        return jnp.arange(tokens, dtype=jnp.int32)[None]
    chunk, i = tokens // 2, lax.axis_index(CONTEXT)
    begins = jnp.stack([i, 2 * parts - 1 - i]).astype(jnp.int32) * chunk
    return (begins[:, None] + jnp.arange(chunk, dtype=jnp.int32)).reshape(1, -1)


def in_text_order(x: jax.Array, parts: int) -> jax.Array:
    """Unsplit sequences [B, T, …] in the order of the devices → in the order of the text."""
    # 0 7 1 6 2 5 3 4: the even ones in order, then the odd ones from the last on.
    chunks = jnp.split(x, 2 * parts, 1)
    return jnp.concatenate([*chunks[0::2], *reversed(chunks[1::2])], 1)


def sum_over(x: jax.Array) -> jax.Array:
    """The sum over the parts of the sequences; not to be differentiated."""
    return lax.stop_gradient(lax.psum(lax.stop_gradient(x), CONTEXT) if size() > 1 else x)


def local_chunks(x: jax.Array, parts: int) -> jax.Array:
    """The two entries of this device's chunks, of entries [B, chunks, …] for all chunks in the
    order of the text."""
    i = lax.axis_index(CONTEXT)
    return jnp.take(x, jnp.stack([i, 2 * parts - 1 - i]), axis=1)


def _in_device_order(x: jax.Array, parts: int) -> jax.Array:
    """The inverse of `in_text_order`."""
    chunks = jnp.split(x, 2 * parts, 1)
    return jnp.concatenate([chunks[n] for i in range(parts) for n in (i, 2 * parts - 1 - i)], 1)


def _gathered(x: jax.Array) -> jax.Array:
    """Unsplit sequences [B, T, …], in the order of the text, from each device's part."""
    return in_text_order(all_gather(x, CONTEXT, 1), size())


def _all_keys(k, v, segments):
    """Keys, values and segments of the unsplit sequence, in the order of the text."""
    # The backward gathers them once more. Their gradients are reduce-scattered by the transpose of
    # the all-gather, so that each device gets those of its own keys.
    k, v = (by_heads(_gathered, (a,)) for a in (k, v))
    return k, v, None if segments is None else (segments, _gathered(segments))


def attend_by_gather(attend: Callable, q, k, v, segments, dropout: WeightDropout | None = None):
    """attend(q, k, v, sight, segments of queries and of keys, noise) with the keys of the unsplit
    sequence; q, k, v are this device's [B, T, heads, head dimension]; noise is that of dropout."""
    parts, i = size(), lax.axis_index(CONTEXT)
    k, v, documents = _all_keys(k, v, segments)
    sight = Sight(jnp.stack([i, 2 * parts - 1 - i]), 2 * parts - 1)
    return attend(q, k, v, sight, documents, dropout and dropout.noise_BTN)


def attend_by_halves(
    attend: Callable, q, k, v, segments, dropout: WeightDropout | None = None
) -> jax.Array:
    """`attend_by_gather` for attend(q, k, v, mask, dropout=…). Each chunk of queries is attended to
    on its own, the lower one with the keys that it sees on any device."""
    # The lower chunk of a device is in the lower half of the sequence on every device, so half of
    # the keys will do, a number that is the same in every device's program.
    t, query_positions = q.shape[1], positions(q.shape[1])
    k, v, documents = _all_keys(k, v, segments)
    out = []
    for begin, keys in ((0, k.shape[1] // 2), (t // 2, k.shape[1])):
        queries = slice(begin, begin + t // 2)
        at = jnp.arange(keys, dtype=jnp.int32)[None]
        mask = query_positions[:, None, queries, None] >= at[:, None, None, :]
        if documents is not None:
            mask &= documents[0][:, None, queries, None] == documents[1][:, None, None, :keys]
        more = {"dropout": dropout.part(queries)} if dropout else {}
        out.append(attend(q[:, queries], k[:, :keys], v[:, :keys], mask, **more))
    return jnp.concatenate(out, 1)


def attend_by_heads(
    attend: Callable, q, k, v, segments, dropout: WeightDropout | None = None
) -> jax.Array:
    """attend(q, k, v, segments, dropout) over unsplit sequences of a part of the heads."""
    # An all-to-all splits the heads and joins the tokens: a device sends each of its numbers to one
    # other, where an all-gather sends them to all. Its results are in the order of the devices, and
    # causal kernels want that of the text.
    parts = size()
    to_heads = lambda a: in_text_order(lax.all_to_all(a, CONTEXT, 2, 1, tiled=True), parts)
    to_tokens = lambda a: lax.all_to_all(_in_device_order(a, parts), CONTEXT, 1, 2, tiled=True)
    q, k, v = (by_heads(to_heads, (a,)) for a in (q, k, v))
    if segments is not None:
        segments = _gathered(segments)
    if dropout:
        noise, position_T = by_heads(to_heads, (dropout.noise_BTN,)), jnp.arange(q.shape[1])
        dropout = WeightDropout(noise, position_T, dropout.rate)
    return by_heads(to_tokens, (attend(q, k, v, segments, dropout),))
