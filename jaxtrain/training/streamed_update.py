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
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled, Lowered, Wrapped

from jaxtrain.config import OptimizerConfig
from jaxtrain.devices.state_file import DiskArray, is_on_disk
from jaxtrain.devices.state_stream import Group, Stream
from jaxtrain.models.spec import Spec, is_spec
from jaxtrain.training import balance
from jaxtrain.training.optimizer import make_optimizer, parts_of
from jaxtrain.training.state import ParameterLayout, TrainState

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
    """

    indices: tuple[int, ...]
    paths: tuple[tuple[str, ...], ...]
    specs: tuple[Spec, ...]
    shapes: tuple[tuple[int, ...], ...]
    stacked: bool

    @property
    def layers(self) -> int:
        return self.shapes[0][1] if self.stacked else 1

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

    layout: ParameterLayout
    state: TrainState
    passes: tuple[tuple[ParameterGroup, Group], ...]
    programs: dict[ParameterGroup, Wrapped]

    def lower(self, skips: bool) -> dict[Wrapped, Lowered]:
        """The traced programs. skips: updates may be skipped"""
        params, counts = jax.tree.leaves(self.state.params), jax.tree.leaves(self.state.optimizer)
        scattered = jax.tree.leaves(self.layout.scattered)
        everywhere = NamedSharding(self.layout.mesh, P())
        scalar = lambda dtype: jax.ShapeDtypeStruct((), dtype, sharding=everywhere)
        guard = Guard(scalar(jnp.float32), scalar(jnp.bool_) if skips else None)
        lowered: dict[Wrapped, Lowered] = {}
        for group, blocks in self.passes:
            program = self.programs[group]
            if program in lowered:
                continue
            gradients = [
                jax.ShapeDtypeStruct(params[i].shape, jnp.float32, sharding=scattered[i])
                for i in group.indices
            ]
            parts = [_layer_of(array) for array in blocks.arrays]
            values = [params[i] for i in group.indices]
            layer = scalar(jnp.int32)
            lowered[program] = program.lower(values, gradients, parts, counts, guard, layer)
        return lowered


def _layer_of(array: DiskArray) -> jax.ShapeDtypeStruct:
    """One layer of a stack; an array outside of stacks entirely."""
    shape = (array.shape[0], 1, *array.shape[2:]) if array.stacked else array.shape
    return jax.ShapeDtypeStruct(shape, array.dtype, sharding=array.sharding)


def streamed_update(
    layout: ParameterLayout,
    state: TrainState,
    cfg: OptimizerConfig,
    steps: int,
    skips: bool,
    balance_rate: float,
    jit: Callable[..., Wrapped],
) -> StreamedUpdate:
    """The update of a layout whose state is on disk; it gives the state its places in the file.

    state: abstract; jit: jax.jit with the step's compiler options; other arguments as in training/
        step.py
    """
    file = layout.disk
    assert file
    parts = _state_by_parameter(layout, state)
    passes: list[tuple[ParameterGroup, Group]] = []
    groups = _parameter_groups(layout, parts)
    for _, unit in itertools.groupby(groups, lambda group: (group.stacked, group.layers)):
        in_unit = list(unit)
        for layer in range(in_unit[0].layers):
            for group in in_unit:
                arrays = [
                    array
                    for of_part in zip(*(parts[i] for i in group.indices))
                    for array in of_part
                ]
                passes.append((group, Group(file, arrays, layer)))
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
        )
        key = (group.paths, group.specs, group.shapes, group.stacked, str(outs))
        if key not in alike:
            update = functools.partial(
                _update, group, _Settings(layout, cfg, steps, skips, balance_rate)
            )
            alike[key] = jit(update, donate_argnums=0, out_shardings=outs)
        programs[group] = alike[key]
    return StreamedUpdate(layout, state, tuple(passes), programs)


def _state_by_parameter(layout: ParameterLayout, state: TrainState) -> list[list[DiskArray]]:
    """The arrays of each parameter's state, in the order of the optimizer's trees."""
    outline: Any
    leaves, outline = jax.tree.flatten(state.optimizer, is_leaf=is_on_disk)
    tree: Any = jax.tree.structure(state.params)
    numbers, follows, _ = parts_of(outline.unflatten(range(len(leaves))), tree)
    trees = [tree.flatten_up_to(part) for part, is_tree in zip(numbers, follows) if is_tree]
    return [[leaves[number] for number in of_parameter] for of_parameter in zip(*trees)]


def _parameter_groups(
    layout: ParameterLayout, parts: list[list[DiskArray]]
) -> Iterator[ParameterGroup]:
    """The groups of parameters: those of one unit whose state of one layer has GROUP_BYTES in a
    process, or a larger one alone."""
    devices = layout.mesh.devices.flat
    here = len(devices) // len({device.process_index for device in devices})
    shapes = [array.shape for array in jax.tree.leaves(layout.shapes)]
    specs = jax.tree_util.tree_leaves_with_path(layout.specs, is_leaf=is_spec)
    keys = [tuple(str(key.key) for key in path) for path, _ in specs]
    unit_of = lambda i: keys[i][1] if keys[i][0] == "layers" else ""
    for unit, numbers in itertools.groupby(range(len(keys)), unit_of):
        together: list[list[int]] = []
        size = 0
        for i in numbers:
            bytes_of_layer = here * sum(a.bytes_per_device() // a.layers for a in parts[i])
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
                bool(unit),
            )


class _Settings(NamedTuple):
    """What the updates of all groups share."""

    layout: ParameterLayout
    optimizer: OptimizerConfig
    steps: int
    skips: bool
    balance_rate: float


def _update(
    group: ParameterGroup,
    settings: _Settings,
    values: list[jax.Array],
    with_counts: list[jax.Array],
    parts: list[jax.Array],
    counts: list[jax.Array],
    guard: Guard,
    layer: jax.Array,
) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
    """Inside jit: the parameters of a group, of stacks with one layer updated; the new state of
    that layer, and the new counts.

    with_counts: the gradients, as of runtime; parts: the layer's state; counts: of updates, before
        the step
    """
    layout, cfg, steps, skips, balance_rate = settings
    cut = lambda a: lax.dynamic_slice_in_dim(a, layer, 1, 1) if group.stacked else a
    scattered_shardings = jax.tree.leaves(layout.scattered)
    shardings = jax.tree.leaves(layout.shardings)
    scattered = [
        lax.with_sharding_constraint(cut(value), scattered_shardings[i])
        for i, value in zip(group.indices, values, strict=True)
    ]
    specs, before = group.tree(group.specs), group.tree(scattered)
    counted = group.tree([cut(gradient) for gradient in with_counts])
    optimizer = make_optimizer(cfg, steps, specs, skips=skips)
    gradients = balance.without_counts(specs, counted)
    state = _joined(optimizer, before, group, parts, counts)
    extra = {"finite": guard.finite} if skips else {}
    updates, after = optimizer.update(gradients, state, before, norm=guard.norm, **extra)
    moved = balance.move(specs, optax.apply_updates(before, updates), counted, balance_rate)
    if skips:
        moved = jax.tree.map(functools.partial(jnp.where, guard.finite), moved, before)
    results = []
    for i, value, new in zip(group.indices, values, group.order(moved), strict=True):
        new = lax.with_sharding_constraint(new, shardings[i])
        results.append(
            lax.dynamic_update_slice_in_dim(value, new, layer, 1) if group.stacked else new
        )
    return results, *_separated(after, before, group)


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
        self._stream = Stream(file, [blocks for _, blocks in update.passes])

    def __call__(
        self, params: dict, optimizer: Any, gradients: list[jax.Array], guard: Guard
    ) -> tuple[dict, Any]:
        """The new parameters, and the optimizer's state with its new counts; it donates the
        parameters. Returns when the last group's update is dispatched.

        gradients: of all parameters; each is dropped from the list after its use

        Raises StateFileError.
        """
        tree: Any
        outline: Any
        values, tree = jax.tree.flatten(params)
        counts, outline = jax.tree.flatten(optimizer)
        new_counts = counts
        passes = enumerate(zip(self._update.passes, self._stream.groups(), strict=True))
        for number, ((group, blocks), (_, buffer)) in passes:
            results, parts, new_counts = self._programs[group](
                [values[i] for i in group.indices],
                [gradients[i] for i in group.indices],
                blocks.on_devices(buffer),
                counts,
                guard,
                np.int32(blocks.layer),
            )
            self._stream.write(blocks, parts, buffer)
            for i, result in zip(group.indices, results, strict=True):
                values[i] = result
                if self._last[group] == number:
                    gradients[i] = None  # type: ignore[call-overload]
        return tree.unflatten(values), outline.unflatten(new_counts)
