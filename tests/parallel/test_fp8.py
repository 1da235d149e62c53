"""Products in FP8 against float64 references that quantize in the same way, forward and backward:
of plain layers, of experts in both forms; and what becomes of tensors that have no usual scale."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.small import normal

from jaxtrain.models import layers
from jaxtrain.parallel import fp8
from jaxtrain.parallel.experts import products
from jaxtrain.parallel.fp8 import FORMATS, Fp8

E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
TOKENS, IN, OUT, EXPERTS = 24, 16, 40, 3
# of a sum of products: float32's rounding, since both sides multiply the same numbers of 8 bits
EXACT = {"rtol": 0, "atol": 2e-5}
USES = [
    Fp8(jnp.dtype("float32")),
    Fp8(jnp.dtype("float32"), FORMATS["e4m3"]),
    Fp8(jnp.dtype("float32"), weight_gradients=False),
]
uses = pytest.mark.parametrize("use", USES, ids=["e5m2", "e4m3", "weights in float32"])


def rounded(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """x as FP8 holds it, float64."""
    scale = scale_of(x, dtype)
    numbers = (x.astype(np.float32) * (np.float32(1) / scale)).astype(dtype)
    return numbers.astype(np.float64) * np.float64(scale)


def scale_of(x: np.ndarray, dtype: np.dtype) -> np.float32:
    return np.float32(np.abs(x).max()) * np.float32(1 / float(ml_dtypes.finfo(dtype).max))


def close(value, wanted) -> None:
    np.testing.assert_allclose(value, wanted, **EXACT)


def weights(use: Fp8, *shape: int) -> tuple[np.ndarray, fp8.Quantized]:
    """Random weights, and the same quantized and differentiable."""
    w = normal(2, *shape) / 8
    quantized = fp8.quantized_weights(jnp.asarray(w), use, len(shape), ())
    return w, fp8.with_trainable(quantized, fp8.trainable(quantized))


def backward(fn, *args):
    """Returns (the result, the gradients of its product with random numbers, these numbers)."""
    y, vjp = jax.vjp(fn, *args)
    g = normal(3, *y.shape)
    return y, vjp(jnp.asarray(g)), g


def gradient_format(use: Fp8) -> np.dtype:
    return np.dtype(use.gradients)


@uses
@pytest.mark.parametrize("product", ["matmul", "row", "columns", "three dimensions"])
def test_dense_products(use, product):
    x = normal(1, 2, TOKENS, IN)
    w, quantized = weights(use, IN, OUT)
    forms = {
        "matmul": lambda x, w: layers.matmul(layers.flat(x), w).reshape(2, TOKENS, OUT),
        "row": layers.row_product,
        "columns": lambda x, w: layers.column_products(x, (w,))[0],
        "three dimensions": layers.matmul,
    }
    y, (by_x, by_w), g = backward(forms[product], jnp.asarray(x), quantized)
    q, r, s = rounded(x, E4M3), rounded(w, E4M3), rounded(g, gradient_format(use))
    close(y, q @ r)
    close(by_x, s @ r.T)
    left, right = (q, s) if use.weight_gradients else (x, g)
    close(by_w.carrier, np.einsum("bti,bto->io", left, right, dtype=np.float64))
    # the rounding itself: e4m3 keeps 3 bits and e5m2 2, of operands that are no larger than theirs
    assert 0.005 < np.abs(y - x @ w).max() / np.abs(x @ w).max() < 0.1


def test_several_columns_share_what_is_multiplied():
    x, (w, quantized), (_, other) = (
        normal(1, 2, TOKENS, IN),
        weights(USES[0], IN, OUT),
        weights(USES[0], IN, 8),
    )
    run = lambda x: jnp.concatenate(layers.column_products(x, (quantized, other)), -1)
    _, (by_x,), g = backward(run, jnp.asarray(x))
    second = np.asarray(fp8.dequantized(other), np.float64)
    parts = rounded(g[..., :OUT], E5M2) @ rounded(w, E4M3).T, rounded(g[..., OUT:], E5M2) @ second.T
    close(by_x, sum(parts))


@uses
@pytest.mark.parametrize("sizes", [None, (5, 0, 15)], ids=["equal groups", "groups"])
def test_products_of_experts(use, sizes):
    rows = normal(1, 1, EXPERTS, TOKENS, IN) if sizes is None else normal(1, 1, TOKENS, IN)
    w, quantized = weights(use, EXPERTS, IN, OUT)
    given = None if sizes is None else jnp.asarray(sizes, jnp.int32)
    run = lambda x, w: products.product(x, w, given, products.COLUMNS)
    y, (by_x, by_w), g = backward(run, jnp.asarray(rows), quantized)
    if sizes is None:
        of = np.arange(EXPERTS).repeat(TOKENS)
    else:
        of = np.concatenate([np.arange(EXPERTS).repeat(sizes), [-1] * (TOKENS - sum(sizes))])
    q, r, s = rounded(rows, E4M3), rounded(w, E4M3), rounded(g, gradient_format(use))
    member = (of[:, None] == np.arange(EXPERTS)).astype(np.float64)
    flat = lambda a: a.reshape(-1, a.shape[-1])
    close(flat(y), np.einsum("re,ri,eio->ro", member, flat(q), r))
    close(flat(by_x), np.einsum("re,ro,eio->ri", member, flat(s), r))
    left, right = (q, s) if use.weight_gradients else (rows, g)
    close(by_w.carrier, np.einsum("re,ri,ro->eio", member, flat(left), flat(right)))


def test_numbers_are_rounded_as_by_ml_dtypes():
    """The compiled rounding, against that of another implementation, bit by bit."""
    x = np.concatenate([normal(1, 1 << 16), normal(2, 1 << 12) * np.float32(1e-3), [0, -0.0]])
    x = x.astype(np.float32)
    for dtype in (E4M3, E5M2):
        run = functools.partial(fp8._quantized, dtype=dtype, dims=1, axes=(), use=USES[0])
        scale = scale_of(x, dtype)
        wanted = (x * (np.float32(1) / scale)).astype(dtype).view(np.uint8)
        for quantize in (run, jax.jit(run)):
            got = quantize(jnp.asarray(x))
            np.testing.assert_array_equal(got.scale, scale)
            np.testing.assert_array_equal(got.bits, wanted)


def test_each_matrix_of_a_stack_has_its_scale():
    w = normal(2, EXPERTS, IN, OUT) * np.asarray([1, 1e-3, 1e3], np.float32)[:, None, None]
    stack = fp8.quantized_weights(jnp.asarray(w), USES[0], 2, ())
    assert stack.scale.shape == (EXPERTS,)
    for i in range(EXPERTS):
        alone = fp8.quantized_weights(jnp.asarray(w[i]), USES[0], 2, ())
        np.testing.assert_array_equal(alone.scale, stack.scale[i])
        np.testing.assert_array_equal(alone.bits, stack.bits[i])


@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e-12, 1e20])
def test_unusual_sizes(factor):
    """Zeros give zeros, and numbers beyond 8 bits' own range the same product as others."""
    x, (w, quantized) = normal(1, TOKENS, IN), weights(USES[0], IN, OUT)
    y = layers.matmul(jnp.asarray(x * np.float32(factor)), quantized)
    wanted = rounded(x, E4M3) @ rounded(w, E4M3) * factor
    small = fp8.SMALLEST  # tensors below it lose digits, and stay as small
    np.testing.assert_allclose(
        y, wanted, rtol=1e-2 if factor > small else 0, atol=1e-2 * max(factor, small)
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["x", "weight", "gradient"])
def test_numbers_that_are_not_finite_are_seen(bad, where):
    x, w, g = normal(1, TOKENS, IN), normal(2, IN, OUT), normal(3, TOKENS, OUT)
    {"x": x, "weight": w, "gradient": g}[where][1, 1] = bad
    quantized = fp8.quantized_weights(jnp.asarray(w), USES[0], 2, ())
    quantized = fp8.with_trainable(quantized, fp8.trainable(quantized))
    y, vjp = jax.vjp(layers.matmul, jnp.asarray(x), quantized)
    by_x, by_w = vjp(jnp.asarray(g))
    seen = {"x": y, "weight": y, "gradient": by_x}[where]
    assert not np.isfinite(seen).all()
    assert where == "weight" or not np.isfinite(by_w.carrier).all()
