"""The activation of experts' MLPs, their biases and the weights of choices: elementwise work on
rows, with gradients.

A row is multiplied with its choice's weight before the last product of its MLP and not after, since
the hidden layer is there in both passes, and the weight's gradient needs no sum over `model` of the
results. Where a device has memory for many more rows than it mostly gets, such work leaves out
empty ones (filled_rows.py).

Shape suffixes: M parts over model, R rows of a device's experts, E experts of a device, F columns
of an expert.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.config.sizes import exceeds_mean
from jaxtrain.devices.mesh import MODEL, over_model, psum
from jaxtrain.parallel.experts.exchange_group import PART, REPLICATED
from jaxtrain.parallel.experts.filled_rows import on_rows, sum_over_rows
from jaxtrain.parallel.tensor import take


def activated(
    fn: Callable,
    inputs: Sequence[jax.Array],
    gates: jax.Array,
    sizes: jax.Array | None,
    mean_rows: int,
) -> jax.Array:
    """fn(*inputs), an elementwise function of rows [M, R, F], times the weight of each row.

    sizes: rows of each expert; None if all have the same number
    mean_rows: the mean number of rows of all experts; with sizes and memory for more, empty rows
        are left out and hold anything
    """
    if sizes is None or not exceeds_mean(inputs[0].shape[1], mean_rows):
        return weigh(fn(*inputs), gates)
    return _activated(fn, mean_rows, tuple(inputs), gates, sizes)


# A custom_vjp: jax's own gradient would sum the weights' gradients in the rows' type, and let the
# partitioner reduce them over `model` wherever it likes.
@jax.custom_vjp
def weigh(rows: jax.Array, gates: jax.Array) -> jax.Array:
    """Rows [M, …, F] times the weight of each, […]; the gradient of the weights is summed over
    M."""
    return _weigh(rows, gates)[0]


def _weigh(rows, gates):
    weights = gates[None, ..., None].astype(rows.dtype)
    return rows * weights, (rows, weights)


def _weigh_backward(residuals, g):
    rows, weights = residuals

    def by_gates(r, g):
        # in float32: a sum over all columns, and the router's gradient
        part = (r[0].astype(jnp.float32) * g[0].astype(jnp.float32)).sum(-1)
        return psum(part, (MODEL,)) if rows.shape[0] > 1 else part

    return g * weights, over_model(by_gates, (PART, PART), REPLICATED)(rows, g)


weigh.defvjp(_weigh, _weigh_backward)


# The loop over filled rows has a number of trips that is known only when it runs, which jax does
# not differentiate in reverse. The backward is such a loop over the gradients.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _activated(
    fn: Callable, mean_rows: int, inputs: tuple, gates: jax.Array, sizes: jax.Array
) -> jax.Array:
    weighed = lambda gates, *x: fn(*x) * gates[:, None].astype(x[0].dtype)
    run = lambda inputs, gates, sizes: on_rows(
        weighed, mean_rows, sizes.sum(), gates, *(x[0] for x in inputs)
    )[None]
    specs = ((PART,) * len(inputs), REPLICATED, REPLICATED)
    return over_model(run, specs, PART)(inputs, gates, sizes)


def _activated_backward(fn, mean_rows, residuals, g):
    def gradients(gates, g, *x):
        # fn is computed once more: cheaper than its result in memory until the backward
        y, backward = jax.vjp(fn, *x)
        by_gates = (y.astype(jnp.float32) * g.astype(jnp.float32)).sum(-1)
        return by_gates, *backward(g * gates[:, None].astype(g.dtype))

    def run(inputs, gates, sizes, g):
        rows = gates, g[0], *(x[0] for x in inputs)
        by_gates, *by_inputs = on_rows(gradients, mean_rows, sizes.sum(), *rows)
        if model_parts > 1:
            by_gates = psum(by_gates, (MODEL,))
        return tuple(x[None] for x in by_inputs), by_gates

    model_parts = residuals[0][0].shape[0]
    parts = (PART,) * len(residuals[0])
    specs = (parts, REPLICATED, REPLICATED, PART)
    return *over_model(run, specs, (parts, REPLICATED))(*residuals, g), None


_activated.defvjp(
    lambda fn, mean_rows, *inputs: (_activated(fn, mean_rows, *inputs), inputs),
    _activated_backward,
)


# --- biases of experts ----------------------------------------------------------------------------


class Bias(NamedTuple):
    """The biases [E, F] of a matrix of each expert, float32, and how rows get them.

    gates: the weights [rows] that rows were multiplied with before the matrix, and biases are now;
           None if they were not
    sizes: rows of each expert; None if all have the same number
    """

    values_EF: Any
    gates: Any = None
    sizes: Any = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def biased(rows: jax.Array, bias: Bias, mean_rows: int, split: bool) -> jax.Array:
    """Rows [M, R, F], or [M, E, R, F] without sizes, plus the biases of their experts.

    mean_rows: as of `activated`
    split: `model` splits the biases as it does the rows' columns; else the rows are terms of a sum
        over M, whose result gets each bias once
    """
    return _biased(rows, bias, mean_rows, split)[0]


def _biased(rows, bias: Bias, mean_rows: int, split: bool):
    parts = 1 if split else rows.shape[0]

    def run(rows, bias: Bias):
        experts, number = _experts_of_rows(bias, rows[0])

        def add(x, expert, *gates):
            added = take(bias.values_EF.astype(x.dtype) / parts, expert)
            return x + (added * gates[0][:, None].astype(x.dtype) if gates else added)

        flat = rows.reshape(-1, rows.shape[-1])
        y = on_rows(add, mean_rows, number, flat, experts, *jax.tree.leaves(bias.gates))
        return y.reshape(rows.shape)

    return over_model(run, (PART, _specs(bias, split)), PART)(rows, bias), bias


def bias_gradient(mean_rows: int, split: bool, bias: Bias, g: jax.Array) -> Bias:
    """The gradient of a bias, by the gradient g of `biased`'s result. Sizes have none."""

    def run(g, bias: Bias):
        experts, number = _experts_of_rows(bias, g[0])
        flat, gates = g.reshape(-1, g.shape[-1]), jax.tree.leaves(bias.gates)

        def by_values(counts, g, expert, *gates):
            weighed = g * gates[0][:, None].astype(g.dtype) if gates else g
            # rows that do not count may hold NaN
            weighed = jnp.where(counts[:, None], weighed, 0)
            is_of = (expert[:, None] == jnp.arange(len(bias.values_EF))).astype(g.dtype)
            return jnp.einsum("re,rf->ef", is_of, weighed, preferred_element_type=jnp.float32)

        def by_gates(g, expert):
            return (g.astype(jnp.float32) * take(bias.values_EF, expert)).sum(-1)

        values = sum_over_rows(by_values, mean_rows, number, flat, experts, *gates)
        if not gates:
            return Bias(values)
        return Bias(values, on_rows(by_gates, mean_rows, number, flat, experts))

    specs = _specs(bias, split)
    result: Bias = over_model(run, (PART, specs), specs._replace(sizes=None))(g, bias)
    return result


biased.defvjp(
    _biased, lambda mean_rows, split, bias, g: (g, bias_gradient(mean_rows, split, bias, g))
)


def _specs(bias: Bias, split: bool) -> Bias:
    """What `model` splits of biases, in the form in which over_model takes it."""
    gates, sizes = (None if a is None else REPLICATED for a in bias[1:])
    return Bias(P(None, MODEL) if split else REPLICATED, gates, sizes)


def _experts_of_rows(bias: Bias, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (the expert of each row, int32 [R], out of range for empty rows; the number of filled
    rows)."""
    if bias.sizes is None:
        experts, each = rows.shape[:2]
        return jnp.repeat(jnp.arange(experts), each), jnp.int32(experts * each)
    ends_E = jnp.cumsum(bias.sizes)
    row = jnp.arange(rows.shape[0], dtype=jnp.int32)
    return (row[:, None] >= ends_E).sum(-1, dtype=jnp.int32), ends_E[-1]
