"""Tensor parallelism with a split sequence: the collectives over `model` before and after a
product, and the embedding table split by rows.

A matrix that is split by columns multiplies all tokens, which are all-gathered before. One that is
split by rows leaves a sum over `model`, which a reduce-scatter computes and splits along the
sequence (Korthikanti et al. 2022, section 4.2.2). Both collectives are written out, because the
partitioner would reduce each product separately before it adds several, and XLA's CPU backend turns
the partitioner's reduce-scatter into an all-reduce. None of these functions is differentiated: the
layers' backward calls them (models/layers.py).

A device looks up the tokens that are in its rows of the embedding table, and a reduce-scatter over
the sequence sums the results (Megatron-LM's vocabulary-parallel embedding, Shoeybi et al. 2019).
The partitioner alone would gather the table instead. If `stage` splits the table too
(runtime/embedding_and_head.py), the argument is this stage's part, with tokens relative to its
lowest row.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.devices.mesh import MODEL, over_model, psum_scatter
from jaxtrain.devices.sharding import is_split, shards
from jaxtrain.parallel.fp8 import Dims, bare, dot, mapped, split_by

TOKENS = P(None, MODEL)  # [batch, token, …] between blocks
COLUMNS = P(None, None, MODEL)  # [batch, token, columns] inside a block


def gather_tokens(x_BTD):
    """A split sequence, all-gathered over `model`: an array, or a quantized tensor."""
    if not is_split("sequence"):
        return x_BTD
    gather = over_model(lambda x: lax.all_gather(x, MODEL, axis=1, tiled=True), (TOKENS,), P())
    return mapped(gather, x_BTD)


def scattered_products(xs: Sequence, weights: Sequence, dim: int) -> jax.Array:
    """Σ x · weight over all pairs, of arrays or quantized tensors, split along the sequence. Each x
    is [B, T, I] with split columns; its weight has I as dimension `dim` (of 2), split too. A device
    adds up its products before one reduce-scatter."""

    def product(xs, weights):
        flat = [
            dot(mapped(lambda a: a.reshape(-1, a.shape[-1]), x), w, ((1,), (dim,)))
            for x, w in zip(xs, weights, strict=True)
        ]
        return sum(flat[1:], flat[0]).reshape(*xs[0].shape[:2], -1)

    if not is_split("sequence"):
        return product(xs, weights)
    local = lambda xs, weights: psum_scatter(product(xs, weights), MODEL, dim=1)
    xs, weights = bare(tuple(xs)), bare(tuple(weights))
    rows = P(MODEL) if dim == 0 else P(None, MODEL)
    specs = tuple(split_by(x, COLUMNS) for x in xs), tuple(split_by(w, rows) for w in weights)
    return over_model(local, specs, TOKENS)(xs, weights)


def products_of_parts(a, b, contracted: Dims, split: int) -> jax.Array:
    """The product of two quantized matrices on each device of `model`, as one equation. split: the
    dimension of the result that is split, as is the operand that it comes from."""
    operands, columns = bare((a, b)), P(None, MODEL)
    splits = (P(), columns) if split else (columns, P())
    specs = tuple(map(split_by, operands, splits))
    result = columns if split else P(MODEL)
    return over_model(lambda a, b: dot(a, b, contracted), specs, result)(*operands)


def attention_kv_heads(kv_heads: int) -> int:
    """The number of key/value heads in attention: at least one for each device of `model`, copies
    where there are fewer."""
    return max(kv_heads, shards("kv_heads"))


def shared_columns(weight, kv_heads: int):
    """An array or a quantized tensor […, columns of the key/value heads] → columns of
    `attention_kv_heads`, each copy on the devices of its queries. Where there are fewer heads than
    devices, the devices of a head all-gather its columns, and their gradients meet in a
    reduce-scatter."""
    return mapped(lambda a: _shared_columns(a, kv_heads), weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _shared_columns(weight: jax.Array, kv_heads: int) -> jax.Array:
    return _among_sharers(
        lambda a, groups: lax.all_gather(
            a, MODEL, axis=a.ndim - 1, tiled=True, axis_index_groups=groups
        ),
        weight,
        kv_heads,
    )


def _among_sharers(fn: Callable, weight: jax.Array, kv_heads: int) -> jax.Array:
    size = shards("kv_heads") // kv_heads
    if size <= 1:
        return weight
    groups = [list(range(i * size, (i + 1) * size)) for i in range(kv_heads)]
    split = P(*(None,) * (weight.ndim - 1), MODEL)
    return over_model(lambda a: fn(a, groups), (split,), split)(weight)


_shared_columns.defvjp(
    lambda weight, kv_heads: (_shared_columns(weight, kv_heads), None),
    lambda kv_heads, _, g: (
        _among_sharers(lambda a, groups: psum_scatter(a, MODEL, a.ndim - 1, groups), g, kv_heads),
    ),
)


# --- the embedding table --------------------------------------------------------------------------


def _rows(tokens: jax.Array, rows: int, begin=0) -> jax.Array:
    """Token ids as rows of the part of a table that begins at row `begin`; `rows` (out of range)
    for those that are not in it."""
    local = tokens - begin
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
        rows, gathered = part.shape[0], lax.all_gather(gradient, MODEL, axis=1, tiled=True)
        return add(part, _rows(tokens, rows, lax.axis_index(MODEL) * rows), gathered)

    return over_model(local, (P(MODEL), P(), P(None, MODEL)), P(MODEL))(
        accumulator, tokens, gradient
    )
