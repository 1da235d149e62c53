"""Logical axis names → mesh axes: one table, for parameters and activations alike.

Model code names a dimension's meaning ("heads", "sequence"); this table alone maps it to mesh axes.
Inside the runtime's manual region only the partitioner's axes may be named, so `constrain` leaves
out manual axes: the same model code runs on one device, under jit on a mesh, and inside the
pipeline.
"""

import functools
import math
from collections.abc import Container

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxtrain.devices.mesh import BATCH_AXES, CONTEXT, EXPERT, MODEL, STAGE, manual_size

RULES: dict[str, tuple[str, ...]] = {
    # parameters
    "stage": (STAGE,),  # the leading dimension of a chunk's stacked parameters
    "layer": (),
    "width": (),
    "vocab": (MODEL,),
    "staged_vocab": (STAGE, MODEL),  # of tables that all stages share
    "heads": (MODEL,),
    "kv_heads": (MODEL,),
    "mlp": (MODEL,),
    "latent": (),
    "position": (),
    "experts": (EXPERT,),
    "expert": (),  # of arrays that each device has for all experts: the router
    # activations
    "batch": BATCH_AXES,
    "microbatch": (),
    "sequence": (MODEL,),  # between blocks: norms and residuals are split along the sequence
    "token": (),  # inside a block: all tokens, split by heads or MLP columns
    "slot": (CONTEXT,),  # of a cache, in generation: a token's place
    "ring_slot": (CONTEXT,),  # the same, of a cache as long as a window: used again and again
}

# of a batch's arrays [microbatches, sequences, tokens]
BATCH_SPEC = PartitionSpec(None, BATCH_AXES, CONTEXT)

Axes = tuple[str | None, ...]


def spec(axes: Axes) -> PartitionSpec:
    """The PartitionSpec of logical axes. Raises KeyError for an unknown name, ValueError if two
    dimensions map to one mesh axis."""
    parts = [RULES[a] if a is not None else () for a in axes]
    used: dict[str, str | None] = {}
    for name, part in zip(axes, parts, strict=True):
        for mesh_axis in part:
            if mesh_axis in used:
                raise ValueError(
                    f"colliding axes in {axes}: {used[mesh_axis]!r} and {name!r} are both "
                    f"laid on mesh axis {mesh_axis!r}"
                )
            used[mesh_axis] = name
    return PartitionSpec(*[part[0] if len(part) == 1 else part or None for part in parts])


def named(mesh: jax.sharding.Mesh, axes: Axes) -> NamedSharding:
    """The sharding in which an array with these logical axes is stored."""
    return NamedSharding(mesh, spec(axes))


def local_shape(axes: Axes, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A device's shape of an array, cut by the axes that are manual at this point of the trace."""
    cut = lambda part: math.prod(manual_size(name) for name in mesh_axes(part))
    return tuple(size // cut(part) for size, part in zip(shape, spec(axes), strict=True))


def mesh_axes(part) -> tuple[str, ...]:
    """The mesh axes of one dimension of a PartitionSpec."""
    return (part,) if isinstance(part, str) else tuple(part or ())


def restricted(spec: PartitionSpec, names: Container[str]) -> PartitionSpec:
    """A PartitionSpec with these mesh axes alone."""
    parts = [tuple(n for n in mesh_axes(part) if n in names) for part in spec]
    return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in parts))


def _partitioner_spec(axes: Axes) -> PartitionSpec | None:
    """The spec restricted to the axes that the partitioner may split at this point of the trace;
    None without such axes."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None
    free = {
        n
        for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if t == AxisType.Auto and mesh.shape[n] > 1
    }
    return restricted(spec(axes), free) if free else None


def constrain(x: jax.Array, axes: Axes) -> jax.Array:
    """x, constrained by its logical axes to those mesh axes that the partitioner handles at this
    point of the trace; the identity on one device."""
    partition = _partitioner_spec(axes)
    return x if partition is None else lax.with_sharding_constraint(x, partition)


def shards(axis: str) -> int:
    """The number of parts that the partitioner splits a logical axis into at this point of the
    trace."""
    partition = _partitioner_spec((axis,))
    if partition is None or partition[0] is None:
        return 1
    return math.prod(
        jax.sharding.get_abstract_mesh().shape[name] for name in mesh_axes(partition[0])
    )


def cut_count(batch: int, tokens: int, sequence_shards: int, limit: int) -> int:
    """The least number of parts of at most `limit` tokens into which [batch, tokens] can be cut
    evenly along a sequence split over so many shards."""
    local = tokens // sequence_shards
    fits = lambda n: batch * tokens // n <= limit or n == local
    return next(n for n in range(1, local + 1) if local % n == 0 and fits(n))


def is_split(axis: str) -> bool:
    """True if the partitioner splits a logical axis at this point of the trace."""
    return shards(axis) > 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def reshard(x: jax.Array, before: Axes, after: Axes) -> jax.Array:
    """x, moved from the layout `before` to `after`; its gradient goes back the same way.

    The constraint's transpose would put the gradient into `after`: an all-reduce where the
    sequence-sharded gradient needs a reduce-scatter.
    """
    return constrain(x, after)


reshard.defvjp(
    lambda x, before, after: (constrain(x, after), None),
    lambda before, after, _, gradient: (constrain(gradient, before),),
)
