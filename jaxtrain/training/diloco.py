"""DiLoCo: replicas train apart and meet every H steps (Douillard et al. 2023, algorithm 1).

    outer gradient   Δ = anchor − mean over replicas of their parameters
    momentum         m ← μ·m + Δ
    anchor             ← anchor − η·(Δ + μ·m)     (Nesterov's)

Each replica then goes on from the anchor, with its own optimizer state. Between exchanges nothing crosses `replica`. The anchor is what
is evaluated, and what a checkpoint is generated from. Anchor and momentum are float32, scattered over a replica's devices.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.models.spec import Spec
from jaxtrain.parallel import replicas
from jaxtrain.training.state import Layout


def exchange(state: dict, layout: Layout, rate: float, momentum: float, dtype: str) -> dict:
    """The state after an exchange. rate η, momentum μ; dtype: in what the outer gradient crosses, "float32" or "int8"."""
    lay_out = functools.partial(jax.tree.map, lambda a, like: lax.with_sharding_constraint(a, like.sharding))
    mine = lay_out(state["params"], jax.tree.map(replicas.each, layout.outer))
    delta = replicas.mean_across(jax.tree.map(lambda a, p: a - p, state["anchor"], mine), layout.outer, dtype)
    velocity = jax.tree.map(lambda m, d: momentum * m + d, state["outer_momentum"], delta)
    outer = lambda s, a, d, m: a - (d if s.counts else rate * (d + momentum * m))  # what no gradient moves is only averaged
    anchor = jax.tree.map(outer, layout.specs, state["anchor"], delta, velocity, is_leaf=lambda x: isinstance(x, Spec))
    params = jax.tree.map(lambda a, s: lax.with_sharding_constraint(a, s).astype(layout.dtype), anchor, layout.shardings)
    return state | {"params": replicas.copies(params, layout.mesh), "anchor": anchor, "outer_momentum": velocity}


def mean_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """Of a step's metrics, one of each replica [replicas], those of the step: the loss by tokens, the others' mean."""
    tokens = metrics["tokens"]
    means = {k: a.mean() for k, a in metrics.items()}
    return means | {"loss": (metrics["loss"] * tokens).sum() / jnp.maximum(tokens.sum(), 1), "tokens": tokens.sum()}
