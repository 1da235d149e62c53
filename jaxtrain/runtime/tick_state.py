"""The records of the runtime's scan: the state that a tick changes, and the constants that it
reads.

An op gets a part of both. A mask describes it: a record of the same type with True for each field
that the op uses. `only` returns the part, in which all other fields are None (or missing from a
dict); `merged` puts it back after the op has changed it.
"""

import dataclasses
from typing import Any, NamedTuple

import jax

Tree = dict[str, Any]
# None in the place of any value: there is none, or the op does not use it. True: it is in a mask.
Array = Any  # a jax.Array
Part = Any  # a Tree of arrays


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelTree:
    """Parameters, or something for each of them, by part of the model.

    embed, head: as in `ModelParts.specs`
    first, predictors: number → part; None where the model has none
    layers: local unit → part, whose arrays are stacks [stack_size, ...] of its layers on a stage

    Numbers are the keys of the stored parameters: "0", "1", …
    """

    embed: Part = None
    first: Part = None
    head: Part = None
    layers: Part = None
    predictors: Part = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Constants:
    """The parameters and the batch on a device, which no op changes.

    params: in the compute type; where a table has several steps, they are in `TickState.params`
    batch: {"tokens", "targets", "weights", "segments" and "positions" if any}, [microbatches, B,
        T], and "mtp" (`look_ahead`); weights are divided by their sum over the global batch, so
        that losses are plain sums
    """

    params: ModelTree = ModelTree()
    batch: Part = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pools:
    """The slots of a stage by kind. B, T: sequences and tokens of a microbatch on a device.

    activation, gradient: units' inputs, and gradients of their outputs: [slots, B, T, D] of the
        compute type
    layer_input: inputs of a unit's layers, for R: a list of one array [slots · layers, ...]
    residual_b, residual_w, weight_stash: what the forward leaves for B alone, for B and W, and what
        B leaves for W: lists of arrays [slots · layers, ...]
    saved_b, saved_w, saved_stash: the same of the layers that save all residuals in F, where others
        do not
    """

    activation: Array = None
    gradient: Array = None
    layer_input: Part = None
    residual_b: Part = None
    residual_w: Part = None
    weight_stash: Part = None
    saved_b: Part = None
    saved_w: Part = None
    saved_stash: Part = None


class PartState(NamedTuple):
    """What updates change of a part of the model, the layers or embedding and head, where a table
    has several steps: this device's shards, laid out as `Reduction.storage`.

    values: the parameters in float32
    optimizer: the optimizer's state for them
    before: values and optimizer before the last update
    squares: for each parameter float32 [2, steps, devices of `model`], the sums of the squares of
        this device's gradients and updated values
    """

    values: Tree
    optimizer: Any
    before: tuple[Tree, Any]
    squares: Tree


class Checks(NamedTuple):
    """What all devices know of the steps of a table of several ones.

    loss, mtp_loss: float32 [steps], as of TickState, but those of all devices; of the checked steps
    norms: float32 [2, steps], of their gradients and updated parameters
    right: int32, the checked steps up to the first wrong one: one to be clipped or skipped
    wrong: a step was. The ticks after that have no ops
    """

    loss: Array
    mtp_loss: Array
    norms: Array
    right: Array
    wrong: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TickState:
    """The state that the scan over the ticks carries, on each device.

    loss, mtp_loss: float32, the sums so far: of the next tokens, and of those beyond; scalars, or
        [steps] where a table has several steps
    gradients: float32 sums, of one step
    reduced: the layers' sums over `data`, this device's shards, where the last W makes them
    buffers: name (schedule/columns.py) → one message [B, T, D]: `up` and `down` leave to the next
        and to the previous stage, `result` does neither; `up_arrived` and `down_arrived` came with
        the last permute
    params: in the compute type, where a table has several steps; otherwise they are constants
    layers, ends, checks: of the updates in such a table

    Evaluation has neither gradients nor pools of a backward, one stage neither pools nor buffers,
    and a table only the buffers that it uses.
    """

    loss: Array = None
    mtp_loss: Array = None
    gradients: ModelTree = ModelTree()
    reduced: ModelTree = ModelTree()
    pools: Pools = Pools()
    buffers: dict[str, Array] = dataclasses.field(default_factory=dict)
    params: ModelTree = ModelTree()
    layers: PartState | Array = None
    ends: PartState | Array = None
    checks: Checks | Array = None


def only(tree, mask):
    """The part of the tree that has True in the mask."""
    if dataclasses.is_dataclass(mask):
        return type(mask)(**{name: only(getattr(tree, name), m) for name, m in vars(mask).items()})
    if isinstance(mask, dict):
        return {key: only(tree[key], value) for key, value in mask.items()}
    return tree if mask else None


def merged(tree, part):
    """The tree with the values of `part`; those that are None or missing in `part` stay."""
    if dataclasses.is_dataclass(part):
        values = {name: merged(getattr(tree, name), new) for name, new in vars(part).items()}
        return type(part)(**values)
    if isinstance(part, dict) and isinstance(tree, dict):
        return {**tree, **{key: merged(tree.get(key), new) for key, new in part.items()}}
    return tree if part is None else part
