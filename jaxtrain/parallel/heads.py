"""A kernel that the partitioner cannot split, run on each device's own heads."""

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec as P

from jaxtrain.mesh import MODEL
from jaxtrain.sharding import is_split


def over_heads(kernel: Callable, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None) -> jax.Array:
    """kernel(q, k, v, mask) → like q, on arrays [batch, token, heads, head dimension] whose heads are split over `model`;
    the mask ([batch or 1, 1, T, S] or None) is the same for all heads."""
    if not is_split("heads"):
        return kernel(q, k, v, mask)
    heads = P(None, None, MODEL)
    if mask is None:
        return jax.shard_map(
            lambda q, k, v: kernel(q, k, v, None), in_specs=(heads,) * 3, out_specs=heads, axis_names={MODEL}, check_vma=False
        )(q, k, v)
    return jax.shard_map(kernel, in_specs=(heads, heads, heads, P()), out_specs=heads, axis_names={MODEL}, check_vma=False)(q, k, v, mask)
