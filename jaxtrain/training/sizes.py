"""Sizes of a step without running it: parameters, memory of the state and of slots, and the counts
that costs/ turns into communication volume and FLOPs."""

import collections
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxtrain.config import Config
from jaxtrain.costs.collectives import FLOAT32, Parameters, StepCollectives
from jaxtrain.costs.step_counts import StepCounts
from jaxtrain.costs.step_time import bytes_of
from jaxtrain.devices.mesh import AXES, DATA, sizes_of
from jaxtrain.devices.sharding import mesh_axes
from jaxtrain.models.spec import Spec
from jaxtrain.parallel.zero import Reduction
from jaxtrain.pipeline.setup import make_setup
from jaxtrain.pipeline.step_model import layout_of, transformer_of
from jaxtrain.runtime.loss import cut_count
from jaxtrain.training.state import ParameterLayout, bytes_per_device
from jaxtrain.training.step import Step, make_layout


def parameters_of(layout: ParameterLayout) -> dict[str, dict[str, Parameters]]:
    """Sizes on a device and axes of the gradients, by group and name of the parameter. Groups:
    "embed", "head", "layers/UNIT" with the stacks of all layers of a local unit, "first/LAYER",
    "predictors/MODULE"."""
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
        split = tuple(axis for part in reduction.unsharded for axis in mesh_axes(part))
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


def state_memory(step: Step, reduces_in_ops: bool) -> dict[str, int]:
    """Bytes on a device by kind: parameters, the optimizer's moments, anchor and momentum of
    independent replicas, gradient accumulators, slots; then those in the host's memory, such as
    "moments on the host".

    reduces_in_ops: gradients cross `data` each microbatch, so accumulators hold a shard.
    """
    state = step.abstract_state()
    kinds = {
        "parameters": bytes_per_device(state.params),
        "moments": bytes_per_device(state.optimizer),
    }
    if step.layout.independent_replicas:
        kinds["anchor"] = bytes_per_device(state.anchor)
        kinds["outer_momentum"] = bytes_per_device(state.outer_momentum)
    parameters = [p for group in parameters_of(step.layout).values() for p in group.values()]
    shards = step.mesh.shape[DATA] if reduces_in_ops else 1
    sizes = [int(p.size) // (shards if p.over_data else 1) for p in parameters]
    kinds["accumulators"] = FLOAT32 * sum(sizes)
    host = {"moments": bytes_per_device(state.optimizer, host=True)}
    if step.setup.train:
        pools = {kind: number * each for kind, (number, each) in slot_pools(step).items()}
        host["slots"] = sum(size for kind, size in pools.items() if kind in step.host_pools)
        kinds["slots"] = sum(pools.values()) - host["slots"]
    return kinds | {f"{kind} on the host": n for kind, n in host.items() if n}


def step_counts(config: Config, cpu: bool = False) -> StepCounts:
    """The counts of the step of a resolved config whose mesh is known. cpu: XLA's CPU backend
    lowers the collectives."""
    data, mesh, parallel, precision = config.data, config.mesh, config.parallel, config.precision
    setup, layout = make_setup(config), layout_of(mesh, config.pipeline, parallel, data.batch_size)
    # No device is needed: layouts ask a mesh for its sizes alone.
    abstract_mesh: Any = AbstractMesh(sizes_of(mesh), AXES)
    dtype, independent = jnp.dtype(precision.params), config.train.diloco_inner_steps > 0
    state = make_layout(
        setup, abstract_mesh, config.model, parallel, dtype, data.batch_size, independent
    )
    tokens = data.sequence_length // mesh.context
    collectives = StepCollectives(
        transformer_of(config.model, data.sequence_length),
        layout,
        item=bytes_of(precision.compute),
        read=bytes_of(precision.compute),
        reduced=FLOAT32 if cpu else bytes_of(precision.reduce),
        updated=FLOAT32,
        context=parallel.context,
        shares_vocabulary=setup.shares_vocabulary,
        gathers_in_ops=parallel.zero == 3 and parallel.gather == "layer",
        reduces_in_ops=parallel.reduce == "microbatch",
        documents=not data.attend_across_documents,
        loss_cuts=cut_count(layout.microbatch, tokens, mesh.model, config.model.loss_chunk),
        cpu=cpu,
        outer_int8=precision.outer == "int8",
    )
    return StepCounts(
        collectives, parameters_of(state), setup.placement, setup.train, state.independent_replicas
    )


def slot_pools(step: Step) -> dict[str, tuple[int, int]]:
    """Kind of slot → their number on a device, bytes of each; empty with one stage."""
    if not step.setup.train:
        return {}
    size = step.slot_bytes()
    return {
        kind: (number, size[kind]) for kind, number in step.setup.train.pool_sizes.items() if number
    }
