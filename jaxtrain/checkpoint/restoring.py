"""The arrays of one step: those that its config makes, its state on the devices of a run, and its
parameters alone; and the mean of several steps. resuming.py chooses the step.
"""

import dataclasses
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from jax.sharding import Mesh

from jaxtrain.checkpoint import reading, stores
from jaxtrain.checkpoint.manifest import STATE
from jaxtrain.checkpoint.regions import StoredArray, stored_arrays
from jaxtrain.checkpoint.steps import (
    AVERAGE,
    PARAMETERS,
    ArrayShapes,
    CheckpointError,
    Meta,
    read_meta,
    trained_group,
)
from jaxtrain.checkpoint.storage import DeferredPiece, HostArray, nested, read_tree, zeros
from jaxtrain.config import (
    FilledConfig,
    OptimizerConfig,
    PrecisionConfig,
    ResolvedModel,
    with_values,
)
from jaxtrain.devices.mesh import AXES, REPLICA, make_mesh
from jaxtrain.devices.state_file import is_on_disk
from jaxtrain.training.parameter_layout import ParameterLayout
from jaxtrain.training.state import abstract_state, stored_parameters, stored_shapes
from jaxtrain.training.update.optimizer import Optimizer

# --- the arrays that a config makes ---------------------------------------------------------------


def wrong_arrays(
    meta: Meta, stored: ArrayShapes, trained_alone: bool = False, average: bool = False
) -> str:
    """The first array of a state that is missing, is not as the config in its meta makes it, or is
    none of that config's, in words; "" if there is none.

    stored: array → shape; trained_alone: look only at the parameters that are used, or at their
      average.
    """
    config = meta.stored_config()
    # each of these layers has arrays of its own, and no more of them are laid out
    if config.model.dense_layers + config.model.mtp_depth > len(stored):
        return "its state has fewer arrays than its config's model has layers"
    trained = f"{trained_group(config.train, average)}/"
    if trained_alone:  # whatever the optimizer: one of one's own need not be there
        config = with_values(
            config, optimizer=OptimizerConfig(ema_decay=config.optimizer.ema_decay)
        )
    expected = expected_shapes(config)
    # a parameter that is too many has moments, which are named after it
    for name in sorted({*expected, *stored}, key=lambda name: (not name.startswith(trained), name)):
        if trained_alone and not name.startswith(trained):
            break
        if name not in stored:
            return f"its state lacks {name}"
        if name not in expected:
            return f"its state has {name}, which its config's model does not have in this jaxtrain"
        if stored[name] != expected[name]:
            return f"its state's {name} is {list(stored[name])}, not {list(expected[name])}"
    return ""


def expected_shapes(config: FilledConfig) -> dict[str, tuple[int, ...]]:
    """Array → shape of the state that a config's checkpoints hold. No device is used."""
    return {array.name: array.shape for array in expected_arrays(config)}


def expected_arrays(config: FilledConfig) -> list[StoredArray]:
    """The arrays of the state that a config's checkpoints hold, laid out for one device,
    which need not be there."""
    # Only `replica` shows in stored shapes: independent replicas are stored one after the other.
    independent = config.train.diloco_inner_steps > 0
    sizes = [config.mesh.replica if independent and axis == REPLICA else 1 for axis in AXES]
    mesh: Any = jax.sharding.AbstractMesh(tuple(sizes), AXES)
    layout = ParameterLayout.unstaged(config.model, mesh, config.precision, independent)
    layout = dataclasses.replace(layout, optimizer=config.optimizer)
    optimizer = Optimizer(
        config.optimizer, config.train.steps, layout.specs, config.precision.moments
    )
    return stored_arrays(abstract_state(layout, optimizer).stored, stored_shapes(layout, optimizer))


# --- its state ------------------------------------------------------------------------------------


def restore(directory: str | os.PathLike, step: int, abstract: Any, stored: Any) -> Any:
    """The state of a step, laid out as `abstract` says; padding is zero. An average that the step
    does not have begins with its parameters.

    Args:
      directory: the folder of the steps.
      abstract: the state, or some of it, with a jax.ShapeDtypeStruct with sharding for each array.
      stored: as in Checkpointer, for the same arrays.

    Raises:
      CheckpointError: no such step, or an array that is not stored or has another shape or dtype.
      DamageError: an array is damaged.
      ValueError: `abstract` is not laid out as `stored` says.
    """
    steps_folder = stores.absolute(directory)
    folder = steps_folder / str(step) / STATE
    if not folder.exists():
        raise CheckpointError(f"{steps_folder} has no checkpoint of step {step}")
    # An array on disk is a leaf: its file is filled where it is, and the same object comes back.
    arrays = stored_arrays(abstract, stored)
    config = Meta.from_json(read_meta(steps_folder, step)).stored_config()
    if not config.optimizer.ema_decay:
        arrays = [
            dataclasses.replace(array, name=re.sub(f"^{AVERAGE}/", f"{PARAMETERS}/", array.name))
            for array in arrays
        ]
    return jax.tree.unflatten(
        jax.tree.structure(abstract, is_leaf=is_on_disk), read_tree(folder, arrays)
    )


# --- its parameters alone -------------------------------------------------------------------------


def load_parameters(
    directory: str | os.PathLike,
    step: int,
    model: ResolvedModel,
    precision: PrecisionConfig,
    group: str = PARAMETERS,
    mesh: Mesh | None = None,
) -> tuple[ParameterLayout, dict]:
    """A step's model and parameters for use without training, whatever mesh and schedule saved them
    → (layout, {"embed", "first" if any, "layers" (leaves [L, ...]), "head"}). layout: as stored,
    with a dimension of stages before the layers.

    The modules that predict further tokens, which only training needs, are left out.

    Matrices come in the compute type, in which the model uses them. Vectors stay as stored, and so
    does the embedding, of which only a few rows are read (and whose rows the devices of `model` add
    up: XLA's CPU compiler fails on that sum in bfloat16).

    Args:
      directory: the folder of checkpoints.
      model, precision: of the config in the step's meta.
      group: the parameters, as of `steps.trained_group`.
      mesh: has no axes of several devices but `model`, whose size must divide heads, key/value
        heads and the MLP, and `context`, along which parameters are replicated. Default: one
        device.

    Raises:
      CheckpointError: no such step, or its arrays are not this config's.
    """
    mesh = mesh or make_mesh([1] * len(AXES), jax.local_devices()[:1])
    # The stored arrays of the prediction modules are simply not asked for.
    model = dataclasses.replace(model, mtp_depth=0)
    layout = ParameterLayout.unstaged(model, mesh, PrecisionConfig())
    abstract = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
        layout.shapes,
        layout.shardings,
    )
    restored = restore(directory, step, {group: abstract}, {group: stored_parameters(layout)})[
        group
    ]
    specs, layers = layout.specs, restored["layers"].pop("0")
    compute = jnp.dtype(precision.compute)
    with jax.set_mesh(mesh):  # the caller may be inside another one
        params = {"embed": restored.pop("embed")}
        if "first" in restored:
            params["first"] = _ready(restored.pop("first"), specs["first"], compute)
        params["layers"] = _ready(layers, specs["layers"]["0"], compute, stage=0)
        params["head"] = _ready(restored.pop("head"), specs["head"], compute)
        return layout, params


def _ready(params: dict, specs: dict, compute: jnp.dtype, stage=...) -> dict:
    """Parameters of `specs`, at one stage where they are stacked by stage, with matrices in the
    compute type.

    Takes the arrays out of `params` one by one: a model is never in memory twice.
    """
    out: dict[str, Any] = {}
    for name in list(params):
        if isinstance(specs[name], dict):
            out[name] = _ready(params[name], specs[name], compute, stage)
        else:
            out[name] = params.pop(name)[stage]
            out[name] = out[name].astype(compute) if specs[name].cast else out[name]
    return out


# --- the mean of several steps --------------------------------------------------------------------


def mean_state(steps: Sequence[reading.OpenedStep], config: FilledConfig) -> dict:
    """The nested dict of HostArrays of a state before its first step, whose parameters are the mean
    of those of several steps. They are read, added up in float64 and written a piece at a time.

    steps: of one model; config: of the state, without independent replicas
    """
    stored = {}
    for array in expected_arrays(config):
        group, _, name = array.name.partition("/")
        stored[array.name] = zeros(array)
        if group == PARAMETERS:
            stored[array.name] = _mean(
                [each.arrays[f"{trained_group(each.config.train)}/{name}"] for each in steps], array
            )
    return nested(stored)


def _mean(sources: Sequence[ts.TensorStore], array: StoredArray) -> HostArray:
    def read(window: Sequence[range], target: np.ndarray) -> None:
        index = tuple(slice(span.start, span.stop) for span in window)
        target[...] = sum(np.float64(a[index].read().result()) for a in sources) / len(sources)

    return HostArray(
        array.shape,
        array.dtype,
        reading.piece_shape(sources[0]),
        [
            (index, DeferredPiece(read, [range(s.start, s.stop) for s in index], array.dtype))
            for index in reading.pieces(sources[0])
        ],
    )
