"""The ops of one unit's layers on one stage: loops over the unit's stacked parameters.

Begin with `LayerStack.input_gradient`, which has the form of every op: `body` says what one layer
does, with its parameters and a carry; `_run` runs the body in loops over the layers
(layer_loops.py). What a layer leaves for a later op of its microbatch lies in pools of slots:
`LayerSlots` reads and writes those of one layer. overlapped.py has the op that runs two units at
once.

x and y are the unit's input and output, g the gradient of one of them: [B, T, D] of the compute
type. `extra` is what a layer reads beside x.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.devices import host_memory
from jaxtrain.parallel.attention.heads import as_written
from jaxtrain.parallel.dropout import layer_noise
from jaxtrain.runtime.layers.backward_split import LayerOp, Residuals
from jaxtrain.runtime.layers.interleave import TracedOp, side_by_side
from jaxtrain.runtime.layers.layer_loops import (
    LayerBody,
    LayerIndex,
    LayerNumber,
    LayerRange,
    Loop,
    Trip,
    UnitCollectives,
    UnitLoops,
    layers_in_order,
    plan_loops,
    plan_unit,
    run_loops,
    run_loops_gathering,
    run_trips_of,
)
from jaxtrain.runtime.tick_state import Pools, merged
from jaxtrain.schedule.placement import Placement
from jaxtrain.schedule.slots import TickSlots

WITHOUT_ZERO = UnitCollectives()


@dataclasses.dataclass(frozen=True, eq=False)
class LayerSlots:
    """The slots of one layer in the pools of its range, for the microbatch of an op.

    entry: the layer's in each slot
    slots: those that the op reads or fills
    entries: of a slot
    """

    layers: LayerRange
    entry: LayerNumber
    slots: TickSlots
    entries: int

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
            for a, like in zip(getattr(pools, pool)[self.layers.pool], shapes, strict=True)
        ]

    def _write(self, pools: Pools, pool: str, values: Sequence[jax.Array]) -> Pools:
        index, of_kinds = self._index(pool), getattr(pools, pool)
        arrays = [
            host_memory.write_at(a, value.reshape(a.shape[1:]), index)
            for a, value in zip(of_kinds[self.layers.pool], values, strict=True)
        ]
        return dataclasses.replace(pools, **{pool: {**of_kinds, self.layers.pool: arrays}})

    def _index(self, pool: str) -> LayerNumber:
        # An array of a pool has one dimension for slots and layers (`state_plan.pool_arrays`).
        return getattr(self.slots, pool) * self.entries + self.entry


class LayerStack:
    """The layers of one local unit on this stage, and their ops.

    Args:
      ranges: of the layers of all units.
      placement: which layers the unit has on each stage.
      unit: the local unit's number.
      stage: this device's stage, a traced int32.
      collectives: ZeRO's, inside the ops.
      kinds: of the model's layers, those before the placement's included; (): all are of one.

    The methods take `params`, the stacked parameters, with leaves [stack_size, ...], and `sums`,
    float32 sums of their gradients: {form: stacks} where layers are of several forms. `pools` and
    `slots` are those that the op uses.

    unit: the unit's key in trees of parameters
    ranges: those of which some stage has a layer in the unit
    trips: for each stage its layers in their order, as trips of an op's loops
    """

    def __init__(
        self,
        ranges: Sequence[LayerRange],
        placement: Placement,
        unit: int,
        stage,
        collectives: UnitCollectives = WITHOUT_ZERO,
        kinds: tuple[str, ...] = (),
    ):
        self.unit, self.stage, self._collectives = str(unit), stage, collectives
        kinds = kinds or ("",) * placement.layers
        before = len(kinds) - placement.layers
        # layer of the unit → its number in the model
        self._numbers = before + jnp.asarray(placement.layer_index(unit))[stage]
        kinds = kinds[before:]
        self._units = placement.kinds_of_units(kinds)
        # A stage without the unit never runs its ops. With the layers of another stage in its place
        # it need not make the others' loops traced.
        has_unit = [s for s in range(placement.stages) if placement.unit_at(unit, s) is not None]
        self.trips = [
            layers_in_order(ranges, [kinds[i] for i in placement.layers_of(unit, s)])
            for s in (s if s in has_unit else has_unit[0] for s in range(placement.stages))
        ]
        used = {trip.label for of_stage in self.trips for trip in of_stage}
        self.ranges = [layers for layers in ranges if layers in used]
        forms = placement.forms_of_unit(unit)
        self._has_forms = forms != ("",)
        self._recomputed = [[t for t in ts if t.label.recomputed] for ts in self.trips]
        # forms of which no stage has more than one layer in the unit
        self._single = {form for form in forms if placement.stack_size(unit, form) == 1}

    @property
    def reduces_in_last(self) -> bool:
        """True if the last W of a step reduces its gradients."""
        return self._collectives.zero.reduces_in_last

    @property
    def _reduces_late(self) -> bool:
        """True if an op that reduces gradients reduces, in each trip, those of the layer before."""
        # So the layer that runs first is peeled, which every stage must have.
        first = {of_stage[0].label if of_stage else None for of_stage in self.trips}
        start_alike = len(first) == 1 and None not in first
        can_wait = start_alike and not self._has_forms and not self._single
        return can_wait and self._collectives.reduce_late

    @property
    def saves_in_f(self) -> bool:
        """True if F saves residuals or inputs of some layers, though R recomputes some."""
        return self.saves_inputs or any(not each.recomputed for each in self.ranges)

    @property
    def saves_inputs(self) -> bool:
        """True if F leaves the inputs of layers for R."""
        return any(each.layer_input for each in self.ranges)

    # ------------------------------------------------------------------ what each layer gets

    def extra(self, extra, i: LayerIndex):
        """What layer i reads beside its input: the same as all layers, but for noise."""
        return layer_noise(extra, self._numbers[i.number]) if extra[2:] else extra

    def parameters(self, params, layers: LayerRange, row: LayerNumber, op: LayerOp):
        """The parameters of a layer in a row of its form's stack, gathered where the op reads
        them."""
        form = layers.form
        reads = functools.partial(self._reads, op, form)
        collectives = self._collectives.of_form(form)
        return collectives.parameters(of_form(params, form), row, reads)

    def slots(self, layers: LayerRange, i: LayerIndex, slots: TickSlots) -> LayerSlots:
        """The slots of layer i, which is in this range."""
        return LayerSlots(layers, i.entry, slots, layers.most_entries(self._units))

    def _reads(self, op: LayerOp, form: str) -> Any:
        """A tree of bools like the parameters of a form: whether the op reads each in any range."""
        reads = [layers.split.reads(op) for layers in self.ranges if layers.form == form]
        return jax.tree.map(lambda *of_ranges: any(of_ranges), *reads)

    def _run(self, op: LayerOp, body: LayerBody, params, carry, plan: UnitLoops):
        """carry = body(range, i, parameters of layer i, carry) for every layer i of the plan. The
        body of a peeled layer may return another carry than it gets."""
        if not plan.loops:  # no stage has such a layer in this unit
            return carry
        parameters = functools.partial(self.parameters, params, op=op)
        if not self._gathers_ahead(op, plan.loops):
            return run_loops(plan.loops, self.stage, body, parameters, carry)
        return run_loops_gathering(plan, self.stage, body, parameters, carry)

    def _gathers_ahead(self, op: LayerOp, loops: Sequence[Loop]) -> bool:
        """True if an op gathers a layer's parameters while the layer before computes."""
        # Layers of several forms have arrays of different shapes. A loop whose next layer is known
        # by its index alone cannot carry them, and gathers each layer where it is used.
        is_known = all(each.is_known for loop in loops for each in loop.stretches)
        if not self._collectives.zero.gathers_in_ops or (self._has_forms and not is_known):
            return False
        forms = {layers.form for layers in self.ranges}
        return any(jax.tree.leaves([self._reads(op, form) for form in forms]))

    # ------------------------------------------------------------------ one op

    def output(self, params, x: jax.Array, extra) -> jax.Array:
        """The unit's output."""
        body = lambda layers, i, p, x: layers.split.layer(p, x, self.extra(extra, i))
        return self._run(LayerOp.WHOLE, body, params, x, plan_unit(self.trips))

    def output_and_residuals(
        self, params, x: jax.Array, extra, pools: Pools, slots: TickSlots, op: str
    ) -> tuple[jax.Array, Pools]:
        """Returns (the unit's output, the pools with the residuals that its backward reads).

        op: K, all of them; F, those that no R makes; R, those of the layers that it recomputes,
            whose output takes the place of the unit's
        """

        def body(layers: LayerRange, i: LayerIndex, p, carry):
            x, pools = carry
            if op == "F" and layers.recomputed:
                y, residuals = layers.split.layer(p, x, self.extra(extra, i)), None
            else:
                y, residuals = layers.split.output_and_residuals(p, x, self.extra(extra, i))
            return y, self.slots(layers, i, slots).with_saved(pools, op, x, residuals)

        # R begins at the unit's input, and recomputed layers are its lowest ones.
        plan = plan_unit(self._recomputed if op == "R" else self.trips)
        ranges = [each for each in self.ranges if op != "R" or each.recomputed]
        names = {name for each in ranges for name in each.pools_of_forward}
        # As WHOLE, F gathers every parameter: some of its layers may run as they are written.
        layer_op = LayerOp.WHOLE if op == "F" else LayerOp.FORWARD
        carry = x, pools_of(pools, names)
        y, written = self._run(layer_op, body, params, carry, plan)
        return y, merged(pools, written)

    def rebuilt(self, params, extra, pools: Pools, slots: TickSlots) -> Pools:
        """The pools with the residuals of the layers that R recomputes, each from the input that F
        has left. Layers with messages go by twos, so that messages of one travel while the other
        computes."""
        op = LayerOp.RECOMPUTE

        def recompute(layers: LayerRange, i: LayerIndex, p) -> TracedOp:
            x = self.slots(layers, i, slots).layer_input(pools)
            return layers.split.recompute(p, x, self.extra(extra, i))

        def body(layers: LayerRange, i: LayerIndex, p, written: Pools) -> Pools:
            residuals = recompute(layers, i, p).run()
            return self.slots(layers, i, slots).with_residuals(written, residuals)

        def pair(
            ranges: tuple[LayerRange, LayerRange], values: Sequence[LayerNumber], written: Pools
        ) -> Pools:
            layers = list(zip(ranges, two_layers(values), strict=True))
            ops = (
                recompute(each, i, self.parameters(params, each, i.row, op)) for each, i in layers
            )
            for (each, i), residuals in zip(layers, side_by_side(*ops), strict=True):
                written = self.slots(each, i, slots).with_residuals(written, residuals)
            return written

        ranges = [each for each in self.ranges if each.recomputed]
        # Inputs are only read here, so the loops need not carry their pool.
        names = {name for each in ranges for name in (each.residual_b, each.residual_w)}
        written = pools_of(pools, names)
        in_pairs = any(each.split.has_messages for each in ranges)
        # Gathered parameters come a layer ahead, which needs one layer a trip.
        if self._collectives.zero.gathers_in_ops or not in_pairs:
            plan = plan_unit(self._recomputed)
            return merged(pools, self._run(op, body, params, written, plan))
        loops = plan_loops([pairs_of(t[::2], t[1::2]) for t in self._recomputed])
        written = run_trips_of(loops, self.stage, pair, written)
        odd = [of_stage[len(of_stage) // 2 * 2 :] for of_stage in self._recomputed]
        return merged(pools, self._run(op, body, params, written, plan_unit(odd)))

    def input_gradient(
        self, params, extra, pools: Pools, slots: TickSlots, g: jax.Array
    ) -> tuple[jax.Array, Pools]:
        """Returns (the gradient of the unit's input, the pools with the weight stash), from the
        gradient g of its output."""
        op = LayerOp.INPUT_GRADIENT

        def body(layers: LayerRange, i: LayerIndex, p, carry):
            g, written = carry
            of_layer = self.slots(layers, i, slots)
            residuals = of_layer.residuals(pools)
            g, stash = layers.split.input_gradient(p, self.extra(extra, i), residuals, g)
            return g, of_layer.with_weight_stash(written, stash)

        # The loops carry the pools that they write. What they only read they need not carry: it has
        # the same value in each trip.
        carry = g, pools_of(pools, (layers.weight_stash for layers in self.ranges))
        g, written = self._run(op, body, params, carry, plan_unit(self.trips, reverse=True))
        return g, merged(pools, written)

    def weight_gradient(self, params, sums, extra, pools: Pools, slots: TickSlots):
        """`sums` + the gradients of the parameters."""
        op = LayerOp.WEIGHT_GRADIENT

        def body(layers: LayerRange, i: LayerIndex, p, sums):
            gradients = self.slots(layers, i, slots).weight_gradient(p, self.extra(extra, i), pools)
            return self._added(sums, gradients, layers.form, i.row)

        return self._run(op, body, params, sums, plan_unit(self.trips))

    def _added(self, sums, gradients, form: str, row: LayerNumber) -> Any:
        """`sums` + the gradients of the layer in a row of its form's stack."""
        add, is_single = self._collectives.of_form(form).add, form in self._single
        return with_form(sums, form, add(of_form(sums, form), gradients, row, is_single))

    def reduced_gradient(self, params, sums, shards, extra, pools: Pools, slots: TickSlots) -> Any:
        """`shards` with `sums` + the gradients of the parameters, reduced over `data`."""
        op, late = LayerOp.WEIGHT_GRADIENT, self._reduces_late

        def with_reduced(shards, total, form: str, row: LayerNumber):
            reduced = self._collectives.of_form(form).reduced(total)
            write = lambda a, g: a.at[row].set(g.astype(a.dtype))
            return with_form(shards, form, jax.tree.map(write, of_form(shards, form), reduced))

        def body(layers: LayerRange, i: LayerIndex, p, carry):
            shards, *waiting = carry  # waiting: the total of the layer before, where late
            gradients = self.slots(layers, i, slots).weight_gradient(p, self.extra(extra, i), pools)
            collectives, form = self._collectives.of_form(layers.form), layers.form
            total = collectives.added(of_form(sums, form), gradients, i.row)
            if not late:
                return (with_reduced(shards, total, form, i.row),)
            return with_reduced(shards, waiting[0], form, i.row - 1) if waiting else shards, total

        plan = plan_unit(self.trips, peel_first=late)
        shards, *waiting = self._run(op, body, params, (shards,), plan)
        if not waiting:
            return shards
        last = jnp.asarray([len(of_stage) - 1 for of_stage in self.trips])[self.stage]
        return with_reduced(shards, waiting[0], "", last)

    # ------------------------------------------------------------------ forward and backward

    def output_saving(self, params, x: jax.Array, extra) -> tuple[jax.Array, dict]:
        """Returns (the unit's output, `LayerRange.saved` → residuals [layers, ...] in the device's
        or the host's memory)."""
        op = LayerOp.FORWARD
        # One layer's residuals need no array to be written into, unless that is on the host.
        on_host = any(jax.tree.leaves([each.split.on_host for each in self.ranges]))
        is_one_layer = len(self.ranges) == 1 and all(len(of_stage) == 1 for of_stage in self.trips)
        if is_one_layer and not on_host:
            (layers,), i = self.ranges, LayerIndex(0, 0, 0)
            p = self.parameters(params, layers, i.row, op)
            y, values = layers.split.output_and_residuals(p, x, self.extra(extra, i))
            return y, {layers.saved: jax.tree.map(lambda value: value[None], values)}

        def body(layers: LayerRange, i: LayerIndex, p, carry):
            x, saved = carry
            y, values = layers.split.output_and_residuals(p, x, self.extra(extra, i))
            write = lambda a, value: host_memory.write_at(a, value, i.entry)
            return y, {**saved, layers.saved: jax.tree.map(write, saved[layers.saved], values)}

        # An entry for each layer, and no slots: a microbatch's backward follows its forward.
        def empty(layers: LayerRange) -> Any:
            most, split = layers.most_entries(self._units), layers.split
            pool = lambda a, hosted: host_memory.empty_pool((most, *a.shape), a.dtype, hosted)
            return jax.tree.map(pool, split.residuals, split.on_host)

        carry = x, {each.saved: empty(each) for each in self.ranges}
        return self._run(op, body, params, carry, plan_unit(self.trips))

    def gradients(self, params, sums, extra, saved, g: jax.Array) -> tuple[Any, jax.Array]:
        """Returns (`sums` + the gradients of the parameters, the gradient of the unit's input),
        from what `output_saving` has saved."""
        op = LayerOp.BACKWARD
        late = self._collectives.zero.reduces_in_ops and self._reduces_late

        def body(layers: LayerRange, i: LayerIndex, p, carry):
            g, sums, *waiting = carry  # waiting: the gradients of the layer before, where late
            residuals = jax.tree.map(lambda a: host_memory.read_at(a, i.entry), saved[layers.saved])
            gradients, g = layers.split.gradients(p, self.extra(extra, i), residuals, g)
            if not late:
                return g, self._added(sums, gradients, layers.form, i.row)
            return g, self._added(sums, waiting[0], "", i.row + 1) if waiting else sums, gradients

        plan = plan_unit(self.trips, reverse=True, peel_first=late)
        g, sums, *waiting = self._run(op, body, params, (g, sums), plan)
        return self._added(sums, waiting[0], "", 0) if late else sums, g


def pairs_of(first: list[Trip], second: list[Trip]) -> list[Trip]:
    """Trips of two layers each, as long as there are both."""
    pairs = zip(first, second, strict=False)
    return [Trip((a.label, b.label), (*a.values, *b.values)) for a, b in pairs]


def two_layers(values: Sequence[LayerNumber]) -> tuple[LayerIndex, LayerIndex]:
    """The layers of a trip of two."""
    return LayerIndex(*values[:3]), LayerIndex(*values[3:])


def of_form(tree, form: str) -> Any:
    """The part of a form in {form: …}; the tree itself where layers are of one form, ""."""
    return tree[form] if form else tree


def with_form(tree, form: str, part) -> Any:
    """The tree with this part of a form."""
    return {**tree, form: part} if form else part


def pools_of(pools: Pools, names: Iterable[str]) -> Pools:
    """The pools of these names; the others are None. A loop carries those that it writes."""
    return Pools(**{name: getattr(pools, name) for name in names})
