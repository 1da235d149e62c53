"""A kernel that the partitioner cannot split, run on each device's own heads."""

from collections.abc import Callable

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxtrain.mesh import MODEL


def over_heads(kernel: Callable, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None) -> jax.Array:
    """kernel(q, k, v, mask) → like q, on arrays [batch, token, heads, head dimension] whose heads are split over `model`;
    the mask ([batch or 1, 1, T, S] or None) is the same for all heads.

    Also where `model` has one device: inside the runtime all axes are manual then, and a kernel with a partitioning rule
    of its own (cuDNN's attention) is lowered as it is instead of through the partitioner.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[MODEL] != AxisType.Auto:
        return kernel(q, k, v, mask)
    heads = P(None, None, MODEL)
    masks = () if mask is None else (mask,)
    run = jax.shard_map(
        lambda q, k, v, *m: kernel(q, k, v, m[0] if m else None),
        in_specs=(heads, heads, heads, *(P() for _ in masks)),
        out_specs=heads,
        axis_names={MODEL},
        check_vma=False,
    )
    return run(q, k, v, *masks)
