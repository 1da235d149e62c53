"""Products of MXFP8 against float64 references that round blocks in the same way, by another
implementation: forward and backward, and the scales bit by bit on every mesh."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support import small
from support.small import normal

from jaxtrain.config.sizes import MX_BLOCK
from jaxtrain.devices.mesh import MANUAL_AXES, make_mesh
from jaxtrain.models import layers, transformer
from jaxtrain.parallel import fp8, mxfp8
from jaxtrain.parallel.fp8 import FORMATS, Fp8
from jaxtrain.parallel.mxfp8 import LAST, TOKENS
from jaxtrain.runtime.layers.backward_split import LayerSplit, keep_everything, keep_products

E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
BATCH, LENGTH, IN, OUT = 2, 64, 96, 160
# of a sum of products: float32's rounding, since both sides multiply the same numbers
EXACT = {"rtol": 0, "atol": 5e-5}
FLOAT32 = jnp.dtype("float32")
USES = [
    Fp8(FLOAT32, blocks=True),
    Fp8(FLOAT32, FORMATS["e4m3"], blocks=True),
    Fp8(FLOAT32, weight_gradients=False, blocks=True),
]
uses = pytest.mark.parametrize(
    "use",
    [USES[0], *(pytest.param(use, marks=pytest.mark.full) for use in USES[1:])],
    ids=["e5m2", "e4m3", "weights in float32"],
)


def rounded(x: np.ndarray, dtype: np.dtype, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (x as blocks along an axis hold it, float64; the exponents of their scales)."""
    x = np.moveaxis(np.float32(x), axis, -1)
    blocks = x.reshape(*x.shape[:-1], -1, MX_BLOCK)
    largest = np.abs(blocks).max(-1, keepdims=True) * np.float32(
        1 / float(ml_dtypes.finfo(dtype).max)
    )
    fraction, exponent = np.frexp(largest)
    exponent = np.where(fraction == 0.5, exponent - 1, exponent)  # of a power of two itself
    scale = np.ldexp(1.0, exponent)
    numbers = (blocks / scale).astype(np.float32).astype(dtype).astype(np.float64) * scale
    back = lambda a: np.moveaxis(a, -1, axis)
    return back(numbers.reshape(x.shape)), back(exponent[..., 0])


def spread(seed: int, *shape: int) -> np.ndarray:
    """Random numbers whose sizes differ from row to row and from column to column."""
    sizes = np.exp2(np.random.default_rng(seed + 9).integers(-6, 6, (*shape[:-1], 1)))
    columns = np.exp2(np.random.default_rng(seed + 5).integers(-3, 3, shape[-1]))
    return np.float32(normal(seed, *shape) * sizes * columns / 8)


@uses
@pytest.mark.parametrize("product", ["row", "columns", "matmul"])
def test_products(use, product):
    x, w = normal(1, BATCH, LENGTH, IN), spread(2, IN, OUT) / 8
    weight = mxfp8.blocked_weights(jnp.asarray(w), use)
    weight = fp8.with_trainable(weight, fp8.trainable(weight))
    forms = {
        "row": layers.row_product,
        "columns": lambda x, w: layers.column_products(x, (w,))[0],
        "matmul": lambda x, w: layers.matmul(layers.flat(x), w).reshape(BATCH, LENGTH, OUT),
    }
    y, vjp = jax.vjp(forms[product], jnp.asarray(x), weight)
    g = normal(3, *y.shape)
    by_x, by_w = vjp(jnp.asarray(g))
    gradients = np.dtype(use.gradients)
    np.testing.assert_allclose(y, rounded(x, E4M3, -1)[0] @ rounded(w, E4M3, 0)[0], **EXACT)
    wanted = rounded(g, gradients, -1)[0] @ rounded(w, E4M3, 1)[0].T
    np.testing.assert_allclose(by_x, wanted, **EXACT)
    left, right = x, g
    if use.weight_gradients:  # blocks of tokens
        left, right = rounded(x, E4M3, 1)[0], rounded(g, gradients, 1)[0]
    wanted = np.einsum("bti,bto->io", left, right, dtype=np.float64)
    np.testing.assert_allclose(by_w.carrier, wanted, rtol=0, atol=1e-3)
    assert 0.002 < np.abs(y - x @ w).max() / np.abs(x @ w).max() < 0.1


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dim", [LAST, TOKENS])
def test_blocks_are_those_of_another_implementation(dtype, dim):
    """Bit by bit, of numbers of all sizes; no number is cut off."""
    x = spread(1, 4, 128, 64)
    x[0, :32, :32] = 0  # a block of zeros
    x[1, :32, :32] = np.float32(448)  # a scale of 1, exactly, in e4m3
    got = jax.jit(lambda x: mxfp8.in_blocks(x, jnp.dtype(dtype), dim, USES[0]))(x)
    numbers, exponents = rounded(x, dtype, dim)
    np.testing.assert_array_equal(got.in_compute_type(), numbers)
    zero = numbers.any() & (exponents == 0) & (np.asarray(got.scale) == 1)
    np.testing.assert_array_equal(got.scale[~zero], exponents[~zero] + 127)
    assert np.isfinite(numbers).all()


def test_what_is_not_finite_is_nan():
    x = normal(1, 64, 64)
    x[3, 5], x[40, 40] = np.nan, np.inf
    value = mxfp8.in_blocks(jnp.asarray(x), jnp.dtype(E4M3), LAST, USES[0]).in_compute_type()
    assert np.isnan(value[3, 5]) and np.isnan(value[40, 40])


def test_devices_with_products_of_blocks_have_them():
    """As lowered for an NVIDIA GPU, in F, B and W: numbers and scales in rows of what is
    contracted. No such GPU multiplies here."""
    x, g, w = normal(1, LENGTH, IN), normal(3, LENGTH, OUT), normal(2, IN, OUT)
    weight = mxfp8.blocked_weights(jnp.asarray(w), USES[0])
    make = lambda a, dim, dtype=E4M3: mxfp8.in_blocks(
        jnp.asarray(a), jnp.dtype(dtype), dim, USES[0]
    )
    cases = [
        (make(x, LAST), weight, (LENGTH, IN, OUT)),
        (make(g, LAST, E5M2), weight.T, (LENGTH, OUT, IN)),
        (make(x, TOKENS), make(g, TOKENS, E5M2), (IN, LENGTH, OUT)),
    ]
    for a, b, (m, k, n) in cases:
        run = jax.jit(mxfp8.scaled_matmul)
        traced = run.trace(a, b)
        assert traced.out_info.shape == (m, n)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        (call,) = (line for line in text.splitlines() if "block_scaled_dot" in line)
        b_format = "f8E5M2" if b.format == E5M2 else "f8E4M3FN"
        assert f"tensor<1x{n}x{k}x{b_format}>" in call
        assert f"tensor<1x{n}x{k // MX_BLOCK}xf8E8M0FNU>" in call


@pytest.mark.parametrize("keep", [keep_everything, keep_products])
def test_what_crosses_does_not_depend_on_the_device(monkeypatch, keep):
    """A layer for such a GPU saves what it saves elsewhere."""
    cfg = small.config(changes={"model.width": 64, "data.sequence_length": 32}).model
    parts = transformer.build(cfg)

    def crossing(blocks: bool) -> list:
        monkeypatch.setattr(mxfp8, "multiplies_blocks", lambda device: blocks)
        shape = lambda s: (
            jax.eval_shape(
                lambda x: mxfp8.blocked_weights(x, USES[0]),
                jax.ShapeDtypeStruct(s.shape, jnp.float32),
            )
            if s.product
            else jax.ShapeDtypeStruct(s.shape, jnp.float32)
        )
        params = jax.tree.map(shape, parts.specs["layer"])
        x = jax.ShapeDtypeStruct((2, 32, 64), jnp.float32)
        extra = (jax.ShapeDtypeStruct((1, 32), jnp.int32), None)
        layer = lambda params, x, extra: parts.blocks[""](params)(x, *extra)
        with jax.set_mesh(small.mesh_of(small.config((1, 1, 2)))):
            split = LayerSplit(layer, params, x, extra, keep)
        return [
            sorted((a.shape, a.dtype.name) for a in tree)
            for tree in (split.residuals.for_b, split.residuals.for_w, split.weight_stash)
        ]

    assert crossing(True) == crossing(False)


# replica, data, stage, context, expert, model
MESHES = [(2, 2, 1, 1, 1, 2), (1, 2, 2, 2, 1, 1), (1, 1, 1, 2, 1, 4)]


@pytest.mark.parametrize("mesh", small.named(MESHES[:1], MESHES[1:]))
def test_scales_are_the_same_on_every_mesh(mesh):
    """Bit by bit, of activations split along all of their dimensions, and of weights."""
    x, w = spread(1, 8, 256, 128), spread(2, 3, 128, 256)
    both = lambda x: [mxfp8.in_blocks(x, jnp.dtype(E5M2), dim, USES[0]) for dim in (LAST, TOKENS)]
    wanted, wanted_weights = both(jnp.asarray(x)), mxfp8.blocked_weights(jnp.asarray(w), USES[0])
    spec_x, spec_w = P(("replica", "data", "expert"), "context"), P(None, "data")
    model = lambda a: lax.with_sharding_constraint(a, P(*(None,) * (a.ndim - 1), "model"))
    run = lambda x, w: (both(model(x)), mxfp8.blocked_weights(model(w), USES[0]))
    specs = jax.tree.map(lambda _: spec_x, wanted), jax.tree.map(lambda _: spec_w, wanted_weights)
    with jax.set_mesh(make_mesh(mesh)):
        got = jax.jit(
            jax.shard_map(
                run,
                in_specs=(spec_x, spec_w),
                out_specs=specs,
                axis_names=set(MANUAL_AXES),
                check_vma=False,
            )
        )(x, w)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves((wanted, wanted_weights)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
