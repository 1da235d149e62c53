"""The op of an overlapped cell: F or K of a unit and B of a unit at once, for two microbatches.

`plan_pairs` pairs their layers in a list of `PairLoop`s; `forward_and_input_gradient` runs the
list. F's unit runs from its first layer on, B's from its last one on:

    trip            0        1        2        3
    F, 4 layers     layer 0  layer 1  layer 2  layer 3
    B, 2 layers     layer 1  layer 0
                    both              F alone

The two layers of a trip do not read what the other computes, and interleave.py orders their
equations so that messages of one travel while the other computes.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jaxtrain.runtime.layers.backward_split import LayerOp, Residuals
from jaxtrain.runtime.layers.interleave import TracedOp, side_by_side
from jaxtrain.runtime.layers.layer_loops import (
    LayerNumber,
    LayerRange,
    RangeBounds,
    larger,
    layer_count,
    run_trips,
    smaller,
)
from jaxtrain.runtime.layers.layer_stack import LayerSlots, LayerStack, pools_of
from jaxtrain.runtime.tick_state import Pools, merged
from jaxtrain.schedule.slots import TickSlots

# The scopes of layers of F, and of B, that the op runs without one of the other. The planner counts
# trips by them (planner/programs/loops.py).
REST_OF_F, REST_OF_B = "rest_of_f", "rest_of_b"

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

    def layer(self, layers: LayerRange, i: LayerNumber, x: jax.Array) -> TracedOp:
        """Layer i, from its input x. Its result: (its output, its residuals or None)."""
        # Parameters are gathered as by an F or K on its own: an F gathers all of them, since some
        # of the unit's layers may run as they are written.
        unit_op = LayerOp.WHOLE if self.op == "F" else LayerOp.FORWARD
        p = self.stack.parameters(self.params, i, unit_op)
        # A layer that R recomputes leaves no residuals in F.
        recomputed = self.op == "F" and layers.recomputed
        layer_op = LayerOp.WHOLE if recomputed else LayerOp.FORWARD
        return layers.split.forward(layer_op, p, x, self.stack.extra(self.extra, i))

    def slots_of(self, layers: LayerRange, i: LayerNumber) -> LayerSlots:
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
        self, layers: LayerRange, i: LayerNumber, residuals: Residuals, g: jax.Array
    ) -> TracedOp:
        """Layer i, from the gradient g of its output. Its result: (the gradient of its input, its
        weight stash)."""
        p = self.stack.parameters(self.params, i, LayerOp.INPUT_GRADIENT)
        return layers.split.backward(p, self.stack.extra(self.extra, i), residuals, g)

    def slots_of(self, layers: LayerRange, i: LayerNumber) -> LayerSlots:
        return self.stack.slots(layers, i, self.slots)


@dataclasses.dataclass(frozen=True, eq=False)
class PairLoop:
    """A loop whose trip i has layer i of F's unit, and the i-th layer of B's from its last one.

    f, b: the ranges of these layers; None: the loop has none of that unit
    """

    f: LayerRange | None
    b: LayerRange | None
    start: LayerNumber
    stop: LayerNumber


def plan_pairs(f_bounds: RangeBounds, b_bounds: RangeBounds) -> list[PairLoop]:
    """The loops over pairs of layers, then those over the rest of the unit with more layers.

    f_bounds, b_bounds: of each unit's ranges, in the order of the layers
    """
    f_count, b_count = map(layer_count, (f_bounds, b_bounds))
    f_trips = [(layers, begin, end) for layers, (begin, end) in f_bounds.items()]
    # B runs its unit from the last layer on, so its ranges count from there.
    b_trips = [
        (layers, b_count - end, b_count - begin)
        for layers, (begin, end) in reversed(b_bounds.items())
    ]
    # A pair of ranges that share no trip gives a loop without one.
    loops = [
        PairLoop(f, b, larger(f_begin, b_begin), smaller(f_end, b_end))
        for (f, f_begin, f_end), (b, b_begin, b_end) in itertools.product(f_trips, b_trips)
    ]
    loops += [PairLoop(f, None, larger(begin, b_count), end) for f, begin, end in f_trips]
    loops += [PairLoop(None, b, larger(begin, f_count), end) for b, begin, end in b_trips]
    return loops


def forward_and_input_gradient(
    forward: Forward, backward: Backward, pools: Pools
) -> tuple[jax.Array, jax.Array, Pools]:
    """Returns (the output of a unit for one microbatch, as `output_and_residuals` has it; the
    gradient of the input of another unit for another one, as `input_gradient` has it; the pools
    with what both save).
    """
    b_ranges = backward.stack.bounds
    b_count = layer_count(b_ranges)
    layer_of_b = lambda trip: b_count - 1 - trip

    def both(f: LayerRange, b: LayerRange, trip: LayerNumber, carry: _PairCarry) -> _PairCarry:
        x, g, pools = carry
        b_slots = backward.slots_of(b, layer_of_b(trip))
        # F writes a pool that B reads. Without the barrier XLA may put the read after the write,
        # and copies the pool for it.
        residuals, pools = lax.optimization_barrier((b_slots.residuals(pools), pools))
        (g, stash), (y, saved) = side_by_side(
            backward.layer(b, layer_of_b(trip), residuals, g), forward.layer(f, trip, x)
        )
        pools = forward.slots_of(f, trip).with_saved(pools, forward.op, x, saved)
        return y, g, b_slots.with_weight_stash(pools, stash)

    def f_alone(f: LayerRange, trip: LayerNumber, carry: _PairCarry) -> _PairCarry:
        x, g, pools = carry
        y, saved = forward.layer(f, trip, x).run()
        return y, g, forward.slots_of(f, trip).with_saved(pools, forward.op, x, saved)

    def b_alone(b: LayerRange, trip: LayerNumber, carry: _PairCarry) -> _PairCarry:
        x, g, pools = carry
        b_slots = backward.slots_of(b, layer_of_b(trip))
        g, stash = backward.layer(b, layer_of_b(trip), b_slots.residuals(pools), g).run()
        return x, g, b_slots.with_weight_stash(pools, stash)

    names = {name for each in forward.stack.bounds for name in each.pools_of_forward}
    names |= {n for r in b_ranges for n in (r.residual_b, r.residual_w, r.weight_stash)}
    # One carry for both ops: each trip reads and writes pools of both microbatches.
    carry = forward.x, backward.g, pools_of(pools, names)
    for loop in plan_pairs(forward.stack.bounds, b_ranges):
        step: Callable
        scope: contextlib.AbstractContextManager = contextlib.nullcontext()
        if loop.f and loop.b:
            step = functools.partial(both, loop.f, loop.b)
        elif loop.f:
            step, scope = functools.partial(f_alone, loop.f), jax.named_scope(REST_OF_F)
        elif loop.b:
            step, scope = functools.partial(b_alone, loop.b), jax.named_scope(REST_OF_B)
        with scope:
            carry = run_trips(loop.start, loop.stop, step, carry)
    y, g, written = carry
    return y, g, merged(pools, written)
