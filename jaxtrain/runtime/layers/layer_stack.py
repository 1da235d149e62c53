"""The ops of one unit's layers on one stage: loops over the unit's stacked parameters.

Begin with `LayerStack.input_gradient`, which has the form of every op: `body` says what one layer
does, with its parameters and a carry; `_plan` gives the loops over the layers (layer_loops.py), and
`_run` runs the body in them. What a layer leaves for a later op of its microbatch lies in pools of
slots: `LayerSlots` reads and writes those of one layer. overlapped.py has the op that runs two
units at once.

x and y are the unit's input and output, g the gradient of one of them: [B, T, D] of the compute
type. `extra` is what a layer reads beside x.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.devices import host_memory
from jaxtrain.parallel.attention.heads import as_written
from jaxtrain.runtime.layers.backward_split import LayerOp, Residuals
from jaxtrain.runtime.layers.interleave import TracedOp, side_by_side
from jaxtrain.runtime.layers.layer_loops import (
    LayerBody,
    LayerNumber,
    LayerRange,
    Loop,
    UnitCollectives,
    bounds_on_stage,
    layer_count,
    plan_loops,
    run_loops,
    run_loops_gathering,
    run_trips,
)
from jaxtrain.runtime.tick_state import Pools, merged
from jaxtrain.schedule.placement import Placement
from jaxtrain.schedule.slots import TickSlots

# The scopes of layers of R that go by twos, and of the last of an odd number. The planner counts
# trips by them (planner/programs/loops.py).
PAIRS_OF_R, REST_OF_R = "pairs_of_r", "rest_of_r"
WITHOUT_ZERO = UnitCollectives()


@dataclasses.dataclass(frozen=True, eq=False)
class LayerSlots:
    """The slots of one layer in the pools of its range, for the microbatch of an op.

    layer: the layer's number in the unit
    slots: those that the op reads or fills
    most: the most layers of the range in any unit, for which each slot has entries
    """

    layers: LayerRange
    layer: LayerNumber
    slots: TickSlots
    most: int

    def residuals(self, pools: Pools) -> Residuals:
        """What the layer's forward has left."""
        return Residuals(
            self._read(pools, self.layers.residual_b, self.layers.split.residuals.for_b),
            self.for_w(pools),
        )

    def for_w(self, pools: Pools) -> list[jax.Array]:
        """The residuals that W reads."""
        return self._read(pools, self.layers.residual_w, self.layers.split.residuals.for_w)

    def weight_gradient(self, params, extra, pools: Pools) -> Any:
        """W of the layer: the gradients of its parameters, from what F and B have left."""
        split = self.layers.split
        for_w = self.for_w(pools)
        stash = self._read(pools, self.layers.weight_stash, split.weight_stash)
        return split.weight_gradient(params, extra, for_w, stash)

    def layer_input(self, pools: Pools) -> jax.Array:
        """The layer's input, which F has left for R."""
        (x,) = self._read(pools, self.layers.layer_input, [self.layers.split.x])
        return x

    def with_saved(self, pools: Pools, op: str, x: jax.Array, residuals: Residuals | None) -> Pools:
        """The pools with what an F, K or R leaves of the layer: its input for R, or its
        residuals."""
        if op == "F" and self.layers.layer_input:
            pools = self._write(pools, self.layers.layer_input, [x])
        return self.with_residuals(pools, residuals) if residuals else pools

    def with_residuals(self, pools: Pools, residuals: Residuals) -> Pools:
        pools = self._write(pools, self.layers.residual_b, residuals.for_b)
        return self._write(pools, self.layers.residual_w, residuals.for_w)

    def with_weight_stash(self, pools: Pools, stash: Sequence[jax.Array]) -> Pools:
        return self._write(pools, self.layers.weight_stash, stash)

    def _read(
        self, pools: Pools, pool: str, shapes: Sequence[jax.ShapeDtypeStruct]
    ) -> list[jax.Array]:
        """The layer's arrays in a pool, in these shapes. pool: the name of a field of Pools, and of
        TickSlots"""
        index = self._index(pool)
        return [
            as_written(host_memory.read_at(a, index)).reshape(like.shape)
            for a, like in zip(getattr(pools, pool), shapes, strict=True)
        ]

    def _write(self, pools: Pools, pool: str, values: Sequence[jax.Array]) -> Pools:
        index = self._index(pool)
        arrays = [
            host_memory.write_at(a, value.reshape(a.shape[1:]), index)
            for a, value in zip(getattr(pools, pool), values, strict=True)
        ]
        return dataclasses.replace(pools, **{pool: arrays})

    def _index(self, pool: str) -> LayerNumber:
        # An array of a pool has one dimension for slots and layers (`state_plan.pool_arrays`).
        return getattr(self.slots, pool) * self.most + self.layer - self.layers.begin


class LayerStack:
    """The layers of one local unit on this stage, and their ops.

    Args:
      ranges: of the unit's layers, one after the other.
      placement: how many layers the unit has on each stage.
      unit: the local unit's number.
      stage: this device's stage, a traced int32.
      collectives: ZeRO's, inside the ops.
      extra_of_layer: a function (extra, layer's number in the model) → what that layer reads beside
        its input; None: `extra`.

    The methods take `params`, the stacked parameters, with leaves [stack_size, ...], and `sums`,
    float32 sums of their gradients. `pools` and `slots` are those that the op uses.

    unit: the unit's key in trees of parameters
    bounds: range → (its first layer, the number after its last one) on this stage; without ranges
        of which no stage has a layer
    """

    def __init__(
        self,
        ranges: Sequence[LayerRange],
        placement: Placement,
        unit: int,
        stage,
        collectives: UnitCollectives = WITHOUT_ZERO,
        extra_of_layer: Callable | None = None,
    ):
        self.unit = str(unit)
        self._collectives, self._extra_of_layer = collectives, extra_of_layer
        # layer of the unit → its number in the model; only `extra_of_layer` needs them
        self._numbers: Any = None
        if extra_of_layer:
            self._numbers = jnp.asarray(placement.layer_index(unit))[stage]
        counts = [placement.layer_count(unit, s) for s in range(placement.stages)]
        self._counts_of_unit = placement.counts(unit)
        # a stack of one layer, which every stage has that has the unit
        self._is_single = placement.stack_size(unit) == 1 and all(self._counts_of_unit)
        # A stage without the unit never runs its ops. So its 0 layers need not make a single
        # layer's bounds traced, which would put it into a loop.
        self._counts = [1] if self._is_single else counts
        self._sizes = placement.sizes
        self._ranges = [each for each in ranges if each.most(self._counts)]
        self.bounds = bounds_on_stage(self._ranges, self._counts, stage)

    @property
    def reduces_in_last(self) -> bool:
        """True if the last W of a step reduces its gradients."""
        return self._collectives.zero.reduces_in_last

    @property
    def saves_in_f(self) -> bool:
        """True if F saves residuals or inputs of some layers, though R recomputes some."""
        return self.saves_inputs or any(not each.recomputed for each in self._ranges)

    @property
    def saves_inputs(self) -> bool:
        """True if F leaves the inputs of layers for R."""
        return any(each.layer_input for each in self._ranges)

    # ------------------------------------------------------------------ what each layer gets

    def extra(self, extra, i: LayerNumber):
        """What layer i reads beside its input."""
        return self._extra_of_layer(extra, self._numbers[i]) if self._extra_of_layer else extra

    def parameters(self, params, i: LayerNumber, op: LayerOp):
        """Layer i's parameters, gathered where the op reads them."""
        return self._collectives.parameters(params, i, functools.partial(self._reads, op))

    def slots(self, layers: LayerRange, i: LayerNumber, slots: TickSlots) -> LayerSlots:
        """The slots of layer i, which is in this range."""
        return LayerSlots(layers, i, slots, layers.most(self._sizes))

    def _reads(self, op: LayerOp) -> Any:
        """A tree of bools like the parameters: whether the op reads each in any range."""
        reads = [layers.split.reads(op) for layers in self._ranges]
        return jax.tree.map(lambda *of_ranges: any(of_ranges), *reads)

    def _plan(
        self,
        op: LayerOp,
        reverse: bool = False,
        peel_first: bool = False,
        ranges: Sequence[LayerRange] | None = None,
    ) -> list[Loop]:
        """The loops of an op over the layers of these ranges, of all if not given, in the order of
        the layers or in `reverse`.

        peel_first: the layer that runs first is not in a loop, so its body may return another carry
            than it gets
        """
        ranges = self._ranges if ranges is None else ranges
        bounds = {layers: self.bounds[layers] for layers in ranges}
        if not ranges or not self._gathers(op):
            return plan_loops(bounds, reverse, peel_first)
        # The layer that runs last has no layer to gather after it. It stands outside of its loop if
        # its range has a layer for that on every stage; a peeled first one is not it.
        last = ranges[0 if reverse else -1]
        least = 2 if peel_first and len(ranges) == 1 else 1
        counts = [end - begin for begin, end in map(last.bounds, self._counts_of_unit)]
        return plan_loops(bounds, reverse, peel_first, peel_last=min(counts) >= least)

    def _run(self, loops: Sequence[Loop], op: LayerOp, body: LayerBody, params, carry):
        """carry = body(range, i, parameters of layer i, carry) for every layer i of the plan."""
        if not loops:  # no stage has a layer in this unit
            return carry
        run = run_loops_gathering if self._gathers(op) else run_loops
        return run(loops, body, lambda i: self.parameters(params, i, op), carry)

    def _gathers(self, op: LayerOp) -> bool:
        return self._collectives.zero.gathers_in_ops and any(jax.tree.leaves(self._reads(op)))

    # ------------------------------------------------------------------ one op

    def output(self, params, x: jax.Array, extra) -> jax.Array:
        """The unit's output."""
        body = lambda layers, i, p, x: layers.split.layer(p, x, self.extra(extra, i))
        return self._run(self._plan(LayerOp.WHOLE), LayerOp.WHOLE, body, params, x)

    def output_and_residuals(
        self, params, x: jax.Array, extra, pools: Pools, slots: TickSlots, op: str
    ) -> tuple[jax.Array, Pools]:
        """Returns (the unit's output, the pools with the residuals that its backward reads).

        op: K, all of them; F, those that no R makes; R, those of the layers that it recomputes,
            whose output takes the place of the unit's
        """

        def body(layers: LayerRange, i: LayerNumber, p, carry):
            x, pools = carry
            if op == "F" and layers.recomputed:
                y, residuals = layers.split.layer(p, x, self.extra(extra, i)), None
            else:
                y, residuals = layers.split.output_and_residuals(p, x, self.extra(extra, i))
            return y, self.slots(layers, i, slots).with_saved(pools, op, x, residuals)

        ranges = [each for each in self._ranges if op != "R" or each.recomputed]
        names = {name for each in ranges for name in each.pools_of_forward}
        # As WHOLE, F gathers every parameter: some of its layers may run as they are written.
        layer_op = LayerOp.WHOLE if op == "F" else LayerOp.FORWARD
        loops, carry = self._plan(layer_op, ranges=ranges), (x, pools_of(pools, names))
        y, written = self._run(loops, layer_op, body, params, carry)
        return y, merged(pools, written)

    def rebuilt(self, params, extra, pools: Pools, slots: TickSlots) -> Pools:
        """The pools with the residuals of the layers that R recomputes, each from the input that F
        has left. Layers with messages go by twos, so that messages of one travel while the other
        computes."""
        op = LayerOp.RECOMPUTE

        def recompute(layers: LayerRange, i: LayerNumber, p) -> TracedOp:
            x = self.slots(layers, i, slots).layer_input(pools)
            return layers.split.recompute(p, x, self.extra(extra, i))

        def body(layers: LayerRange, i: LayerNumber, p, written: Pools) -> Pools:
            residuals = recompute(layers, i, p).run()
            return self.slots(layers, i, slots).with_residuals(written, residuals)

        def pair(layers: LayerRange, begin: LayerNumber, j: LayerNumber, written: Pools) -> Pools:
            numbers = begin + 2 * j, begin + 2 * j + 1
            ops = (recompute(layers, i, self.parameters(params, i, op)) for i in numbers)
            for i, residuals in zip(numbers, side_by_side(*ops), strict=True):
                written = self.slots(layers, i, slots).with_residuals(written, residuals)
            return written

        ranges = [each for each in self._ranges if each.recomputed]
        # Inputs are only read here, so the loops need not carry their pool.
        names = {name for each in ranges for name in (each.residual_b, each.residual_w)}
        written = pools_of(pools, names)
        in_pairs = any(each.split.has_messages for each in ranges)
        # Gathered parameters come a layer ahead, which needs one layer a trip.
        if self._collectives.zero.gathers_in_ops or not in_pairs:
            loops = self._plan(op, ranges=ranges)
            return merged(pools, self._run(loops, op, body, params, written))
        odd = {}  # range → the bounds of its last layer, where their number is odd
        with jax.named_scope(PAIRS_OF_R):
            for layers in ranges:
                begin, end = self.bounds[layers]
                pairs = (end - begin) // 2
                written = run_trips(0, pairs, functools.partial(pair, layers, begin), written)
                odd[layers] = begin + 2 * pairs, end
        with jax.named_scope(REST_OF_R):
            written = self._run(plan_loops(odd), op, body, params, written)
        return merged(pools, written)

    def input_gradient(
        self, params, extra, pools: Pools, slots: TickSlots, g: jax.Array
    ) -> tuple[jax.Array, Pools]:
        """Returns (the gradient of the unit's input, the pools with the weight stash), from the
        gradient g of its output."""
        op = LayerOp.INPUT_GRADIENT

        def body(layers: LayerRange, i: LayerNumber, p, carry):
            g, written = carry
            of_layer = self.slots(layers, i, slots)
            residuals = of_layer.residuals(pools)
            g, stash = layers.split.input_gradient(p, self.extra(extra, i), residuals, g)
            return g, of_layer.with_weight_stash(written, stash)

        # The loops carry the pools that they write. What they only read they need not carry: it has
        # the same value in each trip.
        carry = g, pools_of(pools, (layers.weight_stash for layers in self._ranges))
        g, written = self._run(self._plan(op, reverse=True), op, body, params, carry)
        return g, merged(pools, written)

    def weight_gradient(self, params, sums, extra, pools: Pools, slots: TickSlots):
        """`sums` + the gradients of the parameters."""
        op = LayerOp.WEIGHT_GRADIENT

        def body(layers: LayerRange, i: LayerNumber, p, sums):
            gradients = self.slots(layers, i, slots).weight_gradient(p, self.extra(extra, i), pools)
            return self._collectives.add(sums, gradients, i, self._is_single)

        return self._run(self._plan(op), op, body, params, sums)

    def reduced_gradient(self, params, sums, shards, extra, pools: Pools, slots: TickSlots) -> Any:
        """`shards` with `sums` + the gradients of the parameters, reduced over `data`."""
        op = LayerOp.WEIGHT_GRADIENT
        # Late, each trip reduces the total of the layer before. So the first layer is peeled, which
        # every stage must have, in the only range.
        can_wait = len(self._ranges) == 1 and all(self._counts_of_unit) and not self._is_single
        late = can_wait and self._collectives.reduce_late

        def with_reduced(shards, total, i: LayerNumber):
            reduced = self._collectives.reduced(total)
            return jax.tree.map(lambda a, g: a.at[i].set(g.astype(a.dtype)), shards, reduced)

        def body(layers: LayerRange, i: LayerNumber, p, carry):
            shards, *waiting = carry  # waiting: the total of the layer before, where late
            gradients = self.slots(layers, i, slots).weight_gradient(p, self.extra(extra, i), pools)
            total = self._collectives.added(sums, gradients, i)
            if not late:
                return (with_reduced(shards, total, i),)
            return with_reduced(shards, waiting[0], i - 1) if waiting else shards, total

        shards, *waiting = self._run(self._plan(op, peel_first=late), op, body, params, (shards,))
        if not waiting:
            return shards
        return with_reduced(shards, waiting[0], layer_count(self.bounds) - 1)

    # ------------------------------------------------------------------ forward and backward

    def output_saving(self, params, x: jax.Array, extra) -> tuple[jax.Array, list[Any]]:
        """Returns (the unit's output, for each range of layers their residuals [layers, ...] in the
        device's or the host's memory)."""
        op = LayerOp.FORWARD
        # One layer's residuals need no array to be written into, unless that is on the host.
        on_host = any(jax.tree.leaves([each.split.on_host for each in self._ranges]))
        if self._is_single and not on_host:
            (layers,) = self._ranges
            p = self.parameters(params, 0, op)
            y, values = layers.split.output_and_residuals(p, x, self.extra(extra, 0))
            return y, [jax.tree.map(lambda value: value[None], values)]

        def body(layers: LayerRange, i: LayerNumber, p, carry):
            x, saved = carry
            y, values = layers.split.output_and_residuals(p, x, self.extra(extra, i))
            number, at = self._ranges.index(layers), i - layers.begin
            write = lambda a, value: host_memory.write_at(a, value, at)
            written = jax.tree.map(write, saved[number], values)
            return y, [*saved[:number], written, *saved[number + 1 :]]

        # An entry for each layer, and no slots: a microbatch's backward follows its forward.
        def empty(layers: LayerRange) -> Any:
            most, split = layers.most(self._counts), layers.split
            pool = lambda a, hosted: host_memory.empty_pool((most, *a.shape), a.dtype, hosted)
            return jax.tree.map(pool, split.residuals, split.on_host)

        carry = x, [empty(layers) for layers in self._ranges]
        return self._run(self._plan(op), op, body, params, carry)

    def gradients(self, params, sums, extra, saved, g: jax.Array) -> tuple[Any, jax.Array]:
        """Returns (`sums` + the gradients of the parameters, the gradient of the unit's input),
        from what `output_saving` has saved."""
        op, reduces = LayerOp.BACKWARD, self._collectives.zero.reduces_in_ops
        late = reduces and self._collectives.reduce_late and not self._is_single
        add = functools.partial(self._collectives.add, is_single=self._is_single)
        saved_of = dict(zip(self._ranges, saved, strict=True))

        def body(layers: LayerRange, i: LayerNumber, p, carry):
            g, sums, *waiting = carry  # waiting: the gradients of the layer before, where late
            at = i - layers.begin
            residuals = jax.tree.map(lambda a: host_memory.read_at(a, at), saved_of[layers])
            gradients, g = layers.split.gradients(p, self.extra(extra, i), residuals, g)
            if not late:
                return g, add(sums, gradients, i)
            return g, add(sums, waiting[0], i + 1) if waiting else sums, gradients

        loops = self._plan(op, reverse=True, peel_first=late)
        g, sums, *waiting = self._run(loops, op, body, params, (g, sums))
        return add(sums, waiting[0], 0) if late else sums, g


def pools_of(pools: Pools, names: Iterable[str]) -> Pools:
    """The pools of these names; the others are None. A loop carries those that it writes."""
    return Pools(**{name: getattr(pools, name) for name in names})
