"""The ops of one unit's layers on one stage: loops over the unit's stacked parameters.

Begin with `LayerStack.input_gradient`, which has the form of every op: a `body` for each range of
layers says what one layer does, with its parameters and a carry; `_each_layer` runs the bodies in
the loops that layer_loops.py plans. What a layer leaves for a later op of its microbatch lies in
pools of slots: `LayerSlots` reads and writes those of one layer. overlapped.py has the op that runs
two units at once.

x and y are the unit's input and output, g the gradient of one of them: [B, T, D] of the compute
type. `extra` is what a layer reads beside x.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.devices import host_memory
from jaxtrain.parallel.attention.heads import as_written
from jaxtrain.runtime.backward_split import LayerOp, Residuals
from jaxtrain.runtime.interleave import TracedOp, side_by_side
from jaxtrain.runtime.layer_loops import (
    LayerBody,
    LayerCollectives,
    LayerRange,
    Number,
    RangeBounds,
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
WITHOUT_ZERO = LayerCollectives()


@dataclasses.dataclass(frozen=True, eq=False)
class LayerSlots:
    """The slots of one layer in the pools of its range, for the microbatch of an op.

    layer: the layer's number in the unit
    slots: those that the op reads or fills
    most: the most layers of the range in any unit, for which each slot has entries
    """

    layers: LayerRange
    layer: Number
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

    def weight_stash(self, pools: Pools) -> list[jax.Array]:
        """What the layer's B has left for W."""
        return self._read(pools, self.layers.weight_stash, self.layers.split.weight_stash)

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

    def _index(self, pool: str) -> Number:
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
        collectives: LayerCollectives = WITHOUT_ZERO,
        extra_of_layer: Callable | None = None,
    ):
        self.unit = str(unit)
        self._collectives = collectives
        self._extra_of_layer = extra_of_layer
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
        self.bounds: RangeBounds = {}
        for each in self._ranges:
            begin, end = (
                values[0] if len(set(values)) == 1 else jnp.asarray(values)[stage]
                for values in zip(*map(each.bounds, self._counts), strict=True)
            )
            self.bounds[each] = begin, end

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

    def extra(self, extra, i: Number):
        """What layer i reads beside its input."""
        if self._extra_of_layer is None:
            return extra
        return self._extra_of_layer(extra, self._numbers[i])

    def parameters(self, params, i: Number, op: LayerOp):
        """Layer i's parameters, gathered where the op reads them."""
        return self._collectives.parameters(params, i, functools.partial(self._reads, op))

    def slots(self, layers: LayerRange, i: Number, slots: TickSlots) -> LayerSlots:
        """The slots of layer i, which is in this range."""
        return LayerSlots(layers, i, slots, layers.most(self._sizes))

    def _reads(self, op: LayerOp) -> Any:
        """A tree of bools like the parameters: whether the op reads each in any range."""
        reads = [layers.split.reads(op) for layers in self._ranges]
        return jax.tree.map(lambda *of_ranges: any(of_ranges), *reads)

    def _each_layer(
        self,
        op: LayerOp,
        bodies: Mapping[LayerRange, LayerBody],
        params,
        carry,
        reverse: bool = False,
        peel_first: bool = False,
    ):
        """carry = body(i, parameters of layer i, carry) for every layer i of the ranges in
        `bodies`.

        bodies: for ranges that follow each other, in the order of their layers
        reverse: from the last layer to the first
        peel_first: the layer that runs first is not in a loop, so its body may return another carry
            than it gets
        """
        if not bodies:  # no stage has a layer in this unit
            return carry
        bounds = {layers: self.bounds[layers] for layers in bodies}
        parameters = lambda i: self.parameters(params, i, op)
        if not self._collectives.zero.gathers_in_ops or not any(jax.tree.leaves(self._reads(op))):
            loops = plan_loops(bounds, reverse, peel_first)
            return run_loops(loops, bodies, parameters, carry)
        # The layer that runs last has no layer to gather after it, so it is not in a loop, if its
        # range has a layer for that on every stage.
        last = list(bodies)[0 if reverse else -1]
        least = 2 if peel_first and len(bodies) == 1 else 1
        peel_last = all(
            end - begin >= least for begin, end in map(last.bounds, self._counts_of_unit)
        )
        loops = plan_loops(bounds, reverse, peel_first, peel_last)
        return run_loops_gathering(loops, bodies, parameters, carry)

    # ------------------------------------------------------------------ one op

    def output(self, params, x: jax.Array, extra) -> jax.Array:
        """The unit's output."""
        body = lambda layers: lambda i, p, x: layers.split.layer(p, x, self.extra(extra, i))
        bodies = {layers: body(layers) for layers in self._ranges}
        return self._each_layer(LayerOp.WHOLE, bodies, params, x)

    def output_and_residuals(
        self, params, x: jax.Array, extra, pools: Pools, slots: TickSlots, op: str
    ) -> tuple[jax.Array, Pools]:
        """Returns (the unit's output, the pools with the residuals that its backward reads).

        op: K, all of them; F, those that no R makes; R, those of the layers that it recomputes,
            whose output takes the place of the unit's
        """

        def body(layers: LayerRange) -> LayerBody:
            def step(i, p, carry):
                x, pools = carry
                if op == "F" and layers.recomputed:
                    y, residuals = layers.split.layer(p, x, self.extra(extra, i)), None
                else:
                    y, residuals = layers.split.output_and_residuals(p, x, self.extra(extra, i))
                return y, self.slots(layers, i, slots).with_saved(pools, op, x, residuals)

            return step

        bodies = {each: body(each) for each in self._ranges if op != "R" or each.recomputed}
        layer_op = LayerOp.WHOLE if op == "F" else LayerOp.FORWARD
        names = {name for each in bodies for name in (each.residual_b, each.residual_w)}
        names |= {each.layer_input for each in bodies if each.layer_input}
        carry = x, pools_of(pools, names)
        y, written = self._each_layer(layer_op, bodies, params, carry)
        return y, merged(pools, written)

    def rebuilt(self, params, extra, pools: Pools, slots: TickSlots) -> Pools:
        """The pools with the residuals of the layers that R recomputes, each from the input that F
        has left. Layers with messages go by twos, so that messages of one travel while the other
        computes."""

        def recompute(layers: LayerRange, i: Number, p) -> TracedOp:
            x = self.slots(layers, i, slots).layer_input(pools)
            return layers.split.recompute(p, x, self.extra(extra, i))

        def body(layers: LayerRange) -> LayerBody:
            def step(i, p, written):
                residuals = recompute(layers, i, p).run()
                return self.slots(layers, i, slots).with_residuals(written, residuals)

            return step

        def pair(layers: LayerRange, begin: Number, j: Number, written: Pools) -> Pools:
            numbers = begin + 2 * j, begin + 2 * j + 1
            ops = (recompute(layers, i, parameters(i)) for i in numbers)
            for i, residuals in zip(numbers, side_by_side(*ops), strict=True):
                written = self.slots(layers, i, slots).with_residuals(written, residuals)
            return written

        parameters = lambda i: self.parameters(params, i, LayerOp.RECOMPUTE)
        bodies = {each: body(each) for each in self._ranges if each.recomputed}
        names = {name for each in bodies for name in (each.residual_b, each.residual_w)}
        written = pools_of(pools, names)
        has_messages = any(each.split.has_messages for each in bodies)
        # Gathered parameters come a layer ahead, which needs one layer a trip.
        if self._collectives.zero.gathers_in_ops or not has_messages:
            written = self._each_layer(LayerOp.RECOMPUTE, bodies, params, written)
            return merged(pools, written)
        odd = {}  # range → the bounds of its last layer, where their number is odd
        with jax.named_scope(PAIRS_OF_R):
            for layers in bodies:
                begin, end = self.bounds[layers]
                pairs = (end - begin) // 2
                step = functools.partial(pair, layers, begin)
                written = run_trips(0, pairs, step, written)
                odd[layers] = begin + 2 * pairs, end
        with jax.named_scope(REST_OF_R):
            written = run_loops(plan_loops(odd), bodies, parameters, written)
        return merged(pools, written)

    def input_gradient(
        self, params, extra, pools: Pools, slots: TickSlots, g: jax.Array
    ) -> tuple[jax.Array, Pools]:
        """Returns (the gradient of the unit's input, the pools with the weight stash), from the
        gradient g of its output."""

        def body(layers: LayerRange) -> LayerBody:
            def step(i, p, carry):
                g, written = carry
                of_layer = self.slots(layers, i, slots)
                residuals = of_layer.residuals(pools)
                g, stash = layers.split.input_gradient(p, self.extra(extra, i), residuals, g)
                return g, of_layer.with_weight_stash(written, stash)

            return step

        bodies = {layers: body(layers) for layers in self._ranges}
        # The loop carries the pools that it writes; it only reads the others.
        carry = g, pools_of(pools, (layers.weight_stash for layers in self._ranges))
        g, written = self._each_layer(LayerOp.INPUT_GRADIENT, bodies, params, carry, reverse=True)
        return g, merged(pools, written)

    def weight_gradient(self, params, sums, extra, pools: Pools, slots: TickSlots):
        """`sums` + the gradients of the parameters."""

        def body(layers: LayerRange) -> LayerBody:
            def step(i, p, sums):
                of_layer = self.slots(layers, i, slots)
                for_w, stash = of_layer.for_w(pools), of_layer.weight_stash(pools)
                gradients = layers.split.weight_gradient(p, self.extra(extra, i), for_w, stash)
                return self._add(sums, gradients, i)

            return step

        bodies = {layers: body(layers) for layers in self._ranges}
        return self._each_layer(LayerOp.WEIGHT_GRADIENT, bodies, params, sums)

    def reduced_gradient(self, params, sums, shards, extra, pools: Pools, slots: TickSlots) -> Any:
        """`shards` with `sums` + the gradients of the parameters, reduced over `data`."""
        has_layers = all(self._counts_of_unit)  # on every stage that runs it
        late = (
            self._collectives.reduce_late
            and not self._is_single
            and len(self._ranges) == 1
            and has_layers
        )

        def with_reduced(shards, total, i: Number):
            reduced = self._collectives.reduced(total)
            return jax.tree.map(lambda a, g: a.at[i].set(g.astype(a.dtype)), shards, reduced)

        def body(layers: LayerRange) -> LayerBody:
            def step(i, p, carry):
                # the total of the layer before, where it is reduced late
                shards, *waiting = carry
                of_layer = self.slots(layers, i, slots)
                for_w, stash = of_layer.for_w(pools), of_layer.weight_stash(pools)
                gradients = layers.split.weight_gradient(p, self.extra(extra, i), for_w, stash)
                total = self._collectives.added(sums, gradients, i)
                if not late:
                    return (with_reduced(shards, total, i),)
                return with_reduced(shards, waiting[0], i - 1) if waiting else shards, total

            return step

        bodies = {layers: body(layers) for layers in self._ranges}
        shards, *waiting = self._each_layer(
            LayerOp.WEIGHT_GRADIENT, bodies, params, (shards,), peel_first=late
        )
        if not waiting:
            return shards
        return with_reduced(shards, waiting[0], self.bounds[self._ranges[-1]][1] - 1)

    def _add(self, sums, gradients, i: Number):
        """The sums with layer i's gradients."""
        if self._collectives.zero.reduces_in_ops:
            gradients = self._collectives.reduced(gradients)
        if self._is_single:
            return jax.tree.map(lambda a, g: a + g[None].astype(a.dtype), sums, gradients)
        return jax.tree.map(lambda a, g: a.at[i].add(g.astype(a.dtype)), sums, gradients)

    # ------------------------------------------------------------------ forward and backward

    def output_saving(self, params, x: jax.Array, extra) -> tuple[jax.Array, list[Any]]:
        """Returns (the unit's output, for each range of layers their residuals [layers, ...] in the
        device's or the host's memory)."""
        places = [each.split.on_host for each in self._ranges]
        if self._is_single and not any(jax.tree.leaves(places)):
            (layers,) = self._ranges
            p = self.parameters(params, 0, LayerOp.FORWARD)
            y, values = layers.split.output_and_residuals(p, x, self.extra(extra, 0))
            return y, [jax.tree.map(lambda value: value[None], values)]

        def body(number: int, layers: LayerRange) -> LayerBody:
            def step(i, p, carry):
                x, saved = carry
                y, values = layers.split.output_and_residuals(p, x, self.extra(extra, i))
                at = i - layers.begin
                write = lambda a, value: host_memory.write_at(a, value, at)
                written = jax.tree.map(write, saved[number], values)
                return y, [*saved[:number], written, *saved[number + 1 :]]

            return step

        def empty(layers: LayerRange) -> Any:
            most, split = layers.most(self._counts), layers.split
            pool = lambda a, hosted: host_memory.empty_pool((most, *a.shape), a.dtype, hosted)
            return jax.tree.map(pool, split.residuals, split.on_host)

        bodies = {each: body(number, each) for number, each in enumerate(self._ranges)}
        carry = (x, [empty(layers) for layers in self._ranges])
        return self._each_layer(LayerOp.FORWARD, bodies, params, carry)

    def gradients(self, params, sums, extra, saved, g: jax.Array) -> tuple[Any, jax.Array]:
        """Returns (`sums` + the gradients of the parameters, the gradient of the unit's input),
        from what `output_saving` has saved."""
        reduces = self._collectives.zero.reduces_in_ops
        late = reduces and self._collectives.reduce_late and not self._is_single

        def body(layers: LayerRange, values) -> LayerBody:
            def step(i, p, carry):
                # the gradients of the layer before, where they are reduced late
                g, sums, *waiting = carry
                at = i - layers.begin
                residuals = jax.tree.map(lambda a: host_memory.read_at(a, at), values)
                gradients, g = layers.split.gradients(p, self.extra(extra, i), residuals, g)
                if not late:
                    return g, self._add(sums, gradients, i)
                return g, self._add(sums, waiting[0], i + 1) if waiting else sums, gradients

            return step

        bodies = {
            layers: body(layers, values) for layers, values in zip(self._ranges, saved, strict=True)
        }
        g, sums, *waiting = self._each_layer(
            LayerOp.BACKWARD, bodies, params, (g, sums), reverse=True, peel_first=late
        )
        return self._add(sums, waiting[0], 0) if late else sums, g


def pools_of(pools: Pools, names: Iterable[str]) -> Pools:
    """The pools of these names; the others are None. A loop carries those that it writes."""
    return Pools(**{name: getattr(pools, name) for name in names})
