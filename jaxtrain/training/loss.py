"""Cross-entropy over a large vocabulary, never with the logits of more than a chunk of tokens.

The loss is a sum over tokens, so a chunk's gradients can be made while its logits are at hand: no logits are kept, none
are recomputed, and the projection's gradient is added to its accumulator chunk by chunk.

Shape suffixes: B batch, T tokens, C tokens of a chunk, D width.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.sharding import shards


def token_losses(logits, targets) -> jax.Array:
    """logits float32 [..., V], targets int32 [...] → negative log-likelihoods [...], in nats."""
    # A comparison in place of an indexed read: it stays local where the vocabulary is split.
    column = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    chosen = jnp.sum(jnp.where(column == targets[..., None], logits, 0.0), -1)
    return jax.nn.logsumexp(logits, -1) - chosen


def chunk_count(batch: int, tokens: int, limit: int) -> int:
    """The fewest chunks of at most `limit` tokens that cut [batch, tokens] evenly along the sequence."""
    whole = tokens // shards("sequence")
    return next(n for n in range(1, whole + 1) if whole % n == 0 and (batch * tokens // n <= limit or n == whole))


def _chunks(a, n):
    """[B, T, ...] → [n, B, T/n, ...]: chunk i takes tokens i, i + n, …, so that every shard of the sequence has its share."""
    return jnp.moveaxis(a.reshape(a.shape[0], a.shape[1] // n, n, *a.shape[2:]), 2, 0)


def loss_sum(head: Callable, x_BTD, targets_BT, weights_BT, limit: int) -> jax.Array:
    """Σ weight · loss over all tokens. head: x [B, C, D] → logits [B, C, V]."""
    n = chunk_count(targets_BT.shape[0], targets_BT.shape[1], limit)
    part = lambda x, t, w: jnp.sum(token_losses(head(x), t) * w)
    if n == 1:
        return part(x_BTD, targets_BT, weights_BT)
    chunks = tuple(_chunks(a, n) for a in (x_BTD, targets_BT, weights_BT))
    return lax.scan(lambda total, c: (total + part(*c), None), jnp.zeros(()), chunks)[0]


def loss_and_gradients(head: Callable, params, accumulators, x_BTD, targets_BT, weights_BT, limit: int):
    """→ (Σ weight · loss, accumulators + gradients of params, gradient of x).

    head: (params, x [B, C, D]) → logits; `accumulators` is a pytree like params, float32.
    """
    n = chunk_count(targets_BT.shape[0], targets_BT.shape[1], limit)

    def part(carry, chunk):
        total, sums = carry
        x, targets, weights = chunk
        loss, vjp = jax.vjp(lambda p, x: jnp.sum(token_losses(head(p, x), targets) * weights), params, x)
        gradients, dx = vjp(jnp.ones_like(loss))
        return (total + loss, jax.tree.map(lambda a, g: a + g.astype(a.dtype), sums, gradients)), dx

    carry = (jnp.zeros(()), accumulators)
    if n == 1:
        (total, accumulators), dx = part(carry, (x_BTD, targets_BT, weights_BT))
        return total, accumulators, dx
    chunks = tuple(_chunks(a, n) for a in (x_BTD, targets_BT, weights_BT))
    (total, accumulators), dx = lax.scan(part, carry, chunks)
    return total, accumulators, jnp.moveaxis(dx, 0, 2).reshape(x_BTD.shape)
