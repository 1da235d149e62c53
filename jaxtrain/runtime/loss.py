"""Cross-entropy over a large vocabulary, never with the logits of more than some tokens at a time.

The loss is a sum over tokens, so the gradients of some tokens can be made while their logits are at
hand: no logits are kept, none are recomputed, and the projection's gradient is added to its
accumulator part by part.

Shape suffixes: B batch, T tokens, C tokens of a part of the sequence, D width, V vocabulary.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.devices.mesh import psum
from jaxtrain.devices.sharding import shards


@dataclasses.dataclass(frozen=True)
class VocabularyPart:
    """Which rows of the vocabulary logits are of, inside a manual region.

    first_row: the first of them, an int or a traced int32
    axes:      the mesh axes whose devices hold the other parts; () where the vocabulary is whole
    """

    first_row: Any = 0
    axes: tuple[str, ...] = ()


WHOLE = VocabularyPart()


def token_losses(logits, targets, part: VocabularyPart = WHOLE) -> tuple[jax.Array, jax.Array]:
    """logits float32 [..., V], targets int32 [...] → (negative log-likelihoods [...] in nats, their
    gradients by the logits [..., V]).

    Of a part of the vocabulary the losses are those of the whole one, the same on all devices of
    `part.axes`.
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


def cut_count(batch: int, tokens: int, sequence_shards: int, limit: int) -> int:
    """The fewest parts of at most `limit` tokens that cut [batch, tokens] evenly along a sequence
    that lies on so many shards."""
    whole = tokens // sequence_shards
    return next(
        n
        for n in range(1, whole + 1)
        if whole % n == 0 and (batch * tokens // n <= limit or n == whole)
    )


def _cut(a: jax.Array, n: int) -> jax.Array:
    """[B, T, ...] → [n, B, T/n, ...]: part i takes tokens i, i + n, …, so that every shard of the
    sequence has its share."""
    return jnp.moveaxis(a.reshape(a.shape[0], a.shape[1] // n, n, *a.shape[2:]), 2, 0)


def _cuts(targets_BT: jax.Array, limit: int) -> int:
    batch, tokens = targets_BT.shape
    return cut_count(batch, tokens, shards("sequence"), limit)


def loss_sum(
    head: Callable, x_BTD, targets_BT, weights_BT, limit: int, part: VocabularyPart = WHOLE
) -> jax.Array:
    """Σ weight · loss over all tokens, a float32 scalar. head: x [B, C, D] → logits [B, C, V];
    limit: tokens whose logits may exist at a time."""

    def loss_of(x, targets, weights):
        return jnp.sum(token_losses(head(x), targets, part)[0] * weights)

    n = _cuts(targets_BT, limit)
    if n == 1:
        return loss_of(x_BTD, targets_BT, weights_BT)
    parts = tuple(_cut(a, n) for a in (x_BTD, targets_BT, weights_BT))
    return lax.scan(lambda total, cut: (total + loss_of(*cut), None), jnp.zeros(()), parts)[0]


def loss_and_gradients(
    head: Callable,
    params,
    sums,
    x_BTD,
    targets_BT,
    weights_BT,
    limit: int,
    part: VocabularyPart = WHOLE,
) -> tuple[jax.Array, Any, jax.Array]:
    """(Σ weight · loss, `sums` + gradients of params, gradient of x [B, T, D]).

    head: (params, x [B, C, D]) → logits [B, C, V]; `sums` is a pytree like params, float32. Of a
    part of the vocabulary the gradient of x is what this part adds to it.
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

    n = _cuts(targets_BT, limit)
    carry = (jnp.zeros(()), sums)
    if n == 1:
        (total, sums), dx = add(carry, (x_BTD, targets_BT, weights_BT))
        return total, sums, dx
    parts = tuple(_cut(a, n) for a in (x_BTD, targets_BT, weights_BT))
    (total, sums), dx = lax.scan(add, carry, parts)
    return total, sums, jnp.moveaxis(dx, 0, 2).reshape(x_BTD.shape)
