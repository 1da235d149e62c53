"""The embedding table split by rows over `model`: lookup, and its gradient added into an accumulator in place.

Each device looks up the tokens that are in its rows and the sums meet in a reduce-scatter over the sequence (Megatron-LM's
vocabulary-parallel embedding, Shoeybi et al. 2019). The partitioner alone would gather the whole table instead.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.mesh import MODEL, psum_scatter
from jaxtrain.sharding import is_split


def _local_rows(tokens: jax.Array, rows: int) -> jax.Array:
    """Token ids as rows of this device's part of the table; `rows` (out of range) where they are elsewhere."""
    local = tokens - lax.axis_index(MODEL) * rows
    return jnp.where((local >= 0) & (local < rows), local, rows)


def _over_model(fn, in_specs, out_specs):
    """fn on each device's part over `model`; the mesh's other axes stay as they are."""
    return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, axis_names={MODEL}, check_vma=False)


def lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """table [V, D], tokens int32 [batch, T] → [batch, T, D], split along T where the vocabulary is split."""
    if not is_split("vocab"):
        return table[tokens]

    def local(part, tokens):
        rows = part.at[_local_rows(tokens, part.shape[0])].get(mode="fill", fill_value=0)
        return psum_scatter(rows, MODEL, dim=1)

    return _over_model(local, (P(MODEL), P()), P(None, MODEL))(table, tokens)


def add_lookup_gradient(accumulator: jax.Array, tokens: jax.Array, gradient: jax.Array) -> jax.Array:
    """accumulator [V, D] plus the gradient of `lookup`; gradient is [batch, T, D]."""
    if not is_split("vocab"):
        return accumulator.at[tokens].add(gradient.astype(accumulator.dtype))

    def local(part, tokens, gradient):
        whole = lax.all_gather(gradient, MODEL, axis=1, tiled=True)
        return part.at[_local_rows(tokens, part.shape[0])].add(whole.astype(part.dtype), mode="drop")

    return _over_model(local, (P(MODEL), P(), P(None, MODEL)), P(MODEL))(accumulator, tokens, gradient)
