"""The layers of one unit on one stage: a loop over the rows of their stacked parameters, for each
op of the schedule.

The number of layers may differ between stages; the loop's bound is then this stage's own, and a
stage with fewer layers does less work. A single layer needs no loop.

x and y are the unit's input and output, g the gradient of one of them: [B, T, D] of the compute
type. `extra` is what a layer reads beside x.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.config.kernels import GPU
from jaxtrain.devices.mesh import hardware
from jaxtrain.parallel import host_memory
from jaxtrain.parallel.heads import as_written
from jaxtrain.parallel.zero import Zero, gather, reduce_in_op
from jaxtrain.runtime.backward_split import LayerOp, LayerSplit, Residuals
from jaxtrain.schedule.placement import Placement

Arrays = list[jax.Array]
Shapes = Sequence[jax.ShapeDtypeStruct]
NO_GATHERS = Zero()  # nor reductions: gradients are summed up whole


@dataclasses.dataclass(frozen=True)
class ResidualSlots:
    """The slots of one unit's residuals in the pools of `Residuals`: traced int32 scalars, or
    ints."""

    for_b: Any
    for_w: Any


def _row(tree, i):
    """Row i of stacked parameters."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, 0, keepdims=False), tree)


def slot_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """How an array lies in a slot: one of four dimensions (tokens, heads, size of a head) with the
    last two as one.

    XLA's GPU compiler would give an array of heads one layout where it is written and another where
    it is read, and transpose it whole in every tick. The last dimension is never split over
    devices, so merging it moves nothing.
    """
    return shape if len(shape) < 4 else (*shape[:-2], shape[-2] * shape[-1])


def empty_pool(slots: int, layers: int, shapes: Shapes, on_host: bool = False) -> Arrays:
    """A pool of so many slots, each for arrays of these shapes of each of `layers` layers: [slots ·
    layers, ...], in the memory of the device or the host. Nothing of it may be read before it is
    written.

    One dimension for both: copies between a TPU and its host cut one dimension alone.
    """
    return [
        host_memory.empty_pool((slots * layers, *slot_shape(a.shape)), a.dtype, on_host)
        for a in shapes
    ]


def read_pool(pool: Arrays, shapes: Shapes, index) -> Arrays:
    """What lies at an index of a pool, in these shapes."""
    return [
        as_written(host_memory.read_at(a, index)).reshape(like.shape)
        for a, like in zip(pool, shapes, strict=True)
    ]


def write_pool(pool: Arrays, values: Arrays, index) -> Arrays:
    """The pool with what lies at an index replaced."""
    return [
        host_memory.write_at(a, value.reshape(a.shape[1:]), index)
        for a, value in zip(pool, values, strict=True)
    ]


class LayerStack:
    """The blocks of the unit with the local index `unit` on this stage.

    Args:
      layer: (params of one layer, x, extra) → y, of the shape and dtype of x.
      split: its partition, whose residuals and weight stash say what lies in the pools, in which
        order.
      placement: how many layers the unit has on each stage.
      unit: the local unit.
      stage: this device's stage, a traced int32.
      zero, reductions: whether each layer's parameters are gathered before they are used and its
        gradients reduced after they are made, and how; `reductions` is a pytree like one layer's
        parameters.

    The methods take `params`, the stacked parameters, with leaves [stack_size, ...], and `sums`,
    float32 sums of their gradients.
    """

    def __init__(
        self,
        layer: Callable,
        split: LayerSplit,
        placement: Placement,
        unit: int,
        stage,
        zero: Zero = NO_GATHERS,
        reductions: Any = None,
    ):
        self._layer, self._split, self._zero, self._reductions = layer, split, zero, reductions
        counts = [placement.layer_count(unit, s) for s in range(placement.stages)]
        self._count = counts[0] if len(set(counts)) == 1 else jnp.asarray(counts)[stage]
        self._stack_size = placement.stack_size(unit)
        # then every stage that has the unit has that one layer
        self._is_single = self._stack_size == 1
        # A layer's gradients are then reduced beside the products of the layer before it: XLA's GPU
        # compiler moves no collective into a loop's next trip. A TPU's has these collectives wait
        # in any case.
        self._reduces_late = (
            zero.gathers_in_ops and zero.reduces_in_ops and hardware().platform == GPU
        )
        self._layers_per_slot = max(placement.sizes)

    def _index(self, slot, i):
        """Where in a pool layer i of a slot lies."""
        return slot * self._layers_per_slot + i

    def _parameters(self, params, i, op: LayerOp):
        """Row i of the parameters: whole, where the op reads them."""
        row = _row(params, i)
        if not self._zero.gathers_in_ops:
            return row
        reads = jax.tree.unflatten(jax.tree.structure(row), self._split.reads(op))
        with jax.named_scope("gather"):
            return jax.tree.map(
                lambda a, reduction, read: gather(a, reduction) if read else a,
                row,
                self._reductions,
                reads,
            )

    def _each_layer(
        self,
        op: LayerOp,
        body: Callable,
        params,
        carry,
        reverse: bool = False,
        first_apart: bool = False,
    ):
        """carry = body(i, parameters of layer i, carry) for every layer. Where parameters are
        gathered, the next layer's are on their way while this one's are at work. first_apart: then
        the first of several layers is not in the loop, and may give another carry."""
        if self._is_single:
            return body(0, self._parameters(params, 0, op), carry)
        last = self._count - 1

        def layer(i):
            return last - i if reverse else i

        def step(i, carry):
            return body(layer(i), self._parameters(params, layer(i), op), carry)

        def step_with_next(i, parameters_and_carry):
            parameters, carry = parameters_and_carry
            following = self._parameters(params, layer(i + 1), op)
            return following, body(layer(i), parameters, carry)

        if not self._zero.gathers_in_ops or not any(self._split.reads(op)):
            return lax.fori_loop(0, self._count, step, carry)
        start, parameters = 0, self._parameters(params, layer(0), op)
        if first_apart:
            start, (parameters, carry) = 1, step_with_next(0, (parameters, carry))
        parameters, carry = lax.fori_loop(start, last, step_with_next, (parameters, carry))
        return body(layer(last), parameters, carry)

    # ------------------------------------------------------------------ an op alone

    def output(self, params, x: jax.Array, extra) -> jax.Array:
        """The unit's output."""
        return self._each_layer(LayerOp.WHOLE, lambda i, p, x: self._layer(p, x, extra), params, x)

    def output_and_residuals(
        self, params, x: jax.Array, extra, pools: Residuals, slots: ResidualSlots
    ) -> tuple[jax.Array, Residuals]:
        """(the unit's output, the pools with what the backward reads in these slots)."""

        def layer(i, p, carry):
            x, pools = carry
            y, residuals = self._split.output_and_residuals(p, x, extra)
            for_b = write_pool(pools.for_b, residuals.for_b, self._index(slots.for_b, i))
            return y, Residuals(
                for_b, write_pool(pools.for_w, residuals.for_w, self._index(slots.for_w, i))
            )

        return self._each_layer(LayerOp.FORWARD, layer, params, (x, pools))

    def input_gradient(
        self,
        params,
        extra,
        pools: Residuals,
        slots: ResidualSlots,
        g: jax.Array,
        stash_pool: Arrays,
        stash_slot,
    ) -> tuple[jax.Array, Arrays]:
        """(the gradient of the unit's input, the pool with the weight stash in its slot), from the
        gradient g of its output."""
        shapes = self._split.residuals

        def layer(i, p, carry):
            g, stash_pool = carry
            for_b = read_pool(pools.for_b, shapes.for_b, self._index(slots.for_b, i))
            residuals = Residuals(
                for_b, read_pool(pools.for_w, shapes.for_w, self._index(slots.for_w, i))
            )
            g, stash = self._split.input_gradient(p, extra, residuals, g)
            return g, write_pool(stash_pool, stash, self._index(stash_slot, i))

        return self._each_layer(
            LayerOp.INPUT_GRADIENT, layer, params, (g, stash_pool), reverse=True
        )

    def weight_gradient(
        self, params, sums, extra, for_w_pool: Arrays, for_w_slot, stash_pool: Arrays, stash_slot
    ):
        """`sums` + the gradients of the parameters."""

        def layer(i, p, sums):
            for_w = read_pool(for_w_pool, self._split.residuals.for_w, self._index(for_w_slot, i))
            stash = read_pool(stash_pool, self._split.weight_stash, self._index(stash_slot, i))
            return self._add(sums, self._split.weight_gradient(p, extra, for_w, stash), i)

        return self._each_layer(LayerOp.WEIGHT_GRADIENT, layer, params, sums)

    def _add(self, sums, gradients, i):
        if self._zero.reduces_in_ops:
            with jax.named_scope("reduce"):
                gradients = jax.tree.map(
                    lambda g, r: reduce_in_op(g, r, self._zero.dtype), gradients, self._reductions
                )
        if self._is_single:
            return jax.tree.map(lambda a, g: a + g[None].astype(a.dtype), sums, gradients)
        return jax.tree.map(lambda a, g: a.at[i].add(g.astype(a.dtype)), sums, gradients)

    # ------------------------------------------------------------------ forward and backward at onc

    def output_keeping_inputs(
        self, params, x: jax.Array, extra, on_host: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """(the unit's output, each layer's input [stack_size, B, T, D] in the device's or the
        host's memory)."""
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return self._output_keeping(
            LayerOp.WHOLE, lambda p, x: (self._layer(p, x, extra), x), params, x, shape, on_host
        )

    def output_keeping_residuals(
        self, params, x: jax.Array, extra, on_host: bool = False
    ) -> tuple[jax.Array, Residuals]:
        """(the unit's output, each layer's residuals [stack_size, ...] in the device's or the
        host's memory)."""
        run = lambda p, x: self._split.output_and_residuals(p, x, extra)
        return self._output_keeping(LayerOp.FORWARD, run, params, x, self._split.residuals, on_host)

    def _output_keeping(
        self, op: LayerOp, run: Callable, params, x: jax.Array, shapes, on_host: bool
    ):
        """(the unit's output, what `run` leaves of each layer, a pytree like `shapes`). run:
        (params of one layer, x) → (y, values)."""
        if self._is_single and not on_host:
            y, values = run(self._parameters(params, 0, op), x)
            return y, jax.tree.map(lambda value: value[None], values)

        def layer(i, p, carry):
            x, kept = carry
            y, values = run(p, x)
            return y, jax.tree.map(lambda a, value: host_memory.write_at(a, value, i), kept, values)

        empty = jax.tree.map(
            lambda a: host_memory.empty_pool((self._stack_size, *a.shape), a.dtype, on_host), shapes
        )
        return self._each_layer(op, layer, params, (x, empty))

    def gradients_from_inputs(self, params, sums, extra, inputs: jax.Array, g: jax.Array):
        """(`sums` + the gradients of the parameters, the gradient of the unit's input); each layer
        is run once more."""

        def gradients(p, x, g):
            return jax.vjp(lambda p, x: self._layer(p, x, extra), p, x)[1](g)

        return self._gradients(LayerOp.WHOLE, gradients, params, sums, inputs, g)

    def gradients_from_residuals(self, params, sums, extra, residuals: Residuals, g: jax.Array):
        """(`sums` + the gradients of the parameters, the gradient of the unit's input)."""

        def gradients(p, kept, g):
            return self._split.gradients(p, extra, kept, g)

        return self._gradients(LayerOp.BACKWARD, gradients, params, sums, residuals, g)

    def _gradients(self, op: LayerOp, gradients_of: Callable, params, sums, kept, g: jax.Array):
        late = self._reduces_late and not self._is_single

        def layer(i, p, carry):
            # the gradients of the layer before, where they are reduced late
            g, sums, *waiting = carry
            gradients, g = gradients_of(
                p, jax.tree.map(lambda a: host_memory.read_at(a, i), kept), g
            )
            if not late:
                return g, self._add(sums, gradients, i)
            return g, self._add(sums, waiting[0], i + 1) if waiting else sums, gradients

        g, sums, *waiting = self._each_layer(
            op, layer, params, (g, sums), reverse=True, first_apart=late
        )
        return self._add(sums, waiting[0], 0) if late else sums, g
