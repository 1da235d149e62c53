"""The layers of one chunk on one stage: a loop over the rows of their stacked parameters, forward and backward.

The number of layers may differ between stages; the loop's bound is then this stage's own, and a stage with fewer layers
does less work. A single layer needs no loop.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.pipeline.partition import Split
from jaxtrain.pipeline.placement import Placement


def _row(tree, i):
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, 0, keepdims=False), tree)


class LayerStack:
    """The blocks of chunk `chunk` on this `stage` (a traced index).

    block: (params of one layer, x, positions, segments) → x. Stacked parameters have leaves [rows, ...], `extra` is
    (positions, segments or None). With `keep_inputs` a layer keeps its input and is recomputed in the backward (full
    recomputation as everyone knows it); otherwise it keeps what its backward reads, which suits a caller that has just
    recomputed the chunk from its own input. `splits` is an empty list that the stacks of one program share.
    """

    def __init__(self, block: Callable, placement: Placement, chunk: int, stage, keep_inputs: bool, splits: list[Split]):
        counts = [placement.count(chunk, s) for s in range(placement.stages)]
        self._layer = lambda params, x, extra: block(params, x, *extra)
        self._rows = placement.rows(chunk)
        self._count = counts[0] if len(set(counts)) == 1 else jnp.asarray(counts)[stage]
        self._keep_inputs, self._splits = keep_inputs, splits

    @property
    def _single(self) -> bool:
        return self._rows == 1  # then every stage has that one

    def forward(self, params, x, extra):
        """x [B, T, D] → the same shape."""
        if self._single:
            return self._layer(_row(params, 0), x, extra)
        return lax.fori_loop(0, self._count, lambda i, x: self._layer(_row(params, i), x, extra), x)

    def _keep(self, params, x, extra):
        """One layer → (y, what it keeps)."""
        if self._keep_inputs:
            return self._layer(params, x, extra), [x]
        return self._split(params, x, extra).forward(params, x, extra)

    def _back(self, params, x_like, extra, kept, g):
        """One layer → (gradients of its parameters, gradient of its input)."""
        if self._keep_inputs:
            return jax.vjp(lambda p, x: self._layer(p, x, extra), params, kept[0])[1](g)
        return self._split(params, x_like, extra).backward(params, extra, kept, g)

    def _split(self, params, x, extra) -> Split:
        """The layer's partition, made once for all chunks: their layers are alike."""
        if not self._splits:
            self._splits.append(Split(self._layer, params, x, extra))
        return self._splits[0]

    def forward_keeping(self, params, x, extra):
        """→ output, and what the backward needs: a list of arrays, [rows, ...] unless there is one layer."""
        if self._single:
            return self._keep(_row(params, 0), x, extra)
        kept = jax.eval_shape(lambda p, x, e: self._keep(_row(p, 0), x, e)[1], params, x, extra)
        stash = [jnp.zeros((self._rows, *k.shape), k.dtype) for k in kept]

        def layer(i, carry):
            x, stash = carry
            y, kept = self._keep(_row(params, i), x, extra)
            return y, [lax.dynamic_update_index_in_dim(s, k, i, 0) for s, k in zip(stash, kept, strict=True)]

        return lax.fori_loop(0, self._count, layer, (x, stash))

    def backward(self, params, sums, extra, stash, g):
        """→ (float32 sums + gradients of the parameters, gradient of the chunk's input)."""
        if self._single:
            gradients, dx = self._back(_row(params, 0), g, extra, stash, g)
            return jax.tree.map(lambda s, d: s + d[None].astype(s.dtype), sums, gradients), dx

        def layer(i, carry):
            g, sums = carry
            i = self._count - 1 - i
            gradients, dx = self._back(_row(params, i), g, extra, _row(stash, i), g)
            return dx, jax.tree.map(lambda s, d: s.at[i].add(d.astype(s.dtype)), sums, gradients)

        dx, sums = lax.fori_loop(0, self._count, layer, (g, sums))
        return sums, dx
