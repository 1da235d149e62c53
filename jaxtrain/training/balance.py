"""The load of experts: the biases that even it out, moved once a step, and what is logged of it.

A router's parameters that are counts (models/spec.py) get, in the place of a gradient, the number of the whole batch's tokens that chose
an expert, or that were dropped. The former is the bias, which is moved by it; where a router has none, a parameter for the count alone.
Trees are like the parameters, with Specs in the place of arrays.
"""

import jax
import jax.numpy as jnp

from jaxtrain.models.spec import Spec

BIAS, LOAD, DROPPED = "bias", "load", "dropped"


def _is_spec(x) -> bool:
    return isinstance(x, Spec)


def gradients(specs: dict, found: dict) -> dict:
    """What was found, with zeros in the place of counts."""
    return jax.tree.map(lambda s, g: jnp.zeros_like(g) if s.counts else g, specs, found, is_leaf=_is_spec)


def _counts(specs: dict, found: dict, *names: str) -> list[jax.Array]:
    """The counts of these names of all stacks of layers."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(specs, is_leaf=_is_spec), jax.tree.leaves(found), strict=True)
    return [a for (path, s), a in pairs if s.counts and path[-1].key in names]


def move(specs: dict, params: dict, found: dict, rate: float) -> dict:
    """The parameters with each expert's bias up by `rate` where its load is below the mean, and down where it is above (Wang et al. 2024,
    algorithm 1)."""

    def moved(path, s, p, count):
        if not s.counts or path[-1].key != BIAS:
            return p
        return p + rate * jnp.sign(count.mean(-1, keepdims=True) - count)

    return jax.tree_util.tree_map_with_path(moved, specs, params, found, is_leaf=_is_spec)


def metrics(specs: dict, found: dict) -> dict[str, jax.Array]:
    """expert_load: the busiest expert's load over the mean, of the layer where that is largest; dropped: choices that were, over all.
    Of a model with experts."""
    loads = _counts(specs, found, BIAS, LOAD)
    if not loads:
        return {}
    uneven = [(a.max(-1) / jnp.maximum(a.mean(-1), 1)).max() for a in loads]
    made = {"expert_load": jnp.stack(uneven).max()}
    if dropped := _counts(specs, found, DROPPED):
        total = lambda counts: jnp.stack([a.sum() for a in counts]).sum()
        made["dropped"] = total(dropped) / total(loads)
    return made
