"""The parameters of a checkpoint for use without training: as the model's functions take them, on
one device or over `model`."""

import dataclasses
import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxtrain.checkpoint.manager import restore
from jaxtrain.config import Config
from jaxtrain.devices.mesh import AXES, MODEL, make_mesh
from jaxtrain.models.spec import Spec
from jaxtrain.models.transformer import ModelParts, build
from jaxtrain.schedule.placement import Placement
from jaxtrain.training.state import Layout


def load_parameters(
    directory: str | os.PathLike,
    step: int,
    config: Config,
    devices: Sequence[jax.Device] | None = None,
) -> tuple[ModelParts, dict]:
    """A step's model and parameters, whatever mesh and schedule saved them → (parts, {"embed",
    "layers" (leaves [L, ...]), "head"}).

    What only training needs, the modules that predict further tokens, stays where it is. Of
    replicas that train apart they are those of the last exchange.

    Matrices come in the compute type, in which the model uses them. Vectors stay as stored, and so
    does the embedding, of which only a few rows are read (and whose rows the devices of `model` add
    up: XLA's CPU compiler fails on that sum in bfloat16).

    Args:
      directory: the folder of checkpoints.
      config: a resolved config, as in the step's meta.
      devices: the tensor-parallel group; its size must divide heads, key/value heads and the MLP.
        Default: one device.

    Raises:
      CheckpointError: no such step, or its arrays are not this config's.
    """
    devices = jax.local_devices()[:1] if devices is None else list(devices)
    mesh = make_mesh([len(devices) if axis == MODEL else 1 for axis in AXES], devices)
    parts = build(dataclasses.replace(config.model, mtp_depth=0), len(devices))
    layout = Layout(
        parts, Placement(config.model.layers), mesh, 0, jnp.dtype(config.precision.params)
    )
    abstract = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
        layout.shapes,
        layout.shardings,
    )
    name = "anchor" if config.train.diloco_inner_steps else "params"
    restored = restore(
        directory, step, {name: abstract}, {name: layout.stored_shapes}, layout.placement
    )[name]
    specs = parts.specs | {"layers": parts.specs["layer"]}
    layers, specs["layers"] = restored["layers"].pop("0"), specs.pop("layer")
    compute = jnp.dtype(config.precision.compute)
    with jax.set_mesh(mesh):  # the caller may be inside another one
        first = (
            {"first": _ready(restored.pop("first"), specs["first"], compute)}
            if "first" in restored
            else {}
        )
        return parts, {
            "embed": restored.pop("embed"),
            **first,
            "layers": _ready(layers, specs["layers"], compute, stage=0),
            "head": _ready(restored.pop("head"), specs["head"], compute),
        }


def _ready(params: dict, specs: dict, compute: jnp.dtype, stage=...) -> dict:
    """Parameters of `specs`, at one stage where they are stacked by stage, with matrices in the
    compute type.

    Takes the arrays out of `params` one by one: a model is never there twice.
    """
    out = {}
    for name in list(params):
        if isinstance(specs[name], Spec):
            out[name] = params.pop(name)[stage]
            out[name] = out[name].astype(compute) if specs[name].cast else out[name]
        else:
            out[name] = _ready(params[name], specs[name], compute, stage)
    return out
