"""A step with the optimizer's state on disk (devices/state_file.py): a loop of the host over
parameters and layers.

    gradients   one program: gradients, their norm, metrics; they stay on the devices
    update      for each group of parameters, and in stacks for each layer of them: one small
                program, which replaces the layer in the parameters and returns its new state
    finish      one program: the metrics that need the new parameters

`streamed_step` makes these programs, and `CompiledStreamedStep` is a step from top to bottom. In
between are the groups (ParameterGroup), the function of the small program (`_update`), and the loop
that reads the next groups' state while one is updated (CompiledUpdate).

The update is that of `Optimizer` for the group's parameters alone, with the norm of all gradients.
So each number has the operations that it has without offload.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.stages import Compiled, Lowered, Wrapped

from jaxtrain.devices import cluster
from jaxtrain.devices.state_file import DiskArray, is_on_disk
from jaxtrain.devices.state_stream import BlockGroup, StateStream
from jaxtrain.models.spec import Spec, is_spec
from jaxtrain.training.one_step import OneStep, StepMetrics
from jaxtrain.training.parameter_layout import ParameterLayout, StackName, gathered
from jaxtrain.training.state import TrainState
from jaxtrain.training.update import balance
from jaxtrain.training.update.optimizer import Guard, Optimizer, parts_of

# State of a process that is streamed together at most, unless one parameter has more.
GROUP_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are updated together: of one stack, layer by layer, or outside of stacks.

    indices: among the leaves of the state's parameters
    paths:   keys in the tree of parameters; in a stack, those after the stack's
    specs:   of one layer
    shapes:  of the parameters on all devices
    stack:   None outside of stacks
    """

    indices: tuple[int, ...]
    paths: tuple[tuple[str, ...], ...]
    specs: tuple[Spec, ...]
    shapes: tuple[tuple[int, ...], ...]
    stack: StackName | None

    @property
    def layers(self) -> int:
        return self.shapes[0][1] if self.stack else 1

    def tree(self, leaves: Sequence[Any]) -> dict:
        """The nested dict of something of each parameter."""
        tree: dict = {}
        for path, leaf in zip(self.paths, leaves, strict=True):
            at = tree
            for key in path[:-1]:
                at = at.setdefault(key, {})
            at[path[-1]] = leaf
        return tree

    def order(self, tree: dict) -> list[Any]:
        """The inverse of `tree`."""
        return [functools.reduce(lambda at, key: at[key], path, tree) for path in self.paths]

    def select(self, tree: Any) -> list[Any]:
        """This group's leaves of a pytree like all parameters, such as their shardings."""
        leaves = jax.tree.leaves(tree)
        return [leaves[i] for i in self.indices]

    def random_keys(self, one: OneStep, layer: int) -> list[np.ndarray] | None:
        """The keys of this layer's random numbers; None if nothing is rounded at random."""
        optimizer = one.optimizer
        rounds = any(one.layout.dtype(s) != jnp.float32 for s in self.specs)
        if optimizer.keys is None or not rounds and optimizer.moments == "float32":
            return None
        keys = [optimizer.keys[i] for i in self.indices]
        return [key[:, layer : layer + 1] for key in keys] if self.stack else keys


class UpdateInputs(NamedTuple):
    """What the update of one layer of a group reads besides the parameters, which it replaces.

    gradients: of the group, of all layers, with counts as of the runtime
    state:     the layer's moments, by tree and then by parameter, then its masters
    counts:    of updates before the step, the scalars of the optimizer's state
    guard:     of the step
    squares:   the sum of the squares of the parameters that are updated already, float32; None
               where no parameter is a master
    keys:      of the layer's random numbers, or None
    layer:     the number of the layer in its stack, int32
    """

    gradients: list[Any]
    state: list[Any]
    counts: list[Any]
    guard: Guard
    squares: Any
    keys: list[Any] | None
    layer: Any


class UpdateResults(NamedTuple):
    """The results of the update of one layer of a group.

    values:  of the group as ops read them, of all layers
    state:   the layer's, as in UpdateInputs
    counts:  of updates with this one
    squares: with those of this layer's parameters
    """

    values: list[Any]
    state: list[Any]
    counts: Any
    squares: Any


@dataclasses.dataclass(frozen=True, eq=False)
class StreamedUpdate:
    """The update of a step whose optimizer's state is on disk, jitted and not yet compiled.

    state:    the step's, abstract
    passes:   the groups of blocks in their order in a pass, each with its parameters
    programs: one for each group of parameters; those of equal shapes share one
    """

    one: OneStep
    state: TrainState
    passes: tuple[tuple[ParameterGroup, BlockGroup], ...]
    programs: dict[ParameterGroup, Wrapped]

    @property
    def layout(self) -> ParameterLayout:
        return self.one.layout

    def lower(self) -> dict[Wrapped, Lowered]:
        """The traced programs."""
        scalar = lambda dtype: jax.ShapeDtypeStruct((), dtype, sharding=self.layout.everywhere)
        counts = jax.tree.leaves(self.state.optimizer)
        guard = Guard(scalar(jnp.float32), scalar(jnp.bool_) if self.one.skips else None)
        squares = scalar(jnp.float32) if self.layout.masters else None
        values_read, scattered = self.state.read, self.layout.scattered
        lowered: dict[Wrapped, Lowered] = {}
        for group, blocks in self.passes:
            program = self.programs[group]
            if program in lowered:
                continue
            values = group.select(values_read)
            gradients = [
                jax.ShapeDtypeStruct(value.shape, jnp.float32, sharding=sharding)
                for value, sharding in zip(values, group.select(scattered), strict=True)
            ]
            # One layer of each stack; an array outside of stacks entirely.
            state = [
                jax.ShapeDtypeStruct(array.layer_shape, array.dtype, sharding=array.sharding)
                for array in blocks.arrays
            ]
            inputs = UpdateInputs(
                gradients,
                state,
                counts,
                guard,
                squares,
                group.random_keys(self.one, 0),
                scalar(jnp.int32),
            )
            lowered[program] = program.lower(values, inputs)
        return lowered


def streamed_update(one: OneStep, state: TrainState, jit: Callable[..., Wrapped]) -> StreamedUpdate:
    """The update of a layout whose state is on disk; it gives the state its places in the file.

    state: abstract; jit: jax.jit with the step's compiler options
    """
    passes = tuple(_passes(one.layout, state))
    value_shardings = one.layout.shardings
    programs: dict[ParameterGroup, Wrapped] = {}
    # Stacks of equal layers share a program: it knows neither its stack nor the layer's number,
    # which is an argument. So a model has a few programs, however many layers it has.
    alike: dict[tuple, Wrapped] = {}
    for group, blocks in passes:
        if group in programs:
            continue
        shardings = UpdateResults(
            group.select(value_shardings),
            [array.sharding for array in blocks.arrays],
            one.layout.everywhere,
            one.layout.everywhere,
        )
        key = (group.paths, group.specs, group.shapes, group.stack is None, str(shardings))
        if key not in alike:
            update = functools.partial(_update, group, one)
            # The values are donated: the layer is replaced in place.
            alike[key] = jit(update, donate_argnums=0, out_shardings=shardings)
        programs[group] = alike[key]
    return StreamedUpdate(one, state, passes, programs)


def _passes(
    layout: ParameterLayout, state: TrainState
) -> Iterator[tuple[ParameterGroup, BlockGroup]]:
    """The groups of parameters with their blocks in the file, in the order of a pass over it: stack
    by stack, layer by layer."""
    file = layout.disk
    assert file
    outline: Any
    leaves, outline = jax.tree.flatten(state.optimizer, is_leaf=is_on_disk)
    tree: Any
    params, tree = jax.tree.flatten(state.params, is_leaf=is_on_disk)
    # Numbers in place of the leaves, for arrays on disk are no leaves of a pytree.
    numbers, follow, _ = parts_of(outline.unflatten(range(len(leaves))), tree)
    trees = [
        tree.flatten_up_to(part) for part, follows in zip(numbers, follow, strict=True) if follows
    ]
    # For each parameter, the arrays of the optimizer's state in the order of its trees, and its
    # master if it has one.
    moments = [[leaves[number] for number in each] for each in zip(*trees, strict=True)]
    masters = [[a] if is_on_disk(a) else [] for a in params]
    arrays_of = [[*each, *master] for each, master in zip(moments, masters, strict=True)]
    for _, stack in itertools.groupby(_parameter_groups(layout, arrays_of), lambda g: g.stack):
        in_stack = list(stack)
        # Layers outside, groups inside: what is read lies in one piece of the file, in its order.
        for layer in range(in_stack[0].layers):
            for group in in_stack:
                columns = zip(*(moments[i] for i in group.indices), strict=True)
                arrays = [array for column in columns for array in column]
                arrays += [array for i in group.indices for array in masters[i]]
                yield group, BlockGroup(file, arrays, layer)


def _parameter_groups(
    layout: ParameterLayout, parts: list[list[DiskArray]]
) -> Iterator[ParameterGroup]:
    """The groups of parameters: those of one stack whose state of one layer has GROUP_BYTES in a
    process, or a larger one alone."""
    devices = layout.mesh.devices.flat
    local_devices = len(devices) // len({device.process_index for device in devices})
    shapes = [array.shape for array in jax.tree.leaves(layout.shapes)]
    specs = jax.tree_util.tree_leaves_with_path(layout.specs, is_leaf=is_spec)
    keys = [tuple(str(key.key) for key in path) for path, _ in specs]
    stack_of = lambda i: layout.stack_of(specs[i][0])
    # A group is one program and one read: small parameters, such as norms, go together with others,
    # since a request of a disk has a price of its own.
    for stack, numbers in itertools.groupby(range(len(keys)), stack_of):
        begin = stack.depth if stack else 0  # of a parameter's keys in its layer
        together: list[list[int]] = []
        size = 0
        for i in numbers:
            bytes_of_layer = local_devices * sum(a.bytes_per_device() // a.layers for a in parts[i])
            if not together or size + bytes_of_layer > GROUP_BYTES:
                together.append([])
                size = 0
            together[-1].append(i)
            size += bytes_of_layer
        for indices in together:
            yield ParameterGroup(
                tuple(indices),
                tuple(keys[i][begin:] for i in indices),
                tuple(specs[i][1] for i in indices),
                tuple(shapes[i] for i in indices),
                stack,
            )


def _update(
    group: ParameterGroup, one: OneStep, values: list[jax.Array], inputs: UpdateInputs
) -> UpdateResults:
    """Inside jit: a group after the update of one layer of its stacks, or of all of it outside of
    stacks. values: of the group as ops read them, of all layers"""
    layout, specs_of, layer = one.layout, group.specs, inputs.layer
    stacked = group.stack is not None
    cut = lambda a: lax.dynamic_slice_in_dim(a, layer, 1, 1) if stacked else a
    scattered, shardings = group.select(layout.scattered), group.select(layout.shardings)

    # 1. The layer's parameters before the update: masters, or the values themselves. Each data
    # shard updates its part, as without offload.
    has_master = [layout.has_master(s) for s in specs_of]
    number_of_moments = len(inputs.state) - sum(has_master)
    moments, masters = inputs.state[:number_of_moments], iter(inputs.state[number_of_moments:])
    before = [
        next(masters) if master else lax.with_sharding_constraint(cut(value), sharding)
        for value, sharding, master in zip(values, scattered, has_master, strict=True)
    ]

    # 2. The update of a tree of these parameters alone.
    specs, params = group.tree(specs_of), group.tree(before)
    with_counts = group.tree([cut(gradient) for gradient in inputs.gradients])
    keys = None if inputs.keys is None else jax.tree.leaves(group.tree(inputs.keys))
    optimizer = one.optimizer.of_part(specs, keys, group.tree(scattered))
    state = _joined(optimizer, params, group, moments, inputs.counts)
    gradients = balance.without_counts(specs, with_counts)
    guard = inputs.guard
    updated = optimizer.update(gradients, state, params, guard.finite, guard.norm)
    moved = balance.move(specs, updated.values, with_counts, one.balance_rate, guard.finite)
    new_params = group.order(moved)

    # 3. Back into the stacks that ops read, and to the disk.
    results = []
    for value, new, storage, read in zip(values, new_params, scattered, shardings, strict=True):
        read_values = gathered(new, value.dtype, storage, read)
        if stacked:
            read_values = lax.dynamic_update_slice_in_dim(value, read_values, layer, 1)
        results.append(read_values)
    parts = parts_of(updated.state, jax.tree.structure(params))
    pairs = list(zip(parts.parts, parts.follow, strict=True))
    counts = [part for part, follows in pairs if not follows]
    new_state = [array for part, follows in pairs if follows for array in group.order(part)]
    new_state += [new for new, master in zip(new_params, has_master, strict=True) if master]
    squares = inputs.squares
    if squares is not None:
        squares += sum(jnp.square(new).sum() for new in new_params)
    return UpdateResults(results, new_state, counts, squares)


def _joined(
    optimizer: Optimizer,
    params: dict,
    group: ParameterGroup,
    moments: list[jax.Array],
    counts: list,
) -> Any:
    """The optimizer's state for a group's parameters."""
    tree: Any = jax.tree.structure(params)
    parts = parts_of(jax.eval_shape(optimizer.init, params), tree)
    arrays, scalars = iter(moments), iter(counts)
    return parts.outline.unflatten(
        group.tree([next(arrays) for _ in group.indices]) if follows else next(scalars)
        for follows in parts.follow
    )


# --- compiled -------------------------------------------------------------------------------------


class CompiledUpdate:
    """A compiled StreamedUpdate, with its stream from disk."""

    def __init__(self, update: StreamedUpdate, compiled: dict[Wrapped, Compiled]):
        self._update = update
        self._programs = {group: compiled[update.programs[group]] for group, _ in update.passes}
        # the last place in a pass that needs a gradient
        self._last = {group: number for number, (group, _) in enumerate(update.passes)}
        # The stream knows the order of all groups, so it reads some ahead of the update and writes
        # others behind it.
        file = update.layout.disk
        assert file
        self._stream = StateStream(file, [blocks for _, blocks in update.passes])

    def __call__(
        self, state: TrainState, gradients: list[jax.Array], guard: Guard
    ) -> tuple[TrainState, jax.Array | None]:
        """The state after the update with the count of steps before it, and the sum of the squares
        of the parameters if these are masters. Donates what ops read. Returns when the last group's
        update is dispatched.

        gradients: of all parameters; each is dropped from the list after its use

        Raises StateFileError.
        """
        outline: Any
        values = jax.tree.leaves(state.read)
        counts, outline = jax.tree.flatten(state.optimizer)
        one, masters = self._update.one, self._update.layout.masters
        squares: Any
        new_counts, squares = counts, np.float32(0) if masters else None
        # Strict, so that the stream is asked once more after its last group: only then does it
        # begin to read the first groups of the next step (StateStream.one_pass).
        passes = zip(self._update.passes, self._stream.one_pass(), strict=True)
        for number, ((group, blocks), (_, buffer)) in enumerate(passes):
            # Without a name for the inputs, which would keep their arrays during the next update.
            results = self._programs[group](
                [values[i] for i in group.indices],
                UpdateInputs(
                    [gradients[i] for i in group.indices],
                    blocks.on_devices(buffer),
                    counts,  # as before the step in all updates: each counts on by one
                    guard,
                    squares,
                    group.random_keys(one, blocks.layer),
                    np.int32(blocks.layer),
                ),
            )
            new_counts, squares = results.counts, results.squares
            self._stream.write(blocks, results.state, buffer)
            for i, value in zip(group.indices, results.values, strict=True):
                values[i] = value
                if self._last[group] == number:
                    gradients[i] = None  # type: ignore[call-overload]
        # Masters stay on disk, and ops read the new values as their copies.
        tree: Any
        held, tree = jax.tree.flatten(state.params, is_leaf=is_on_disk)
        pairs, working = list(zip(held, values, strict=True)), None
        if state.working is not None:
            working = tree.unflatten(value if is_on_disk(a) else None for a, value in pairs)
        after = dataclasses.replace(
            state,
            params=tree.unflatten(a if is_on_disk(a) else value for a, value in pairs),
            optimizer=outline.unflatten(new_counts),
            working=working,
        )
        return after, squares


# --- the step -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class StreamedStep:
    """The rest of a step whose program ends with the gradients, jitted and not yet compiled.

    finish: the updated state → (number of steps, StepMetrics)
    """

    update: StreamedUpdate
    finish: Wrapped

    def lower(self) -> Callable[[Compiled], "CompiledStreamedStep"]:
        """Traces the programs. The function compiles them, and joins them to the compiled program
        of the gradients."""
        layout = self.update.layout
        squares = jax.ShapeDtypeStruct((), jnp.float32, sharding=layout.everywhere)
        # Everything is traced here, on the thread that has the mesh.
        updates = self.update.lower()
        finish = self.finish.lower(self.update.state, squares if layout.masters else None)

        def compile_all(gradients: Compiled) -> CompiledStreamedStep:
            compiled = {
                program: cluster.compile_everywhere(f"update {number}", lowered)
                for number, (program, lowered) in enumerate(updates.items())
            }
            update = CompiledUpdate(self.update, compiled)
            end = cluster.compile_everywhere("end of a step", finish)
            return CompiledStreamedStep(gradients, update, end)

        return compile_all


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledStreamedStep:
    """The compiled programs of a step whose update is streamed."""

    gradients: Compiled
    update: CompiledUpdate
    finish: Compiled

    def __call__(self, state: TrainState, batch: dict) -> tuple[TrainState, StepMetrics]:
        """Returns when the last layer's update is dispatched; donates the state's parameters.
        Raises StateFileError."""
        gradients, guard, metrics = self.gradients(state, batch)
        # The update drops the leaves one by one, so that each is freed when its parameter is
        # updated. The tree would keep all of them.
        leaves = jax.tree.leaves(gradients)
        del gradients
        state, squares = self.update(state, leaves, guard)
        step, others = self.finish(state, squares)
        return dataclasses.replace(state, step=step), metrics | others


def streamed_step(
    one: OneStep, state: TrainState, jit: Callable[..., Wrapped]
) -> tuple[Wrapped, StreamedStep]:
    """`Step.train`, which ends with the gradients, and `Step.streamed`, where the optimizer's state
    is on disk. Arguments as of `streamed_update`."""
    scattered, everywhere = one.layout.scattered, one.layout.everywhere
    # Nothing is donated: the updates read the parameters, and the gradients are new arrays.
    gradients = jit(one.gradients, out_shardings=(scattered, everywhere, everywhere))
    finish = jit(one.finish, out_shardings=everywhere)
    return gradients, StreamedStep(streamed_update(one, state, jit), finish)
