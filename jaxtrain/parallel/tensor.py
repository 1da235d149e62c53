"""Tensor parallelism with a split sequence (Korthikanti et al. 2022, section 4.2.2): the
collectives over `model` around a product.

A matrix that is split by its columns multiplies all tokens, which are gathered before; one that is
split by its rows leaves a sum over `model`, of which each device keeps its own tokens. Written out,
because the partitioner reduces each product by itself before it adds several, and XLA's CPU backend
makes a whole all-reduce of a reduce-scatter of its own. None of these is differentiated: the
layers' backward calls them (models/layers.py).
"""

import functools
from collections.abc import Callable, Sequence

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.devices.mesh import MODEL, over_model, psum_scatter
from jaxtrain.devices.sharding import is_split, shards

TOKENS = P(None, MODEL)  # [batch, token, …] between blocks
COLUMNS = P(None, None, MODEL)  # [batch, token, columns] inside a block


def all_tokens(x_BTD: jax.Array) -> jax.Array:
    """A split sequence, whole on every device."""
    if not is_split("sequence"):
        return x_BTD
    return over_model(lambda x: lax.all_gather(x, MODEL, axis=1, tiled=True), (TOKENS,), P())(x_BTD)


def own_tokens(xs: Sequence[jax.Array], weights: Sequence[jax.Array], dim: int) -> jax.Array:
    """Σ x · weight over all pairs, split along the sequence: each x is [B, T, I] with split
    columns, its weight has I as dimension `dim` (of 2), split too. The products of a device are
    added up before one reduce-scatter."""

    def product(xs, weights):
        flat = [
            lax.dot_general(x.reshape(-1, x.shape[-1]), w, (((1,), (dim,)), ((), ())))
            for x, w in zip(xs, weights, strict=True)
        ]
        return sum(flat[1:], flat[0]).reshape(*xs[0].shape[:2], -1)

    if not is_split("sequence"):
        return product(xs, weights)
    local = lambda xs, weights: psum_scatter(product(xs, weights), MODEL, dim=1)
    return over_model(local, (COLUMNS, P(MODEL) if dim == 0 else P(None, MODEL)), TOKENS)(
        tuple(xs), tuple(weights)
    )


def heads_here(kv_heads: int) -> int:
    """Key/value heads as attention sees them: at least one for each device of `model`, copies where
    there are fewer."""
    return max(kv_heads, shards("kv_heads"))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def shared_columns(weight: jax.Array, kv_heads: int) -> jax.Array:
    """[…, columns of the key/value heads] → those of `heads_here`, each copy beside its devices'
    queries: where there are fewer heads than devices, the devices of a head gather its columns, and
    their gradients meet in a reduce-scatter."""
    return _among_sharers(
        lambda a, groups: lax.all_gather(
            a, MODEL, axis=a.ndim - 1, tiled=True, axis_index_groups=groups
        ),
        weight,
        kv_heads,
    )


def _among_sharers(fn: Callable, weight: jax.Array, kv_heads: int) -> jax.Array:
    size = shards("kv_heads") // kv_heads
    if size <= 1:
        return weight
    groups = [list(range(i * size, (i + 1) * size)) for i in range(kv_heads)]
    split = P(*(None,) * (weight.ndim - 1), MODEL)
    return over_model(lambda a: fn(a, groups), (split,), split)(weight)


shared_columns.defvjp(
    lambda weight, kv_heads: (shared_columns(weight, kv_heads), None),
    lambda kv_heads, _, g: (
        _among_sharers(lambda a, groups: psum_scatter(a, MODEL, a.ndim - 1, groups), g, kv_heads),
    ),
)
