"""The records of the runtime's scan: `TickState`, which a tick changes, and `Constants`, which it
reads.

An op gets only the fields of both that it uses. A mask names them: a record of the same type with
True for each of these fields. `only` selects the fields by the mask, and `merged` puts them back
after the op has changed them:

    state                 TickState(loss=0.0, pools=Pools(activation=x, gradient=g))
    mask                  TickState(pools=Pools(gradient=True))
    only(state, mask)     TickState(pools=Pools(gradient=g))               what the op gets
    the op returns        TickState(pools=Pools(gradient=h))
    merged(state, that)   TickState(loss=0.0, pools=Pools(activation=x, gradient=h))

So the loop around an op (tick.py) carries these fields alone, and an op that used another one would
find None there.
"""

import dataclasses
from typing import Any, NamedTuple

import jax

Tree = dict[str, Any]
# A field of these records: a jax.Array or a tree of them; None where the program has none or the op
# does not use it; True in a mask.
Maskable = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelTree:
    """One value for each parameter of the model: the parameter, its gradient sum, its sharding, …

    embed, head: as in `ModelParts.specs`
    first: the dense layers before the first unit, by number; predictors: the modules of multi-token
        prediction, by number; None where the model has none
    layers: local unit → one tree, whose arrays are stacks [stack_size, ...] of the unit's layers on
        a stage

    Numbers are the keys of the stored parameters: "0", "1", …
    """

    embed: Maskable = None
    first: Maskable = None
    head: Maskable = None
    layers: Maskable = None
    predictors: Maskable = None

    def present(self) -> Tree:
        """The parts of the model that have a value, as a dict by name."""
        return {name: tree for name, tree in vars(self).items() if tree is not None}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Constants:
    """The parameters and the batch on a device, which no op changes.

    params: in the compute type; where a table has several steps, they are in `TickState.params`
    batch: {"tokens", "targets", "weights", "segments", "positions" and "noise" if any},
        [microbatches, B, T], and "mtp" (`look_ahead`); weights are divided by their sum over the
        global batch, so that losses are plain sums
    """

    params: ModelTree = ModelTree()
    batch: Maskable = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pools:
    """The slots of a stage by kind. B, T: sequences and tokens of a microbatch on a device.

    activation, gradient: units' inputs, and gradients of their outputs: [slots, B, T, D] of the
        compute type
    layer_input: inputs of a unit's layers, for R: one array
    residual_b, residual_w, weight_stash: what the forward leaves for B alone, for B and W, and what
        B leaves for W
    saved_b, saved_w, saved_stash: the same of the layers that save all residuals in F, where others
        do not

    What layers leave is {`LayerRange.pool`: a list of arrays [slots · layers, ...]}: kinds of
    layers share an entry where their arrays have the same shapes.
    """

    # messages, which arrive from another stage or stay on this one
    activation: Maskable = None
    gradient: Maskable = None
    # what ops of one unit and microbatch leave for each other, for each of its layers
    layer_input: Maskable = None
    residual_b: Maskable = None
    residual_w: Maskable = None
    weight_stash: Maskable = None
    saved_b: Maskable = None
    saved_w: Maskable = None
    saved_stash: Maskable = None


class GroupState(NamedTuple):
    """The arrays that the updates of one group of parameters change, where a table has several
    steps (updates.py has the two groups): this device's shards, laid out as `Reduction.storage`.

    values: the parameters in float32
    optimizer: the optimizer's state for them
    before: values and optimizer before the last update, for a step that is not accepted
    squares: for each parameter float32 [2, steps, devices of `model`], the sums of the squares of
        this device's gradients and updated values
    """

    values: Tree
    optimizer: Any
    before: tuple[Tree, Any]
    squares: Tree


class Checks(NamedTuple):
    """The results of the checked steps of a table of several steps, the same on all devices.

    loss, further: float32 [steps] each, summed over all devices
    norms: float32 [2, steps], of the gradients and of the updated parameters
    accepted_steps: int32, the steps before the first one that was to be clipped or skipped
    rejected: bool, True after such a step; the ticks after it run no op
    """

    loss: jax.Array
    further: Maskable
    norms: jax.Array
    accepted_steps: jax.Array
    rejected: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TickState:
    """The state that the scan over the ticks carries, on each device.

    loss: float32, the sum so far of the losses of the next tokens; a scalar, or [steps] where a
        table has several steps
    further: the same of the objective's other terms, by the names of their metrics: mtp_loss, of
        the tokens beyond the next, and z_loss
    gradients: float32 sums, of one step
    reduced: this device's shards of the layers' sums over `data`, where the last W computes them
    buffers: name (schedule/columns.py) → one message [B, T, D]: `up` and `down` leave to the next
        and to the previous stage, `result` does neither; `up_arrived` and `down_arrived` came with
        the last permute
    params: in the compute type, where a table has several steps; otherwise they are constants
    layers, ends, checks: the state of the updates in such a table

    Evaluation has neither gradients nor pools of a backward, one stage neither pools nor buffers,
    and a table only the buffers that it uses.
    """

    loss: Maskable = None
    further: Maskable = dataclasses.field(default_factory=dict)
    # added to by the cells' W, the head and the embedding's gradient
    gradients: ModelTree = ModelTree()
    reduced: ModelTree = ModelTree()
    pools: Pools = Pools()
    buffers: dict[str, Maskable] = dataclasses.field(default_factory=dict)
    # only in a table of several steps
    params: ModelTree = ModelTree()
    layers: GroupState | Maskable = None
    ends: GroupState | Maskable = None
    checks: Checks | Maskable = None


def only(tree, mask):
    """The values of the tree that have True in the mask; None in place of all others, and no key in
    dicts."""
    # Below a True of the mask all arrays are selected, whatever tree they are in.
    if dataclasses.is_dataclass(mask):
        return type(mask)(**{name: only(getattr(tree, name), m) for name, m in vars(mask).items()})
    if isinstance(mask, dict):
        return {key: only(tree[key], value) for key, value in mask.items()}
    return tree if mask else None


def merged(tree, changes):
    """The tree with the values of `changes`; where these are None or missing, the tree's stay."""
    # A dict is merged by key: an op of one unit returns the trees of this unit alone.
    if dataclasses.is_dataclass(changes):
        values = {name: merged(getattr(tree, name), new) for name, new in vars(changes).items()}
        return type(changes)(**values)
    if isinstance(changes, dict) and isinstance(tree, dict):
        return {**tree, **{key: merged(tree.get(key), new) for key, new in changes.items()}}
    return tree if changes is None else changes


def stage_dropped(tree: Tree) -> Tree:
    """A device's parameters by part of the model, without the dimension of stages, which leads the
    stacks of layers and is 1 on a device: [1, stack_size, ...] → [stack_size, ...]."""
    return {
        name: jax.tree.map(lambda a: a[0], arrays) if name == "layers" else arrays
        for name, arrays in tree.items()
    }


def stage_added(tree: Tree) -> Tree:
    """The reverse of `stage_dropped`."""
    return {
        name: jax.tree.map(lambda a: a[None], arrays) if name == "layers" else arrays
        for name, arrays in tree.items()
    }
