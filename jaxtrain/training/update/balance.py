"""Load balancing of experts: biases that are updated once a step, and the load that is logged.

Some of a router's parameters are counts (models/spec.py). In place of their gradient is the number
of the batch's tokens that chose each expert, or that were dropped. A bias is such a parameter, and
its count updates it; a router without biases has a parameter only for the count. `specs` is the
tree of the parameters' Specs, `with_counts` the same tree with gradients and counts.
"""

import jax
import jax.numpy as jnp

from jaxtrain.models.spec import Spec, is_spec

BIAS, LOAD, DROPPED = "bias", "load", "dropped"


def without_counts(specs: dict, with_counts: dict) -> dict:
    """The gradients, with zeros instead of counts."""
    # Zeros, and not None: the optimizer's state has an array for each parameter, and a count must
    # add nothing to the norm.
    return jax.tree.map(
        lambda s, g: jnp.zeros_like(g) if s.counts else g, specs, with_counts, is_leaf=is_spec
    )


def _counts(specs: dict, with_counts: dict, *names: str) -> list[jax.Array]:
    """The counts with these names, in all stacks of layers."""
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec),
        jax.tree.leaves(with_counts),
        strict=True,
    )
    return [count for (path, s), count in pairs if s.counts and path[-1].key in names]


def move(
    specs: dict, params: dict, with_counts: dict, rate: float, finite: jax.Array | None = None
) -> dict:
    """The parameters, with each expert's bias up by `rate` where its load is below the mean, and
    down where it is above (Wang et al. 2024, algorithm 1). finite: a scalar; if it is false, biases
    stay as they are."""

    def moved(path: tuple, s: Spec, parameter: jax.Array, count: jax.Array) -> jax.Array:
        if not s.counts or path[-1].key != BIAS:
            return parameter
        # The sign alone: all biases move at one speed, however uneven the load.
        towards_mean = parameter + rate * jnp.sign(count.mean(-1, keepdims=True) - count)
        return towards_mean if finite is None else jnp.where(finite, towards_mean, parameter)

    return jax.tree_util.tree_map_with_path(moved, specs, params, with_counts, is_leaf=is_spec)


def expert_load(specs: dict, with_counts: dict) -> jax.Array | None:
    """The busiest expert's load over the mean, in the layer where that is largest; None for a model
    without experts."""
    # A local unit without layers has an empty stack.
    loads = [load for load in _counts(specs, with_counts, BIAS, LOAD) if load.size]
    uneven = [(load.max(-1) / jnp.maximum(load.mean(-1), 1)).max() for load in loads]
    return jnp.stack(uneven).max() if uneven else None


def dropped(specs: dict, with_counts: dict) -> jax.Array | None:
    """The fraction of the choices of experts that was dropped; None if none can be."""
    drops = _counts(specs, with_counts, DROPPED)
    # Loads count choices that were dropped, too, so they are all choices.
    choices = sum(load.sum() for load in _counts(specs, with_counts, BIAS, LOAD))
    return jnp.divide(sum(drop.sum() for drop in drops), choices) if drops else None
