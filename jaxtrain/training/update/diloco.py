"""DiLoCo: replicas train independently and exchange every H steps (Douillard et al. 2023, algorithm
1).

    outer gradient   Δ = anchor − mean over replicas of their parameters
    momentum         m ← μ·m + Δ
    anchor             ← anchor − η·(Δ + μ·m)     (Nesterov's)

Each replica then goes on from the anchor, with its own optimizer state. Between exchanges nothing
crosses `replica`. Evaluation and generation use the anchor. Anchor and momentum are float32,
scattered over a replica's devices.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.devices.host_memory import on_device
from jaxtrain.models.spec import Spec, is_spec
from jaxtrain.parallel import replicas
from jaxtrain.training.parameter_layout import ParameterLayout
from jaxtrain.training.state import TrainState


def exchange(
    state: TrainState, layout: ParameterLayout, rate: float, momentum: float, dtype: str
) -> TrainState:
    """The state after an exchange.

    rate: η; momentum: μ; dtype: of the outer gradient that crosses `replica`, "float32" or "int8".
    """
    shardings = jax.tree.map(lambda like: replicas.each(like).sharding, layout.outer)
    # Scattered before the difference is taken: each device computes and sends its own shard.
    params = jax.tree.map(
        lambda a, s: lax.with_sharding_constraint(on_device(a).astype(jnp.float32), s),
        state.params,
        shardings,
    )
    delta = replicas.mean_across(
        jax.tree.map(lambda a, p: a - p, state.anchor, params), layout.outer, dtype
    )
    velocity = jax.tree.map(lambda m, d: momentum * m + d, state.outer_momentum, delta)

    def moved(spec: Spec, anchor: jax.Array, delta: jax.Array, velocity: jax.Array) -> jax.Array:
        # Parameters without a gradient, such as experts' biases, are only averaged: momentum would
        # carry them past the mean.
        return anchor - (delta if spec.counts else rate * (delta + momentum * velocity))

    anchor = jax.tree.map(moved, layout.specs, state.anchor, delta, velocity, is_leaf=is_spec)
    # All replicas go on from the anchor, each with its own optimizer state.
    params, working = replicas.copies((layout.as_held(anchor), layout.working(anchor)), layout.mesh)
    return dataclasses.replace(
        state, params=params, anchor=anchor, outer_momentum=velocity, working=working
    )
