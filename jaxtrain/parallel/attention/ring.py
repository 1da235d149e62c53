"""Ring attention (Liu et al. 2023): keys and values pass from device to device along the `context`
axis, and each device attends to those that it has.

Device i of c has chunks i and 2c − 1 − i of the sequence (parallel/attention/context.py). When it
has the keys of device r,

    r < i    all its queries see the lower chunk of the keys
    r > i    the queries of its upper chunk see both chunks of the keys

so every device computes two of the four pairs of chunks in every step, and nothing that is masked.
The outputs of the steps are merged by log-sum-exp. The next keys are sent while the present ones
are used. In the backward the gradients of keys and values follow them one step behind, in float32.
A device saves only its own keys for the backward. Begin with `_forward` and `_around`.

Shapes: q, k, v, out [B, T, heads, size of a head], lse [B, T, heads], segments [B, T], all of one
device's tokens.

Messages are permutes, or with several stages all-to-alls (parallel/attention/context.py: send).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.devices.mesh import CONTEXT, STAGE, manual_size, over_model
from jaxtrain.parallel.attention.context import send
from jaxtrain.parallel.attention.flash import (
    SPLITS,
    AttentionResiduals,
    Inputs,
    Kernel,
    Sight,
    gradient_of_sinks,
    input_gradients,
    with_sinks,
)
from jaxtrain.parallel.attention.heads import HEADS

# of a device's own keys: each chunk of queries sees its own chunk of keys up to the diagonal, and
# the upper one also the lower chunk in full
OWN = Sight((0, 1), 1)


# A custom_vjp: jax's gradient of the loop would save the keys and values of every step, which are
# those of all devices.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(kernel: Kernel, inputs: Inputs) -> jax.Array:
    """Causal attention over split sequences → [B, T, N, V]. The inputs are this device's; the
    kernel gets the sight of each step."""
    return _attend(kernel, inputs)[0]


class _Keys(NamedTuple):
    """The keys, values and segments of one device, which go around the ring; or the gradients of
    its keys and values."""

    k: jax.Array
    v: jax.Array
    segments: jax.Array | None = None


def _attend(kernel, inputs: Inputs):
    """The output, and AttentionResiduals with the log-sum-exp over the keys of all devices and the
    sinks."""
    run = over_model(functools.partial(_forward, kernel), (SPLITS, P()), HEADS)
    out, lse = run(inputs, lax.axis_index(CONTEXT))
    out, lse = with_sinks(out, lse, inputs.scores.sinks)
    out = out.astype(inputs.v.dtype)
    return out, AttentionResiduals(inputs, out, lse)


def _attend_backward(kernel, residuals: AttentionResiduals, g):
    splits = AttentionResiduals._make((SPLITS, HEADS, HEADS)), HEADS, P()
    run = over_model(functools.partial(_backward, kernel), splits, HEADS)
    gradients = run(residuals, g, lax.axis_index(CONTEXT))
    sinks = residuals.inputs.scores.sinks
    of_sinks = gradient_of_sinks(sinks, g, residuals.out, residuals.lse)
    return (input_gradients(residuals.inputs, gradients, of_sinks),)


attend.defvjp(_attend, _attend_backward)


def _next(keys: _Keys) -> _Keys:
    """The arrays of the device before.

    With several stages keys and values are one message: TPUs have one ragged all-to-all under way
    at a time, so only one of two would overlap with attention's kernel.
    """
    c = lax.axis_size(CONTEXT)
    pairs = tuple((n, (n + 1) % c) for n in range(c))
    to_next = lambda a: send(a, pairs)
    if manual_size(STAGE) == 1:
        return jax.tree.map(to_next, keys)
    both = to_next(jnp.concatenate([keys.k, keys.v], -1))
    k, v = jnp.split(both, [keys.k.shape[-1]], -1)
    return _Keys(k, v, jax.tree.map(to_next, keys.segments))


def _sight(i, step) -> Sight:
    """The keys that the queries of device i see of those that it has after `step` steps, at least
    1: those of device i − step, or, where that is negative, of c + i − step."""
    return Sight(jnp.where(step <= i, jnp.array([1, 1]), jnp.array([0, 2])), 2, diagonal=False)


def _around(keys: _Keys, attend_own: Callable, attend_others: Callable):
    """The result after all devices' keys: attend_own(keys) of this device's, then result =
    attend_others(step, result, keys) with those of every other device."""
    c = lax.axis_size(CONTEXT)
    # The next keys are asked for before the present ones are used, so that XLA can overlap the
    # message with attention.
    arriving, result = _next(keys), attend_own(keys)

    def step(n, carry):
        result, keys = carry
        arriving = _next(keys)
        return attend_others(n, result, keys), arriving

    result, keys = lax.fori_loop(1, c - 1, step, (result, arriving))
    return attend_others(c - 1, result, keys)  # outside of the loop: nothing more is sent


def _keys(inputs: Inputs) -> _Keys:
    return _Keys(inputs.k, inputs.v, inputs.segments and inputs.segments[1])


def _with_keys(inputs: Inputs, keys: _Keys, sight: Sight) -> Inputs:
    """The kernel's inputs for this device's queries and one device's keys."""
    pair: Any = inputs.segments and (inputs.segments[0], keys.segments)
    return inputs._replace(k=keys.k, v=keys.v, sight=sight, segments=pair)


def _forward(kernel: Kernel, inputs: Inputs, i):
    """Output [B, T, N, V] and log-sum-exp [B, T, N], float32. i: this device's index"""

    # In float32, since the outputs of all steps are added up before they are rounded.
    def attend_to(sight: Sight, keys: _Keys):
        return kernel.forward(_with_keys(inputs, keys, sight), jnp.float32)

    def merge(n, merged, keys: _Keys):
        (out, lse), (step_out, step_lse) = merged, attend_to(_sight(i, n), keys)
        # An output is a mean of values by weights whose sum is exp(lse), so two outputs are
        # averaged by their shares of both sums.
        total = jnp.logaddexp(lse, step_lse)
        share, step_share = jnp.exp(lse - total), jnp.exp(step_lse - total)
        return out * share[..., None] + step_out * step_share[..., None], total

    return _around(_keys(inputs), functools.partial(attend_to, OWN), merge)


def _backward(kernel: Kernel, residuals: AttentionResiduals, g, i):
    """Gradients of queries, keys and values: float32, or keys' and values' in their own types."""
    inputs = residuals.inputs

    def gradients(sight: Sight, keys: _Keys):
        of_keys = residuals._replace(inputs=_with_keys(inputs, keys, sight))
        dq, dk, dv = kernel.backward(of_keys, g, jnp.float32)
        return dq, _Keys(dk, dv)

    def add(n, sums, keys: _Keys):
        # The sums of the keys' gradients follow the keys: those of the device before are of the
        # keys that have just come from there.
        dq, by_keys = sums
        return jax.tree.map(jnp.add, (dq, _next(by_keys)), gradients(_sight(i, n), keys))

    dq, by_keys = _around(_keys(inputs), functools.partial(gradients, OWN), add)
    if manual_size(STAGE) > 1:
        # Complete sums need no more bits than the gradients that are returned, and take half of
        # the message's bytes.
        by_keys = jax.tree.map(lambda d, a: d.astype(a.dtype), by_keys, _Keys(inputs.k, inputs.v))
    dk, dv, _ = _next(by_keys)  # one more step, and they are at the device that has the keys
    return dq, dk, dv
