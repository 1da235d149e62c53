"""Grouped products on TPUs: the three functions of grouped.py by jax's megablox kernels
(jax.experimental.pallas.ops.tpu.megablox).

A kernel goes over a grid of tiles: of the rows of the groups, of input columns and of output
columns. The number of row tiles is known when it runs, so rows of no group cost nothing; a tile
that two groups share is computed once for each. The kernels read the matrices as they are in
memory, even when the gradient of the rows contracts their output columns. XLA's own kernel for
`ragged_dot` needs them transposed then, which copies all of them. For the gradient of the weights
XLA has no kernel, and multiplies all rows for every group.

Shape suffixes: R rows, E groups, I input columns, O output columns.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from jaxtrain.parallel.experts.filled_rows import on_rows
from jaxtrain.parallel.experts.grouped import block_rows

MOST_ROWS = 512  # of a tile
LANES = 128  # numbers in a row of a TPU's registers
# of a tile's columns: with 1,024 columns of 16 bits all tiles fit the 16 MB that a kernel has,
# twice 1,024 do not
TILE_BYTES = 2048
SUBLANES = 16  # divides the number of a tile's rows


def tile_rows(rows: int, groups: int) -> int:
    """Rows of a tile: a power of two that divides `rows`, a multiple of SUBLANES."""
    # A tile that two groups share is computed twice, so tiles are small compared with a mean group.
    size = max(SUBLANES, block_rows(rows, groups, MOST_ROWS))
    while rows % size:
        size //= 2
    return size


def tile_columns(columns: int, itemsize: int) -> int:
    """Columns of a tile: all columns if TILE_BYTES allow, or else the largest multiple of LANES
    within bounds that divides them, if one does."""
    most = TILE_BYTES // itemsize
    if columns <= most:
        return columns
    return next((n for n in range(most, most // 4, -LANES) if columns % n == 0), most)


def _tiles(
    rows: int, groups: int, contracted: int, outputs: int, itemsize: int
) -> tuple[int, int, int]:
    columns = tile_columns(contracted, itemsize), tile_columns(outputs, itemsize)
    return tile_rows(rows, groups), *columns


def _padded(array_R: jax.Array) -> jax.Array:
    """The array with rows of zeros behind, to a multiple of SUBLANES."""
    # The kernel wants tiles that divide the rows.
    missing = -array_R.shape[0] % SUBLANES
    return jnp.pad(array_R, ((0, missing), (0, 0))) if missing else array_R


def _times_matrices(
    rows_RK: jax.Array,
    weights_EIO: jax.Array,
    sizes_E: jax.Array,
    transposed: bool,
    interpret: bool,
    fills_empty: bool,
) -> jax.Array:
    rows = _padded(rows_RK)
    outputs = weights_EIO.shape[1 if transposed else 2]
    tiles = _tiles(rows.shape[0], sizes_E.size, rows.shape[1], outputs, rows.dtype.itemsize)
    filled = sizes_E.sum()
    # The kernel fails on a grid without tiles: if no row has a group, group 0 gets one row.
    nonempty_E = sizes_E.at[0].add((filled == 0).astype(sizes_E.dtype))
    out = gmm(
        rows,
        weights_EIO,
        nonempty_E,
        rows.dtype,
        tiles,
        transpose_rhs=transposed,
        interpret=interpret,
    )
    # The kernel writes no tile without rows: its memory is undefined.
    if not fills_empty:
        return out[: rows_RK.shape[0]]
    return jnp.where(jnp.arange(rows_RK.shape[0])[:, None] < filled, out[: rows_RK.shape[0]], 0)


def product(
    rows_RI: jax.Array,
    weights_EIO: jax.Array,
    sizes_E: jax.Array,
    dtype: jnp.dtype | None = None,
    interpret: bool = False,
    fills_empty: bool = True,
) -> jax.Array:
    """Each row times its group's matrix, [R, O] of the rows' type."""
    return _times_matrices(rows_RI, weights_EIO, sizes_E, False, interpret, fills_empty)


def rows_gradient(
    g_RO: jax.Array,
    weights_EIO: jax.Array,
    sizes_E: jax.Array,
    dtype: jnp.dtype | None = None,
    interpret: bool = False,
    fills_empty: bool = True,
) -> jax.Array:
    """The gradient of the rows, [R, I] of the gradients' type."""
    return _times_matrices(g_RO, weights_EIO, sizes_E, True, interpret, fills_empty)


def add_rows_gradient(
    total_RI: jax.Array,
    g_RO: jax.Array,
    weights_EIO: jax.Array,
    sizes_E: jax.Array,
    mean: int,
    interpret: bool = False,
) -> jax.Array:
    """`total` and the gradient of the rows, [R, I]; anything in rows of no group. mean: the mean
    number of rows of all groups"""
    # The kernel cannot add to an array, so its result is added in a pass over the filled rows.
    by_rows = rows_gradient(g_RO, weights_EIO, sizes_E, interpret=interpret, fills_empty=False)
    return on_rows(jnp.add, mean, sizes_E.sum(), total_RI, by_rows)


def weights_gradient(
    rows_RI: jax.Array,
    g_RO: jax.Array,
    sizes_E: jax.Array,
    dtype: jnp.dtype | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The gradient of the weights, [E, I, O] of the rows' type, summed in float32; zeros for groups
    without rows."""
    # The kernel reads rows in columns: it multiplies rowsᵀ, so this product alone needs a
    # transpose.
    rows, g = _padded(rows_RI), _padded(g_RO)
    tiles = _tiles(rows.shape[0], sizes_E.size, rows.shape[1], g.shape[1], rows.dtype.itemsize)
    return tgmm(rows.T, g, sizes_E, rows.dtype, tiles, interpret=interpret)
