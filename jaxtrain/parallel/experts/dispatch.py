"""Tokens to their experts and results back, on all parts over `model` and with gradients.

    to_gateways   in two steps, the message across nodes; in one step nothing
    to_experts    the message to the experts, of tokens and of the choices' weights
    combine       the results back, the rows of a token added up

The gradient of a dispatch is a combination with the same routing, and the other way round, so both
are `custom_vjp`s: jax's own transposes would scatter rows one by one, where the inverse order is
known and a gather will do. A routing is saved for the backward, and has no gradient.

Shape suffixes: M parts over model, B batch, T tokens, K choices of a token, D width, E experts of a
device, R rows of a device's experts.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from jaxtrain.devices.mesh import over_model
from jaxtrain.parallel.experts import expert_messages
from jaxtrain.parallel.experts.exchange_group import PART, REPLICATED, DispatchSpec
from jaxtrain.parallel.experts.routing import Routing, TwoSteps
from jaxtrain.parallel.fp8 import Quantized
from jaxtrain.parallel.tensor import take

# --- rows and sums of tokens, without gradients ---------------------------------------------------


def _in_turn(
    functions: Sequence[Callable], x: jax.Array, routing: Routing, spec: DispatchSpec
) -> jax.Array:
    """The functions of each part of x [M, …], each as a call of its own."""
    # A call each, since runtime/layers/interleave.py overlaps a message with another op's products:
    # work that shared the message's call would be waited for with it.
    for function in functions:
        on_part = lambda routing, x, function=function: function(x[0], routing, spec)[None]
        x = over_model(on_part, (REPLICATED, PART), PART)(routing, x)
    return x


def dispatched(x_MBTD: jax.Array, routing: Routing | TwoSteps, spec: DispatchSpec) -> jax.Array:
    """Tokens → the rows of this device's experts, [M, R, D], or [M, E, R, D] by capacity. Each of
    two steps is a message of its own (runtime/layers/interleave.py)."""
    if isinstance(routing, TwoSteps):
        at_gateways = dispatched(x_MBTD, routing.across_nodes, spec.across_nodes)
        return dispatched(at_gateways, routing.inside_node, spec.inside_node)
    return _in_turn(expert_messages.DISPATCH, x_MBTD, routing, spec)


def _combined(rows: jax.Array, routing: Routing | TwoSteps, spec: DispatchSpec) -> jax.Array:
    """Rows → the sum of each token's rows, [M, B, T, D]. Each of two steps is a message of its
    own."""
    if isinstance(routing, TwoSteps):
        at_gateways = _combined(rows, routing.inside_node, spec.inside_node)
        at_gateways = at_gateways.reshape(at_gateways.shape[0], -1, at_gateways.shape[-1])
        return _combined(at_gateways, routing.across_nodes, spec.across_nodes)
    return _in_turn(expert_messages.COMBINE, rows, routing, spec)


def _last_step(routing: Routing | TwoSteps, spec: DispatchSpec) -> tuple[Routing, DispatchSpec]:
    """The routing and the spec of the step to the experts."""
    if isinstance(routing, TwoSteps):
        return routing.inside_node, spec.inside_node
    return routing, spec


# --- the choices' weights, numbers without `model` ------------------------------------------------


def _weights_out(
    routing: Routing | TwoSteps, gates_BTK: jax.Array, spec: DispatchSpec
) -> jax.Array:
    """Weights of choices → weights of rows."""
    if isinstance(routing, TwoSteps):
        # A row brings all weights of its token to the gateway, which passes each to its choice.
        at_gateways = expert_messages.run(
            expert_messages.DISPATCH, gates_BTK, routing.across_nodes, spec.across_nodes
        )
        return _weights_out(routing.inside_node, at_gateways, spec.inside_node)
    sent = take(gates_BTK.reshape(-1), routing.choice_of_position)
    return expert_messages.run(expert_messages.DISPATCH[1:], sent, routing, spec)


def _weights_back(routing: Routing | TwoSteps, gates: jax.Array, spec: DispatchSpec) -> jax.Array:
    """Weights' gradients of rows → those of choices [B, T, K]."""
    if isinstance(routing, TwoSteps):
        at_gateways = _weights_back(routing.inside_node, gates, spec.inside_node)
        at_gateways = at_gateways.reshape(-1, at_gateways.shape[-1])
        return expert_messages.run(
            expert_messages.COMBINE, at_gateways, routing.across_nodes, spec.across_nodes
        )
    rows = expert_messages.run(expert_messages.COMBINE[:2], gates, routing, spec)
    return take(rows, routing.position_of_choice).reshape(spec.batch, spec.tokens, -1)


# --- tokens to the experts ------------------------------------------------------------------------


def to_gateways(x_MBTD, routing: Routing | TwoSteps, spec: DispatchSpec):
    """Tokens, an array or quantized → the rows [M, R, D] that arrive at their gateways; in one step
    the tokens as they are."""
    if not isinstance(routing, TwoSteps):
        return x_MBTD
    step = routing.across_nodes, spec.across_nodes
    if not isinstance(x_MBTD, Quantized):
        return _to_gateways(x_MBTD, *step)
    carrier = _to_gateways(x_MBTD.carrier, *step)
    return dataclasses.replace(x_MBTD, bits=dispatched(x_MBTD.bits, *step), carrier=carrier)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _to_gateways(x_MBTD: jax.Array, routing: Routing, spec: DispatchSpec) -> jax.Array:
    return dispatched(x_MBTD, routing, spec)


_to_gateways.defvjp(
    lambda x, routing, spec: (_to_gateways(x, routing, spec), routing),
    lambda spec, routing, g: (_combined(g, routing, spec), None),
)


def to_experts(
    x_MBTD, gates_BTK: jax.Array, routing: Routing | TwoSteps, spec: DispatchSpec
) -> tuple[Any, jax.Array]:
    """Returns (rows of this device's experts [M, R, D], or [M, E, R, D] by capacity; the weight of
    each row). In two steps x_MBTD is the result of `to_gateways`.

    A quantized tensor is sent in FP8, and the gradient comes back in its own type: the carrier,
    which no program has, takes the way of the gradient (parallel/fp8.py).
    """
    if not isinstance(x_MBTD, Quantized):
        return _to_experts(x_MBTD, gates_BTK, routing, spec)
    carrier, gates = _to_experts(x_MBTD.carrier, gates_BTK, routing, spec)
    bits = dispatched(x_MBTD.bits, *_last_step(routing, spec))
    return dataclasses.replace(x_MBTD, bits=bits, carrier=carrier), gates


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _to_experts(
    x_MBTD: jax.Array, gates_BTK: jax.Array, routing: Routing | TwoSteps, spec: DispatchSpec
) -> tuple[jax.Array, jax.Array]:
    rows = dispatched(x_MBTD, *_last_step(routing, spec))
    weights = functools.partial(_weights_out, spec=spec)
    return rows, over_model(weights, (REPLICATED, REPLICATED), REPLICATED)(routing, gates_BTK)


def _to_experts_backward(spec, routing, gradients):
    rows, gates = gradients
    by_tokens = combine(rows, *_last_step(routing, spec))
    if isinstance(routing, TwoSteps):  # as rows of a gateway
        by_tokens = by_tokens.reshape(by_tokens.shape[0], -1, by_tokens.shape[-1])
    weights = functools.partial(_weights_back, spec=spec)
    by_gates = over_model(weights, (REPLICATED, REPLICATED), REPLICATED)(routing, gates)
    return by_tokens, by_gates, None


_to_experts.defvjp(
    lambda x, gates, routing, spec: (_to_experts(x, gates, routing, spec), routing),
    _to_experts_backward,
)


# --- results back to their tokens -----------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def combine(rows: jax.Array, routing: Routing | TwoSteps, spec: DispatchSpec) -> jax.Array:
    """Rows → the sum of each token's rows, [M, B, T, D]: a term of the sum over M."""
    return _combined(rows, routing, spec)


combine.defvjp(
    lambda rows, routing, spec: (combine(rows, routing, spec), routing),
    lambda spec, routing, g: (dispatched(g, routing, spec), None),
)


# --- the order of messages and products -----------------------------------------------------------

# XLA may overlap any message with any product that does not need it. These barriers leave it one
# choice, the same in forward and backward: models/moe.py says which products overlap with which
# message. A quantized tensor needs a custom_vjp, since its bits have no gradient, and its carrier
# is no part of the program.


def after_routing(routing: Routing | TwoSteps, x):
    """x, an array or a quantized tensor, behind a barrier: its readers begin when the routing is
    known."""
    if isinstance(x, Quantized):
        return dataclasses.replace(x, bits=_after_routing(routing, x.bits))
    return _after_routing(routing, x)


@jax.custom_vjp
def _after_routing(routing: Routing | TwoSteps, x: jax.Array) -> jax.Array:
    return lax.optimization_barrier((routing, x))[1]


# The backward has no barrier: the routing is long known then.
_after_routing.defvjp(lambda routing, x: (_after_routing(routing, x), None), lambda _, g: (None, g))


def behind_one_barrier(rows, hidden: jax.Array) -> tuple[Any, jax.Array]:
    """Both, behind one barrier, and so are their gradients: the readers of each begin when both are
    computed."""
    if isinstance(rows, Quantized):
        return _behind_one_barrier(rows, hidden)
    return lax.optimization_barrier((rows, hidden))


@jax.custom_vjp
def _behind_one_barrier(rows: Quantized, hidden: jax.Array) -> tuple[Quantized, jax.Array]:
    bits, hidden = lax.optimization_barrier((rows.bits, hidden))
    return dataclasses.replace(rows, bits=bits), hidden


def _behind_one_barrier_backward(_, gradients):
    rows, hidden = gradients
    carrier, hidden = lax.optimization_barrier((rows.carrier, hidden))
    return rows.with_gradient(carrier), hidden


_behind_one_barrier.defvjp(
    lambda rows, hidden: (_behind_one_barrier(rows, hidden), None), _behind_one_barrier_backward
)
