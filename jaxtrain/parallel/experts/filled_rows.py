"""Work on single rows of experts, of which a device has fewer than it has memory for.

Rows lie sorted by expert, and empty ones behind them. Their mean number is known when a program is
compiled: so many are computed at once. A loop over small blocks computes those beyond the mean, in
most microbatches none or one block:

    │ computed at once: the mean          │ block │ block │ … to the last row      │
    │ rows that are there                    │ empty rows, which nothing reads       │

Begin with `on_rows`, which writes an array in place, block by block. Rows behind the last block
hold anything, also NaN. `sum_over_rows` adds up the results of blocks.
"""

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
    if not exceeds_mean(arrays[0].shape[0], mean):
        return fn(*arrays)

    def begin():
        # Not zeros: filling memory for the worst case is the pass that this module saves.
        results = jax.eval_shape(fn, *arrays)
        return jax.tree.map(lambda a: lax.empty(a.shape, a.dtype), results)

    def write(results, part, start):
        put = lambda result, part: lax.dynamic_update_slice_in_dim(result, part, start, 0)
        return jax.tree.map(put, results, part)

    of_rows = lambda counts, *rows: fn(*rows)
    return _by_blocks(of_rows, begin, write, mean, number, arrays, name)


def sum_over_rows(fn: Callable, mean: int, number: jax.Array, *arrays: jax.Array) -> jax.Array:
    """Returns the sum over blocks of fn(counts, *rows of the arrays). `counts`, bool [n], is False
    for rows that are empty or that an earlier block has had. Other arguments as of `on_rows`."""
    rows = arrays[0].shape[0]
    if not exceeds_mean(rows, mean):
        return fn(jnp.arange(rows) < number, *arrays)
    add = lambda total, part, start: part if total is None else total + part
    return _by_blocks(fn, lambda: None, add, mean, number, arrays, FILLED_ROWS)


def _by_blocks(
    fn: Callable,
    begin: Callable,
    join: Callable,
    mean: int,
    number: jax.Array,
    arrays: Sequence[jax.Array],
    name: str,
) -> Any:
    """begin(), then for the mean number of rows and for each block of those beyond it: result =
    join(result, fn(counts, *rows of the arrays), the first of these rows)."""

    # A call with a name: runtime/ keeps it in one piece when it cuts a layer into ops.
    def call(number: jax.Array, *arrays: jax.Array):
        rows, block = arrays[0].shape[0], -(-mean // BLOCKS)

        def with_rows(result, first_new: jax.typing.ArrayLike, size: int):
            # The last block may begin earlier and compute some rows twice, to end with the array.
            start = jnp.minimum(first_new, rows - size)
            row = start + jnp.arange(size, dtype=jnp.int32)
            of_block = (lax.dynamic_slice_in_dim(a, start, size) for a in arrays)
            part = fn((row >= first_new) & (row < number), *of_block)
            return join(result, part, start)

        step = lambda state: (state[0] + 1, with_rows(state[1], mean + state[0] * block, block))
        # Negative where fewer rows than the mean are filled: no trip. A while loop, since the
        # number of trips is in the data.
        blocks = (number - mean + block - 1) // block
        first = with_rows(begin(), 0, mean)
        # planner/programs/loops.py reads the loop's number of trips from this name.
        with jax.named_scope(f"row_excess_{rows}_{mean}_{block}"):
            return lax.while_loop(lambda state: state[0] < blocks, step, (jnp.int32(0), first))[1]

    call.__name__ = name
    return jax.jit(call)(number, *arrays)
