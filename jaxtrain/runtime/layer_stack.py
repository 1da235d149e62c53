"""The layers of one unit on one stage: a loop over the rows of their stacked parameters, for each op of the schedule.

The number of layers may differ between stages; the loop's bound is then this stage's own, and a stage with fewer layers
does less work. A single layer needs no loop.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.parallel import host_memory
from jaxtrain.parallel.zero import Zero, gather, reduce_in_op
from jaxtrain.runtime.backward_split import Split
from jaxtrain.schedule.placement import Placement

Arrays = list[jax.Array]
NO_GATHERS = Zero()  # nor reductions: gradients are summed up whole


def _row(tree, i):
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, 0, keepdims=False), tree)


def slot_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """How an array lies in a slot: one of four dimensions (tokens, heads, size of a head) with the last two as one.

    XLA's GPU compiler would give an array of heads one layout where it is written and another where it is read, and transpose it whole in
    every tick. The last dimension is never split over devices, so merging it moves nothing.
    """
    return shape if len(shape) < 4 else (*shape[:-2], shape[-2] * shape[-1])


def slots(number: int, rows: int, like: Sequence[jax.ShapeDtypeStruct], host: bool = False) -> Arrays:
    """Empty slots for arrays like these, of each of `rows` layers: [slots · rows, ...]; in the memory of the device or the host.

    One dimension for both: copies between a TPU and its host cut one dimension alone.
    """
    return [host_memory.slots((number * rows, *slot_shape(a.shape)), a.dtype, host) for a in like]


def read(arrays: Arrays, like: Sequence[jax.ShapeDtypeStruct], at) -> Arrays:
    """What lies at an index of slots, in the shapes of `like`."""
    return [host_memory.row(a, at).reshape(own.shape) for a, own in zip(arrays, like, strict=True)]


def write(arrays: Arrays, values: Arrays, at) -> Arrays:
    """The slots with what lies at an index replaced."""
    return [host_memory.with_row(a, v.reshape(a.shape[1:]), at) for a, v in zip(arrays, values, strict=True)]


class LayerStack:
    """The blocks of unit `unit` (a local index) on this `stage` (a traced index).

    layer: (params of one layer, x, extra) → x; `split` its partition. Stacked parameters have leaves [rows, ...]; `how` is like them, of
    Reductions, by which `zero` gathers each layer's parameters before its use and reduces its gradients after it, if it does. What ops
    leave for each other lies in `slots`, in the order of the split's residuals and stash.
    """

    def __init__(self, layer: Callable, split: Split, placement: Placement, unit: int, stage, zero: Zero = NO_GATHERS, how: Any = None):
        counts = [placement.layer_count(unit, s) for s in range(placement.stages)]
        self._layer, self._split, self._rows, self._zero, self._how = layer, split, placement.stack_size(unit), zero, how
        self._for_b, self._for_w = split.sort(split.residuals)
        self._count = counts[0] if len(set(counts)) == 1 else jnp.asarray(counts)[stage]
        self._room = max(placement.sizes)  # layers that a slot has room for
        self._single = self._rows == 1  # then every stage that has the unit has that one

    def _at(self, slot, i):
        """The index of layer i of a slot."""
        return slot * self._room + i

    def _weights(self, params, i, op: str):
        """Row i of the parameters: whole, where the op reads them."""
        row = _row(params, i)
        if not self._zero.gathers_in_ops:
            return row
        reads = jax.tree.unflatten(jax.tree.structure(row), self._split.reads(op))
        with jax.named_scope("gather"):
            return jax.tree.map(lambda a, how, read: gather(a, how) if read else a, row, self._how, reads)

    def _each(self, op: str, fn: Callable, params, carry, reverse: bool = False):
        """carry = fn(i, parameters of layer i, carry) for every layer. Where parameters are gathered, the next layer's are on their way
        while this one's are at work."""
        if self._single:
            return fn(0, self._weights(params, 0, op), carry)
        last = self._count - 1
        at = lambda i: last - i if reverse else i
        if not self._zero.gathers_in_ops or not any(self._split.reads(op)):
            return lax.fori_loop(0, self._count, lambda i, c: fn(at(i), self._weights(params, at(i), op), c), carry)

        def with_next(i, held):
            weights, carry = held
            following = self._weights(params, at(i + 1), op)
            return following, fn(at(i), weights, carry)

        weights, carry = lax.fori_loop(0, last, with_next, (self._weights(params, at(0), op), carry))
        return fn(at(last), weights, carry)

    # ------------------------------------------------------------------ ops of their own

    def forward(self, params, x, extra):
        """x [B, T, D] → the same shape."""
        return self._each("whole", lambda i, p, x: self._layer(p, x, extra), params, x)

    def forward_keeping(self, params, x, extra, residual_b: Arrays, residual_w: Arrays, slot_b, slot_w):
        """→ output, and the slots with what the backward needs."""

        def layer(i, p, carry):
            x, for_b, for_w = carry
            y, kept = self._split.forward(p, x, extra)
            b, w = self._split.sort(kept)
            return y, write(for_b, b, self._at(slot_b, i)), write(for_w, w, self._at(slot_w, i))

        return self._each("forward", layer, params, (x, residual_b, residual_w))

    def input_gradient(self, params, extra, residual_b: Arrays, residual_w: Arrays, slot_b, slot_w, g, stash: Arrays, slot):
        """→ (gradient of the unit's input, the stash with what W needs)."""

        def layer(i, p, carry):
            g, stash = carry
            for_b = read(residual_b, self._for_b, self._at(slot_b, i))
            kept = self._split.merge(for_b, read(residual_w, self._for_w, self._at(slot_w, i)))
            g, left = self._split.input_gradient(p, extra, kept, g)
            return g, write(stash, left, self._at(slot, i))

        return self._each("input", layer, params, (g, stash), reverse=True)

    def weight_gradient(self, params, sums, extra, residual_w: Arrays, slot_w, stash: Arrays, slot):
        """→ float32 sums + gradients of the parameters."""

        def layer(i, p, sums):
            kept = read(residual_w, self._for_w, self._at(slot_w, i))
            left = read(stash, self._split.stash, self._at(slot, i))
            return self._add(sums, self._split.weight_gradient(p, extra, kept, left), i)

        return self._each("weight", layer, params, sums)

    def _add(self, sums, gradients, i):
        if self._zero.reduces_in_ops:
            with jax.named_scope("reduce"):
                gradients = jax.tree.map(lambda g, how: reduce_in_op(g, how, self._zero.dtype), gradients, self._how)
        if self._single:
            return jax.tree.map(lambda s, d: s + d[None].astype(s.dtype), sums, gradients)
        return jax.tree.map(lambda s, d: s.at[i].add(d.astype(s.dtype)), sums, gradients)

    # ------------------------------------------------------------------ forward and backward at once: one stage

    def forward_with(self, params, x, extra, recompute: bool, host: bool = False):
        """→ output, and for each layer its input (`recompute`) or its residuals: slots of one microbatch, in the device's or the `host`'s
        memory."""
        keep = (lambda p, x: (self._layer(p, x, extra), [x])) if recompute else lambda p, x: self._split.forward(p, x, extra)
        like = [jax.ShapeDtypeStruct(x.shape, x.dtype)] if recompute else self._split.residuals
        op = "whole" if recompute else "forward"
        if self._single and not host:
            y, kept = keep(self._weights(params, 0, op), x)
            return y, [k[None] for k in kept]

        def layer(i, p, carry):
            x, kept = carry
            y, new = keep(p, x)
            return y, [host_memory.with_row(a, k, i) for a, k in zip(kept, new, strict=True)]

        return self._each(op, layer, params, (x, [host_memory.slots((self._rows, *k.shape), k.dtype, host) for k in like]))

    def backward_with(self, params, sums, extra, kept: Arrays, g, recompute: bool):
        """→ (float32 sums + gradients of the parameters, gradient of the input)."""

        def layer(i, p, carry):
            g, sums = carry
            own = [host_memory.row(a, i) for a in kept]
            if recompute:
                gradients, g = jax.vjp(lambda p, x: self._layer(p, x, extra), p, own[0])[1](g)
            else:
                gradients, g = self._split.backward(p, extra, own, g)
            return g, self._add(sums, gradients, i)

        g, sums = self._each("whole" if recompute else "both", layer, params, (g, sums), reverse=True)
        return sums, g
