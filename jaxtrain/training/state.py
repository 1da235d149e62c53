"""The training state: what it holds, in memory and in a checkpoint, and how it begins.

    TrainState(params={"embed": …, "layers": {"0": …, "1": …}, "head": …},
               optimizer=optax's state, step=int32)

How the parameters lie on the mesh is said in training/parameter_layout.py; the functions here
apply it to the state as a whole. Begin with TrainState and `abstract_state`.

    abstract_state   shapes, dtypes and shardings
    stored_shapes    the form in a checkpoint: without padding, layers in their order in the model
    initial_state    the arrays before the first step
    with_working     a restored state with the 16-bit copies that a checkpoint does not have

With independent replicas (training/update/diloco.py) parameters and optimizer state have a leading
dimension [replicas], sharded over `replica`, and the state has two further trees: `anchor`, the
parameters of the last exchange, and `outer_momentum`.
"""

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from jaxtrain.devices import cluster, host_memory
from jaxtrain.devices.state_file import DiskArray, is_on_disk
from jaxtrain.models.spec import is_spec
from jaxtrain.parallel import replicas
from jaxtrain.training.initial_values import initial_values, random_keys, with_values_of_own_layers
from jaxtrain.training.parameter_layout import ParameterLayout, ParameterState, StackName
from jaxtrain.training.update.optimizer import Optimizer

# numbers the programs of with_working, whose names all processes must share
_programs = itertools.count()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state that a step changes and a checkpoint stores: arrays, or their shapes or shardings.

    params:    the model's parameters, a dict by name; [replicas, …] where replicas are independent
    optimizer: optax's state for them
    step:      the number of steps done, int32
    anchor, outer_momentum: float32, shaped like one replica's parameters; None if replicas are not
        independent
    ema: float32, the exponential moving average of the parameters (update/average.py); None
        without `optimizer.ema_decay`
    evaluates_ema: it is evaluated in the place of the parameters
    working:   where parameters are masters, the 16-bit matrices that ops read, in a tree like
        `params` with None for all other parameters; otherwise None
    """

    params: Any
    optimizer: Any
    step: Any
    # Trees that few runs have are None, which is a pytree without leaves: programs and checkpoints
    # of the others do not see them.
    anchor: Any = None
    outer_momentum: Any = None
    working: Any = None
    ema: Any = None
    evaluates_ema: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def read(self) -> Any:
        """The parameters that ops read."""
        if self.working is None:
            return self.params
        return jax.tree.map(
            lambda p, w: p if w is None else w, self.params, self.working, is_leaf=is_on_disk
        )

    @property
    def trained(self) -> Any:
        """The parameters to evaluate and to generate with: their average with `train.eval_ema`;
        with independent replicas, those of the last exchange."""
        if self.evaluates_ema:
            return self.ema
        return self.read if self.anchor is None else self.anchor

    @property
    def stored(self) -> "TrainState":
        """The part of the state that a checkpoint stores, whatever the types in memory."""
        return dataclasses.replace(self, working=None)


def abstract_state(layout: ParameterLayout, optimizer: Optimizer) -> TrainState:
    """The state as ShapeDtypeStructs with shardings."""

    def laid_out(arrays, shardings):
        return jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), arrays, shardings
        )

    params = laid_out(layout.shapes, layout.held)
    working = layout.working_shapes
    optimizer_state = laid_out(
        jax.eval_shape(optimizer.init, layout.shapes),
        layout.state_of(optimizer, layout.state_sharding, lambda _: layout.everywhere),
    )
    if layout.disk:
        params, optimizer_state = _on_disk(layout, optimizer, params, optimizer_state)
    # The number of steps is on every device, since each reads it for the learning rate.
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=layout.everywhere)
    if not layout.independent_replicas:
        return TrainState(
            params,
            optimizer_state,
            step,
            working=working,
            ema=layout.ema,
            evaluates_ema=layout.evaluates_ema,
        )
    # Anchor and momentum are those of all replicas together: they have no dimension [replicas].
    params, optimizer_state, working = jax.tree.map(
        replicas.each, (params, optimizer_state, working)
    )
    return TrainState(params, optimizer_state, step, layout.outer, layout.outer, working)


def _on_disk(
    layout: ParameterLayout, optimizer: Optimizer, params: Any, optimizer_state: Any
) -> tuple[Any, Any]:
    """The abstract masters and optimizer's state, whose arrays lie in the layout's file; the rest
    as it is."""
    file = layout.disk
    assert file
    in_memory = -1  # otherwise the number of an array's leading dimensions

    # A stack is read and written layer by layer, so the file has each layer in one piece.
    def place(path: tuple, a: jax.ShapeDtypeStruct, lead: int) -> Any:
        name = jax.tree_util.keystr(path)
        return a if lead == in_memory else file.array(name, a.shape, a.dtype, a.sharding, lead > 0)

    of_parameters = jax.tree.map(
        lambda s, a: len(a.shape) - len(s.shape) if layout.has_master(s) else in_memory,
        layout.specs,
        params,
        is_leaf=is_spec,
    )
    of_state = layout.state_of(optimizer, lambda one: one.lead, lambda _: in_memory)
    return jax.tree_util.tree_map_with_path(
        place, (params, optimizer_state), (of_parameters, of_state)
    )


# --- in a checkpoint ------------------------------------------------------------------------------


class Stack(NamedTuple):
    """The layers of one form in a local unit, a stack [stages, places, …].

    held:  the layers of each stage, which are at its first places, by their numbers among the
        model's layers of the form
    model: the number of layers of the form in the model
    """

    held: tuple[range, ...]
    model: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.held), max(map(len, self.held))


@dataclasses.dataclass(frozen=True)
class Stored:
    """How a checkpoint stores a leaf of the state. It is a leaf itself, where a tuple would be a
    pytree.

    shape: without padding; of one layer in a stack
    lead:  dimensions before the layers, both in memory and in the checkpoint: independent replicas
    stack: the layers that the leaf holds; None outside of stacks
    """

    shape: tuple[int, ...]
    lead: tuple[int, ...] = ()
    stack: Stack | None = None


def stored_parameters(layout: ParameterLayout) -> dict:
    """A Stored for each parameter of one replica."""
    stacks = _stacks(layout)
    return jax.tree_util.tree_map_with_path(
        lambda path, s: Stored(s.shape, stack=stacks[layout.stack_of(path)]),
        layout.specs,
        is_leaf=is_spec,
    )


def _stacks(layout: ParameterLayout) -> dict[StackName | None, Stack | None]:
    """The layers in each stack, and None outside of stacks."""
    placement, stacks = layout.placement, dict[StackName | None, Stack | None]({None: None})
    for name in layout.stacks:
        held = tuple(placement.held(name.unit, s, name.form) for s in range(placement.stages))
        layers = placement.forms.count(name.form) if name.form else placement.layers
        stacks[name] = Stack(held, layers)
    return stacks


def stored_shapes(layout: ParameterLayout, optimizer: Optimizer) -> TrainState:
    """The shapes in a checkpoint of `TrainState.stored`: a state whose leaves are `Stored`."""
    # Anchor and momentum are stored as parameters are, so that a run with and one without
    # independent replicas can read each other's model.
    one, stacks = stored_parameters(layout), _stacks(layout)

    def of_parameter(one: ParameterState) -> Stored:
        shape = tuple(one.spec.shape[d] for d in one.dims) or one.array.shape[one.lead :]
        return Stored(shape, stack=stacks[one.stack])

    moments = layout.state_of(optimizer, of_parameter, lambda _: Stored(()))
    state = TrainState(
        one,
        moments,
        Stored(()),
        ema=one if layout.optimizer.ema_decay else None,
        evaluates_ema=layout.evaluates_ema,
    )
    if not layout.independent_replicas:
        return state
    lead = (replicas.count(layout.mesh),)
    params, moments = jax.tree.map(
        lambda stored: dataclasses.replace(stored, lead=lead), (state.params, state.optimizer)
    )
    return TrainState(params, moments, state.step, anchor=one, outer_momentum=one)


# --- its arrays -----------------------------------------------------------------------------------


def initial_state(layout: ParameterLayout, optimizer: Optimizer, seed: int) -> TrainState:
    """The state before the first step; each device initializes its own shards. Moments on disk are
    taken to be zero, and masters are written there if the file is open."""
    abstract = abstract_state(layout, optimizer)
    leaves, tree = jax.tree.flatten(abstract, is_leaf=is_on_disk)
    # Moments begin at zero. Those outside of the devices' memory are zeros there at once: a program
    # that returned them would have them in that memory first.
    outside = dataclasses.replace(
        jax.tree.map(lambda _: False, abstract, is_leaf=is_on_disk),
        optimizer=jax.tree.map(
            lambda a: is_on_disk(a) or host_memory.is_host(a.sharding),
            abstract.optimizer,
            is_leaf=is_on_disk,
        ),
    )
    are_zeros = jax.tree.leaves(outside)

    def make(keys: list[jax.Array]) -> list[jax.Array]:
        values = initial_values(layout, keys)
        params = layout.as_held(values)
        of_each = params, optimizer.init(params), layout.working(values)
        anchor = momentum = ema = None
        if layout.optimizer.ema_decay:
            # XLA would leave out a cast to 16 bits and back, and begin with other numbers.
            held = lax.optimization_barrier(params)
            ema = jax.tree.map(lambda a: a.astype(jnp.float32), held)
        if layout.independent_replicas:
            of_each = replicas.copies(of_each, layout.mesh)
            anchor, momentum = values, jax.tree.map(jnp.zeros_like, values)
        params, optimizer_state, working = of_each
        state = TrainState(
            params, optimizer_state, jnp.zeros((), jnp.int32), anchor, momentum, working, ema
        )
        computed = zip(jax.tree.leaves(state), are_zeros, strict=True)
        return [a for a, is_zero in computed if not is_zero]

    # One program with the shardings of the state as those of its results: no device ever has an
    # array that it does not keep. Only masters on disk come to the devices first, all at once.
    with jax.set_mesh(layout.mesh):
        shardings = [a.sharding for a, zero in zip(leaves, are_zeros, strict=True) if not zero]
        keys = with_values_of_own_layers(layout, random_keys(layout, seed))
        computed = iter(jax.jit(make, out_shardings=shardings)(keys))
    arrays = []
    for a, is_zero in zip(leaves, are_zeros, strict=True):
        value = None if is_zero else next(computed)
        if not is_on_disk(a):
            arrays.append(host_memory.zeros(a) if value is None else value)
            continue
        # Moments need no writing, for a new file reads as zeros. When op times are measured the
        # file is not open: ops read the copies of its masters.
        if value is not None and a.file.is_open:
            a.fill(value)
        arrays.append(a)
    return jax.tree.unflatten(tree, arrays)


def with_working(layout: ParameterLayout, stored: TrainState) -> TrainState:
    """The state of whose `stored` this is, with the matrices that ops read. Every process must call
    this, at the same point of the program."""
    if not layout.masters:
        return stored
    masters = jax.tree.map(
        lambda s, a: a if s.cast else None, layout.specs, stored.params, is_leaf=is_spec
    )
    if layout.disk:
        return dataclasses.replace(stored, working=_working_of_disk(layout, masters))
    shapes: Any = layout.working_shapes
    if layout.independent_replicas:
        shapes = jax.tree.map(replicas.each, shapes)
    shardings = jax.tree.map(lambda a: a.sharding, shapes)

    # A checkpoint has masters alone. Their copies are made by the same function as after an update,
    # so that a resumed run reads the same bits as one that went on.
    def copies(masters: dict) -> Any:
        return layout.working(jax.tree.map(host_memory.on_device, masters))

    if layout.independent_replicas:
        copies = replicas.in_each(copies)
    program = jax.jit(copies, out_shardings=shardings).lower(masters)
    # A run may go back to a checkpoint several times, and a barrier's name is used once.
    name = f"copies that ops read, {next(_programs)}"
    return dataclasses.replace(stored, working=cluster.compile_everywhere(name, program)(masters))


def _working_of_disk(layout: ParameterLayout, masters: dict) -> Any:
    """The matrices that ops read, of masters on disk; one after the other is on the devices."""

    def copy(master: DiskArray, scattered: NamedSharding, read: NamedSharding) -> jax.Array:
        def narrow(a: jax.Array) -> jax.Array:
            return lax.with_sharding_constraint(a.astype(layout.precision.params), scattered)

        # Waiting frees this master's memory before the next one is loaded.
        return jax.block_until_ready(jax.jit(narrow, out_shardings=read)(master.load()))

    return jax.tree.map(copy, masters, layout.scattered, layout.shardings, is_leaf=is_on_disk)


def bytes_per_device(abstract: Any, host: bool = False) -> int:
    """Bytes of a pytree of abstract arrays for one device, in its own memory or in the host's."""
    # Arrays on disk are pytrees without leaves: they do not count here.
    arrays = [a for a in jax.tree.leaves(abstract) if host_memory.is_host(a.sharding) == host]
    return sum(int(np.prod(a.sharding.shard_shape(a.shape))) * a.dtype.itemsize for a in arrays)


def bytes_on_disk(abstract: Any) -> int:
    """Bytes of an abstract state on disk, for one device."""
    leaves = jax.tree.leaves(abstract, is_leaf=is_on_disk)
    return sum(a.bytes_per_device() for a in leaves if is_on_disk(a))
