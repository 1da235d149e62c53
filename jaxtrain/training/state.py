"""The training state: its shapes, shardings and initial values.

    TrainState(params={"embed": …, "layers": {"0": …, "1": …}, "head": …},
               optimizer=optax's state, step=int32)

The parameters have "predictors", too, if the model predicts further tokens.

"layers"[u] has local unit u of all stages, with leaves [stages, layers, …] (schedule/placement.py).
ZeRO's stage decides what is replicated over the data shards and what is scattered over them
(parallel/zero.py).

16-bit state: with `precision.params=bfloat16` ops read matrices of 2 bytes a number.

    masters=float32   the parameters are float32 masters, which lie with the optimizer's state:
                      scattered as it is, on the host if it is. The state has a further tree,
                      `working`: the matrices that ops read. A checkpoint does not have it
    masters=none      the parameters themselves are of 16 bits (training/update/rounding.py)

Vectors and routers, which no product of the compute type reads, are float32 in both cases.

With independent replicas (training/update/diloco.py) parameters and optimizer state have a leading
dimension [replicas], sharded over `replica`, and the state has two further trees: `anchor`, the
parameters of the last exchange, and `outer_momentum`.
"""

import dataclasses
import itertools
import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.config import ModelConfig, OptimizerConfig, PrecisionConfig
from jaxtrain.config.optimizers import OPTIMIZERS
from jaxtrain.config.sizes import SHARD_AXES
from jaxtrain.devices import cluster, host_memory
from jaxtrain.devices.mesh import AXES, DATA, MODEL, REPLICA, psum
from jaxtrain.devices.sharding import constrain, mesh_axes, restricted, spec
from jaxtrain.devices.state_file import DiskArray, StateFile, is_on_disk
from jaxtrain.models.spec import Spec, is_spec
from jaxtrain.models.transformer import ModelParts, build
from jaxtrain.parallel import replicas
from jaxtrain.parallel.zero import (
    ParameterArray,
    Reduction,
    Zero,
    reduction_of,
    sum_of_squares,
)
from jaxtrain.schedule.placement import Placement
from jaxtrain.training.update.optimizer import Optimizer, parts_of

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
    working:   where parameters are masters, the 16-bit matrices that ops read, in a tree like
        `params` with None for all other parameters; otherwise None
    """

    params: Any
    optimizer: Any
    step: Any
    anchor: Any = None
    outer_momentum: Any = None
    working: Any = None

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
        """The parameters to evaluate and to generate with; with independent replicas, those of the
        last exchange."""
        return self.read if self.anchor is None else self.anchor

    @property
    def stored(self) -> "TrainState":
        """The part of the state that a checkpoint stores, whatever the types in memory."""
        return dataclasses.replace(self, working=None)


class Stack(NamedTuple):
    """The layers in the stack of a local unit, [stages, places, …].

    held:  the layers of each stage, which are at its first places
    model: the number of layers of the model
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


class LaidOutParameter(NamedTuple):
    """One parameter of a layout, or the stack of one parameter of all layers of a local unit.

    keys: its place in the tree of parameters
    spec: of one layer
    size: elements on all devices, with padding
    """

    keys: tuple[str, ...]
    spec: Spec
    size: int
    reduction: Reduction


@dataclasses.dataclass(frozen=True, eq=False)
class ParameterLayout:
    """The layout of the model's parameters on a mesh. All trees are shaped like the parameters."""

    parts: ModelParts
    placement: Placement
    mesh: Mesh
    zero: int = 1  # of layers, and where `shards_ends` is false of all others
    precision: PrecisionConfig = PrecisionConfig()
    independent_replicas: bool = False  # each replica has its own parameters
    offload: bool = False  # the optimizer's state, with masters, lies in the host's memory
    disk: StateFile | None = None  # or in this file
    optimizer: OptimizerConfig = OptimizerConfig()
    # what stands before and after the layers is sharded as in ZeRO-3, over a stage's devices
    shards_ends: bool = False

    @classmethod
    def unstaged(
        cls,
        model: ModelConfig,
        mesh: Mesh,
        precision: PrecisionConfig,
        independent_replicas: bool = False,
    ) -> "ParameterLayout":
        """The layout of a resolved config's model on a mesh with one stage, without ZeRO."""
        parts, placement = build(model, mesh.shape[MODEL]), Placement(model.layers)
        return cls(parts, placement, mesh, 0, precision, independent_replicas)

    @property
    def masters(self) -> bool:
        """True if matrices are float32 masters, of which ops read 16-bit copies."""
        return self.precision.params != "float32" and self.precision.masters == "float32"

    def has_master(self, s: Spec) -> bool:
        """True for a parameter of which ops read a copy."""
        return self.masters and s.cast

    def dtype(self, s: Spec) -> jnp.dtype:
        """The type of a parameter in the state."""
        held = s.cast and not self.masters
        return jnp.dtype(self.precision.params if held else "float32")

    @property
    def specs(self) -> dict:
        """A Spec for each parameter; for the stack of a local unit, the Spec of one layer."""
        layer = self.parts.specs["layer"]
        return {
            **self.parts.ends,
            "layers": {str(unit): layer for unit in range(self.placement.units_per_stage)},
        }

    def _map(self, fn: Callable[[Spec, tuple[int, ...], tuple[str, ...]], Any]) -> dict:
        """fn(spec, leading shape, leading axes) for all parameters."""

        def of_parameters(tree: dict, lead: tuple[int, ...], axes: tuple[str, ...]) -> dict:
            return jax.tree.map(lambda s: fn(s, lead, axes), tree, is_leaf=is_spec)

        specs = self.specs
        stacks = {
            unit: of_parameters(
                tree,
                (self.placement.stages, self.placement.stack_size(int(unit))),
                ("stage", "layer"),
            )
            for unit, tree in specs.pop("layers").items()
        }
        return of_parameters(specs, (), ()) | {"layers": stacks}

    @property
    def shapes(self) -> dict:
        """ShapeDtypeStructs of the parameters of one replica, without shardings."""
        return self._map(
            lambda s, shape, _: jax.ShapeDtypeStruct((*shape, *s.padded), self.dtype(s))
        )

    @property
    def stored(self) -> dict:
        """A Stored for each parameter of one replica."""
        return self.in_stacks(self._map(lambda s, *_: Stored(s.shape)))

    def in_stacks(self, stored: Any) -> Any:
        """The Stored of a state or of a part of it, with the layers of their stacks."""
        stages, units = range(self.placement.stages), range(self.placement.units_per_stage)
        stacks = {
            str(unit): Stack(
                tuple(self.placement.layers_of(unit, stage) for stage in stages),
                self.placement.layers,
            )
            for unit in units
        }

        def of_leaf(path: tuple, one: Stored) -> Stored:
            keys = [jax.tree_util.keystr((key,), simple=True) for key in path]
            if "layers" not in keys:
                return one
            return dataclasses.replace(one, stack=stacks[keys[keys.index("layers") + 1]])

        return jax.tree_util.tree_map_with_path(of_leaf, stored)

    @property
    def reductions(self) -> dict:
        """A Reduction for each parameter's gradient; with independent replicas, inside a
        replica."""
        sum_axes = replicas.sum_axes(self.independent_replicas)

        def reduction(s: Spec, lead: tuple[int, ...], axes: tuple[str, ...]) -> Reduction:
            array = ParameterArray((*axes, *s.axes), (*lead, *s.padded), len(lead), s.counts)
            shard_axes = SHARD_AXES if self.shards_ends and not lead else (DATA,)
            return reduction_of(array, self.mesh, self.zero, sum_axes, shard_axes)

        return self._map(reduction)

    def parameters(self) -> list[LaidOutParameter]:
        """The parameters of one replica, in the order of their leaves."""
        specs = jax.tree_util.tree_leaves_with_path(self.specs, is_leaf=is_spec)
        reductions = jax.tree.leaves(self.reductions, is_leaf=lambda r: isinstance(r, Reduction))
        return [
            LaidOutParameter(
                tuple(str(key.key) for key in path), one, math.prod(array.shape), reduction
            )
            for (path, one), array, reduction in zip(
                specs, jax.tree.leaves(self.shapes), reductions, strict=True
            )
        ]

    def _shardings(self, spec_of: Callable[[str, Reduction], P]) -> dict:
        """spec_of: (name of a part of the model, a parameter's reduction) → its spec"""
        return {
            name: jax.tree.map(
                lambda r, name=name: NamedSharding(self.mesh, spec_of(name, r)),
                part,
                is_leaf=lambda r: isinstance(r, Reduction),
            )
            for name, part in self.reductions.items()
        }

    @property
    def shardings(self) -> dict:
        """Shardings of the parameters of one replica that ops read."""
        ends = 3 if self.shards_ends else self.zero
        stage = lambda name: self.zero if name == "layers" else ends
        return self._shardings(lambda name, r: Zero(stage(name)).held(r))

    def _held(self, master: Callable[[NamedSharding], NamedSharding]) -> dict:
        """Shardings of the state's parameters; master(sharding): of a master, from that of its
        optimizer's state on devices."""
        return jax.tree.map(
            lambda s, read, scattered: master(scattered) if self.has_master(s) else read,
            self.specs,
            self.shardings,
            self.scattered,
            is_leaf=is_spec,
        )

    @property
    def held(self) -> dict:
        """Shardings of the parameters of one replica in the state: masters lie with the
        optimizer's state."""
        return self._held(host_memory.on_host if self.offload else lambda sharding: sharding)

    def as_held(self, values: dict) -> dict:
        """Inside jit: the parameters of one replica in the types of the state and laid out as in
        it, on devices; the nearest numbers. values: float32, laid out as `scattered`"""

        def hold(s: Spec, a: jax.Array, scattered: NamedSharding, held: NamedSharding) -> jax.Array:
            return gathered(a, self.dtype(s), scattered, held)

        shardings = self._held(lambda sharding: sharding)
        return jax.tree.map(hold, self.specs, values, self.scattered, shardings, is_leaf=is_spec)

    def working(self, values: Any) -> dict | None:
        """Inside jit: one replica's `TrainState.working` from parameters in float32, laid out as
        `scattered`; None where ops read the parameters themselves."""
        if not self.masters:
            return None

        def copy(
            s: Spec, a: jax.Array, scattered: NamedSharding, read: NamedSharding
        ) -> jax.Array | None:
            return gathered(a, self.precision.params, scattered, read) if s.cast else None

        return jax.tree.map(
            copy, self.specs, values, self.scattered, self.shardings, is_leaf=is_spec
        )

    @property
    def working_shapes(self) -> dict | None:
        """The result of `working` as ShapeDtypeStructs with shardings."""
        if not self.masters:
            return None

        def shape(s: Spec, a: jax.ShapeDtypeStruct, sharding: NamedSharding) -> Any:
            if not s.cast:
                return None
            return jax.ShapeDtypeStruct(a.shape, self.precision.params, sharding=sharding)

        return jax.tree.map(shape, self.specs, self.shapes, self.shardings, is_leaf=is_spec)

    @property
    def scattered(self) -> dict:
        """Shardings of the reduced gradients, and of the parameters during their update."""
        return self._shardings(lambda _, r: r.storage)

    def state_of(self, optimizer: Optimizer, fn: Callable, other: Callable) -> Any:
        """A pytree like the optimizer's state.

        fn(array, dimensions, spec, sharding): of an array [leading shape, …] of a parameter's
            state; the dimensions of the parameter that it has (config/optimizers.py), and the
            parameter's Spec and its sharding during the update
        other(array): of an array that is no parameter's
        """
        record = OPTIMIZERS[self.optimizer.name]
        tree: Any
        specs, tree = jax.tree.flatten(self.specs, is_leaf=is_spec)
        shardings = tree.flatten_up_to(self.scattered)
        parts, trees, outline = parts_of(jax.eval_shape(optimizer.init, self.shapes), tree)
        results, number = [], 0
        for part, follows in zip(parts, trees, strict=True):
            if not follows:
                results.append(other(part))
                continue
            arrays = tree.flatten_up_to(part)
            dims = [record.state(s.shape, self.optimizer)[number] for s in specs]
            results.append(tree.unflatten(map(fn, arrays, dims, specs, shardings)))
            number += 1
        return outline.unflatten(results)

    def state_sharding(
        self, array: Any, dims: tuple[int, ...], s: Spec, sharding: NamedSharding
    ) -> NamedSharding:
        """The sharding of an array of a parameter's state: the parameter's, in the dimensions that
        it has. Without the parameter's padding a dimension may not divide; it is replicated."""
        names = [mesh_axes(part) for part in sharding.spec]
        lead = len(names) - len(s.shape)
        names = [*names[:lead], *(names[lead + d] for d in dims)]
        parts = [
            axes if size % math.prod(self.mesh.shape[axis] for axis in axes) == 0 else None
            for size, axes in zip(array.shape, names, strict=False)
        ]
        on_device = NamedSharding(self.mesh, P(*parts))
        return host_memory.on_host(on_device) if self.offload else on_device

    @property
    def outer(self) -> dict:
        """The arrays that replicas exchange, float32, as ShapeDtypeStructs. They are sharded as by
        ZeRO 1 at least."""
        shardings = dataclasses.replace(self, zero=max(self.zero, 1)).scattered
        return jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, jnp.float32, sharding=s),
            self.shapes,
            shardings,
        )

    def norm(self, tree: dict) -> jax.Array:
        """The l2 norm in float32 of arrays laid out as `scattered`: all devices of a replica add up
        the squares of their shards, in one all-reduce of a scalar."""
        shared = [a for a in AXES if not (self.independent_replicas and a == REPLICA)]
        sizes = {axis: self.mesh.shape[axis] for axis in shared}
        specs = jax.tree.map(lambda s: s.spec, self.scattered)

        def total(tree: dict) -> jax.Array:
            squares = jax.tree.map(lambda a, spec: sum_of_squares(a, spec, sizes), tree, specs)
            return psum(jnp.stack(jax.tree.leaves(squares)).sum(), shared)

        summed = jax.shard_map(
            total,
            mesh=self.mesh,
            in_specs=(specs,),
            out_specs=P(),
            axis_names=set(AXES),
            check_vma=False,
        )
        return jnp.sqrt(summed(tree))

    def keys(self, seed: int, *use: int) -> list[np.ndarray]:
        """The random keys of the parameters, in the order of their leaves: [*leading, 2] uint32. A
        key depends on seed, name and layer only. use: a number for any use but the initial values

        They are computed on the host: as a part of the program below they would take as long to
        compile as the values.
        """

        def keys_of(path: tuple) -> np.ndarray:
            name, layers = zlib.crc32(_name(path).encode()), self._index(path)
            keys = [
                np.random.SeedSequence([seed, name, int(layer), *use]).generate_state(2)
                for layer in np.maximum(layers, 0).flat
            ]
            return np.array(keys, np.uint32).reshape(*layers.shape, 2)

        leaves = jax.tree_util.tree_leaves_with_path(self.specs, is_leaf=is_spec)
        return [keys_of(path) for path, _ in leaves]

    def initial(self, keys: list[jax.Array]) -> dict:
        """The parameters' initial values, float32, from `keys`; they are the same on every mesh and
        placement.

        Parameters of one shape and one sharding are drawn together, for random generators are most
        of this program's compile time.
        """
        leaves, tree = jax.tree_util.tree_flatten_with_path(self.specs, is_leaf=is_spec)
        # by shape, leading dimensions and the mesh axes that shard it
        groups: dict[tuple, list[int]] = {}
        values = {}
        for i, (path, s) in enumerate(leaves):
            if s.std is None:
                values[i] = self._used(path, s, jnp.full(s.padded, s.constant, jnp.float32))
            else:
                lead = keys[i].shape[:-1]
                split = restricted(
                    spec(s.axes), {name for name, size in self.mesh.shape.items() if size > 1}
                )
                groups.setdefault((s.shape, s.padded, lead, split), []).append(i)
        for (_, _, lead, _), members in groups.items():
            like = leaves[members[0]][1]  # all members are drawn alike
            draw = lambda key, s=like: s.draw(jax.random.wrap_key_data(key, impl="threefry2x32"))
            for _ in (None, *lead):
                draw = jax.vmap(draw)
            # The barrier separates the noise's last factor and `std`: XLA merges the two on some
            # layouts, and rounds differently.
            noise = lax.optimization_barrier(draw(jnp.stack([keys[i] for i in members])))
            noise = constrain(noise, (None, *("stage", "layer")[: len(lead)], *like.axes))
            for n, i in enumerate(members):
                path, s = leaves[i]
                values[i] = self._used(path, s, noise[n] * s.std)
        return jax.tree.unflatten(tree, [values[i] for i in range(len(leaves))])

    def _index(self, path: tuple) -> np.ndarray:
        """The layers of a parameter's stack, [stages, layers], −1 in unused places; [] for a
        parameter outside of stacks."""
        return (
            self.placement.layer_index(int(path[1].key))
            if path[0].key == "layers"
            else np.zeros((), int)
        )

    def _used(self, path: tuple, s: Spec, value: jax.Array) -> jax.Array:
        """`value` in the places of a stack that hold a layer, zero in the others."""
        used = self._index(path) >= 0
        return jnp.where(used.reshape(*used.shape, *(1 for _ in s.padded)), value, 0)


def _name(path: tuple) -> str:
    """A parameter's name, the same for all local units."""
    return jax.tree_util.keystr((path[0], *path[2:]) if path[0].key == "layers" else path)


def abstract_state(layout: ParameterLayout, optimizer: Optimizer) -> TrainState:
    """The state as ShapeDtypeStructs with shardings."""

    def laid_out(arrays, shardings):
        return jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), arrays, shardings
        )

    replicated = NamedSharding(layout.mesh, P())
    params = laid_out(layout.shapes, layout.held)
    working = layout.working_shapes
    optimizer_state = laid_out(
        jax.eval_shape(optimizer.init, layout.shapes),
        layout.state_of(optimizer, layout.state_sharding, lambda _: replicated),
    )
    if layout.disk:
        params, optimizer_state = _on_disk(layout, optimizer, params, optimizer_state)
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
    if not layout.independent_replicas:
        return TrainState(params, optimizer_state, step, working=working)
    of_each = jax.tree.map(replicas.each, (params, optimizer_state, working))
    params, optimizer_state, working = of_each
    return TrainState(params, optimizer_state, step, layout.outer, layout.outer, working)


def _on_disk(
    layout: ParameterLayout, optimizer: Optimizer, params: Any, optimizer_state: Any
) -> tuple[Any, Any]:
    """The abstract masters and optimizer's state, whose arrays lie in the layout's file; the rest
    as it is."""
    file = layout.disk
    assert file

    def dimensions(array: Any, dims: tuple[int, ...], s: Spec, sharding: NamedSharding) -> int:
        """The number of leading dimensions, those of a stack."""
        return len(sharding.spec) - len(s.shape)

    def place(path: tuple, a: jax.ShapeDtypeStruct, lead: int) -> Any:
        name = jax.tree_util.keystr(path)
        return a if lead < 0 else file.array(name, a.shape, a.dtype, a.sharding, lead > 0)

    of_parameters = jax.tree.map(
        lambda s, a: len(a.shape) - len(s.shape) if layout.has_master(s) else -1,
        layout.specs,
        params,
        is_leaf=is_spec,
    )
    of_state = layout.state_of(optimizer, dimensions, lambda _: -1)
    return jax.tree_util.tree_map_with_path(
        place, (params, optimizer_state), (of_parameters, of_state)
    )


def _stored_part(array: Any, dims: tuple[int, ...], s: Spec, sharding: NamedSharding) -> Stored:
    """The stored shape of an array of a parameter's state."""
    lead = len(sharding.spec) - len(s.shape)
    return Stored(tuple(s.shape[d] for d in dims) or array.shape[lead:])


def stored_shapes(layout: ParameterLayout, optimizer: Optimizer) -> TrainState:
    """The shapes in a checkpoint of `TrainState.stored`: a state whose leaves are `Stored`."""
    one = layout.stored
    state = TrainState(
        one,
        layout.in_stacks(layout.state_of(optimizer, _stored_part, lambda _: Stored(()))),
        Stored(()),
    )
    if not layout.independent_replicas:
        return state
    lead = (replicas.count(layout.mesh),)
    params, moments = jax.tree.map(
        lambda stored: dataclasses.replace(stored, lead=lead), (state.params, state.optimizer)
    )
    return TrainState(params, moments, state.step, anchor=one, outer_momentum=one)


def initial_state(layout: ParameterLayout, optimizer: Optimizer, seed: int) -> TrainState:
    """The state before the first step; each device initializes its own shards. Moments on disk are
    taken to be zero, and masters are written there if the file is open."""
    abstract = abstract_state(layout, optimizer)
    leaves, tree = jax.tree.flatten(abstract, is_leaf=is_on_disk)
    # Moments begin at zero. Those on the host are created there: a program would have them in the
    # device's memory first.
    created = dataclasses.replace(
        jax.tree.map(lambda _: False, abstract, is_leaf=is_on_disk),
        optimizer=jax.tree.map(
            lambda a: is_on_disk(a) or host_memory.is_host(a.sharding),
            abstract.optimizer,
            is_leaf=is_on_disk,
        ),
    )
    on_host = jax.tree.leaves(created)

    def make(keys: list[jax.Array]) -> list[jax.Array]:
        values = layout.initial(keys)
        params = layout.as_held(values)
        of_each = params, optimizer.init(params), layout.working(values)
        anchor = momentum = None
        if layout.independent_replicas:
            of_each = replicas.copies(of_each, layout.mesh)
            anchor, momentum = values, jax.tree.map(jnp.zeros_like, values)
        params, optimizer_state, working = of_each
        state = TrainState(
            params, optimizer_state, jnp.zeros((), jnp.int32), anchor, momentum, working
        )
        return [a for a, host in zip(jax.tree.leaves(state), on_host, strict=True) if not host]

    with jax.set_mesh(layout.mesh):
        shardings = [a.sharding for a, host in zip(leaves, on_host, strict=True) if not host]
        others = iter(jax.jit(make, out_shardings=shardings)(layout.keys(seed)))
    arrays = []
    for a, host in zip(leaves, on_host, strict=True):
        if is_on_disk(a):
            if not host and a.file.is_open:
                a.fill(next(others))
            arrays.append(a)
        else:
            arrays.append(host_memory.zeros(a) if host else next(others))
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

    def copies(masters: dict) -> Any:
        return layout.working(jax.tree.map(host_memory.on_device, masters))

    if layout.independent_replicas:
        copies = replicas.in_each(copies)
    program = jax.jit(copies, out_shardings=shardings).lower(masters)
    name = f"copies that ops read, {next(_programs)}"
    working = cluster.compile_everywhere(name, program)(masters)
    return dataclasses.replace(stored, working=working)


def _working_of_disk(layout: ParameterLayout, masters: dict) -> Any:
    """The matrices that ops read, of masters on disk; one after the other is on the devices."""

    def copy(master: DiskArray, scattered: NamedSharding, read: NamedSharding) -> jax.Array:
        def narrow(a: jax.Array) -> jax.Array:
            return lax.with_sharding_constraint(a.astype(layout.precision.params), scattered)

        return jax.block_until_ready(jax.jit(narrow, out_shardings=read)(master.load()))

    return jax.tree.map(copy, masters, layout.scattered, layout.shardings, is_leaf=is_on_disk)


def gathered(
    a: jax.Array, dtype: jnp.dtype | str, scattered: NamedSharding, held: NamedSharding
) -> jax.Array:
    """Inside jit: an array as `held`, in this type, from shards as `scattered`. What is gathered
    are numbers of this type, not those of 32 bits."""
    narrow = lax.with_sharding_constraint(a.astype(dtype), scattered)
    return lax.with_sharding_constraint(narrow, held)


def bytes_per_device(abstract: Any, host: bool = False) -> int:
    """Bytes of a pytree of abstract arrays for one device, in its own memory or in the host's."""
    arrays = [a for a in jax.tree.leaves(abstract) if host_memory.is_host(a.sharding) == host]
    return sum(int(np.prod(a.sharding.shard_shape(a.shape))) * a.dtype.itemsize for a in arrays)


def bytes_on_disk(abstract: Any) -> int:
    """Bytes of an abstract state on disk, for one device."""
    leaves = jax.tree.leaves(abstract, is_leaf=is_on_disk)
    return sum(a.bytes_per_device() for a in leaves if is_on_disk(a))
