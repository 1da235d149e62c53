"""The embedding table split by rows over `model`: lookup, and its gradient added into an
accumulator in place.

Each device looks up the tokens that are in its rows and the sums meet in a reduce-scatter over the
sequence (Megatron-LM's vocabulary-parallel embedding, Shoeybi et al. 2019). The partitioner alone
would gather the whole table instead. A table that is split over `stage` too
(runtime/embedding_and_head.py) comes here as this stage's part, tokens relative to its first row.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.devices.mesh import MODEL, over_model, psum_scatter
from jaxtrain.devices.sharding import is_split


def _rows(tokens: jax.Array, rows: int, first=0) -> jax.Array:
    """Token ids as rows of the part of a table that begins at row `first`; `rows` (out of range)
    where they are elsewhere."""
    local = tokens - first
    return jnp.where((local >= 0) & (local < rows), local, rows)


def _take(table: jax.Array, rows: jax.Array) -> jax.Array:
    return table.at[rows].get(mode="fill", fill_value=0)


def lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """table [V, D], tokens int32 [batch, T] → [batch, T, D], split along T where the vocabulary is
    split; zero for a token that is not in the table."""
    if not is_split("vocab"):
        return _take(table, _rows(tokens, table.shape[0]))

    def local(part, tokens):
        rows = part.shape[0]
        return psum_scatter(
            _take(part, _rows(tokens, rows, lax.axis_index(MODEL) * rows)), MODEL, dim=1
        )

    return over_model(local, (P(MODEL), P()), P(None, MODEL))(table, tokens)


def add_lookup_gradient(
    accumulator: jax.Array, tokens: jax.Array, gradient: jax.Array
) -> jax.Array:
    """accumulator [V, D] plus the gradient of `lookup`; gradient is [batch, T, D]."""
    add = lambda part, rows, g: part.at[rows].add(g.astype(part.dtype), mode="drop")
    if not is_split("vocab"):
        return add(accumulator, _rows(tokens, accumulator.shape[0]), gradient)

    def local(part, tokens, gradient):
        rows, whole = part.shape[0], lax.all_gather(gradient, MODEL, axis=1, tiled=True)
        return add(part, _rows(tokens, rows, lax.axis_index(MODEL) * rows), whole)

    return over_model(local, (P(MODEL), P(), P(None, MODEL)), P(MODEL))(
        accumulator, tokens, gradient
    )
