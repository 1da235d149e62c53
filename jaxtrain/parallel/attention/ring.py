"""Ring attention (Liu et al. 2023): keys and values pass from device to device along the `context`
axis, and each device attends to those that it has.

Device i of c has chunks i and 2c − 1 − i of the sequence (parallel/attention/context.py). When it
has the keys of device r,

    r < i    all its queries see the lower chunk of the keys
    r > i    the queries of its upper chunk see both chunks of the keys

so every device computes two of the four pairs of chunks in every step, and nothing that is masked.
The outputs of the steps are merged by log-sum-exp. The next keys are sent while the present ones
are used. In the backward the gradients of keys and values follow them one step behind, in float32.
A device saves only its own keys for the backward.

With one stage the arrays are sent by permutes. With several only some stages run an op, and in
XLA's CPU backend a permute waits for all devices of the program (docs/traps.md). A ragged
all-to-all then sends everything to the next device; its groups are the devices of `context` in one
stage. The CPU backend has none: there a plain all-to-all sends zeros to the other devices.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.devices.mesh import CONTEXT, STAGE, manual_size, on_cpu
from jaxtrain.parallel.attention.context import Sight
from jaxtrain.parallel.attention.flash import Kernel
from jaxtrain.parallel.attention.heads import by_heads

OWN = Sight((0, 1), 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(kernel: Kernel, q, k, v, segments=None) -> jax.Array:
    """Causal attention over split sequences; q, k, v [B, T, heads, head dimension] and segments [B,
    T] are this device's."""
    return _attend(kernel, q, k, v, segments)[0]


def _attend(kernel, q, k, v, segments):
    i = lax.axis_index(CONTEXT)
    out, lse = by_heads(functools.partial(_forward, kernel), (q, k, v), (i, segments))
    out = out.astype(v.dtype)
    return out, (q, k, v, out, lse, segments)


def _attend_backward(kernel, residuals, g):
    *arrays, segments = residuals
    gradients = by_heads(
        functools.partial(_backward, kernel), (*arrays, g), (lax.axis_index(CONTEXT), segments)
    )
    return *(d.astype(a.dtype) for d, a in zip(gradients, arrays[:3], strict=True)), None


attend.defvjp(_attend, _attend_backward)


def _next(held: tuple) -> tuple:
    """What the device before holds: keys, values (or the gradients of both), and perhaps segments.

    With several stages keys and values are one message: TPUs have one ragged all-to-all under way
    at a time, so only one of two would stand beside attention's kernel.
    """
    if manual_size(STAGE) == 1:
        return jax.tree.map(_permuted, held)
    k, v, *segments = held
    both = _exchanged(jnp.concatenate([k, v], -1))
    return *jnp.split(both, [k.shape[-1]], -1), *jax.tree.map(_exchanged, segments)


def _permuted(a: jax.Array) -> jax.Array:
    """The device before's array, by a permute."""
    c = lax.axis_size(CONTEXT)
    return lax.ppermute(a, CONTEXT, [(n, (n + 1) % c) for n in range(c)])


def _exchanged(a: jax.Array) -> jax.Array:
    """The device before's array, by an all-to-all among the devices of `context` alone."""
    c, i = lax.axis_size(CONTEXT), lax.axis_index(CONTEXT)
    after, before = (i + 1) % c, (i - 1) % c
    if on_cpu():
        sent = jnp.zeros((c, *a.shape), a.dtype).at[after].set(a)
        return lax.all_to_all(sent, CONTEXT, 0, 0)[before]
    device, begin = jnp.arange(c), jnp.zeros(c, jnp.int32)
    rows_of = lambda other: jnp.where(device == other, a.shape[0], 0)
    return lax.ragged_all_to_all(
        *(a, lax.empty(a.shape, a.dtype), begin, rows_of(after), begin, rows_of(before)),
        axis_name=CONTEXT,
    )


def _sight(i, step) -> Sight:
    """The sight of the keys that device i holds after `step` steps, at least 1."""
    return Sight(jnp.where(step <= i, jnp.array([1, 1]), jnp.array([0, 2])), 2, diagonal=False)


def _round(held, start: Callable, following: Callable):
    """start(held), then result = following(step, result, held) with the arrays of every other
    device; the next arrays are sent meanwhile."""
    c = lax.axis_size(CONTEXT)
    coming, result = _next(held), start(held)

    def step(n, carry):
        result, held = carry
        coming = _next(held)
        return following(n, result, held), coming

    result, held = lax.fori_loop(1, c - 1, step, (result, coming))
    return following(c - 1, result, held)


def _forward(kernel: Kernel, q, k, v, i, segments):
    """Output and log-sum-exp, float32."""

    def some(sight, k, v, of_keys):
        return kernel.forward(q, k, v, sight, None if segments is None else (segments, of_keys))

    def merge(n, merged, held):
        (out, lse), (step_out, step_lse) = merged, some(_sight(i, n), *held)
        total = jnp.logaddexp(lse, step_lse)
        return out * jnp.exp(lse - total)[..., None] + step_out * jnp.exp(step_lse - total)[
            ..., None
        ], total

    return _round((k, v, segments), lambda held: some(OWN, *held), merge)


def _backward(kernel: Kernel, q, k, v, out, lse, g, i, segments):
    """Gradients of queries, keys and values: float32, or keys' and values' in their own types."""

    def some(sight, k, v, of_keys):
        dq, dk, dv = kernel.backward(
            q, k, v, g, out, lse, sight, None if segments is None else (segments, of_keys)
        )
        return dq, (dk, dv)

    def add(n, sums, held):
        arrived = sums[0], _next(sums[1])  # of the keys that this device now holds
        return jax.tree.map(jnp.add, arrived, some(_sight(i, n), *held))

    dq, of_keys = _round((k, v, segments), lambda held: some(OWN, *held), add)
    if manual_size(STAGE) > 1:  # complete sums go home in fewer bytes
        of_keys = tuple(d.astype(a.dtype) for d, a in zip(of_keys, (k, v), strict=True))
    return dq, *_next(of_keys)
