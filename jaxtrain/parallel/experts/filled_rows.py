"""Work on single rows of experts, of which a device has fewer than it has memory for.

Rows lie sorted by expert, and empty ones behind them. Their mean number is known when a program is
compiled: so many are computed at once. A loop over small blocks computes those beyond the mean, in
most microbatches none or one block:

    │ computed at once: the mean          │ block │ block │ … to the last row      │
    │ rows that are there                    │ empty rows, which nothing reads       │

Begin with `on_rows`, which writes an array in place, block by block. Rows behind the last block
hold anything, also NaN. `sum_over_rows` adds up the results of blocks.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.config.sizes import exceeds_mean

BLOCKS = 8  # in the mean number of rows
# Names of calls that are such work (runtime/layers/equations.py): elementwise work, and another
# order.
FILLED_ROWS, ROWS_IN_ORDER = "filled_rows", "rows_in_order"


def on_rows(
    fn: Callable, mean: int, number: jax.Array, *arrays: jax.Array, name: str = FILLED_ROWS
) -> Any:
    """Returns fn(*arrays) for filled rows, and anything behind them. Row i of the results depends
    on row i of the arrays [R, …], and on complete arrays that fn closes over.

    Args:
      fn: arrays [n, …] → an array [n, …] or a tuple of these, for any n.
      mean: the number of rows that are computed in any case.
      number: int32 scalar, of filled rows.
      name: of the call, FILLED_ROWS or ROWS_IN_ORDER.
    """
    rows = arrays[0].shape[0]
    if not exceeds_mean(rows, mean):
        return fn(*arrays)

    return _in_one_piece(functools.partial(_in_blocks, fn, mean), name, number, arrays)


def sum_over_rows(fn: Callable, mean: int, number: jax.Array, *arrays: jax.Array) -> jax.Array:
    """Returns the sum over blocks of fn(counts, *rows of the arrays). `counts`, bool [n], is False
    for rows that are empty or that an earlier block has had. Arguments else as of `on_rows`."""
    rows = arrays[0].shape[0]
    if not exceeds_mean(rows, mean):
        return fn(jnp.arange(rows) < number, *arrays)
    in_blocks = functools.partial(_sum_of_blocks, fn, mean)
    return _in_one_piece(in_blocks, FILLED_ROWS, number, arrays)


def _in_one_piece(
    in_blocks: Callable, name: str, number: jax.Array, arrays: Sequence[jax.Array]
) -> Any:
    """in_blocks(number, arrays) as a call with a name: runtime/ keeps it in one piece when it cuts
    a layer into ops."""

    def call(number: jax.Array, *arrays: jax.Array):
        return in_blocks(number, arrays)

    call.__name__ = name
    return jax.jit(call)(number, *arrays)


def _sum_of_blocks(fn: Callable, mean: int, number: jax.Array, arrays: Sequence[jax.Array]):
    """`sum_over_rows` by the mean number of rows and a loop over blocks."""
    rows = arrays[0].shape[0]

    def part(start: jax.typing.ArrayLike, size: int, first_new: jax.typing.ArrayLike):
        row = start + jnp.arange(size, dtype=jnp.int32)
        block = (lax.dynamic_slice_in_dim(a, start, size) for a in arrays)
        return fn((row >= first_new) & (row < number), *block)

    def add(i: jax.Array, size: int, total: jax.Array):
        first_new = mean + i * size
        return total + part(jnp.minimum(first_new, rows - size), size, first_new)

    return _over_blocks(add, part(0, mean, 0), rows, mean, number)


def _in_blocks(fn: Callable, mean: int, number: jax.Array, arrays: Sequence[jax.Array]):
    """`on_rows` by the mean number of rows and a loop over blocks."""
    rows = arrays[0].shape[0]

    def write(start: jax.typing.ArrayLike, size: int, results):
        part = fn(*(lax.dynamic_slice_in_dim(a, start, size) for a in arrays))
        put = lambda result, part: lax.dynamic_update_slice_in_dim(result, part, start, 0)
        return jax.tree.map(put, results, part)

    # The last block may begin earlier and compute some rows twice, to end with the array.
    def write_block(i: jax.Array, size: int, results):
        return write(jnp.minimum(mean + i * size, rows - size), size, results)

    # Not zeros: filling memory for the worst case is the pass that this module saves.
    results = jax.tree.map(lambda a: lax.empty(a.shape, a.dtype), jax.eval_shape(fn, *arrays))
    return _over_blocks(write_block, write(0, mean, results), rows, mean, number)


def _over_blocks(body: Callable, result: Any, rows: int, mean: int, number: jax.Array) -> Any:
    """`result` after body(i, rows of a block, result) of the blocks beyond the mean."""
    size = -(-mean // BLOCKS)
    step = lambda state: (state[0] + 1, body(state[0], size, state[1]))
    # Negative where fewer rows than the mean are filled: no trip. A while loop, since the number of
    # trips is in the data.
    blocks = (number - mean + size - 1) // size
    # planner/programs/loops.py reads the loop's number of trips from this name.
    with jax.named_scope(f"row_excess_{rows}_{mean}_{size}"):
        return lax.while_loop(lambda state: state[0] < blocks, step, (jnp.int32(0), result))[1]
