"""The layers of one unit on one stage: a loop over the rows of their stacked parameters, for each op of the schedule.

The number of layers may differ between stages; the loop's bound is then this stage's own, and a stage with fewer layers
does less work. A single layer needs no loop.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.pipeline.partition import Split
from jaxtrain.pipeline.placement import Placement

Arrays = list[jax.Array]


def _row(tree, i):
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, 0, keepdims=False), tree)


def slot_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """How an array lies in a slot: one of four dimensions (tokens, heads, size of a head) with the last two as one.

    XLA's GPU compiler would give an array of heads one layout where it is written and another where it is read, and transpose it whole in
    every tick. The last dimension is never split over devices, so merging it moves nothing.
    """
    return shape if len(shape) < 4 else (*shape[:-2], shape[-2] * shape[-1])


def slots(number: int, rows: int, like: Sequence[jax.ShapeDtypeStruct]) -> Arrays:
    """Empty slots for arrays like these, of each of `rows` layers: [slots, rows, ...]."""
    return [jnp.zeros((number, rows, *slot_shape(a.shape)), a.dtype) for a in like]


def read(arrays: Arrays, like: Sequence[jax.ShapeDtypeStruct], slot, i) -> Arrays:
    """Row i of a slot, in the shapes of `like`."""
    start = lambda a: (slot, i, *[0] * (a.ndim - 2))
    return [lax.dynamic_slice(a, start(a), (1, 1, *a.shape[2:])).reshape(own.shape) for a, own in zip(arrays, like, strict=True)]


def write(arrays: Arrays, values: Arrays, slot, i) -> Arrays:
    """The slots with a row replaced."""
    start = lambda a: (slot, i, *[0] * (a.ndim - 2))
    row = lambda a, v: v.astype(a.dtype).reshape(1, 1, *a.shape[2:])
    return [lax.dynamic_update_slice(a, row(a, v), start(a)) for a, v in zip(arrays, values, strict=True)]


class LayerStack:
    """The blocks of unit `unit` (a local index) on this `stage` (a traced index).

    layer: (params of one layer, x, extra) → x; `split` its partition. Stacked parameters have leaves [rows, ...]. What ops leave for
    each other lies in `slots`, in the order of the split's residuals and stash.
    """

    def __init__(self, layer: Callable, split: Split, placement: Placement, unit: int, stage):
        counts = [placement.count(unit, s) for s in range(placement.stages)]
        self._layer, self._split, self._rows = layer, split, placement.rows(unit)
        self._for_b, self._for_w = split.sort(split.residuals)
        self._count = counts[0] if len(set(counts)) == 1 else jnp.asarray(counts)[stage]
        self._single = self._rows == 1  # then every stage that has the unit has that one

    def _each(self, fn: Callable, carry, reverse: bool = False):
        """carry = fn(i, carry) for every layer."""
        if self._single:
            return fn(0, carry)
        last = self._count - 1
        return lax.fori_loop(0, self._count, lambda i, c: fn(last - i if reverse else i, c), carry)

    # ------------------------------------------------------------------ ops of their own

    def forward(self, params, x, extra):
        """x [B, T, D] → the same shape."""
        return self._each(lambda i, x: self._layer(_row(params, i), x, extra), x)

    def forward_keeping(self, params, x, extra, residual_b: Arrays, residual_w: Arrays, slot_b, slot_w):
        """→ output, and the slots with what the backward needs."""

        def layer(i, carry):
            x, for_b, for_w = carry
            y, kept = self._split.forward(_row(params, i), x, extra)
            b, w = self._split.sort(kept)
            return y, write(for_b, b, slot_b, i), write(for_w, w, slot_w, i)

        return self._each(layer, (x, residual_b, residual_w))

    def input_gradient(self, params, extra, residual_b: Arrays, residual_w: Arrays, slot_b, slot_w, g, stash: Arrays, slot):
        """→ (gradient of the unit's input, the stash with what W needs)."""

        def layer(i, carry):
            g, stash = carry
            kept = self._split.merge(read(residual_b, self._for_b, slot_b, i), read(residual_w, self._for_w, slot_w, i))
            g, left = self._split.input_gradient(_row(params, i), extra, kept, g)
            return g, write(stash, left, slot, i)

        return self._each(layer, (g, stash), reverse=True)

    def weight_gradient(self, params, sums, extra, residual_w: Arrays, slot_w, stash: Arrays, slot):
        """→ float32 sums + gradients of the parameters."""

        def layer(i, sums):
            kept, left = read(residual_w, self._for_w, slot_w, i), read(stash, self._split.stash, slot, i)
            gradients = self._split.weight_gradient(_row(params, i), extra, kept, left)
            return self._add(sums, gradients, i)

        return self._each(layer, sums)

    def _add(self, sums, gradients, i):
        if self._single:
            return jax.tree.map(lambda s, d: s + d[None].astype(s.dtype), sums, gradients)
        return jax.tree.map(lambda s, d: s.at[i].add(d.astype(s.dtype)), sums, gradients)

    # ------------------------------------------------------------------ forward and backward at once: one stage

    def forward_with(self, params, x, extra, recompute: bool):
        """→ output, and for each layer its input (`recompute`) or its residuals: a list of arrays [rows, ...]."""
        keep = (lambda p, x: (self._layer(p, x, extra), [x])) if recompute else lambda p, x: self._split.forward(p, x, extra)
        kept = jax.eval_shape(lambda p, x: keep(_row(p, 0), x)[1], params, x)
        if self._single:
            y, kept = keep(_row(params, 0), x)
            return y, [k[None] for k in kept]

        def layer(i, carry):
            x, kept = carry
            y, new = keep(_row(params, i), x)
            return y, [lax.dynamic_update_index_in_dim(a, k, i, 0) for a, k in zip(kept, new, strict=True)]

        return lax.fori_loop(0, self._count, layer, (x, [jnp.zeros((self._rows, *k.shape), k.dtype) for k in kept]))

    def backward_with(self, params, sums, extra, kept: Arrays, g, recompute: bool):
        """→ (float32 sums + gradients of the parameters, gradient of the input)."""

        def layer(i, carry):
            g, sums = carry
            p, own = _row(params, i), _row(kept, i)
            if recompute:
                gradients, g = jax.vjp(lambda p, x: self._layer(p, x, extra), p, own[0])[1](g)
            else:
                gradients, g = self._split.backward(p, extra, own, g)
            return g, self._add(sums, gradients, i)

        g, sums = self._each(layer, (g, sums), reverse=True)
        return sums, g
