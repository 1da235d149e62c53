"""Work on single rows of experts, of which a device has fewer than it has memory for.

Rows lie sorted by expert, and empty ones behind them. Their mean number is known when a program is
compiled: so many are computed at once. A loop over small blocks computes those beyond the mean, in
most microbatches none or one block:

    │ computed at once: the mean          │ block │ block │ … to the last row      │
    │ rows that are there                    │ empty rows, which nothing reads       │

Begin with `on_rows`. An array is written in place, block by block. Rows behind the last block hold
anything, also NaN.
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
    rows = arrays[0].shape[0]
    if not exceeds_mean(rows, mean):
        return fn(*arrays)

    def call(number: jax.Array, *arrays: jax.Array):
        return _in_blocks(fn, mean, number, arrays)

    # A call with a name: runtime/ keeps it in one piece when it cuts a layer into ops.
    call.__name__ = name
    return jax.jit(call)(number, *arrays)


def _in_blocks(fn: Callable, mean: int, number: jax.Array, arrays: Sequence[jax.Array]):
    """`on_rows` by the mean number of rows and a loop over blocks."""
    rows, size = arrays[0].shape[0], -(-mean // BLOCKS)

    def write(start: jax.typing.ArrayLike, size: int, results):
        part = fn(*(lax.dynamic_slice_in_dim(a, start, size) for a in arrays))
        put = lambda result, part: lax.dynamic_update_slice_in_dim(result, part, start, 0)
        return jax.tree.map(put, results, part)

    def step(state):
        i, results = state
        # The last block may begin earlier and compute some rows twice, to end with the array.
        return i + 1, write(jnp.minimum(mean + i * size, rows - size), size, results)

    # Not zeros: filling memory for the worst case is the pass that this module saves.
    results = jax.tree.map(lambda a: lax.empty(a.shape, a.dtype), jax.eval_shape(fn, *arrays))
    results = write(0, mean, results)
    # Negative where fewer rows than the mean are filled: no trip. A while loop, since the number of
    # trips is in the data.
    blocks = (number - mean + size - 1) // size
    # planner/programs/loops.py reads the loop's number of trips from this name.
    with jax.named_scope(f"row_excess_{rows}_{mean}_{size}"):
        return lax.while_loop(lambda s: s[0] < blocks, step, (jnp.int32(0), results))[1]
