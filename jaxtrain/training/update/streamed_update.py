"""The optimizer's update with its state on disk (devices/state_file.py): a loop of the host over
parameters and layers.

    gradients   one program: gradients, their norm, metrics; they stay on the devices
    update      for each group of parameters, and in stacks for each layer of them: one small
                program, which replaces the layer in the parameters and returns its new state
    finish      one program: the metrics that need the new parameters

The update is that of `make_optimizer` for the group's parameters alone, with the norm of all
gradients. So each number has the operations that it has without offload.
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
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled, Lowered, Wrapped

from jaxtrain.config import OptimizerConfig
from jaxtrain.devices.state_file import DiskArray, is_on_disk
from jaxtrain.devices.state_stream import BlockGroup, StateStream
from jaxtrain.models.spec import Spec, is_spec
from jaxtrain.training.parameter_layout import ParameterLayout, gathered
from jaxtrain.training.state import TrainState
from jaxtrain.training.update import balance
from jaxtrain.training.update.optimizer import make_optimizer, parts_of

# State of a process that is streamed together at most, unless one parameter has more.
GROUP_BYTES = 64 * 2**20


class Guard(NamedTuple):
    """What all updates of a step need of all gradients: their l2 norm, a float32 scalar, and
    whether the updates are made, a bool scalar; None if they always are."""

    norm: Any
    finite: Any


@dataclasses.dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are updated together: stacks of one local unit, layer by layer, or parameters
    outside of stacks.

    indices: among the leaves of the state's parameters
    paths:   keys in the tree of parameters, without the unit of a stack
    specs:   of one layer
    shapes:  of the parameters on all devices
    unit:    of the stacks; "" outside of stacks
    """

    indices: tuple[int, ...]
    paths: tuple[tuple[str, ...], ...]
    specs: tuple[Spec, ...]
    shapes: tuple[tuple[int, ...], ...]
    unit: str

    @property
    def layers(self) -> int:
        return self.shapes[0][1] if self.unit else 1

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


@dataclasses.dataclass(frozen=True, eq=False)
class StreamedUpdate:
    """The update of a step whose optimizer's state is on disk, jitted and not yet compiled.

    state:    the step's, abstract
    passes:   the groups of blocks in their order in a pass, each with its parameters
    programs: one for each group of parameters; those of equal shapes share one
    """

    settings: "UpdateSettings"
    state: TrainState
    passes: tuple[tuple[ParameterGroup, BlockGroup], ...]
    programs: dict[ParameterGroup, Wrapped]

    @property
    def layout(self) -> ParameterLayout:
        return self.settings.layout

    def lower(self) -> dict[Wrapped, Lowered]:
        """The traced programs."""
        values, counts = jax.tree.leaves(self.state.read), jax.tree.leaves(self.state.optimizer)
        gradients = jax.tree.leaves(self.layout.scattered)
        everywhere = NamedSharding(self.layout.mesh, P())
        scalar = lambda dtype: jax.ShapeDtypeStruct((), dtype, sharding=everywhere)
        settings = self.settings
        guard = Guard(scalar(jnp.float32), scalar(jnp.bool_) if settings.skips else None)
        lowered: dict[Wrapped, Lowered] = {}
        for group, blocks in self.passes:
            program = self.programs[group]
            if program in lowered:
                continue
            lowered[program] = program.lower(
                [values[i] for i in group.indices],
                [
                    jax.ShapeDtypeStruct(values[i].shape, jnp.float32, sharding=gradients[i])
                    for i in group.indices
                ],
                [_layer_of(array) for array in blocks.arrays],
                counts,
                guard,
                scalar(jnp.float32) if self.layout.masters else None,
                settings.keys_of(group, 0),
                scalar(jnp.int32),
            )
        return lowered


def _layer_of(array: DiskArray) -> jax.ShapeDtypeStruct:
    """One layer of a stack; an array outside of stacks entirely."""
    return jax.ShapeDtypeStruct(array.layer_shape, array.dtype, sharding=array.sharding)


def streamed_update(
    settings: "UpdateSettings", state: TrainState, jit: Callable[..., Wrapped]
) -> StreamedUpdate:
    """The update of a layout whose state is on disk; it gives the state its places in the file.

    state: abstract; jit: jax.jit with the step's compiler options
    """
    layout = settings.layout
    file = layout.disk
    assert file
    parts, masters = _state_by_parameter(state)
    passes: list[tuple[ParameterGroup, BlockGroup]] = []
    sizes = [[*moments, *master] for moments, master in zip(parts, masters, strict=True)]
    for _, unit in itertools.groupby(_parameter_groups(layout, sizes), lambda group: group.unit):
        in_unit = list(unit)
        for layer in range(in_unit[0].layers):
            for group in in_unit:
                columns = zip(*(parts[i] for i in group.indices), strict=True)
                arrays = [array for column in columns for array in column]
                arrays += [array for i in group.indices for array in masters[i]]
                passes.append((group, BlockGroup(file, arrays, layer)))
    everywhere = NamedSharding(layout.mesh, P())
    shardings = jax.tree.leaves(layout.shardings)
    programs: dict[ParameterGroup, Wrapped] = {}
    alike: dict[tuple, Wrapped] = {}
    for group, blocks in passes:
        if group in programs:
            continue
        outs = (
            [shardings[i] for i in group.indices],
            [array.sharding for array in blocks.arrays],
            everywhere,
            everywhere,
        )
        key = (group.paths, group.specs, group.shapes, group.unit != "", str(outs))
        if key not in alike:
            update = functools.partial(_update, group, settings)
            alike[key] = jit(update, donate_argnums=0, out_shardings=outs)
        programs[group] = alike[key]
    return StreamedUpdate(settings, state, tuple(passes), programs)


def _state_by_parameter(
    state: TrainState,
) -> tuple[list[list[DiskArray]], list[list[DiskArray]]]:
    """For each parameter, the arrays of the optimizer's state in the order of its trees, and its
    master if it has one."""
    outline: Any
    leaves, outline = jax.tree.flatten(state.optimizer, is_leaf=is_on_disk)
    tree: Any
    params, tree = jax.tree.flatten(state.params, is_leaf=is_on_disk)
    numbers, follows, _ = parts_of(outline.unflatten(range(len(leaves))), tree)
    trees = [
        tree.flatten_up_to(part) for part, is_tree in zip(numbers, follows, strict=True) if is_tree
    ]
    moments = [[leaves[number] for number in each] for each in zip(*trees, strict=True)]
    return moments, [[a] if is_on_disk(a) else [] for a in params]


def _parameter_groups(
    layout: ParameterLayout, parts: list[list[DiskArray]]
) -> Iterator[ParameterGroup]:
    """The groups of parameters: those of one unit whose state of one layer has GROUP_BYTES in a
    process, or a larger one alone."""
    devices = layout.mesh.devices.flat
    local_devices = len(devices) // len({device.process_index for device in devices})
    shapes = [array.shape for array in jax.tree.leaves(layout.shapes)]
    specs = jax.tree_util.tree_leaves_with_path(layout.specs, is_leaf=is_spec)
    keys = [tuple(str(key.key) for key in path) for path, _ in specs]
    unit_of = lambda i: keys[i][1] if keys[i][0] == "layers" else ""
    for unit, numbers in itertools.groupby(range(len(keys)), unit_of):
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
                tuple(keys[i][2:] if unit else keys[i] for i in indices),
                tuple(specs[i][1] for i in indices),
                tuple(shapes[i] for i in indices),
                unit,
            )


class UpdateSettings(NamedTuple):
    """What the updates of all groups share; arguments of `make_optimizer`, and skips: updates whose
    gradients are not finite are not made.

    keys: of all parameters
    """

    layout: ParameterLayout
    optimizer: OptimizerConfig
    steps: int
    moments: str
    keys: Sequence[np.ndarray]
    skips: bool
    balance_rate: float

    def keys_of(self, group: ParameterGroup, layer: int) -> list[np.ndarray] | None:
        """The random keys of a layer of a group; None if nothing is rounded at random."""
        specs = group.specs
        rounds = any(self.layout.dtype(s) != jnp.float32 for s in specs)
        if not rounds and self.moments == "float32":
            return None
        keys = [self.keys[i] for i in group.indices]
        return [key[:, layer : layer + 1] for key in keys] if group.unit else keys


def _update(
    group: ParameterGroup,
    settings: UpdateSettings,
    values: list[jax.Array],
    with_counts: list[jax.Array],
    parts: list[jax.Array],
    counts: list[jax.Array],
    guard: Guard,
    squares: jax.Array | None,
    keys: list[jax.Array] | None,
    layer: jax.Array,
) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array], jax.Array | None]:
    """Inside jit: what ops read of a group, of stacks with one layer updated; the new state of that
    layer; the new counts; the squares with those of the layer's parameters.

    with_counts: the gradients, as of runtime; parts: the layer's state, masters last; counts: of
        updates, before the step; squares: sum over the parameters so far; None where parameters
        are not masters
    """
    layout, specs_of, stacked = settings.layout, group.specs, group.unit != ""
    cut = lambda a: lax.dynamic_slice_in_dim(a, layer, 1, 1) if stacked else a
    of_group = lambda tree: [jax.tree.leaves(tree)[i] for i in group.indices]
    scattered, shardings = of_group(layout.scattered), of_group(layout.shardings)
    has_master = [layout.has_master(s) for s in specs_of]
    moments = len(parts) - sum(has_master)
    masters = iter(parts[moments:])
    before = [
        next(masters) if master else lax.with_sharding_constraint(cut(value), sharding)
        for value, sharding, master in zip(values, scattered, has_master, strict=True)
    ]
    specs, params = group.tree(specs_of), group.tree(before)
    counted = group.tree([cut(gradient) for gradient in with_counts])
    optimizer = make_optimizer(
        settings.optimizer, settings.steps, specs, settings.moments, keys=_ordered(group, keys)
    )
    state = _joined(optimizer, params, group, parts[:moments], counts)
    gradients = balance.without_counts(specs, counted)
    updated = optimizer.update(gradients, state, params, guard.finite, guard.norm)
    rate = settings.balance_rate
    moved = group.order(balance.move(specs, updated.values, counted, rate, guard.finite))
    results = []
    for value, new, storage, read in zip(values, moved, scattered, shardings, strict=True):
        read_values = gathered(new, value.dtype, storage, read)
        results.append(
            lax.dynamic_update_slice_in_dim(value, read_values, layer, 1)
            if stacked
            else read_values
        )
    new_parts, new_counts = _separated(updated.state, params, group)
    new_parts += [new for new, master in zip(moved, has_master, strict=True) if master]
    if squares is not None:
        squares += sum(jnp.square(new).sum() for new in moved)
    return results, new_parts, new_counts, squares


def _ordered(group: ParameterGroup, keys: list[Any] | None) -> list[Any] | None:
    """Keys in the order of the leaves of the group's tree."""
    return None if keys is None else jax.tree.leaves(group.tree(keys))


def _joined(
    optimizer: Any, params: dict, group: ParameterGroup, parts: list[jax.Array], counts: list
) -> Any:
    """The optimizer's state for a group's parameters."""
    tree: Any = jax.tree.structure(params)
    outlines, follows, outline = parts_of(jax.eval_shape(optimizer.init, params), tree)
    arrays, scalars = iter(parts), iter(counts)
    return outline.unflatten(
        group.tree([next(arrays) for _ in group.indices]) if is_tree else next(scalars)
        for is_tree in follows
    )


def _separated(
    state: Any, params: dict, group: ParameterGroup
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The inverse of `_joined`."""
    parts, follows, _ = parts_of(state, jax.tree.structure(params))
    arrays = [
        array
        for part, is_tree in zip(parts, follows, strict=True)
        if is_tree
        for array in group.order(part)
    ]
    counts = [part for part, is_tree in zip(parts, follows, strict=True) if not is_tree]
    return arrays, counts


class CompiledUpdate:
    """A compiled StreamedUpdate, with its stream from disk."""

    def __init__(self, update: StreamedUpdate, compiled: dict[Wrapped, Compiled]):
        self._update = update
        self._programs = {group: compiled[update.programs[group]] for group, _ in update.passes}
        # the last place in a pass that needs a gradient
        self._last = {group: number for number, (group, _) in enumerate(update.passes)}
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
        squares: Any
        new_counts, squares = counts, np.float32(0) if self._update.layout.masters else None
        settings = self._update.settings
        passes = enumerate(zip(self._update.passes, self._stream.groups(), strict=True))
        for number, ((group, blocks), (_, buffer)) in passes:
            results, parts, new_counts, squares = self._programs[group](
                [values[i] for i in group.indices],
                [gradients[i] for i in group.indices],
                blocks.on_devices(buffer),
                counts,
                guard,
                squares,
                settings.keys_of(group, blocks.layer),
                np.int32(blocks.layer),
            )
            self._stream.write(blocks, parts, buffer)
            for i, result in zip(group.indices, results, strict=True):
                values[i] = result
                if self._last[group] == number:
                    gradients[i] = None  # type: ignore[call-overload]
        return self._replaced(state, values, outline.unflatten(new_counts)), squares

    def _replaced(self, state: TrainState, values: list[jax.Array], optimizer: Any) -> TrainState:
        """The state with other arrays that ops read."""
        tree: Any
        params, tree = jax.tree.flatten(state.params, is_leaf=is_on_disk)
        on_disk = [is_on_disk(a) for a in params]
        pairs = list(zip(params, values, on_disk, strict=True))
        working = None
        if state.working is not None:
            working = tree.unflatten(value if disk else None for _, value, disk in pairs)
        params = tree.unflatten(held if disk else value for held, value, disk in pairs)
        return dataclasses.replace(state, params=params, optimizer=optimizer, working=working)
