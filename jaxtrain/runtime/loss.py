"""Cross-entropy over a large vocabulary, never with the logits of more than a chunk of tokens.

The loss is a sum over tokens, so a chunk's gradients can be made while its logits are at hand: no logits are kept, none
are recomputed, and the projection's gradient is added to its accumulator chunk by chunk.

Shape suffixes: B batch, T tokens, C tokens of a chunk, D width.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.devices.mesh import psum
from jaxtrain.devices.sharding import shards


def token_losses(logits, targets, first_row=0, over: tuple[str, ...] = ()) -> tuple[jax.Array, jax.Array]:
    """logits float32 [..., V], targets int32 [...] → (negative log-likelihoods [...] in nats, their gradients by the logits [..., V]).

    Inside a manual region the logits may be those of a part of the vocabulary, from `first_row` on, of which the mesh axes `over` hold
    the others; the losses are then the same on all of them.
    """
    top = logits.max(-1, keepdims=True)
    top = lax.pmax(top, over) if over else top
    powers = jnp.exp(logits - top)
    # A comparison in place of an indexed read: it stays local where the vocabulary is split.
    hit = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == (targets - first_row)[..., None]
    sums = jnp.stack([powers.sum(-1), jnp.sum(jnp.where(hit, logits, 0.0), -1)])
    total, chosen = psum(sums, over) if over else sums
    return jnp.log(total) + top[..., 0] - chosen, powers / total[..., None] - hit


def chunk_count(batch: int, tokens: int, limit: int) -> int:
    """The fewest chunks of at most `limit` tokens that cut [batch, tokens] evenly along the sequence."""
    return chunk_number(batch, tokens, shards("sequence"), limit)


def chunk_number(batch: int, tokens: int, parts: int, limit: int) -> int:
    """The same for a sequence in so many parts."""
    whole = tokens // parts
    return next(n for n in range(1, whole + 1) if whole % n == 0 and (batch * tokens // n <= limit or n == whole))


def _chunks(a, n):
    """[B, T, ...] → [n, B, T/n, ...]: chunk i takes tokens i, i + n, …, so that every shard of the sequence has its share."""
    return jnp.moveaxis(a.reshape(a.shape[0], a.shape[1] // n, n, *a.shape[2:]), 2, 0)


def loss_sum(head: Callable, x_BTD, targets_BT, weights_BT, limit: int, **part) -> jax.Array:
    """Σ weight · loss over all tokens. head: x [B, C, D] → logits [B, C, V]; part: of the vocabulary, as for `token_losses`."""
    n = chunk_count(targets_BT.shape[0], targets_BT.shape[1], limit)
    add = lambda x, t, w: jnp.sum(token_losses(head(x), t, **part)[0] * w)
    if n == 1:
        return add(x_BTD, targets_BT, weights_BT)
    chunks = tuple(_chunks(a, n) for a in (x_BTD, targets_BT, weights_BT))
    return lax.scan(lambda total, c: (total + add(*c), None), jnp.zeros(()), chunks)[0]


def loss_and_gradients(head: Callable, params, accumulators, x_BTD, targets_BT, weights_BT, limit: int, **part):
    """→ (Σ weight · loss, accumulators + gradients of params, gradient of x).

    head: (params, x [B, C, D]) → logits; `accumulators` is a pytree like params, float32. Of a part of the vocabulary (`part`, as for
    `token_losses`) the gradient of x is what this part adds to it.
    """
    n = chunk_count(targets_BT.shape[0], targets_BT.shape[1], limit)

    def add(carry, chunk):
        total, sums = carry
        x, targets, weights = chunk
        logits, vjp = jax.vjp(head, params, x)
        losses, by_logits = token_losses(logits, targets, **part)
        gradients, dx = vjp(by_logits * weights[..., None])
        return (total + jnp.sum(losses * weights), jax.tree.map(lambda a, g: a + g.astype(a.dtype), sums, gradients)), dx

    carry = (jnp.zeros(()), accumulators)
    if n == 1:
        (total, accumulators), dx = add(carry, (x_BTD, targets_BT, weights_BT))
        return total, accumulators, dx
    chunks = tuple(_chunks(a, n) for a in (x_BTD, targets_BT, weights_BT))
    (total, accumulators), dx = lax.scan(add, carry, chunks)
    return total, accumulators, jnp.moveaxis(dx, 0, 2).reshape(x_BTD.shape)
