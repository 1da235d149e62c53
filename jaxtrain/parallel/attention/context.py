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

In a layer with a window a device gets only the tokens that its own see, the last ones of the chunks
before its two, instead of all_gather and ring (`attend_by_neighbours`); config/kernels.py: reach
says from which window on these would be no fewer than all. Lower chunks send to the next device,
upper ones to the one before, and the last device has two consecutive chunks:

    device      0       1       2       3
    chunks      0 7     1 6     2 5     3 4
    lower       0 ────► 1 ────► 2 ────► 3          upper     7 ◄──── 6 ◄──── 5 ◄──── 4 ◄─ 3

Begin with flash.Inputs and one of the functions `attend_by_…`.

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

from jaxtrain.devices.mesh import CONTEXT, STAGE, all_gather, manual_size, on_cpu
from jaxtrain.parallel.attention.flash import Inputs, Sight
from jaxtrain.parallel.attention.heads import by_heads

# The name of a call that adds other devices' tokens to a device's own. When a layer is cut into ops
# it counts as a gather does: no device saves these tokens (runtime/layers/equations.py).
NEIGHBOURS_TOKENS = "neighbours_tokens"


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


def _with_all_keys(inputs: Inputs) -> Inputs:
    """The inputs with keys, values and their segments of the unsplit sequence, in the order of the
    text."""
    k, v = (by_heads(_gathered, (a,)) for a in (inputs.k, inputs.v))
    segments = inputs.segments and (inputs.segments[0], _gathered(inputs.segments[1]))
    return inputs._replace(k=k, v=v, segments=segments)


def attend_by_gather(attend: Callable, inputs: Inputs) -> jax.Array:
    """attend(inputs) with the keys of the unsplit sequence."""
    parts, i = size(), lax.axis_index(CONTEXT)
    inputs = _with_all_keys(inputs)
    chunks = jnp.stack([i, 2 * parts - 1 - i])
    sight = Sight(chunks, 2 * parts - 1, window=inputs.sight.window)
    return attend(inputs._replace(sight=sight))


def attend_by_halves(attend: Callable, inputs: Inputs) -> jax.Array:
    """`attend_by_gather` for attend(inputs, mask, the queries' places among the keys). Each chunk
    of queries is attended to on its own, the lower one with the keys that it sees on any device."""
    # The lower chunk of a device is in the lower half of the sequence on every device, so half of
    # the keys will do, a number that is the same in every device's program.
    inputs = _with_all_keys(inputs)
    t, s, window = inputs.q.shape[1], inputs.k.shape[1], inputs.sight.window
    query_positions, out = positions(t), []
    for begin, keys in ((0, s // 2), (t // 2, s)):
        queries = slice(begin, begin + t // 2)
        half = inputs.part(queries, slice(keys))
        at = jnp.arange(keys, dtype=jnp.int32)[None]
        mask = query_positions[:, None, queries, None] >= at[:, None, None, :]
        if window:
            mask &= query_positions[:, None, queries, None] - at[:, None, None, :] < window
        if half.segments is not None:
            of_queries, of_keys = half.segments
            mask &= of_queries[:, None, :, None] == of_keys[:, None, None, :]
        out.append(attend(half, mask, query_positions[0, queries]))
    return jnp.concatenate(out, 1)


def attend_by_heads(attend: Callable, inputs: Inputs) -> jax.Array:
    """attend(inputs) over unsplit sequences of a part of the heads."""
    # An all-to-all splits the heads and joins the tokens: a device sends each of its numbers to one
    # other, where an all-gather sends them to all. Its results are in the order of the devices, and
    # causal kernels want that of the text.
    parts, i = size(), lax.axis_index(CONTEXT)
    to_heads = lambda a: in_text_order(lax.all_to_all(a, CONTEXT, 2, 1, tiled=True), parts)
    to_tokens = lambda a: lax.all_to_all(_in_device_order(a, parts), CONTEXT, 1, 2, tiled=True)
    q, k, v = (by_heads(to_heads, (a,)) for a in inputs[:3])
    segments, noise, scores = inputs[4:]
    if segments is not None:
        segments = (_gathered(segments[0]),) * 2
    if noise is not None:
        noise = by_heads(to_heads, (noise,))
    if scores.sinks is not None:
        own = lambda a, i: jnp.take(a.reshape(1, 1, parts, -1), i, 2)
        sinks_N = by_heads(own, (scores.sinks[None, None],), (i,))[0, 0]
        scores = dataclasses.replace(scores, sinks=sinks_N)
    return by_heads(to_tokens, (attend(Inputs(q, k, v, inputs.sight, segments, noise, scores)),))


def attend_by_neighbours(attend: Callable, inputs: Inputs) -> jax.Array:
    """attend(inputs) for each of this device's chunks, with its window's keys: queries [2·B, T/2,
    …] are the last tokens of the keys [2·B, T/2 + window − 1, …]. Where there are no tokens before
    a chunk, keys are zeros in a segment of their own."""
    q, k, v, sight, pair, noise, scores = inputs
    batch, chunk = q.shape[0], q.shape[1] // 2
    segments = jnp.zeros(q.shape[:2], jnp.int32) if pair is None else pair[0]
    widened = functools.partial(_with_neighbours, count=sight.window - 1)
    k, v = (by_heads(widened, (a,)) for a in (k, v))
    in_chunks = lambda a: a.reshape(2 * batch, chunk, *a.shape[2:])
    # Where nothing arrives, 0 does.
    pair = in_chunks(segments), widened(segments + 1) - 1
    noise = None if noise is None else in_chunks(noise)
    out = attend(Inputs(in_chunks(q), k, v, sight, pair, noise, scores))
    return out.reshape(batch, 2 * chunk, q.shape[2], -1)


def _with_neighbours(x: jax.Array, count: int) -> jax.Array:
    """[B, T, …] → [2·B, count + T/2, …]: each chunk after the `count` tokens before it, zeros where
    there are none. count: at most `size()` − 1 chunks"""
    parts, chunk = size(), x.shape[1] // 2

    def neighbours_tokens(x):
        lower, upper = x[:, :chunk], x[:, chunk:]
        of_lower, of_upper = [lower], [upper]
        for hop in range(1, -(-count // chunk) + 1):
            seen = slice(max(0, hop * chunk - count), chunk)
            # Chunk n gets tokens of chunk n − hop. Device i has an upper chunk, 2 · parts − 1 − i.
            # Its tokens come from an upper chunk, of device i + hop, or if there is none from a
            # lower chunk; with one hop that is the last device's own.
            upwards = tuple((i, i + hop) for i in range(parts - hop))
            downwards = tuple((i + hop, i) for i in range(parts - hop))
            middle = tuple((i, 2 * parts - 1 - hop - i) for i in range(parts - hop, parts))
            is_last = lax.axis_index(CONTEXT) == parts - 1
            from_lower = (
                jnp.where(is_last, lower[:, seen], 0) if hop == 1 else send(lower[:, seen], middle)
            )
            of_lower.insert(0, send(lower[:, seen], upwards))
            of_upper.insert(0, send(upper[:, seen], downwards) + from_lower)
        joined = jnp.stack([jnp.concatenate(of_lower, 1), jnp.concatenate(of_upper, 1)], 1)
        return joined.reshape(-1, *joined.shape[2:])

    assert neighbours_tokens.__name__ == NEIGHBOURS_TOKENS
    return jax.jit(neighbours_tokens)(x)


# A custom_vjp: gradients go the other way, and need no more than that.
@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def send(x: jax.Array, pairs: tuple[tuple[int, int], ...]) -> jax.Array:
    """The x of the device that is in `pairs` (sender, receiver) with this one; 0 on a device that
    receives nothing.

    With one stage by a permute. With several only some stages run an op, and in XLA's CPU backend a
    permute waits for all devices of the program (docs/traps.md). A ragged all-to-all then sends;
    its groups are the devices of `context` in one stage. The CPU backend has none: there a plain
    all-to-all sends zeros to the other devices.
    """
    if manual_size(STAGE) == 1:
        return lax.ppermute(x, CONTEXT, pairs)
    c, i = size(), lax.axis_index(CONTEXT)
    receivers, senders = np.full((2, c), c)  # c: none
    for sender, receiver in pairs:
        receivers[sender], senders[receiver] = receiver, sender
    to, source = jnp.asarray(receivers)[i], jnp.asarray(senders)[i]
    if on_cpu():
        sent = jnp.zeros((c, *x.shape), x.dtype).at[to].set(x, mode="drop")
        return lax.all_to_all(sent, CONTEXT, 0, 0).at[source].get(mode="fill", fill_value=0)
    begin = jnp.zeros(c, jnp.int32)
    rows_of = lambda other: jnp.where(jnp.arange(c) == other, x.shape[0], 0)
    arrived = (lax.empty if len(pairs) == c else jnp.zeros)(x.shape, x.dtype)
    return lax.ragged_all_to_all(
        *(x, arrived, begin, rows_of(to), begin, rows_of(source)), axis_name=CONTEXT
    )


send.defvjp(
    lambda x, pairs: (send(x, pairs), None),
    lambda pairs, _, g: (send(g, tuple((receiver, sender) for sender, receiver in pairs)),),
)
