"""Tensor parallelism with a split sequence: the collectives over `model` before and after a
product, and the embedding table split by rows.

Begin with `gathered_products` and `scattered_products`, the first and the last product of
attention or an MLP. A matrix that is split by columns multiplies all tokens, which are all-gathered
before. One that is split by rows leaves a sum over `model`, which a reduce-scatter computes and
splits along the sequence (Korthikanti et al. 2022, section 4.2.2). Both collectives are written
out, because the partitioner would reduce each product separately before it adds several, and XLA's
CPU backend turns the partitioner's reduce-scatter into an all-reduce. None of these functions is
differentiated: the layers' backward calls them (models/layers.py), since a gradient needs the other
collective, and which of both operands is saved, gathered or quantized is the layer's choice.

A device looks up the tokens that are in its rows of the embedding table, and a reduce-scatter over
the sequence sums the results (Megatron-LM's vocabulary-parallel embedding, Shoeybi et al. 2019).
The partitioner alone would gather the table instead. If `stage` splits the table too
(runtime/embedding_and_head.py), the argument is this stage's part, with tokens relative to its
lowest row.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.devices.mesh import MODEL, over_model, psum_scatter
from jaxtrain.devices.sharding import is_split, shards
from jaxtrain.parallel import collective_matmul as ring
from jaxtrain.parallel.fp8 import ContractedDims, Quantized, bare, dot, mapped, operands, split_by

TOKENS = P(None, MODEL)  # [batch, token, …] between blocks
COLUMNS = P(None, None, MODEL)  # [batch, token, columns] inside a block


def flat(x):
    """An array or a quantized tensor [..., D] → [all tokens, D]."""
    # With the tokens in one dimension a weight's gradient is one plain matmul, not one with two
    # contracted dimensions, which costs a transposed copy (measured on CPU: 9.1 → 6.4 CPU-seconds a
    # step).
    return mapped(lambda a: a.reshape(-1, a.shape[-1]), x)


def gather_tokens(x_BTD):
    """A split sequence, all-gathered over `model`: an array, or a quantized tensor."""
    if not is_split("sequence"):
        return x_BTD
    gather = over_model(lambda x: lax.all_gather(x, MODEL, axis=1, tiled=True), (TOKENS,), P())
    return mapped(gather, x_BTD)


def gathered_products(
    x_BTD, weights: Sequence, gather: Callable, gradient: bool = False
) -> tuple[tuple, Any]:
    """Returns (x · weight of each, over all tokens [B, T, columns]; all tokens of x, as products
    that make the weights' gradients read them). x is split along the sequence, the weights
    [D, columns] are split by their columns.

    gather: the function that gathers x where its products do not overlap with messages
    gradient: x is one
    """
    if not isinstance(weights[0], Quantized) and _overlaps(x_BTD, x_BTD.shape[2]):
        # The gathered blocks stay on the device as they have arrived: the weights' gradients read
        # them again in the backward, and joining them would be a copy.
        blocks = ring.Arrived([TOKENS] * shards("sequence"))
        arrived = over_model(ring.ring_gather, (TOKENS,), blocks)(x_BTD)
        columns = tuple(P(None, MODEL) for _ in weights)
        each = lambda x, weights: tuple(ring.products(x, w) for w in weights)
        return over_model(each, (blocks, columns), COLUMNS)(arrived, tuple(weights)), arrived
    x_BTD, for_weights_BTD = operands(x_BTD, weights[0], gradient, gather)
    products = (_by_columns(flat(x_BTD), w).reshape(*x_BTD.shape[:-1], -1) for w in weights)
    return tuple(products), for_weights_BTD


def _overlaps(x: jax.Array, columns: int) -> bool:
    """True if products of x [B, T, …] overlap with messages of so many columns. Quantized tensors
    are gathered and scattered in one collective each."""
    if isinstance(x, Quantized) or not is_split("sequence"):
        return False
    return ring.serves(x.shape[0] * x.shape[1] // shards("sequence") * columns * x.dtype.itemsize)


def _by_columns(x_TI, weight_IO) -> jax.Array:
    """x @ weight, which `model` splits by its columns."""
    if isinstance(x_TI, Quantized) and x_TI.use.blocks:
        return products_of_parts(x_TI, weight_IO, ((1,), (0,)), 1)
    return x_TI @ weight_IO  # type: ignore[no-any-return]


def contracted(a, b) -> jax.Array:
    """aᵀ b over all tokens, of what `gathered_products` has gathered and an array [B, T, columns],
    in either order."""
    gathered_first = isinstance(a, ring.Arrived)
    blocks = ring.Arrived([TOKENS] * shards("sequence"))
    splits = (blocks, COLUMNS) if gathered_first else (COLUMNS, blocks)
    result = P(None, MODEL) if gathered_first else P(MODEL)
    return over_model(ring.contracted, splits, result)(a, b)


def scattered_products(xs: Sequence, weights: Sequence, dim: int) -> jax.Array:
    """Σ x · weight over all pairs, of arrays or quantized tensors, split along the sequence. Each x
    is [B, T, I] with split columns; its weight has I as dimension `dim` (of 2), split too. A device
    adds up its products before one reduce-scatter."""

    def of_rows(xs, weights):
        products = [dot(x, w, ((1,), (dim,))) for x, w in zip(xs, weights, strict=True)]
        return sum(products[1:], products[0])

    def product(xs, weights):
        return of_rows(list(map(flat, xs)), weights).reshape(*xs[0].shape[:2], -1)

    if not is_split("sequence"):
        return product(xs, weights)
    overlaps = _overlaps(xs[0], weights[0].shape[1 - dim])

    def local(xs, weights):
        xs, weights = _joined(xs, weights, dim)
        if overlaps:
            return ring.ring_scatter(of_rows, xs, weights)
        return psum_scatter(product(xs, weights), MODEL, dim=1)

    # A carrier has no numbers in the program; shard_map would want a split for it.
    xs, weights = bare(tuple(xs)), bare(tuple(weights))
    rows = P(MODEL) if dim == 0 else P(None, MODEL)
    specs = tuple(split_by(x, COLUMNS) for x in xs), tuple(split_by(w, rows) for w in weights)
    return over_model(local, specs, TOKENS)(xs, weights)


def _joined(xs: Sequence, weights: Sequence, dim: int) -> tuple[Sequence, Sequence]:
    """The pairs of `scattered_products` on a device as one, where copying their columns moves fewer
    numbers than adding up their products; so a narrow head's columns are no product of their
    own."""
    # One product over the joined columns copies each x; separate products write and add an array of
    # `outputs` columns for each pair but one.
    columns, outputs = sum(x.shape[-1] for x in xs), weights[0].shape[1 - dim]
    if isinstance(weights[0], Quantized) or columns > outputs * (len(xs) - 1):
        return xs, weights
    return [jnp.concatenate(xs, -1)], [jnp.concatenate(weights, dim)]


def products_of_parts(a, b, contracted: ContractedDims, split: int) -> jax.Array:
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
    `attention_kv_heads`, each copy on the devices of its queries."""
    # With fewer heads than devices each device stores a part of a head's columns. The devices of a
    # head all-gather them for the product, and a reduce-scatter adds up their gradients: so all
    # devices have the same number of parameters, and no head's key is computed from a part.
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

# An index that is not in a device's rows is set out of range. A gather gives zeros for it and a
# scatter drops it. So each device handles all tokens without a condition, and the sum over devices
# has each token's row exactly once.


def _rows(tokens: jax.Array, rows: int, begin=0) -> jax.Array:
    """Token ids as rows of the part of a table that begins at row `begin`; `rows` (out of range)
    for those that are not in it."""
    local = tokens - begin
    return jnp.where((local >= 0) & (local < rows), local, rows)


def take(table: jax.Array, index: jax.Array) -> jax.Array:
    """The entries of an array at these indices; zeros for an index that is out of bounds."""
    return table.at[index].get(mode="fill", fill_value=0)


def lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """table [V, D], tokens int32 [batch, T] → [batch, T, D], split along T where the vocabulary is
    split; zero for a token that is not in the table."""
    if not is_split("vocab"):
        return take(table, _rows(tokens, table.shape[0]))

    def local(part, tokens):
        rows = part.shape[0]
        return psum_scatter(
            take(part, _rows(tokens, rows, lax.axis_index(MODEL) * rows)), MODEL, dim=1
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
