"""The restoration of a step on the devices of a run: process 0 chooses it, and all processes read
it.

Damage to an array's numbers shows only when they are read, and each process reads different ones.
So one process may find damage that no other sees. The processes tell each other, and either all of
them take an older step or none does.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.checkpoint import stores
from jaxtrain.checkpoint.manifest import STATE
from jaxtrain.checkpoint.regions import StoredArray, stored_arrays
from jaxtrain.checkpoint.steps import (
    NONE,
    TO_TRAIN,
    CheckpointError,
    DamageError,
    Meta,
    Shapes,
    StepChoice,
    UnrecognizedEntry,
    choose,
    trained_group,
)
from jaxtrain.checkpoint.storage import read_tree
from jaxtrain.config import Config, ModelConfig, PrecisionConfig
from jaxtrain.devices import cluster
from jaxtrain.devices.mesh import AXES, CONTEXT, MODEL, REPLICA, make_mesh
from jaxtrain.devices.state_file import is_on_disk
from jaxtrain.training.parameter_layout import ParameterLayout
from jaxtrain.training.state import abstract_state, stored_parameters, stored_shapes
from jaxtrain.training.update.optimizer import Optimizer

# --- the step -------------------------------------------------------------------------------------


def choose_together(
    directory: str | os.PathLike, damaged: Mapping[int, str] = NONE, before: int | None = None
) -> StepChoice:
    """The step that a run resumes from, and what else is in the directory: process 0's answer, on
    every process. damaged, before: as in `choose`.

    Raises CheckpointError if no step is complete, but something of one exists: a new run would
    push it aside.
    """

    def decide() -> dict:
        choice = choose(directory, TO_TRAIN, wrong_arrays, damaged, before)
        lost = ", ".join(str(entry) for entry in choice.unrecognized if entry.holds_data)
        if choice.step is None and lost:
            raise CheckpointError(
                f"{directory} has no complete checkpoint: {lost}: move it away to begin anew, or "
                "use another --workdir"
            )
        return dataclasses.asdict(choice)

    values = cluster.from_main(decide, CheckpointError)
    return StepChoice(
        values["step"],
        Meta(**values["meta"]),
        tuple(values["steps"]),
        tuple(UnrecognizedEntry(**entry) for entry in values["unrecognized"]),
    )


def wrong_arrays(meta: Meta, stored: Shapes, trained_alone: bool = False) -> str:
    """The first array of a state that is missing, is not as the config in its meta makes it, or is
    none of that config's, in words; "" if there is none.

    stored: array → shape; trained_alone: look only at the parameters that are evaluated and used.
    """
    config = meta.stored_config().resolve()
    # each of these layers has arrays of its own, and no more of them are laid out
    if config.model.dense_layers + config.model.mtp_depth > len(stored):
        return "its state has fewer arrays than its config's model has layers"
    trained = f"{trained_group(config.train.diloco_inner_steps > 0)}/"
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


def expected_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Array → shape of the state that a resolved config's checkpoints hold. No device is used."""
    return {array.name: array.shape for array in expected_arrays(config)}


def expected_arrays(config: Config) -> list[StoredArray]:
    """The arrays of the state that a resolved config's checkpoints hold, laid out for one device,
    which need not be there."""
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
    """The state of a step, laid out as `abstract` says; padding is zero.

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
    arrays = stored_arrays(abstract, stored)
    return jax.tree.unflatten(
        jax.tree.structure(abstract, is_leaf=is_on_disk), read_tree(folder, arrays)
    )


def restore_newest(
    choice: StepChoice,
    choose_again: Callable[[Mapping[int, str]], StepChoice],
    directory: str | os.PathLike,
    *state: Any,
) -> tuple[Any, StepChoice]:
    """The state of the chosen step, or of the newest one before it whose arrays are undamaged; and
    the choice of that step. Every process must call this.

    Args:
      choice: of a step.
      choose_again: step → its damage, for all that turned out to be damaged → the next choice,
        which has a step.
      directory, state: as in `restore`, whose last two arguments are `state`.

    Raises:
      CheckpointError: as `restore` on any process, for what is no damage; and as `choose_again`.
    """
    damaged: dict[int, str] = {}

    def read(step: int) -> tuple[Any, str]:
        try:
            return restore(directory, step, *state), ""
        except DamageError as error:
            return None, error.what

    while True:
        assert choice.step is not None
        restored, damage = cluster.in_all(functools.partial(read, choice.step), CheckpointError)
        damage = next(filter(None, cluster.gather(damage)), "")
        if not damage:
            return restored, choice
        del restored  # its memory is needed for the next one
        damaged[choice.step] = damage
        choice = choose_again(damaged)


# --- its parameters alone -------------------------------------------------------------------------


def load_parameters(
    directory: str | os.PathLike,
    step: int,
    model: ModelConfig,
    precision: PrecisionConfig,
    independent_replicas: bool,
    devices: Sequence[jax.Device] | None = None,
    context: int = 1,
) -> tuple[ParameterLayout, dict]:
    """A step's model and parameters for use without training, whatever mesh and schedule saved them
    → (layout, {"embed", "first" if any, "layers" (leaves [L, ...]), "head"}). layout: as stored,
    with a dimension of stages before the layers.

    The modules that predict further tokens, which only training needs, are left out. Parameters of
    independent replicas are those of the last exchange.

    Matrices come in the compute type, in which the model uses them. Vectors stay as stored, and so
    does the embedding, of which only a few rows are read (and whose rows the devices of `model` add
    up: XLA's CPU compiler fails on that sum in bfloat16).

    Args:
      directory: the folder of checkpoints.
      model, precision: of a resolved config, as in the step's meta.
      independent_replicas: replicas had parameters of their own (DiLoCo).
      devices: `context` tensor-parallel groups, whose size must divide heads, key/value heads and
        the MLP. Default: one device.
      context: the size of the mesh's context axis, along which parameters are replicated.

    Raises:
      CheckpointError: no such step, or its arrays are not this config's.
    """
    devices = jax.local_devices()[:1] if devices is None else list(devices)
    sizes = {CONTEXT: context, MODEL: len(devices) // context}
    mesh = make_mesh([sizes.get(axis, 1) for axis in AXES], devices)
    model = dataclasses.replace(model, mtp_depth=0)
    layout = ParameterLayout.unstaged(model, mesh, PrecisionConfig())
    abstract = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
        layout.shapes,
        layout.shardings,
    )
    name = trained_group(independent_replicas)
    restored = restore(directory, step, {name: abstract}, {name: stored_parameters(layout)})[name]
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
