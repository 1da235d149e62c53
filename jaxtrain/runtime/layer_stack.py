"""The layers of one unit on one stage: a loop over its stacked parameters, for each op of the
schedule.

The number of layers may differ between stages. The bound of the loop is that of its stage, so a
stage with fewer layers computes less. A single layer needs no loop.

x and y are the unit's input and output, g the gradient of one of them: [B, T, D] of the compute
type. `extra` is what a layer reads beside x.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.devices import host_memory
from jaxtrain.devices.mesh import on_nvidia_gpu
from jaxtrain.parallel import fp8
from jaxtrain.parallel.heads import as_written
from jaxtrain.parallel.zero import Zero, gather, in_memory_order, reduce_in_op
from jaxtrain.runtime.backward_split import LayerOp, LayerSplit, Residuals
from jaxtrain.runtime.tick_state import Pools
from jaxtrain.schedule.placement import Placement
from jaxtrain.schedule.slots import TickSlots

Arrays = list[jax.Array]
Shapes = Sequence[jax.ShapeDtypeStruct]
UNSHARDED = Zero()  # parameters are neither gathered nor their gradients reduced inside an op


def slot_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an array in a slot: one of four dimensions (tokens, heads, size of a head) has
    the last two as one.

    XLA's GPU compiler would give an array of heads one layout where it is written and another where
    it is read, and transpose all of it in every tick. The last dimension is never split over
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


class RecomputedLayer:
    """A layer whose backward runs it once more from its input, the one residual: full remat on one
    stage. It has the methods of a LayerSplit that forward and backward at once need."""

    def __init__(self, layer: Callable, params, x: jax.ShapeDtypeStruct):
        self.layer, self.residuals = layer, x
        self._reads = jax.tree.map(lambda _: True, params)

    def reads(self, op: LayerOp) -> Any:
        return self._reads

    def output_and_residuals(self, params, x: jax.Array, extra) -> tuple[jax.Array, jax.Array]:
        return self.layer(params, x, extra), x

    def gradients(self, params, extra, x: jax.Array, g: jax.Array) -> tuple[Any, jax.Array]:
        return fp8.vjp(lambda p, x: self.layer(p, x, extra), params, x)[1](g)


class LayerStack:
    """The blocks of one local unit on this stage.

    Args:
      split: a layer, cut into ops; its residuals and weight stash say which arrays lie in the
        pools, in which order.
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
        split: LayerSplit | RecomputedLayer,
        placement: Placement,
        unit: int,
        stage,
        zero: Zero = UNSHARDED,
        reductions: Any = None,
        extra_of_layer: Callable | None = None,
    ):
        self.unit = str(unit)
        self._split, self._zero, self._reductions = split, zero, reductions
        self._extra_of_layer = extra_of_layer
        self._numbers = jnp.asarray(placement.layer_index(unit))[stage] if extra_of_layer else None
        counts = [placement.layer_count(unit, s) for s in range(placement.stages)]
        self._count = counts[0] if len(set(counts)) == 1 else jnp.asarray(counts)[stage]
        self._stack_size = placement.stack_size(unit)
        # then every stage that has the unit has that one layer
        self._is_single = self._stack_size == 1
        # A layer's gradients are then reduced overlapped with the products of the layer before it:
        # XLA's GPU compiler moves no collective into a loop's next trip. A TPU's has these
        # collectives wait in any case.
        self._reduces_late = zero.gathers_in_ops and zero.reduces_in_ops and on_nvidia_gpu()
        self._layers_per_slot = max(placement.sizes)

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
                self._split.reads(op),
            )

    def _each_layer(
        self,
        op: LayerOp,
        body: Callable,
        params,
        carry,
        reverse: bool = False,
        unrolls_first: bool = False,
    ):
        """carry = body(i, parameters of layer i, carry) for every layer. Where parameters are
        gathered, the next layer's are on their way while this one's are at work. unrolls_first:
        then the first of several layers is not in the loop, and may give another carry."""
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

        if not self._zero.gathers_in_ops or not any(jax.tree.leaves(self._split.reads(op))):
            return lax.fori_loop(0, self._count, step, carry)
        start, parameters = 0, self._parameters(params, layer(0), op)
        if unrolls_first:
            start, (parameters, carry) = 1, step_with_next(0, (parameters, carry))
        parameters, carry = lax.fori_loop(start, last, step_with_next, (parameters, carry))
        return body(layer(last), parameters, carry)

    def _read(self, pool: Arrays, shapes: Shapes, slot, i) -> Arrays:
        """Layer i's arrays in a slot, in these shapes."""
        index = slot * self._layers_per_slot + i
        return [
            as_written(host_memory.read_at(a, index)).reshape(like.shape)
            for a, like in zip(pool, shapes, strict=True)
        ]

    def _write(self, pool: Arrays, values: Arrays, slot, i) -> Arrays:
        """The pool with layer i's arrays in a slot."""
        index = slot * self._layers_per_slot + i
        return [
            host_memory.write_at(a, value.reshape(a.shape[1:]), index)
            for a, value in zip(pool, values, strict=True)
        ]

    # ------------------------------------------------------------------ one op

    def output(self, params, x: jax.Array, extra) -> jax.Array:
        """The unit's output."""
        layer = lambda i, p, x: self._split.layer(p, x, self._extra(extra, i))
        return self._each_layer(LayerOp.WHOLE, layer, params, x)

    def output_and_residuals(
        self, params, x: jax.Array, extra, pools: Pools, slots: TickSlots
    ) -> tuple[jax.Array, Pools]:
        """Returns (the unit's output, the pools with the residuals that its backward reads)."""

        def layer(i, p, carry):
            x, for_b, for_w = carry
            y, residuals = self._split.output_and_residuals(p, x, self._extra(extra, i))
            for_b = self._write(for_b, residuals.for_b, slots.residual_b, i)
            return y, for_b, self._write(for_w, residuals.for_w, slots.residual_w, i)

        carry = (x, pools.residual_b, pools.residual_w)
        y, for_b, for_w = self._each_layer(LayerOp.FORWARD, layer, params, carry)
        return y, dataclasses.replace(pools, residual_b=for_b, residual_w=for_w)

    def input_gradient(
        self, params, extra, pools: Pools, slots: TickSlots, g: jax.Array
    ) -> tuple[jax.Array, Pools]:
        """Returns (the gradient of the unit's input, the pools with the weight stash), from the
        gradient g of its output."""
        shapes = self._split.residuals

        def layer(i, p, carry):
            g, stash_pool = carry
            for_b = self._read(pools.residual_b, shapes.for_b, slots.residual_b, i)
            for_w = self._read(pools.residual_w, shapes.for_w, slots.residual_w, i)
            residuals = Residuals(for_b, for_w)
            g, stash = self._split.input_gradient(p, self._extra(extra, i), residuals, g)
            return g, self._write(stash_pool, stash, slots.weight_stash, i)

        carry = (g, pools.weight_stash)
        g, stash_pool = self._each_layer(LayerOp.INPUT_GRADIENT, layer, params, carry, reverse=True)
        return g, dataclasses.replace(pools, weight_stash=stash_pool)

    def weight_gradient(self, params, sums, extra, pools: Pools, slots: TickSlots):
        """`sums` + the gradients of the parameters."""
        split = self._split

        def layer(i, p, sums):
            for_w = self._read(pools.residual_w, split.residuals.for_w, slots.residual_w, i)
            stash = self._read(pools.weight_stash, split.weight_stash, slots.weight_stash, i)
            gradients = split.weight_gradient(p, self._extra(extra, i), for_w, stash)
            return self._add(sums, gradients, i)

        return self._each_layer(LayerOp.WEIGHT_GRADIENT, layer, params, sums)

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

    # ------------------------------------------------------------------ forward and backward

    def output_saving(
        self, params, x: jax.Array, extra, on_host: bool = False
    ) -> tuple[jax.Array, Any]:
        """Returns (the unit's output, each layer's residuals [stack_size, ...] in the device's or
        the host's memory)."""
        if self._is_single and not on_host:
            params = self._parameters(params, 0, LayerOp.FORWARD)
            y, values = self._split.output_and_residuals(params, x, self._extra(extra, 0))
            return y, jax.tree.map(lambda value: value[None], values)

        def layer(i, p, carry):
            x, saved = carry
            y, values = self._split.output_and_residuals(p, x, self._extra(extra, i))
            write = lambda a, value: host_memory.write_at(a, value, i)
            return y, jax.tree.map(write, saved, values)

        empty = jax.tree.map(
            lambda a: host_memory.empty_pool((self._stack_size, *a.shape), a.dtype, on_host),
            self._split.residuals,
        )
        return self._each_layer(LayerOp.FORWARD, layer, params, (x, empty))

    def gradients(self, params, sums, extra, saved, g: jax.Array) -> tuple[Any, jax.Array]:
        """Returns (`sums` + the gradients of the parameters, the gradient of the unit's input),
        from what `output_saving` has saved."""
        late = self._reduces_late and not self._is_single

        def layer(i, p, carry):
            # the gradients of the layer before, where they are reduced late
            g, sums, *waiting = carry
            residuals = jax.tree.map(lambda a: host_memory.read_at(a, i), saved)
            gradients, g = self._split.gradients(p, self._extra(extra, i), residuals, g)
            if not late:
                return g, self._add(sums, gradients, i)
            return g, self._add(sums, waiting[0], i + 1) if waiting else sums, gradients

        g, sums, *waiting = self._each_layer(
            LayerOp.BACKWARD, layer, params, (g, sums), reverse=True, unrolls_first=late
        )
        return self._add(sums, waiting[0], 0) if late else sums, g
