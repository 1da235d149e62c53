"""The loops over the layers of one unit on one stage, and the parameters that each layer gets.

Begin with `plan_loops`: it turns ranges of layers into a list of `Loop`s, in the order in which
they run. The plan computes nothing on a device and can be printed. `run_loops` runs it where a
layer's parameters are at hand; `run_loops_gathering` runs it where ZeRO-3 gathers them layer by
layer. `UnitCollectives` has ZeRO's collectives themselves.

A forward over five layers that gathers parameters, where R recomputes the lowest two:

    Loop(recomputed, 0, 2, trips 0, 1)     layers 0, 1; layer 2 is gathered in the trip of layer 1
    Loop(others, 2, 5, trips 0, 1)         layers 2, 3
    Loop(others, 2, 5, trip 2, peeled)     layer 4, after which there is nothing to gather

Stages may have different numbers of layers in a unit. Bounds are ints where all stages have the
same, and traced int32 where they differ, so a stage with fewer layers computes less.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.devices.mesh import on_nvidia_gpu
from jaxtrain.parallel.zero import Zero, gather, in_memory_order, in_order, reduce_in_op

LayerNumber = Any  # an int, or a traced int32
LayerBody = Callable  # (a layer's range, its number, its parameters, carry) → carry


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

    @property
    def pools_of_forward(self) -> list[str]:
        """The names of the pools that F or R fills."""
        return [n for n in (self.residual_b, self.residual_w, self.layer_input) if n]

    def bounds(self, layers: int) -> tuple[int, int]:
        """Returns (the number of the lowest layer, the number after the highest) in a unit of so
        many layers."""
        return min(self.begin, layers), layers if self.end is None else min(self.end, layers)

    def most(self, sizes: Sequence[int]) -> int:
        """The most layers of it in any unit. sizes: the layers of each unit"""
        return max(end - begin for begin, end in map(self.bounds, sizes))


@dataclasses.dataclass(frozen=True, eq=False)
class UnitCollectives:
    """ZeRO's collectives inside the ops of one unit.

    zero: whether ops gather each layer's parameters before they use them, and reduce its gradients
        once they have them
    reductions: the `Reduction` of each parameter, in a pytree like one layer's parameters; it may
        be None where ops do neither
    """

    zero: Zero = Zero()
    reductions: Any = None

    @property
    def reduce_late(self) -> bool:
        """True where a layer's gradients are reduced one trip late, so that the collective overlaps
        with the products of the next layer."""
        # XLA's GPU compiler moves no collective into a loop's next trip by itself: a reduction
        # would stand alone behind its layer's last product. TPUs do not need it.
        return on_nvidia_gpu()

    def parameters(self, stack, i: LayerNumber, reads: Callable[[], Any]) -> Any:
        """Layer i's parameters, gathered where `reads()`, a tree of bools like them, says so."""
        one = lambda a: lax.dynamic_index_in_dim(a, i, 0, keepdims=False)
        params = jax.tree.map(one, stack)
        # Matrices of FP8 lie in one order in memory, or XLA transposes the stack in every tick.
        if on_nvidia_gpu() and self.reductions is not None:
            params = jax.tree.map(in_memory_order, self.reductions, params)
        if not self.zero.gathers_in_ops:
            return params
        with jax.named_scope("gather"):
            return jax.tree.map(
                lambda reduction, a, read: gather(a, reduction) if read else a,
                self.reductions,
                params,
                reads(),
            )

    def reduced(self, gradients) -> Any:
        """One layer's gradients, each summed over its `shard_axes`: this device's shards."""
        with jax.named_scope("reduce"):
            return jax.tree.map(
                lambda g, r: reduce_in_op(g, r, self.zero.dtype), gradients, self.reductions
            )

    def add(self, sums, gradients, i: LayerNumber, is_single: bool) -> Any:
        """The stack `sums` with layer i's gradients, which are reduced before if ops do that.
        is_single: layer i is the stack's only one"""
        if self.zero.reduces_in_ops:
            gradients = self.reduced(gradients)
        # The sum of two arrays, where no other layer's sums have to stay in place.
        if is_single:
            return jax.tree.map(lambda a, g: a + g[None].astype(a.dtype), sums, gradients)
        return jax.tree.map(lambda a, g: a.at[i].add(g.astype(a.dtype)), sums, gradients)

    def added(self, sums, gradients, i: LayerNumber) -> Any:
        """Layer i's gradients and its sums in the stack `sums`: one layer's arrays, in the type of
        the sums."""
        return jax.tree.map(
            lambda a, g, r: in_order(a[i], r) + g.astype(a.dtype), sums, gradients, self.reductions
        )


# A range's bounds on this stage: its first layer, and the number after its last one.
RangeBounds = dict[LayerRange, tuple[LayerNumber, LayerNumber]]


def bounds_on_stage(ranges: Sequence[LayerRange], counts: Sequence[int], stage) -> RangeBounds:
    """counts: the unit's layers on each stage; stage: this device's, a traced int32"""
    bounds = {}
    for layers in ranges:
        # Equal bounds stay ints: a loop of a known number of trips may be none at all.
        begin, end = (
            values[0] if len(set(values)) == 1 else jnp.asarray(values)[stage]
            for values in zip(*map(layers.bounds, counts), strict=True)
        )
        bounds[layers] = begin, end
    return bounds


def layer_count(bounds: RangeBounds) -> LayerNumber:
    """The number of a unit's layers on this stage. bounds: of its ranges, in the order of the
    layers"""
    return list(bounds.values())[-1][1] if bounds else 0


# --- the plan -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    """A loop over layers of one range, one a trip. Trip 0 is the range's first layer, or with
    `reverse` its last one.

    begin, end: of the range's layers on this stage
    start, stop: of the loop's trips
    peeled: its only trip stands outside of a loop in the program
    """

    layers: LayerRange
    begin: LayerNumber
    end: LayerNumber
    start: LayerNumber
    stop: LayerNumber
    reverse: bool = False
    peeled: bool = False

    def layer(self, trip: LayerNumber) -> LayerNumber:
        return self.end - 1 - trip if self.reverse else self.begin + trip

    def run(self, step: Callable, carry):
        """carry = step(layer's number, carry) in each trip."""
        one = lambda trip, carry: step(self.layer(trip), carry)
        if self.peeled:
            return one(self.start, carry)
        return run_trips(self.start, self.stop, one, carry)


def plan_loops(
    bounds: RangeBounds,
    reverse: bool = False,
    peel_first: bool = False,
    peel_last: bool = False,
) -> list[Loop]:
    """The loops that run each layer once, from the first one on, or with `reverse` from the last
    one on.

    bounds: of ranges that follow each other, in the order of the layers
    peel_first, peel_last: the layer that runs first, or last, stands outside of its loop; every
        stage has it
    """
    loops = []
    # A backward goes through the ranges from the last one, and through each from its last layer.
    ranges = list(reversed(bounds.items()) if reverse else bounds.items())
    for number, (layers, (begin, end)) in enumerate(ranges):
        peels_first = peel_first and number == 0
        peels_last = peel_last and number == len(ranges) - 1
        start, stop = int(peels_first), end - begin - 1 if peels_last else end - begin
        if peels_first:
            loops.append(Loop(layers, begin, end, 0, 1, reverse, peeled=True))
        loops.append(Loop(layers, begin, end, start, stop, reverse))
        if peels_last:
            loops.append(Loop(layers, begin, end, stop, stop + 1, reverse, peeled=True))
    return loops


# --- two ways to run it ---------------------------------------------------------------------------


def run_loops(
    loops: Sequence[Loop], body: LayerBody, parameters: Callable[[LayerNumber], Any], carry
):
    """carry = body(range, i, parameters(i), carry) for each layer i."""
    for loop in loops:
        step = lambda i, carry, layers=loop.layers: body(layers, i, parameters(i), carry)
        carry = loop.run(step, carry)
    return carry


def run_loops_gathering(
    loops: Sequence[Loop], body: LayerBody, gathered: Callable[[LayerNumber], Any], carry
):
    """carry = body(range, i, gathered(i), carry) for each layer i. `gathered` has collectives: each
    layer's trip begins with those of the next layer, so that they overlap with this layer's
    products."""
    # The first layer's parameters are gathered before all loops; nothing overlaps with that.
    way = -1 if loops[0].reverse else 1
    state = gathered(loops[0].layer(0)), carry
    for loop in loops:
        # A stage may have no layer in the last range. Then no layer is known to run last, none is
        # peeled, and the one that does gathers a layer that nobody reads: its number is clamped.
        is_last = loop.peeled and loop is loops[-1]

        def step(i, state, layers=loop.layers, is_last=is_last):
            parameters, carry = state
            # Before the body, which does not depend on it: so XLA may start the gather first.
            following = None if is_last else gathered(i + way)
            return following, body(layers, i, parameters, carry)

        state = loop.run(step, state)
    return state[1]


def run_trips(start: LayerNumber, stop: LayerNumber, step: Callable, carry):
    """`lax.fori_loop`, without a loop for a number of trips that is known to be 0 or 1."""
    # XLA fuses and reorders nothing across a loop's border, so one known trip stands outside.
    if isinstance(start, int) and isinstance(stop, int) and stop - start <= 1:
        return step(start, carry) if stop > start else carry
    return lax.fori_loop(start, stop, step, carry)


def smaller(a: LayerNumber, b: LayerNumber) -> LayerNumber:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


def larger(a: LayerNumber, b: LayerNumber) -> LayerNumber:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.maximum(a, b)
