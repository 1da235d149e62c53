"""The layers of one unit on one stage: a loop over its stacked parameters, for each op of the
schedule.

The number of layers may differ between stages. The bound of the loop is that of its stage, so a
stage with fewer layers computes less. A single layer needs no loop.

x and y are the unit's input and output, g the gradient of one of them: [B, T, D] of the compute
type. `extra` is what a layer reads beside x.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.devices import host_memory
from jaxtrain.devices.mesh import on_nvidia_gpu
from jaxtrain.parallel import fp8
from jaxtrain.parallel.attention.heads import as_written
from jaxtrain.parallel.zero import Zero, gather, in_memory_order, in_order, reduce_in_op
from jaxtrain.runtime.backward_split import LayerOp, Residuals
from jaxtrain.runtime.interleave import OpInParts, side_by_side
from jaxtrain.runtime.tick_state import Pools, merged
from jaxtrain.schedule.placement import Placement
from jaxtrain.schedule.slots import TickSlots

Arrays = list[jax.Array]
Shapes = Sequence[jax.ShapeDtypeStruct]
Body = Callable  # (layer's number, its parameters, carry) → carry
# the scopes of layers of F, and of B, that an overlapped op runs alone, and of layers of R that go
# by twos and of the last of an odd number (planner/programs/loops.py)
REST_OF_F, REST_OF_B = "rest_of_f", "rest_of_b"
PAIRS_OF_R, REST_OF_R = "pairs_of_r", "rest_of_r"
UNSHARDED = Zero()  # parameters are neither gathered nor their gradients reduced inside an op


class RecomputedLayer:
    """A layer whose backward runs it once more from its input, the one residual: full remat on one
    stage. It has the methods of a LayerSplit that forward and backward at once need.

    on_host: the input lies in the host's memory
    """

    def __init__(self, layer: Callable, params, x: jax.ShapeDtypeStruct, on_host: bool = False):
        self.layer, self.residuals, self.on_host = layer, x, on_host
        self._reads = jax.tree.map(lambda _: True, params)

    def reads(self, op: LayerOp) -> Any:
        return self._reads

    def output_and_residuals(self, params, x: jax.Array, extra) -> tuple[jax.Array, jax.Array]:
        return self.layer(params, x, extra), x

    def gradients(self, params, extra, x: jax.Array, g: jax.Array) -> tuple[Any, jax.Array]:
        return fp8.vjp(lambda p, x: self.layer(p, x, extra), params, x)[1](g)


@dataclasses.dataclass(frozen=True, eq=False)
class LayerRange:
    """Consecutive layers of every unit that save the same for their backward.

    split: a RecomputedLayer, or a LayerSplit, whose residuals and weight stash say which arrays lie
        in the pools, in which order
    begin, end: of a unit's layers; end None: the unit's. A unit of fewer layers has those that it
        has.
    recomputed: the op R makes the residuals, where the unit has one, and not F
    residual_b, residual_w, weight_stash: the names of the pools
    layer_input: the name of the pool in which F leaves each layer's input for R; "": R starts from
        the unit's input, and makes each layer's from the one before
    """

    split: Any
    begin: int = 0
    end: int | None = None
    recomputed: bool = False
    residual_b: str = "residual_b"
    residual_w: str = "residual_w"
    weight_stash: str = "weight_stash"
    layer_input: str = ""

    def bounds(self, layers: int) -> tuple[int, int]:
        """Returns (the number of the lowest layer, the number after the highest) in a unit of so
        many layers."""
        return min(self.begin, layers), layers if self.end is None else min(self.end, layers)

    def most(self, sizes: Sequence[int]) -> int:
        """The most layers of it in any unit. sizes: the layers of each unit"""
        return max(end - begin for begin, end in map(self.bounds, sizes))


@dataclasses.dataclass(frozen=True, eq=False)
class Forward:
    """An F or K of a microbatch: its op, the unit's stacked parameters, the unit's input, what
    layers read beside it, and the slots that it fills."""

    op: str
    params: Any
    x: jax.Array
    extra: Any
    slots: TickSlots

    @property
    def layer_op(self) -> LayerOp:
        return LayerOp.WHOLE if self.op == "F" else LayerOp.FORWARD


class LayerStack:
    """The blocks of one local unit on this stage.

    Args:
      ranges: of the unit's layers, one after the other.
      placement: how many layers the unit has on each stage.
      unit: the local unit's number.
      stage: this device's stage, a traced int32.
      zero, reductions: whether each layer's parameters are gathered before they are used and its
        gradients reduced after they are made, and how; `reductions` is a pytree like one layer's
        parameters.
      extra_of_layer: a function (extra, layer's number in the model) → what that layer reads beside
        its input; None: `extra`.

    The methods take `params`, the stacked parameters, with leaves [stack_size, ...], and `sums`,
    float32 sums of their gradients. `pools` and `slots` are those that the op uses.

    unit: the unit's key in trees of parameters
    """

    def __init__(
        self,
        ranges: Sequence[LayerRange],
        placement: Placement,
        unit: int,
        stage,
        zero: Zero = UNSHARDED,
        reductions: Any = None,
        extra_of_layer: Callable | None = None,
    ):
        self.unit = str(unit)
        self._zero, self._reductions = zero, reductions
        self._extra_of_layer = extra_of_layer
        self._numbers = jnp.asarray(placement.layer_index(unit))[stage] if extra_of_layer else None
        self._stack_size = placement.stack_size(unit)
        counts = [placement.layer_count(unit, s) for s in range(placement.stages)]
        self._counts_of_unit = placement.counts(unit)
        # a stack of one layer, which every stage has that has the unit
        self._is_single = self._stack_size == 1 and all(self._counts_of_unit)
        self._counts = [1] if self._is_single else counts
        # A layer's gradients are then reduced overlapped with the products of the layer before it:
        # XLA's GPU compiler moves no collective into a loop's next trip. A TPU's has these
        # collectives wait in any case.
        self._reduces_late = zero.reduces_in_ops and on_nvidia_gpu()
        self._sizes = placement.sizes
        # without those of which no stage has a layer
        self._ranges = [each for each in ranges if each.most(self._counts)]
        # on this stage: ints where all stages have the same bounds, or traced
        self._bounds: dict[LayerRange, tuple[Any, Any]] = {}
        for each in self._ranges:
            begin, end = (
                values[0] if len(set(values)) == 1 else jnp.asarray(values)[stage]
                for values in zip(*map(each.bounds, self._counts), strict=True)
            )
            self._bounds[each] = begin, end

    @property
    def reduces_in_last(self) -> bool:
        """True if the last W of a step reduces its gradients."""
        return self._zero.reduces_in_last

    @property
    def saves_in_f(self) -> bool:
        """True if F saves residuals or inputs of some layers, though R recomputes some."""
        return self.saves_inputs or any(not each.recomputed for each in self._ranges)

    @property
    def saves_inputs(self) -> bool:
        """True if F leaves the inputs of layers for R."""
        return any(each.layer_input for each in self._ranges)

    def _extra(self, extra, i):
        """What layer i reads beside its input."""
        return self._extra_of_layer(extra, self._numbers[i]) if self._extra_of_layer else extra

    def _parameters(self, params, i, op: LayerOp):
        """Layer i's parameters, gathered where the op reads them."""
        one = lambda a: lax.dynamic_index_in_dim(a, i, 0, keepdims=False)
        params = jax.tree.map(one, params)
        if on_nvidia_gpu() and self._reductions is not None:
            params = jax.tree.map(in_memory_order, self._reductions, params)
        if not self._zero.gathers_in_ops:
            return params
        with jax.named_scope("gather"):
            return jax.tree.map(
                lambda reduction, a, read: gather(a, reduction) if read else a,
                self._reductions,
                params,
                self._reads(op),
            )

    def _reads(self, op: LayerOp) -> Any:
        """A tree of bools like the parameters: whether the op reads each in any range."""
        reads = [layers.split.reads(op) for layers in self._ranges]
        return jax.tree.map(lambda *of_ranges: any(of_ranges), *reads)

    def _each_layer(
        self,
        op: LayerOp,
        bodies: Sequence[tuple[LayerRange, Body]],
        params,
        carry,
        reverse: bool = False,
        unrolls_first: bool = False,
        bounds: Mapping[LayerRange, tuple[Any, Any]] | None = None,
    ):
        """carry = body(i, parameters of layer i, carry) for every layer. Where parameters are
        gathered, the next layer's are on their way while this one's are at work. unrolls_first:
        the first of several layers is not in the loop, and may give another carry.

        bodies: of ranges one after the other, in the order of their layers
        bounds: of the layers in each range; None: all of them, which gathered parameters need
        """
        if not bodies:  # no stage has a layer in this unit
            return carry
        bounds = bounds or self._bounds
        loops = [
            (body, *bounds[layers]) for layers, body in (reversed(bodies) if reverse else bodies)
        ]
        way = -1 if reverse else 1

        def layer(j, begin, end):
            return end - 1 - j if reverse else begin + j

        if not self._zero.gathers_in_ops or not any(jax.tree.leaves(self._reads(op))):
            for number, (body, begin, end) in enumerate(loops):

                def step(j, carry, body=body, begin=begin, end=end):
                    i = layer(j, begin, end)
                    return body(i, self._parameters(params, i, op), carry)

                start = 0
                if unrolls_first and number == 0:
                    start, carry = 1, step(0, carry)
                carry = _loop(start, end - begin, step, carry)
            return carry
        state = self._parameters(params, layer(0, *loops[0][1:]), op), carry
        # The last layer stands outside of its loop, with no layer to gather after it, where its
        # range is empty on no stage.
        last_range = bodies[0 if reverse else -1][0]
        least = 1 + (unrolls_first and len(loops) == 1)  # the first one stands outside, too
        is_outside = all(
            end - begin >= least for begin, end in map(last_range.bounds, self._counts_of_unit)
        )
        for number, (body, begin, end) in enumerate(loops):

            def step_with_next(j, state, body=body, begin=begin, end=end):
                i, (parameters, carry) = layer(j, begin, end), state
                following = self._parameters(params, i + way, op)
                return following, body(i, parameters, carry)

            start, stop = 0, end - begin - (is_outside and number == len(loops) - 1)
            if unrolls_first and number == 0:
                start, state = 1, step_with_next(0, state)
            state = _loop(start, stop, step_with_next, state)
        parameters, carry = state
        return body(layer(end - begin - 1, begin, end), parameters, carry) if is_outside else carry

    def _read(self, layers: LayerRange, name: str, shapes: Shapes, pools, slots, i) -> Arrays:
        """Layer i's arrays in their slot of a pool of its range, in these shapes. name: the pool's
        field of LayerRange"""
        pool = getattr(layers, name)
        index = getattr(slots, pool) * layers.most(self._sizes) + i - layers.begin
        return [
            as_written(host_memory.read_at(a, index)).reshape(like.shape)
            for a, like in zip(getattr(pools, pool), shapes, strict=True)
        ]

    def _write(
        self, layers: LayerRange, name: str, values: Arrays, pools: Pools, slots, i
    ) -> Pools:
        """The pools with layer i's arrays in their slot of one of them, as for `_read`."""
        pool = getattr(layers, name)
        index = getattr(slots, pool) * layers.most(self._sizes) + i - layers.begin
        arrays = [
            host_memory.write_at(a, value.reshape(a.shape[1:]), index)
            for a, value in zip(getattr(pools, pool), values, strict=True)
        ]
        return dataclasses.replace(pools, **{pool: arrays})

    # ------------------------------------------------------------------ one op

    def output(self, params, x: jax.Array, extra) -> jax.Array:
        """The unit's output."""
        body = lambda layers: lambda i, p, x: layers.split.layer(p, x, self._extra(extra, i))
        bodies = [(layers, body(layers)) for layers in self._ranges]
        return self._each_layer(LayerOp.WHOLE, bodies, params, x)

    def output_and_residuals(
        self, params, x: jax.Array, extra, pools: Pools, slots: TickSlots, op: str
    ) -> tuple[jax.Array, Pools]:
        """Returns (the unit's output, the pools with the residuals that its backward reads).

        op: K, all of them; F, those that no R makes; R, those of the layers that it recomputes,
            whose output takes the place of the unit's
        """

        def body(layers: LayerRange) -> Body:
            def step(i, p, carry):
                x, pools = carry
                y, residuals = self._forward(layers, op, p, extra, i, x)
                return y, self._write_saved(layers, op, x, residuals, pools, slots, i)

            return step

        bodies = [(each, body(each)) for each in self._ranges if op != "R" or each.recomputed]
        written = {name for each, _ in bodies for name in (each.residual_b, each.residual_w)}
        written |= {each.layer_input for each, _ in bodies if each.layer_input}
        part = Pools(**{name: getattr(pools, name) for name in sorted(written)})
        layer_op = LayerOp.WHOLE if op == "F" else LayerOp.FORWARD
        y, part = self._each_layer(layer_op, bodies, params, (x, part))
        return y, merged(pools, part)

    def rebuilt(self, params, extra, pools: Pools, slots: TickSlots) -> Pools:
        """The pools with the residuals of the layers that R recomputes, each from the input that F
        has left. Layers with messages go by twos, so that messages of one travel while the other
        computes."""

        def recompute(layers: LayerRange, i, p) -> OpInParts:
            (x,) = self._read(layers, "layer_input", [layers.split.x], pools, slots, i)
            return layers.split.recompute(p, x, self._extra(extra, i))

        def body(layers: LayerRange) -> Body:
            def step(i, p, part):
                residuals = recompute(layers, i, p).run()
                return self._write_residuals(layers, residuals, part, slots, i)

            return step

        def pair(layers: LayerRange, begin, j, part: Pools) -> Pools:
            numbers = begin + 2 * j, begin + 2 * j + 1
            ops = (
                recompute(layers, i, self._parameters(params, i, LayerOp.RECOMPUTE))
                for i in numbers
            )
            for i, residuals in zip(numbers, side_by_side(*ops), strict=True):
                part = self._write_residuals(layers, residuals, part, slots, i)
            return part

        recomputed = [each for each in self._ranges if each.recomputed]
        written = sorted({n for each in recomputed for n in (each.residual_b, each.residual_w)})
        part = Pools(**{name: getattr(pools, name) for name in written})
        bodies, bounds = [(each, body(each)) for each in recomputed], dict(self._bounds)
        if self._zero.gathers_in_ops or not any(each.split.has_messages for each in recomputed):
            part = self._each_layer(LayerOp.RECOMPUTE, bodies, params, part)
            return merged(pools, part)
        with jax.named_scope(PAIRS_OF_R):
            for layers in recomputed:
                begin, end = bounds[layers]
                pairs = (end - begin) // 2
                part = _loop(0, pairs, functools.partial(pair, layers, begin), part)
                bounds[layers] = begin + 2 * pairs, end
        with jax.named_scope(REST_OF_R):
            part = self._each_layer(LayerOp.RECOMPUTE, bodies, params, part, bounds=bounds)
        return merged(pools, part)

    def _forward(
        self, layers: LayerRange, op: str, p, extra, i, x: jax.Array
    ) -> tuple[jax.Array, Residuals | None]:
        """Returns (layer i's output, its residuals; None where the op makes none)."""
        if op == "F" and layers.recomputed:
            return layers.split.layer(p, x, self._extra(extra, i)), None
        return layers.split.output_and_residuals(p, x, self._extra(extra, i))

    def _write_saved(
        self,
        layers: LayerRange,
        op: str,
        x: jax.Array,
        residuals: Residuals | None,
        pools: Pools,
        slots,
        i,
    ) -> Pools:
        """The pools with what an F, K or R leaves of layer i: its input for R, or its residuals."""
        if op == "F" and layers.layer_input:
            pools = self._write(layers, "layer_input", [x], pools, slots, i)
        return self._write_residuals(layers, residuals, pools, slots, i)

    def _write_residuals(
        self, layers: LayerRange, residuals: Residuals | None, pools: Pools, slots, i
    ) -> Pools:
        if residuals is None:
            return pools
        pools = self._write(layers, "residual_b", residuals.for_b, pools, slots, i)
        return self._write(layers, "residual_w", residuals.for_w, pools, slots, i)

    def _read_residuals(self, layers: LayerRange, pools: Pools, slots, i) -> Residuals:
        shapes = layers.split.residuals
        for_b = self._read(layers, "residual_b", shapes.for_b, pools, slots, i)
        return Residuals(for_b, self._read(layers, "residual_w", shapes.for_w, pools, slots, i))

    def input_gradient(
        self, params, extra, pools: Pools, slots: TickSlots, g: jax.Array
    ) -> tuple[jax.Array, Pools]:
        """Returns (the gradient of the unit's input, the pools with the weight stash), from the
        gradient g of its output."""

        def body(layers: LayerRange) -> Body:
            def step(i, p, carry):
                g, stash_pools = carry
                residuals = self._read_residuals(layers, pools, slots, i)
                g, stash = layers.split.input_gradient(p, self._extra(extra, i), residuals, g)
                return g, self._write(layers, "weight_stash", stash, stash_pools, slots, i)

            return step

        bodies = [(layers, body(layers)) for layers in self._ranges]
        names = (layers.weight_stash for layers in self._ranges)
        carry = (g, Pools(**{name: getattr(pools, name) for name in names}))
        g, part = self._each_layer(LayerOp.INPUT_GRADIENT, bodies, params, carry, reverse=True)
        return g, merged(pools, part)

    def weight_gradient(self, params, sums, extra, pools: Pools, slots: TickSlots):
        """`sums` + the gradients of the parameters."""

        def body(layers: LayerRange) -> Body:
            split = layers.split

            def step(i, p, sums):
                for_w = self._read(layers, "residual_w", split.residuals.for_w, pools, slots, i)
                stash = self._read(layers, "weight_stash", split.weight_stash, pools, slots, i)
                gradients = split.weight_gradient(p, self._extra(extra, i), for_w, stash)
                return self._add(sums, gradients, i)

            return step

        bodies = [(layers, body(layers)) for layers in self._ranges]
        return self._each_layer(LayerOp.WEIGHT_GRADIENT, bodies, params, sums)

    def reduced_gradient(self, params, sums, shards, extra, pools: Pools, slots: TickSlots) -> Any:
        """`shards` with `sums` + the gradients of the parameters, reduced over `data`.

        On GPUs a layer's are reduced beside the products of the next one: XLA moves no collective
        into a loop's next trip.
        """
        has_layers = all(self._counts_of_unit)  # on every stage that runs it
        late = on_nvidia_gpu() and not self._is_single and len(self._ranges) == 1 and has_layers

        def reduced(shards, gradients, i):
            with jax.named_scope("reduce"):
                gradients = jax.tree.map(
                    lambda g, r: reduce_in_op(g, r, self._zero.dtype), gradients, self._reductions
                )
            return jax.tree.map(lambda a, g: a.at[i].set(g.astype(a.dtype)), shards, gradients)

        def body(layers: LayerRange) -> Body:
            split = layers.split

            def step(i, p, carry):
                shards, *waiting = carry
                for_w = self._read(layers, "residual_w", split.residuals.for_w, pools, slots, i)
                stash = self._read(layers, "weight_stash", split.weight_stash, pools, slots, i)
                gradients = split.weight_gradient(p, self._extra(extra, i), for_w, stash)
                total = jax.tree.map(
                    lambda a, g, r: in_order(a[i], r) + g.astype(a.dtype),
                    sums,
                    gradients,
                    self._reductions,
                )
                if not late:
                    return (reduced(shards, total, i),)
                return reduced(shards, waiting[0], i - 1) if waiting else shards, total

            return step

        bodies = [(layers, body(layers)) for layers in self._ranges]
        shards, *waiting = self._each_layer(
            LayerOp.WEIGHT_GRADIENT, bodies, params, (shards,), unrolls_first=late
        )
        if not waiting:
            return shards
        return reduced(shards, waiting[0], self._bounds[self._ranges[-1]][1] - 1)

    def _add(self, sums, gradients, i):
        """The sums with layer i's gradients."""
        if self._zero.reduces_in_ops:
            with jax.named_scope("reduce"):
                gradients = jax.tree.map(
                    lambda g, r: reduce_in_op(g, r, self._zero.dtype), gradients, self._reductions
                )
        if self._is_single:
            return jax.tree.map(lambda a, g: a + g[None].astype(a.dtype), sums, gradients)
        return jax.tree.map(lambda a, g: a.at[i].add(g.astype(a.dtype)), sums, gradients)

    # ------------------------------------------------------------------ two ops, layer by layer

    def forward_and_input_gradient(
        self,
        forward: Forward,
        backward: "LayerStack",
        params,
        extra,
        pools: Pools,
        slots: TickSlots,
        g: jax.Array,
    ) -> tuple[jax.Array, jax.Array, Pools]:
        """Returns (the output of this unit for one microbatch, as `output_and_residuals` has it;
        the gradient of the input of another unit for another one, as `input_gradient` has it; the
        pools with what both save).

        A trip of the loop has a layer of the one and a layer of the other, from the first on and
        from the last on. Neither reads what the other computes, so XLA may run the products of one
        while messages of the other are on their way. A unit with more layers than the other has
        the rest of them alone.

        backward: the layers of the other unit, with its params, extra, slots and g
        """
        pair = _LayerPairs(self, forward, backward, params, extra, slots)
        ranges = [*self._ranges, *backward._ranges]
        used = {n for r in ranges for n in (r.residual_b, r.residual_w, r.weight_stash)}
        used |= {r.layer_input for r in self._ranges if r.layer_input}
        part = Pools(**{name: getattr(pools, name) for name in sorted(used)})
        x, g, part = pair.run((forward.x, g, part))
        return x, g, merged(pools, part)

    # ------------------------------------------------------------------ forward and backward

    def output_saving(self, params, x: jax.Array, extra) -> tuple[jax.Array, list[Any]]:
        """Returns (the unit's output, for each range of layers their residuals [layers, ...] in the
        device's or the host's memory)."""
        places = [each.split.on_host for each in self._ranges]
        if self._is_single and not any(jax.tree.leaves(places)):
            (layers,) = self._ranges
            params = self._parameters(params, 0, LayerOp.FORWARD)
            y, values = layers.split.output_and_residuals(params, x, self._extra(extra, 0))
            return y, [jax.tree.map(lambda value: value[None], values)]

        def body(number: int, layers: LayerRange) -> Body:
            def step(i, p, carry):
                x, saved = carry
                y, values = layers.split.output_and_residuals(p, x, self._extra(extra, i))
                at = i - layers.begin
                write = lambda a, value: host_memory.write_at(a, value, at)
                written = jax.tree.map(write, saved[number], values)
                return y, [*saved[:number], written, *saved[number + 1 :]]

            return step

        def empty(layers: LayerRange) -> Any:
            most, split = layers.most(self._counts), layers.split
            pool = lambda a, hosted: host_memory.empty_pool((most, *a.shape), a.dtype, hosted)
            return jax.tree.map(pool, split.residuals, split.on_host)

        bodies = [(each, body(number, each)) for number, each in enumerate(self._ranges)]
        carry = (x, [empty(layers) for layers in self._ranges])
        return self._each_layer(LayerOp.FORWARD, bodies, params, carry)

    def gradients(self, params, sums, extra, saved, g: jax.Array) -> tuple[Any, jax.Array]:
        """Returns (`sums` + the gradients of the parameters, the gradient of the unit's input),
        from what `output_saving` has saved."""
        late = self._reduces_late and not self._is_single

        def body(layers: LayerRange, values) -> Body:
            def step(i, p, carry):
                # the gradients of the layer before, where they are reduced late
                g, sums, *waiting = carry
                at = i - layers.begin
                residuals = jax.tree.map(lambda a: host_memory.read_at(a, at), values)
                gradients, g = layers.split.gradients(p, self._extra(extra, i), residuals, g)
                if not late:
                    return g, self._add(sums, gradients, i)
                return g, self._add(sums, waiting[0], i + 1) if waiting else sums, gradients

            return step

        bodies = [
            (layers, body(layers, values))
            for layers, values in zip(self._ranges, saved, strict=True)
        ]
        g, sums, *waiting = self._each_layer(
            LayerOp.BACKWARD, bodies, params, (g, sums), reverse=True, unrolls_first=late
        )
        return self._add(sums, waiting[0], 0) if late else sums, g


# x of F's next layer, the gradient for B's next one, the pools
_PairCarry = tuple[jax.Array, jax.Array, Pools]


class _LayerPairs:
    """The layers of F's unit, from the first on, beside those of B's, from the last on. Arguments
    are those of `LayerStack.forward_and_input_gradient`; layers of B count from the last one."""

    def __init__(
        self, stack: LayerStack, forward: Forward, b_stack: LayerStack, params, extra, slots
    ):
        self._stack, self._forward, self._b_stack = stack, forward, b_stack
        self._params, self._extra, self._slots = params, extra, slots
        bounds, b_bounds = (
            [(each, *of._bounds[each]) for each in of._ranges] for of in (stack, b_stack)
        )
        self._count, self._b_count = (of[-1][2] if of else 0 for of in (bounds, b_bounds))
        self._ranges = bounds
        self._b_ranges = [
            (layers, self._b_count - end, self._b_count - begin)
            for layers, begin, end in reversed(b_bounds)
        ]

    def run(self, carry: _PairCarry) -> _PairCarry:
        for (f, begin, end), (b, b_begin, b_end) in itertools.product(self._ranges, self._b_ranges):
            both = functools.partial(self._both, f, b)
            carry = _loop(_larger(begin, b_begin), _smaller(end, b_end), both, carry)
        with jax.named_scope(REST_OF_F):
            for f, begin, end in self._ranges:
                rest = functools.partial(self._rest_of_f, f)
                carry = _loop(_larger(begin, self._b_count), end, rest, carry)
        with jax.named_scope(REST_OF_B):
            for b, begin, end in self._b_ranges:
                rest = functools.partial(self._rest_of_b, b)
                carry = _loop(_larger(begin, self._count), end, rest, carry)
        return carry

    def _both(self, f: LayerRange, b: LayerRange, i, carry: _PairCarry) -> _PairCarry:
        x, g, pools = carry
        residuals = self._residuals(b, pools, i)
        # or XLA copies a pool that F writes and B reads
        residuals, pools = lax.optimization_barrier((residuals, pools))
        (g, stash), (y, saved) = side_by_side(
            self._backward(b, residuals, g, i), self._output(f, x, i)
        )
        pools = self._with_saved(f, x, saved, pools, i)
        return y, g, self._with_stash(b, stash, pools, i)

    def _rest_of_f(self, f: LayerRange, i, carry: _PairCarry) -> _PairCarry:
        x, g, pools = carry
        y, saved = self._output(f, x, i).run()
        return y, g, self._with_saved(f, x, saved, pools, i)

    def _rest_of_b(self, b: LayerRange, i, carry: _PairCarry) -> _PairCarry:
        x, g, pools = carry
        g, stash = self._backward(b, self._residuals(b, pools, i), g, i).run()
        return x, g, self._with_stash(b, stash, pools, i)

    def _output(self, f: LayerRange, x: jax.Array, i) -> OpInParts:
        forward = self._forward
        p = self._stack._parameters(forward.params, i, forward.layer_op)
        recomputed = forward.op == "F" and f.recomputed
        op = LayerOp.WHOLE if recomputed else LayerOp.FORWARD
        return f.split.forward(op, p, x, self._stack._extra(forward.extra, i))

    def _with_saved(
        self, f: LayerRange, x: jax.Array, saved: Residuals | None, pools: Pools, i
    ) -> Pools:
        forward = self._forward
        return self._stack._write_saved(f, forward.op, x, saved, pools, forward.slots, i)

    def _backward(self, b: LayerRange, residuals: Residuals, g: jax.Array, i) -> OpInParts:
        layer = self._b_count - 1 - i
        p = self._b_stack._parameters(self._params, layer, LayerOp.INPUT_GRADIENT)
        return b.split.backward(p, self._b_stack._extra(self._extra, layer), residuals, g)

    def _residuals(self, b: LayerRange, pools: Pools, i) -> Residuals:
        return self._b_stack._read_residuals(b, pools, self._slots, self._b_count - 1 - i)

    def _with_stash(self, b: LayerRange, stash: Arrays, pools: Pools, i) -> Pools:
        layer = self._b_count - 1 - i
        return self._b_stack._write(b, "weight_stash", stash, pools, self._slots, layer)


def _loop(start, stop, step: Callable, carry):
    """lax.fori_loop, without a loop for a number of trips that is known to be 0 or 1."""
    if isinstance(start, int) and isinstance(stop, int) and stop - start <= 1:
        return step(start, carry) if stop > start else carry
    return lax.fori_loop(start, stop, step, carry)


def _smaller(a, b):
    """The smaller one of two numbers, of which some are traced."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


def _larger(a, b):
    """The larger one of two numbers, of which some are traced."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.maximum(a, b)
