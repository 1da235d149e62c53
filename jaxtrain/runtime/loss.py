"""Cross-entropy over a large vocabulary, with the logits of a limited number of tokens at a time.

The loss is a sum over tokens, so the gradients of a chunk of tokens are computed while its logits
exist: no logits are stored or recomputed, and the projection's gradient is added to its accumulator
chunk by chunk.

Shape suffixes: B batch, T tokens, C tokens of a part of the sequence, D width, V vocabulary.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.devices.mesh import psum
from jaxtrain.devices.sharding import cut_count, shards


@dataclasses.dataclass(frozen=True)
class VocabularyPart:
    """The part of the vocabulary that a device has logits of, inside a manual region.

    first_row: the vocabulary's row at which it begins, an int or a traced int32
    axes:      the mesh axes whose devices hold the other parts; () for all of the vocabulary
    """

    first_row: Any = 0
    axes: tuple[str, ...] = ()


ALL = VocabularyPart()


def token_losses(logits, targets, part: VocabularyPart = ALL) -> tuple[jax.Array, jax.Array]:
    """logits float32 [..., V], targets int32 [...] → (negative log-likelihoods [...] in nats, their
    gradients by the logits [..., V]).

    The losses are over all parts of the vocabulary, the same on all devices of `part.axes`.
    """
    top = logits.max(-1, keepdims=True)
    top = lax.pmax(top, part.axes) if part.axes else top
    powers = jnp.exp(logits - top)
    # A comparison in place of an indexed read: it stays local where the vocabulary is split.
    hit = (
        lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
        == (targets - part.first_row)[..., None]
    )
    sums = jnp.stack([powers.sum(-1), jnp.sum(jnp.where(hit, logits, 0.0), -1)])
    total, chosen = psum(sums, part.axes) if part.axes else sums
    return jnp.log(total) + top[..., 0] - chosen, powers / total[..., None] - hit


def _parts(limit: int, *arrays: jax.Array) -> list[jax.Array] | None:
    """Arrays [B, T, ...] cut for a scan, [n, B, T/n, ...]; None where one part is enough.

    Part i takes tokens i, i + n, …, so that every shard of the sequence has its share.
    """
    batch, tokens, *_ = arrays[0].shape
    n = cut_count(batch, tokens, shards("sequence"), limit)
    if n == 1:
        return None
    cut = lambda a: a.reshape(a.shape[0], a.shape[1] // n, n, *a.shape[2:])
    return [jnp.moveaxis(cut(a), 2, 0) for a in arrays]


def loss_sum(
    head: Callable, x_BTD, targets_BT, weights_BT, limit: int, part: VocabularyPart = ALL
) -> jax.Array:
    """Returns Σ weight · loss over all tokens, a float32 scalar.

    head: x [B, C, D] → logits [B, C, V]; limit: tokens whose logits may exist at a time.
    """

    def loss_of(x, targets, weights):
        return jnp.sum(token_losses(head(x), targets, part)[0] * weights)

    parts = _parts(limit, x_BTD, targets_BT, weights_BT)
    if parts is None:
        return loss_of(x_BTD, targets_BT, weights_BT)
    return lax.scan(lambda total, cut: (total + loss_of(*cut), None), jnp.zeros(()), parts)[0]


def loss_and_gradients(
    head: Callable,
    params,
    sums,
    x_BTD,
    targets_BT,
    weights_BT,
    limit: int,
    part: VocabularyPart = ALL,
) -> tuple[jax.Array, Any, jax.Array]:
    """Returns (Σ weight · loss, `sums` + gradients of params, gradient of x [B, T, D]).

    head: (params, x [B, C, D]) → logits [B, C, V]; `sums` is a pytree like params, float32. The
    gradient of x is this part of the vocabulary's share of it.
    """

    def add(carry, cut):
        total, sums = carry
        x, targets, weights = cut
        logits, vjp = jax.vjp(head, params, x)
        losses, by_logits = token_losses(logits, targets, part)
        gradients, dx = vjp(by_logits * weights[..., None])
        return (
            total + jnp.sum(losses * weights),
            jax.tree.map(lambda a, g: a + g.astype(a.dtype), sums, gradients),
        ), dx

    carry, arrays = (jnp.zeros(()), sums), (x_BTD, targets_BT, weights_BT)
    parts = _parts(limit, *arrays)
    if parts is None:
        (total, sums), dx = add(carry, arrays)
        return total, sums, dx
    (total, sums), dx = lax.scan(add, carry, parts)
    return total, sums, jnp.moveaxis(dx, 0, 2).reshape(x_BTD.shape)
