"""Products of rows with their experts' matrices, with gradients.

Begin with `product`. `KERNELS` has the three products of a forward and backward for each kernel of
config/kernels.py: on sorted rows by grouped.py or megablox.py, with equally many rows of each
expert (by capacity, and shared experts) by an einsum. `two_products` is for a gated MLP, and
`product_combined` for the last product of an MLP, whose results go back to their tokens.

None of the kernels is differentiated: jax has no gradient of loops whose number of trips it does
not know, and FP8 quantizes gradients before they are multiplied. So products are `custom_vjp`s.

Shape suffixes: M parts over model, B batch, T tokens, D width, E experts of a device, R rows of a
device's experts, I input columns, O output columns.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.config.kernels import BLOCKS, LARGE_BLOCKS, MEGABLOX, product_kernel
from jaxtrain.config.sizes import exceeds_mean, is_large
from jaxtrain.devices.mesh import MODEL, over_model
from jaxtrain.parallel.experts import activation, grouped, megablox
from jaxtrain.parallel.experts.activation import Bias
from jaxtrain.parallel.experts.dispatch import combine, dispatched
from jaxtrain.parallel.experts.exchange_group import PART, REPLICATED, DispatchSpec
from jaxtrain.parallel.experts.routing import Routing, TwoSteps
from jaxtrain.parallel.fp8 import (
    Quantized,
    dequantized,
    gradient_of,
    multiplicable,
    operands,
    quantized,
    rescaled,
)
from jaxtrain.parallel.target_device import target_device

# cuts of experts' matrices [E, in, out] over `model`
COLUMNS, ROWS = P(None, None, MODEL), P(None, MODEL)


# --- kernels --------------------------------------------------------------------------------------


class Products(NamedTuple):
    """Products of rows with their experts' matrices, and their gradients; arguments as in
    grouped.py."""

    product: Callable
    rows_gradient: Callable
    weights_gradient: Callable
    add_rows_gradient: Callable


def _products_of(module) -> Products:
    return Products(*(getattr(module, form) for form in Products._fields))


BY_BLOCKS = _products_of(grouped)
KERNELS = {
    BLOCKS: BY_BLOCKS,
    LARGE_BLOCKS: Products(
        *(functools.partial(form, most_rows=grouped.MOST_ROWS_ON_GPU) for form in BY_BLOCKS)
    ),
    MEGABLOX: _products_of(megablox),
}


def _einsum(form: str) -> Callable:
    return lambda a, b, _, dtype=None: jnp.einsum(form, a, b, preferred_element_type=dtype)


# of [E, R, I]: all experts have the same number of rows
EQUAL_GROUPS = Products(
    _einsum("eri,eio->ero"),
    _einsum("ero,eio->eri"),
    _einsum("eri,ero->eio"),
    lambda total, g, weights, *_: total + jnp.einsum("ero,eio->eri", g, weights),
)


def _products(sizes: jax.Array | None) -> Products:
    return EQUAL_GROUPS if sizes is None else KERNELS[product_kernel(target_device()).kernel]


def _multiply(form: str, a, b, sizes: jax.Array | None, in_specs, out_spec: P) -> jax.Array:
    """A product of `Products` on each device's part; of arrays, or of quantized tensors in FP8.

    Arrays [M, …] have a part of their own on each device.
    """
    local = lambda x, spec: x[0] if spec is PART else x
    stacked = lambda y: y[None] if out_spec is PART else y
    dtype = None
    x, y = a, b
    if isinstance(a, Quantized):
        dtype = a.use.compute
        x, y = multiplicable(a, b)

    def run(x, y, sizes=None):
        multiply = getattr(_products(sizes), form)
        x, y = local(x, in_specs[0]), local(y, in_specs[1])
        if dtype is not None:
            # The result is quantized next, by a scale that is the largest of all numbers: empty
            # rows have to be zeros.
            return stacked(multiply(x, y, sizes, dtype))
        if sizes is not None and form != "weights_gradient" and is_large(x.shape[0]):
            # Nothing reads empty rows, and filling them would write memory for the worst case.
            return stacked(multiply(x, y, sizes, fills_empty=False))
        return stacked(multiply(x, y, sizes))

    if sizes is None:
        result = over_model(lambda x, y: run(x, y), in_specs, out_spec)(x, y)
    else:
        result = over_model(run, (*in_specs, REPLICATED), out_spec)(x, y, sizes)
    return result if dtype is None else rescaled(result, a, b)


# --- one product ----------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def product(rows, weights, sizes: jax.Array | None, cut: P) -> jax.Array:
    """Rows [M, R, I] sorted by expert, `sizes` of each, or [M, E, R, I], times their experts'
    weights [E, I, O] → rows of O. Rows and weights are arrays or quantized tensors.

    The weights are cut over model: COLUMNS (outputs are cut), or ROWS (inputs are cut, outputs are
    terms of a sum).
    """
    return _product(rows, weights, sizes, cut)[0]


def _product(rows, weights, sizes, cut):
    """The product, and what its backward reads: rows as they came if they are quantized (their
    gradient has that form), rows as the weights' gradient multiplies them, weights, sizes."""
    multiplied, for_weights = operands(rows, weights)
    y = _multiply("product", multiplied, weights, sizes, (PART, cut), PART)
    return y, (rows if isinstance(rows, Quantized) else None, for_weights, weights, sizes)


def _gradients(rows, weights, sizes, g_operands: tuple, cut: P) -> tuple[jax.Array, jax.Array]:
    """The gradients of rows and weights. g_operands: the gradient of their product, as it is
    multiplied with the weights and with the rows"""
    g, g_for_weights = g_operands
    by_rows = _multiply("rows_gradient", g, weights, sizes, (PART, cut), PART)
    return by_rows, _multiply("weights_gradient", rows, g_for_weights, sizes, (PART, PART), cut)


def _product_backward(cut, residuals, g):
    quantized_rows, rows, weights, sizes = residuals
    g_operands = operands(g, weights, gradient=True)
    by_rows, by_weights = _gradients(rows, weights, sizes, g_operands, cut)
    return gradient_of(quantized_rows, by_rows), gradient_of(weights, by_weights), None


product.defvjp(_product, _product_backward)


# --- two products of the same rows ----------------------------------------------------------------


def two_products(
    rows, up, gate, sizes: jax.Array | None, mean_rows: int
) -> tuple[jax.Array, jax.Array]:
    """The products of rows with two weights of their experts that are cut by COLUMNS. Where there
    is memory for more than `mean_rows`, the rows' two gradients are added up on filled rows."""
    if sizes is None or not exceeds_mean(rows.shape[1], mean_rows):
        return product(rows, up, sizes, COLUMNS), product(rows, gate, sizes, COLUMNS)
    return _two_products(rows, up, gate, sizes, mean_rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _two_products(
    rows: jax.Array, up: jax.Array, gate: jax.Array, sizes: jax.Array, mean_rows: int
) -> tuple[jax.Array, jax.Array]:
    return product(rows, up, sizes, COLUMNS), product(rows, gate, sizes, COLUMNS)


def _two_products_backward(mean_rows, residuals, gradients):
    rows, *weights, sizes = residuals
    by_weights = [
        _multiply("weights_gradient", rows, g, sizes, (PART, PART), COLUMNS) for g in gradients
    ]
    total = _multiply("rows_gradient", gradients[0], weights[0], sizes, (PART, COLUMNS), PART)
    specs = (PART, COLUMNS, PART, REPLICATED)

    # The second gradient is added to the first in place. jax's sum of the two would read and write
    # memory for the worst case.
    def add(g, weights, total, sizes):
        return _products(sizes).add_rows_gradient(total[0], g[0], weights, sizes, mean_rows)[None]

    return over_model(add, specs, PART)(gradients[1], weights[1], total, sizes), *by_weights, None


_two_products.defvjp(
    lambda rows, up, gate, sizes, mean_rows: (
        _two_products(rows, up, gate, sizes, mean_rows),
        (rows, up, gate, sizes),
    ),
    _two_products_backward,
)


# --- the product whose results go back to their tokens --------------------------------------------


def product_combined(
    rows: jax.Array, weights, bias: Bias | None, routing: Routing | TwoSteps, spec: DispatchSpec
) -> jax.Array:
    """`combine` of the rows' products with weights cut by ROWS, with biases if there are any. With
    quantized weights the gradient goes out to the experts in FP8."""
    if isinstance(weights, Quantized):
        return _product_combined(rows, weights, bias, routing, spec)
    y = product(rows, weights, routing.sizes, ROWS)
    y = y if bias is None else activation.biased(y, bias, spec.mean_rows, False)
    return combine(y, routing, spec)


# One function with one gradient, which quantizes before the message: half of the bytes. Two would
# send the gradient in the compute type and quantize it where it arrives.
@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _product_combined(
    rows, weights, bias: Bias | None, routing: Routing | TwoSteps, spec: DispatchSpec
) -> jax.Array:
    return _product_combined_forward(rows, weights, bias, routing, spec)[0]


def _product_combined_forward(rows, weights, bias, routing, spec):
    y, (_, rows, _, _) = _product(rows, weights, routing.sizes, ROWS)
    y = y if bias is None else activation.biased(y, bias, spec.mean_rows, False)
    return combine(y, routing, spec), (rows, weights, bias, routing)


def _product_combined_backward(spec, residuals, g):
    rows, weights, bias, routing = residuals
    sent = quantized(g, weights.use, gradient=True).map(lambda a: dispatched(a, routing, spec))
    g_operands = operands(sent, weights, gradient=True)
    by_rows, by_weights = _gradients(rows, weights, routing.sizes, g_operands, ROWS)
    by_bias = None
    if bias is not None:
        by_bias = activation.bias_gradient(spec.mean_rows, False, bias, dequantized(sent))
    return by_rows, gradient_of(weights, by_weights), by_bias, None


_product_combined.defvjp(_product_combined_forward, _product_combined_backward)
