"""Plans of what the runtime has on a device before the first tick: shapes and memory of pools,
message buffers and gradient sums, and how parameters are held, gathered and reduced.

`ParameterPlan` has the parameters, with the ZeRO of their part of the model. `UnitPlan` has the
activations; read its methods in this order:

    ranges   the layers of a unit by what their forward saves; traces a layer
    pools    the pools of slots that a table needs for these ranges: a `PoolArray` for each array
    slot_bytes   the bytes of a slot of each pool

A plan computes nothing on a device, so tests print it. `empty` makes a planned array in the
program.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.config.saved_values import LAYER_INPUT, names_on_host
from jaxtrain.config.sizes import Remat
from jaxtrain.devices import host_memory
from jaxtrain.devices.mesh import MANUAL_AXES, STAGE
from jaxtrain.devices.sharding import constrain, mesh_axes, restricted
from jaxtrain.models.layers import SPLIT
from jaxtrain.models.spec import Spec
from jaxtrain.parallel.fp8 import Fp8, Quantized
from jaxtrain.parallel.zero import (
    Reduction,
    Zero,
    gather,
    reduce,
    reduce_rest,
    shard_shape,
    unsharded_shape,
)
from jaxtrain.runtime.layers.backward_split import LayerSplit, RecomputedLayer
from jaxtrain.runtime.layers.layer_loops import LayerRange
from jaxtrain.runtime.layers.saved_bytes import (
    RuntimeLayer,
    as_used,
    bytes_of,
    host_rule,
    keep_rule,
)
from jaxtrain.runtime.tick_state import ModelTree, Pools, TickState, Tree, stage_dropped
from jaxtrain.schedule.columns import ARRIVED, TickTable
from jaxtrain.schedule.slots import SAVED, SlottedTable


class SlotBytes(NamedTuple):
    """Bytes of a slot on a device and its host, and those on the host."""

    all: int
    on_host: int = 0


@dataclasses.dataclass(frozen=True)
class PoolArray:
    """One array of a pool, [slots · layers, ...] on a device.

    on_host: it lies in the host's memory
    axes: the logical axes of its dimensions, to which the partitioner is bound; None: it decides
    """

    shape: tuple[int, ...]
    dtype: Any
    on_host: bool = False
    axes: tuple[str | None, ...] | None = None


def slot_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an array in a slot: one of four dimensions (tokens, heads, size of a head) has
    the last two as one.

    XLA's GPU compiler would give an array of heads one layout where it is written and another where
    it is read, and transpose all of it in every tick. The last dimension is never split over
    devices, so merging it moves nothing.
    """
    return shape if len(shape) < 4 else (*shape[:-2], shape[-2] * shape[-1])


def pool_arrays(
    slots: int, layers: int, shapes: Sequence, on_host: Sequence[bool] = ()
) -> list[PoolArray]:
    """The arrays of a pool of so many slots, each for arrays of these shapes of each of `layers`
    layers.

    Slots and layers are one dimension: copies between a TPU and its host cut one dimension alone.
    """
    return [
        PoolArray((slots * layers, *slot_shape(a.shape)), a.dtype, hosted)
        for a, hosted in zip(shapes, on_host or [False] * len(shapes), strict=True)
    ]


def _arrays_of(split: LayerSplit | RecomputedLayer) -> tuple:
    """The shapes, types and places of the arrays that a layer leaves for a later op: layers in
    which these are equal can share slots."""
    shapes = [(a.shape, a.dtype) for a in jax.tree.leaves(split.residuals)]
    places = jax.tree.leaves(split.on_host)
    if isinstance(split, RecomputedLayer):
        return shapes, places
    stash = [(a.shape, a.dtype) for a in split.weight_stash]
    return shapes, places, len(split.residuals.for_b), stash, split.gathered


def empty(array: PoolArray) -> jax.Array:
    """A planned array, of which nothing may be read before it is written."""
    pool = host_memory.empty_pool(array.shape, array.dtype, array.on_host)
    return pool if array.axes is None else constrain(pool, array.axes)


def buffer_names(ticks: TickTable) -> list[str]:
    """The message buffers that the table uses (`TickState.buffers`)."""
    arrived = (ARRIVED[way] for way in ticks.permutes)
    return sorted({*ticks.result_buffers.values(), *ticks.permutes, *arrived})


@dataclasses.dataclass(frozen=True, eq=False)
class UnitPlan:
    """What the layers of every unit save between its ops.

    layers: by kind
    units: the kinds of the layers of each unit
    slotted: the table with its slots; None on one stage
    remat, save, offload: as `remat`, `save` and `offload_activations` of Runtime

    `message` is the shape of activations on a device, [B, T, D]; `extra` what a layer reads beside
    them, as shapes.
    """

    layers: Mapping[str, RuntimeLayer]
    units: Sequence[Sequence[str]]
    slotted: SlottedTable | None
    remat: Remat
    save: tuple[str, ...]
    offload: bool

    def ranges(self, message: tuple[int, ...], extra) -> list[LayerRange]:
        """The layers of a unit by their kind, and by what they save: the recomputed ones, which are
        the lowest, and those that save everything."""
        # Stages may have fewer layers; the cut is the same in all, so that one program serves all.
        mode, most = self.remat.mode, max(map(len, self.units))
        recomputed = self.remat.recomputed(most)
        inputs = "layer_input" * self._saves_inputs
        lowest = {"recomputed": mode == "full", "layer_input": inputs}
        if not recomputed:
            return self._of_kinds("none", message, extra)
        if recomputed == most:
            return self._of_kinds(mode, message, extra, **lowest)
        # With `full:k` a unit has layers of both, whose arrays differ: two sets of pools.
        names = dict(zip(("residual_b", "residual_w", "weight_stash"), SAVED, strict=True))
        return [
            *self._of_kinds(mode, message, extra, end=recomputed, **lowest),
            *self._of_kinds("none", message, extra, begin=recomputed, **names),
        ]

    def _of_kinds(
        self, mode: str, message: tuple[int, ...], extra, **fields: Any
    ) -> list[LayerRange]:
        """A range for each kind of layer, cut into ops as this mode of remat says. fields: others
        of LayerRange"""
        splits = {
            kind: self._split(layer, mode, message, extra) for kind, layer in self.layers.items()
        }
        arrays = {kind: _arrays_of(split) for kind, split in splits.items()}
        # Kinds whose layers leave arrays of the same shapes share a pool.
        alike = lambda kind: tuple(other for other in arrays if arrays[other] == arrays[kind])
        return [
            LayerRange(
                split, kind=kind, form=self.layers[kind].form, pool_kinds=alike(kind), **fields
            )
            for kind, split in splits.items()
        ]

    def _split(
        self, layer: RuntimeLayer, mode: str, message: tuple[int, ...], extra
    ) -> LayerSplit | RecomputedLayer:
        """One layer cut into ops as this mode of remat says."""
        # On one stage forward and backward are one op without slots between them, and full
        # recomputation saves a layer's input alone.
        if mode == "full" and self.slotted is None:
            x = jax.ShapeDtypeStruct(message, layer.compute)
            return RecomputedLayer(layer, layer.specs, x, bool(self.input_on_host))
        hosted = host_rule(mode, self.save, self.offload)
        return layer.split(message, extra, keep_rule(mode, self.save), hosted)

    @property
    def _compute(self) -> jnp.dtype:
        return next(iter(self.layers.values())).compute

    @property
    def _saves_inputs(self) -> bool:
        return self.slotted is not None and self.slotted.table.saves_inputs

    @property
    def input_on_host(self) -> str:
        """The pool in the host's memory of the inputs that full recomputation starts from: those of
        layers, or of units; "" where they are in the device's memory."""
        if self.remat.mode != "full" or not (
            self.offload or LAYER_INPUT in names_on_host(self.save)
        ):
            return ""
        return "layer_input" if self._saves_inputs else "activation"

    def pools(self, ranges: Sequence[LayerRange], message: tuple[int, ...]) -> Pools:
        """The pools that the table needs: a PoolArray for each array."""
        assert self.slotted
        # An op's mask may name a pool of which the table uses no slot: each pool has at least one.
        slots = {pool: max(1, count) for pool, count in self.slotted.pool_sizes.items()}

        def messages(name: str, layers: int = 1) -> PoolArray:
            on_host, shape = name == self.input_on_host, (slots[name] * layers, *message)
            return PoolArray(shape, self._compute, on_host, None if on_host else (None, *SPLIT))

        # Evaluation has no backward that would read anything but the inputs of units.
        if self.slotted.table.forward_only:
            return Pools(messages("activation"))
        # A slot has room for each layer of the largest unit: all units share a stage's pools.
        pools: dict[str, Any] = {name: messages(name) for name in ("activation", "gradient")}
        for layers in ranges:
            split, most = layers.split, layers.most_entries(self.units)
            if layers.layer_input:
                inputs = [messages(layers.layer_input, most)]
                pools.setdefault(layers.layer_input, {})[layers.pool] = inputs
            for name, shapes, on_host in (
                (layers.residual_b, split.residuals.for_b, split.on_host.for_b),
                (layers.residual_w, split.residuals.for_w, split.on_host.for_w),
                (layers.weight_stash, split.weight_stash, ()),
            ):
                arrays = pool_arrays(slots[name], most, shapes, on_host)
                pools.setdefault(name, {})[layers.pool] = arrays
            # What B has gathered for W stays replicated: the partitioner may split it, and W would
            # gather it again.
            pools[layers.weight_stash][layers.pool] = [
                dataclasses.replace(a, axes=(None,) * len(a.shape)) if gathered else a
                for a, gathered in zip(arrays, split.gathered, strict=True)
            ]
        return Pools(**pools)

    def begin(
        self,
        state: TickState,
        ticks: TickTable,
        ranges: Sequence[LayerRange],
        message: tuple[int, ...],
    ) -> TickState:
        """The state with its pools and message buffers, before the first tick."""
        # Permutes send buffers that nobody has filled: of zeros, whatever reads them stays finite.
        # A slot is read only after an op has filled it, so pools need no values.
        buffers = {
            name: constrain(jnp.zeros(message, self._compute), SPLIT)
            for name in buffer_names(ticks)
        }
        pools = jax.tree.map(empty, self.pools(ranges, message))
        return dataclasses.replace(state, pools=pools, buffers=buffers)

    def slot_bytes(self, ranges: Sequence[LayerRange], model: int) -> dict[str, SlotBytes]:
        """Pool → bytes of one of its slots on each of `model` devices."""
        sizes: dict[str, SlotBytes] = {}
        for layers in {each.saved: each for each in ranges}.values():  # one of those with one pool
            saved, most = bytes_of(layers.split, model), layers.most_entries(self.units)
            on_host = lambda name, size: SlotBytes(size, size * (name == self.input_on_host))
            sizes |= {name: on_host(name, saved.input) for name in ("activation", "gradient")}
            of_range = {
                layers.residual_b: SlotBytes(most * saved.residual_b, most * saved.host_b),
                layers.residual_w: SlotBytes(most * saved.residual_w, most * saved.host_w),
                layers.weight_stash: SlotBytes(most * saved.weight_stash),
            }
            if layers.layer_input:
                of_range[layers.layer_input] = on_host(layers.layer_input, most * saved.input)
            for name, size in of_range.items():
                before = sizes.get(name, SlotBytes(0))
                sizes[name] = SlotBytes(*map(sum, zip(before, size, strict=True)))
        return sizes


@dataclasses.dataclass(frozen=True, eq=False)
class ParameterPlan:
    """How a device holds each parameter, and where it is gathered and its gradient reduced.

    specs, reductions: of each parameter; for a unit's stack of layers, the specs of one layer
    zero: of the layers' parameters; zero_of_ends: of all others
    compute, fp8: as of Runtime
    mesh_sizes: axis of the mesh → its size
    """

    specs: ModelTree
    reductions: ModelTree
    zero: Zero
    zero_of_ends: Zero
    compute: jnp.dtype
    fp8: Fp8 | None
    mesh_sizes: Mapping[str, int]

    def zero_of(self, name: str) -> Zero:
        """ZeRO of the parameters in the part `name` of the model."""
        # Embedding and head may be sharded (`parallel.ends`) where layers are not.
        return self.zero if name == "layers" else self.zero_of_ends

    def each(self, fn: Callable, *trees: ModelTree) -> ModelTree:
        """fn(zero, spec, reduction, …) for each parameter, with its values in these trees."""
        trees = self.specs, self.reductions, *trees
        return ModelTree(
            **{
                name: jax.tree.map(
                    functools.partial(fn, self.zero_of(name)),
                    *(getattr(tree, name) for tree in trees),
                )
                for name in self.specs.present()
            }
        )

    def held_specs(self) -> ModelTree:
        """The specs over the manual axes with which parameters enter the manual region."""
        return self.each(lambda zero, _, r: restricted(zero.held(r), MANUAL_AXES))

    def stored_specs(self) -> ModelTree:
        """The specs over the manual axes of arrays laid out as `Reduction.storage`: the gradients
        that leave the manual region, and the values that updates change."""
        return self.each(lambda zero, _, r: restricted(r.storage, MANUAL_AXES))

    def as_used(
        self, zero: Zero, spec: Spec, reduction: Reduction, a: jax.Array
    ) -> jax.Array | Quantized:
        """A parameter of this device, or a stack of them, in the form that products take."""
        # An FP8 scale is taken from the largest number of the matrix, so from all devices that hold
        # a shard of it. Stages hold matrices of their own.
        split_over = {axis for entry in zero.held(reduction) for axis in mesh_axes(entry)}
        axes = [axis for axis in MANUAL_AXES if axis in split_over and axis != STAGE]
        return as_used(spec, a, self.compute, self.fp8, axes)

    def constants(self, params: Tree) -> ModelTree:
        """The parameters of this device in the form that ops read.

        Each is cast, and gathered if it is once a step, before the first tick and not in every one;
        with ZeRO inside ops these gather a layer's shards.
        """
        used = self.each(self.as_used, ModelTree(**stage_dropped(params)))
        with jax.named_scope("gather"):
            return self.each(lambda zero, _, r, a: gather(a, r) if zero.gathers_once else a, used)

    def zero_sums(self, params: ModelTree) -> ModelTree:
        """Gradient sums of zero, float32. params: as the ops receive them"""

        def zeros(zero: Zero, spec: Spec, reduction: Reduction, parameter: Any) -> jax.Array:
            shape = parameter.shape
            # A parameter is a shard where ops gather it; its sum is a shard where ops reduce
            # gradients. Either may be without the other, so the shape goes by the full one.
            if zero.gathers_in_ops:
                shape = unsharded_shape(shape, reduction, self.mesh_sizes)
            if zero.reduces_in_ops:
                shape = shard_shape(shape, reduction, self.mesh_sizes)
            return _sharded_zeros(shape, spec)

        return self.each(zeros, params)

    def zero_shards(self, sums: ModelTree) -> ModelTree:
        """Zeros for `TickState.reduced`, where the last W reduces the layers' sums."""
        # The sums stay unsharded until the last W, which leaves the reduced shards here.
        if not self.zero.reduces_in_last:
            return ModelTree()

        def zeros(spec: Spec, reduction: Reduction, a: jax.Array) -> jax.Array:
            return _sharded_zeros(shard_shape(a.shape, reduction, self.mesh_sizes), spec)

        specs, reductions = self.specs.layers, self.reductions.layers
        return ModelTree(layers=jax.tree.map(zeros, specs, reductions, sums.layers))

    def reduced(self, sums: Tree) -> Tree:
        """The gradients by the parts of the model, from their sums after all of a step's
        microbatches."""
        return {
            name: jax.tree.map(
                functools.partial(self._reduced, name), getattr(self.reductions, name), tree
            )
            for name, tree in sums.items()
        }

    def _reduced(self, name: str, reduction: Reduction, sums: jax.Array) -> jax.Array:
        """A gradient of the part `name` of the model, reduced over the axes over which no op has
        reduced it."""
        # Ops reduce over the axes that shard the parameter, and `reduce_rest` over the others. The
        # last W reduces the gradients of layers alone.
        zero = self.zero_of(name)
        in_ops = zero.reduces_in_ops or (zero.reduces_in_last and name == "layers")
        return (reduce_rest if in_ops else reduce)(sums, reduction, zero.dtype)


def _sharded_zeros(shape: tuple[int, ...], spec: Spec) -> jax.Array:
    """Zeros for the sums of a parameter's gradients, or of a stack of such parameters."""
    # Without the constraint the partitioner gathers full gradients over `model` before they are
    # reduced over `data`. Dimensions in front of the specification's are those of a stack.
    axes = (*(None for _ in shape[len(spec.axes) :]), *spec.axes)
    return constrain(jnp.zeros(shape, jnp.float32), axes)
