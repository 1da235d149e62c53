"""The op of an overlapped cell: F or K of a unit and B of a unit at once, for two microbatches.

`plan_pairs` pairs their layers in loops; `forward_and_input_gradient` runs them.
F's unit runs from its first layer on, B's from its last one on:

    trip            0        1        2        3
    F, 4 layers     layer 0  layer 1  layer 2  layer 3
    B, 2 layers     layer 1  layer 0
                    both              F alone

The two layers of a trip do not read what the other computes, and interleave.py orders their
equations so that messages of one travel while the other computes.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from jaxtrain.runtime.layers.backward_split import LayerOp, Residuals
from jaxtrain.runtime.layers.interleave import TracedOp, side_by_side
from jaxtrain.runtime.layers.layer_loops import (
    LayerIndex,
    LayerNumber,
    LayerRange,
    Loop,
    Trip,
    plan_loops,
    run_trips_of,
)
from jaxtrain.runtime.layers.layer_stack import (
    LayerSlots,
    LayerStack,
    pairs_of,
    pools_of,
    two_layers,
)
from jaxtrain.runtime.tick_state import Pools, merged
from jaxtrain.schedule.slots import TickSlots

_PairCarry = tuple[jax.Array, jax.Array, Pools]


@dataclasses.dataclass(frozen=True, eq=False)
class Forward:
    """An F or K of a microbatch.

    op: "F" or "K"
    params: the unit's stacked parameters
    x: the unit's input
    extra: what layers read beside it
    slots: those that the op fills
    """

    stack: LayerStack
    op: str
    params: Any
    x: jax.Array
    extra: Any
    slots: TickSlots

    def layer(self, layers: LayerRange, i: LayerIndex, x: jax.Array) -> TracedOp:
        """Layer i, from its input x. Its result: (its output, its residuals or None)."""
        # Parameters are gathered as by an F or K on its own: an F gathers all of them, since some
        # of the unit's layers may run as they are written.
        unit_op = LayerOp.WHOLE if self.op == "F" else LayerOp.FORWARD
        p = self.stack.parameters(self.params, layers, i.row, unit_op)
        # A layer that R recomputes leaves no residuals in F.
        recomputed = self.op == "F" and layers.recomputed
        layer_op = LayerOp.WHOLE if recomputed else LayerOp.FORWARD
        return layers.split.forward(layer_op, p, x, self.stack.extra(self.extra, i))

    def slots_of(self, layers: LayerRange, i: LayerIndex) -> LayerSlots:
        return self.stack.slots(layers, i, self.slots)


@dataclasses.dataclass(frozen=True, eq=False)
class Backward:
    """A B of a microbatch.

    params: the unit's stacked parameters
    extra: what layers read beside their input
    slots: those that the op reads and fills
    g: the gradient of the unit's output
    """

    stack: LayerStack
    params: Any
    extra: Any
    slots: TickSlots
    g: jax.Array

    def layer(
        self, layers: LayerRange, i: LayerIndex, residuals: Residuals, g: jax.Array
    ) -> TracedOp:
        """Layer i, from the gradient g of its output. Its result: (the gradient of its input, its
        weight stash)."""
        p = self.stack.parameters(self.params, layers, i.row, LayerOp.INPUT_GRADIENT)
        return layers.split.backward(p, self.stack.extra(self.extra, i), residuals, g)

    def slots_of(self, layers: LayerRange, i: LayerIndex) -> LayerSlots:
        return self.stack.slots(layers, i, self.slots)


class PairLoops(NamedTuple):
    """The loops over pairs of layers, and over the rest of the unit with more layers."""

    both: list[Loop]
    rest_of_f: list[Loop]
    rest_of_b: list[Loop]


def plan_pairs(f: Sequence[list[Trip]], b: Sequence[list[Trip]]) -> PairLoops:
    """The loops of an overlapped cell. f, b: for each stage the layers of each unit, in order"""
    # B runs its unit from the last layer on.
    b = [of_stage[::-1] for of_stage in b]
    shared = [min(map(len, of_stage)) for of_stage in zip(f, b, strict=True)]
    rest = lambda trips: [t[count:] for t, count in zip(trips, shared, strict=True)]
    both = [pairs_of(*of_stage) for of_stage in zip(f, b, strict=True)]
    return PairLoops(plan_loops(both), plan_loops(rest(f)), plan_loops(rest(b)))


def forward_and_input_gradient(
    forward: Forward, backward: Backward, pools: Pools
) -> tuple[jax.Array, jax.Array, Pools]:
    """Returns (the output of a unit for one microbatch, as `output_and_residuals` has it; the
    gradient of the input of another unit for another one, as `input_gradient` has it; the pools
    with what both save).
    """

    def both(
        ranges: tuple[LayerRange, LayerRange], values: Sequence[LayerNumber], carry: _PairCarry
    ) -> _PairCarry:
        x, g, pools = carry
        (f, b), (i, j) = ranges, two_layers(values)
        b_slots = backward.slots_of(b, j)
        # F writes a pool that B reads. Without the barrier XLA may put the read after the write,
        # and copies the pool for it.
        residuals, pools = lax.optimization_barrier((b_slots.residuals(pools), pools))
        (g, stash), (y, saved) = side_by_side(
            backward.layer(b, j, residuals, g), forward.layer(f, i, x)
        )
        pools = forward.slots_of(f, i).with_saved(pools, forward.op, x, saved)
        return y, g, b_slots.with_weight_stash(pools, stash)

    def f_alone(f: LayerRange, values: Sequence[LayerNumber], carry: _PairCarry) -> _PairCarry:
        (x, g, pools), i = carry, LayerIndex(*values)
        y, saved = forward.layer(f, i, x).run()
        return y, g, forward.slots_of(f, i).with_saved(pools, forward.op, x, saved)

    def b_alone(b: LayerRange, values: Sequence[LayerNumber], carry: _PairCarry) -> _PairCarry:
        (x, g, pools), j = carry, LayerIndex(*values)
        b_slots = backward.slots_of(b, j)
        g, stash = backward.layer(b, j, b_slots.residuals(pools), g).run()
        return x, g, b_slots.with_weight_stash(pools, stash)

    names = {name for each in forward.stack.ranges for name in each.pools_of_forward}
    names |= {
        n for r in backward.stack.ranges for n in (r.residual_b, r.residual_w, r.weight_stash)
    }
    # One carry for both ops: each trip reads and writes pools of both microbatches.
    carry = forward.x, backward.g, pools_of(pools, names)
    loops, stage = plan_pairs(forward.stack.trips, backward.stack.trips), forward.stack.stage
    carry = run_trips_of(loops.both, stage, both, carry)
    carry = run_trips_of(loops.rest_of_f, stage, f_alone, carry)
    carry = run_trips_of(loops.rest_of_b, stage, b_alone, carry)
    y, g, written = carry
    return y, g, merged(pools, written)
