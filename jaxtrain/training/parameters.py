"""The model's parameters as costs/collectives.py sees them: sizes on a device, and the axes over
which their gradients go."""

import collections
import dataclasses
import math

import jax

from jaxtrain.costs.collectives import Parameters
from jaxtrain.devices.sharding import mesh_axes
from jaxtrain.models.spec import Spec
from jaxtrain.parallel.zero import Reduction
from jaxtrain.training.state import Layout


def parameters_of(layout: Layout) -> dict[str, dict[str, Parameters]]:
    """Parameters by group and name. Groups: "embed", "head", "layers/UNIT" with the stacks of all
    layers of a local unit, "first/LAYER", "predictors/MODULE"."""
    outer = dataclasses.replace(layout, zero=max(layout.zero, 1))
    specs = jax.tree_util.tree_leaves_with_path(layout.specs, is_leaf=lambda x: isinstance(x, Spec))
    reductions, outer_reductions = (
        jax.tree.leaves(each.reductions, is_leaf=lambda x: isinstance(x, Reduction))
        for each in (layout, outer)
    )
    groups: dict[str, dict[str, Parameters]] = collections.defaultdict(dict)
    for (path, spec), reduction, shared, array in zip(
        specs, reductions, outer_reductions, jax.tree.leaves(layout.shapes), strict=True
    ):
        keys = [str(key.key) for key in path]
        depth = 2 if keys[0] in ("layers", "first", "predictors") else 1
        split = tuple(axis for part in reduction.whole for axis in mesh_axes(part))
        groups["/".join(keys[:depth])][".".join(keys[depth:])] = Parameters(
            math.prod(array.shape) // math.prod(layout.mesh.shape[axis] for axis in split),
            reduction.scatter_axes,
            reduction.sum_axes,
            split,
            shared.scatter_axes,
            spec.cast,
            spec.matrix,
        )
    return groups
