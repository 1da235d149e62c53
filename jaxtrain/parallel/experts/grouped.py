"""Grouped products in plain XLA: rows are sorted by group, and each group has its own matrix. The
cost is proportional to the rows.

A group is cut into blocks of rows. An outer loop goes over the groups and reads each matrix once,
an inner loop over the blocks of a group. Empty groups and rows of no group cost nothing. The last
block of a group is computed in full, up to a block more than the group's r rows; `block_rows` keeps
a block small compared with r, of a weights' gradient a quarter of it at most.

    product           rows [R, I] × weights [E, I, O] → [R, O]
    rows_gradient     gradients [R, O] × weights [E, I, O], contracted over O as they lie in memory
                      → [R, I]
    weights_gradient  rowsᵀ [I, R] × gradients [R, O], group by group → [E, I, O], summed in float32

`dtype` is that of the result; None: that of the rows or gradients. `most_rows` bounds a block. Rows
of no group are zeros; without `fills_empty` they may hold anything. None of these functions
reads such rows, and none is differentiated: products.product, which calls them, has its own
gradient. `add_rows_gradient` adds the rows' gradient to another one in place.
The outer loop is a `while`, so that it is one equation when a layer is cut into ops
(runtime/layers/backward_split.py).

Shape suffixes: R rows, E groups, I input columns, O output columns, X rows of a block.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# of a block: enough for a matmul unit, and a group of 2,000 rows computes 6 % too many on average
MOST_ROWS = 256
# A block's turn takes an H100 some 40 µs besides its product (benchmarks/README.md): the host waits
# for the loop's condition and starts small kernels. In that time it multiplies 200 rows of
# 4096 × 14336, so a group of 4,096 rows takes least in blocks of about 1,024; with 512 the last
# block of a group computes half as many rows too many.
MOST_ROWS_ON_GPU = 1024
BLOCKS, BLOCKS_ON_GPU = 16, 8  # in a group of mean size that has enough rows
# A block's sum, a matrix in float32, is read and written: 4096 × 7168 take an H100 72 µs, their
# product with 256 rows 22 µs at 0.7 of the peak.
BLOCKS_OF_WEIGHTS = 4


def block_rows(rows: int, groups: int, at_most: int = MOST_ROWS, blocks: int = BLOCKS) -> int:
    """Rows of a block: a power of two, at most `at_most`, of which a group of mean size has
    `blocks` or more; never under 8, nor over all rows."""
    most = max(8, min(at_most, rows // groups // blocks))
    return min(rows, 1 << (most.bit_length() - 1))


class _Blocks(NamedTuple):
    """The blocks into which groups of sorted rows are cut.

    sizes_E: the rows of each group
    rows:    all rows that there is memory for
    size:    rows of a block
    """

    sizes_E: jax.Array
    rows: int
    size: int

    def each_group(self, result: jax.Array, body: Callable) -> jax.Array:
        """`result` after body(group, its lowest row, the row after its highest, result) of every
        group, in order."""
        ends_E = jnp.cumsum(self.sizes_E)

        def step(state):
            group, result = state
            end = ends_E[group]
            return group + 1, body(group, end - self.sizes_E[group], end, result)

        # With a number of trips that is known, fori_loop is a scan, which the backward split would
        # unroll.
        return lax.while_loop(
            lambda state: state[0] < self.sizes_E.size, step, (jnp.int32(0), result)
        )[1]

    def each_block(self, begin, end, state, body: Callable):
        """`state` after body(the block's lowest row, bool [X]: the rows that are new, state) of
        every block of the rows begin … end.

        A block that would reach beyond the last of all rows begins earlier; its rows of the block
        before are not new.
        """

        def step(i, state):
            begin_new = begin + i * self.size
            start = jnp.minimum(begin_new, self.rows - self.size)
            row = start + jnp.arange(self.size, dtype=jnp.int32)
            return body(start, (row >= begin_new) & (row < end), state)

        # planner/programs/loops.py reads the loop's number of trips from this name.
        with jax.named_scope(f"row_blocks_{self.rows}_{self.sizes_E.size}_{self.size}"):
            return lax.fori_loop(0, (end - begin + self.size - 1) // self.size, step, state)


def _cut(rows: jax.Array, sizes_E: jax.Array, most_rows: int) -> _Blocks:
    """The blocks of products with matrices."""
    blocks = BLOCKS_ON_GPU if most_rows == MOST_ROWS_ON_GPU else BLOCKS
    return _Blocks(sizes_E, len(rows), block_rows(len(rows), sizes_E.size, most_rows, blocks))


def _write_products(
    out: jax.Array,
    rows_RK: jax.Array,
    weights: jax.Array,
    blocks: _Blocks,
    contracted: int,
    adds: bool = False,
) -> jax.Array:
    """`out` with each row's product with its group's matrix, contracted over the matrix's dimension
    `contracted`. adds: the products are added to the rows of `out`"""
    preferred = None if out.dtype == rows_RK.dtype else out.dtype

    def group(e, begin, end, out):
        # Read once for all blocks of the group.
        matrix = lax.dynamic_index_in_dim(weights, e, keepdims=False)

        def block(start, new_X, out):
            x_XK = lax.dynamic_slice_in_dim(rows_RK, start, blocks.size)
            dims = (((1,), (contracted,)), ((), ()))
            y = lax.dot_general(x_XK, matrix, dims, preferred_element_type=preferred)
            before = lax.dynamic_slice_in_dim(out, start, blocks.size)
            y = before + y if adds else y
            return lax.dynamic_update_slice_in_dim(
                out, jnp.where(new_X[:, None], y, before), start, 0
            )

        return blocks.each_block(begin, end, out, block)

    return blocks.each_group(out, group)


def _empty(shape: tuple[int, int], dtype: jnp.dtype, fills_empty: bool) -> jax.Array:
    """An array for products, of zeros or of anything."""
    return (jnp.zeros if fills_empty else lax.empty)(shape, dtype)


def product(
    rows_RI: jax.Array,
    weights_EIO: jax.Array,
    sizes_E: jax.Array,
    dtype: jnp.dtype | None = None,
    most_rows: int = MOST_ROWS,
    fills_empty: bool = True,
) -> jax.Array:
    """Each row times its group's matrix, [R, O]."""
    out = _empty((len(rows_RI), weights_EIO.shape[2]), dtype or rows_RI.dtype, fills_empty)
    return _write_products(out, rows_RI, weights_EIO, _cut(rows_RI, sizes_E, most_rows), 0)


def rows_gradient(
    g_RO: jax.Array,
    weights_EIO: jax.Array,
    sizes_E: jax.Array,
    dtype: jnp.dtype | None = None,
    most_rows: int = MOST_ROWS,
    fills_empty: bool = True,
) -> jax.Array:
    """The gradient of the rows, [R, I]. No matrix is transposed in memory."""
    out = _empty((len(g_RO), weights_EIO.shape[1]), dtype or g_RO.dtype, fills_empty)
    return _write_products(out, g_RO, weights_EIO, _cut(g_RO, sizes_E, most_rows), 1)


def add_rows_gradient(
    total_RI: jax.Array,
    g_RO: jax.Array,
    weights_EIO: jax.Array,
    sizes_E: jax.Array,
    mean: int,
    most_rows: int = MOST_ROWS,
) -> jax.Array:
    """`total` and the gradient of the rows, [R, I]; rows of no group are the total's. mean: as for
    megablox.add_rows_gradient, where it matters"""
    blocks = _cut(g_RO, sizes_E, most_rows)
    return _write_products(total_RI, g_RO, weights_EIO, blocks, 1, adds=True)


def weights_gradient(
    rows_RI: jax.Array,
    g_RO: jax.Array,
    sizes_E: jax.Array,
    dtype: jnp.dtype | None = None,
    most_rows: int = MOST_ROWS,
) -> jax.Array:
    """The gradient of the weights, [E, I, O], summed in float32; zeros for groups without rows."""
    (rows, i), o, groups = rows_RI.shape, g_RO.shape[1], sizes_E.size
    size = block_rows(rows, groups, most_rows, BLOCKS_OF_WEIGHTS)
    blocks = _Blocks(sizes_E, rows, size)

    def group(e, begin, end, out_EIO):
        def block(start, new_X, total_IO):
            x_XI, g_XO = (lax.dynamic_slice_in_dim(a, start, size) for a in (rows_RI, g_RO))
            x_XI, g_XO = (jnp.where(new_X[:, None], a, 0) for a in (x_XI, g_XO))
            return total_IO + lax.dot_general(
                x_XI, g_XO, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
            )

        # A group's sum is one float32 matrix, rounded once when all of its rows are in it.
        total_IO = blocks.each_block(begin, end, jnp.zeros((i, o), jnp.float32), block)
        return lax.dynamic_update_index_in_dim(out_EIO, total_IO.astype(out_EIO.dtype), e, 0)

    return blocks.each_group(jnp.zeros((groups, i, o), dtype or rows_RI.dtype), group)
