"""Cross-entropy over a large vocabulary, or a loss of one's own, with the logits of a limited
number of tokens at a time.

Begin with `loss_and_gradients`. The loss is a sum over tokens, so the gradients of a chunk of
tokens are computed while its logits exist: no logits are stored or recomputed, and the projection's
gradient is added to its accumulator chunk by chunk. `loss_sum` is the same without gradients.

Shape suffixes: B batch, T tokens, C tokens of a chunk of the sequence, D width, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.devices.mesh import psum
from jaxtrain.devices.sharding import cut_count, shards
from jaxtrain.runtime.own_loss import OwnLoss, losses_of


@dataclasses.dataclass(frozen=True)
class VocabularyShard:
    """The rows of the vocabulary that a device has logits of, inside a manual region.

    first_row: the vocabulary's row at which they begin, an int or a traced int32
    axes:      the mesh axes whose devices hold the other rows; () if it has all of them
    """

    first_row: Any = 0
    axes: tuple[str, ...] = ()


ALL = VocabularyShard()


@dataclasses.dataclass(frozen=True)
class LossRule:
    """The loss of a token.

    z_loss: the weight of (log Z)², where Z is the sum of the powers of a token's logits (PaLM,
        arXiv:2204.02311, section 5)
    own: a function in place of cross-entropy (own_loss.py), which has no z_loss; vocab_size: rows
        of the vocabulary without padding, all of which it sees
    """

    z_loss: float = 0.0
    own: OwnLoss | None = None
    vocab_size: int = 0


CROSS_ENTROPY = LossRule()


class OutputHead(NamedTuple):
    """The function from the last layer's output to logits, and the loss of these.

    logits: (params, x [B, C, D]) → logits [B, C, V]
    chunk:  the most tokens whose logits may exist at a time
    shard:  the rows of the vocabulary that the logits are of
    rule:   the loss of a token
    """

    logits: Callable
    chunk: int
    shard: VocabularyShard = ALL
    rule: LossRule = CROSS_ENTROPY


class LossInputs(NamedTuple):
    """The last layer's output x [B, T, D], the tokens to predict, int32 [B, T], and the weights of
    their losses, [B, T]."""

    x_BTD: jax.Array
    targets_BT: jax.Array
    weights_BT: jax.Array


class LossSums(NamedTuple):
    """Sums over tokens, float32 scalars.

    loss:   of weight · loss
    z_loss: of weight · z_loss · (log Z)²; None where there is no z_loss
    """

    loss: jax.Array
    z_loss: jax.Array | None = None


def token_losses(
    logits, targets, shard: VocabularyShard = ALL, z_loss: float = 0.0
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """logits float32 [..., V], targets int32 [...] → (negative log-likelihoods [...] in nats; the
    gradients by the logits [..., V] of these and of z_loss · (log Z)²; log Z [...]).

    The losses are over all of the vocabulary, the same on all devices of `shard.axes`.
    """
    # Without the largest logit the powers overflow. It must be the same on all devices, since their
    # sums of powers are added up.
    top = logits.max(-1, keepdims=True)
    top = lax.pmax(top, shard.axes) if shard.axes else top
    powers = jnp.exp(logits - top)
    # A comparison in place of an indexed read: it stays local where the vocabulary is split.
    hit = (
        lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
        == (targets - shard.first_row)[..., None]
    )
    # One collective for both sums. The target's logit is on one device, on the others `hit` is
    # False everywhere.
    sums = jnp.stack([powers.sum(-1), jnp.sum(jnp.where(hit, logits, 0.0), -1)])
    total, chosen = psum(sums, shard.axes) if shard.axes else sums
    log_z, by_log_z = jnp.log(total) + top[..., 0], powers / total[..., None]
    if z_loss:
        by_log_z = by_log_z * (1 + 2 * z_loss * log_z)[..., None]
    return log_z - chosen, by_log_z - hit, log_z


def _weighted(head: OutputHead, logits_BCV, inputs: LossInputs) -> tuple[LossSums, jax.Array]:
    """Returns (the sums over a chunk's tokens, their gradient by the logits)."""
    (_, targets, weights), rule = inputs, head.rule
    if own := rule.own:
        of_logits = functools.partial(losses_of, own, rule.vocab_size, targets_BC=targets)
        losses, vjp = jax.vjp(of_logits, logits_BCV)
        return LossSums(jnp.sum(losses * weights)), *vjp(weights)
    # The gradient by the logits has a closed form, so no second exponential is computed.
    losses, by_logits, log_z = token_losses(logits_BCV, targets, head.shard, rule.z_loss)
    z_loss = rule.z_loss * jnp.sum(log_z**2 * weights) if rule.z_loss else None
    return LossSums(jnp.sum(losses * weights), z_loss), by_logits * weights[..., None]


def _chunks(limit: int, inputs: LossInputs) -> LossInputs | None:
    """Arrays [B, T, ...] cut for a scan over n chunks, [n, B, T/n, ...]; None where one is enough.

    Chunk i takes tokens i, i + n, …: with consecutive tokens it would be the shard of one device
    where the sequence is split, and the others would wait. 6 tokens in 2 chunks: 0 2 4, 1 3 5.
    """
    batch, tokens = inputs.targets_BT.shape
    n = cut_count(batch, tokens, shards("sequence"), limit)
    if n == 1:
        return None
    cut = lambda a: a.reshape(a.shape[0], a.shape[1] // n, n, *a.shape[2:])
    return LossInputs(*(jnp.moveaxis(cut(a), 2, 0) for a in inputs))


def loss_sum(head: OutputHead, params, inputs: LossInputs) -> jax.Array:
    """Returns Σ weight · loss over all tokens, a float32 scalar. params: as `head.logits` takes
    them"""

    def loss_of(chunk: LossInputs) -> jax.Array:
        # Its gradient is not computed: nothing reads it.
        return _weighted(head, head.logits(params, chunk.x_BTD), chunk)[0].loss

    chunks = _chunks(head.chunk, inputs)
    if chunks is None:
        return loss_of(inputs)
    return lax.scan(lambda total, chunk: (total + loss_of(chunk), None), jnp.zeros(()), chunks)[0]


def loss_and_gradients(
    head: OutputHead, params, sums, inputs: LossInputs
) -> tuple[LossSums, Any, jax.Array]:
    """Returns (the sums of losses, `sums` + gradients of params, gradient of x [B, T, D]), both of
    these of all losses together.

    sums: a pytree like params, float32. The gradient of x is that by the logits of this device's
    shard of the vocabulary: the sum over `head.shard.axes` is the gradient.
    """

    def add(carry, chunk: LossInputs):
        total, sums = carry
        logits, vjp = jax.vjp(head.logits, params, chunk.x_BTD)
        of_chunk, by_logits = _weighted(head, logits, chunk)
        gradients, dx = vjp(by_logits)
        return (
            jax.tree.map(jnp.add, total, of_chunk),
            jax.tree.map(lambda a, g: a + g.astype(a.dtype), sums, gradients),
        ), dx

    zero = LossSums(jnp.zeros(()), jnp.zeros(()) if head.rule.z_loss else None)
    chunks, carry = _chunks(head.chunk, inputs), (zero, sums)
    if chunks is None:
        (total, sums), dx = add(carry, inputs)
        return total, sums, dx
    (total, sums), dx = lax.scan(add, carry, chunks)
    # back into the order of tokens
    return total, sums, jnp.moveaxis(dx, 0, 2).reshape(inputs.x_BTD.shape)
