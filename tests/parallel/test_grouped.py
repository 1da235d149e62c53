"""Products by groups against a loop over the groups in numpy: values, gradients, and how much is
computed."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small

from jaxtrain.config import sizes as config_sizes
from jaxtrain.config.kernels import BLOCKS, LARGE_BLOCKS, MEGABLOX
from jaxtrain.parallel.experts import grouped, megablox, products
from jaxtrain.planner.programs.program import Program

INPUTS, OUTPUTS = 24, 40
# Rows of each group; what is left of the rows belongs to none. Blocks are of 8 rows.
SIZES = {
    "uneven": (17, 1, 30, 8, 5),
    "empty": (0, 0, 45, 0, 12),
    "one": (0, 0, 0, 61, 0),
    "none": (0, 0, 0, 0, 0),
    "room left": (9, 3, 0, 7, 2),
}
ROWS = 61  # a block at the end begins inside of the one before


def plainly(rows, weights, g, sizes):
    """→ (product, gradient of the rows, gradient of the weights) in float64."""
    rows, weights, g = (np.asarray(a, np.float64) for a in (rows, weights, g))
    product, by_rows, by_weights = np.zeros(g.shape), np.zeros(rows.shape), np.zeros(weights.shape)
    ends = np.cumsum(sizes)
    for e, (begin, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        product[begin:end] = rows[begin:end] @ weights[e]
        by_rows[begin:end] = g[begin:end] @ weights[e].T
        by_weights[e] = rows[begin:end].T @ g[begin:end]
    return product, by_rows, by_weights


INTERPRETED = products.Products(
    *(functools.partial(form, interpret=True) for form in products.KERNELS[MEGABLOX])
)
KERNELS = {BLOCKS: products.KERNELS[BLOCKS], MEGABLOX: INTERPRETED}


def with_gradients(kernel: str, *given):
    """The three forms of rows, weights, gradients and sizes."""
    return _with_gradients(KERNELS[kernel], *given)


@functools.partial(jax.jit, static_argnums=0)
def _with_gradients(kernel, rows, weights, g, sizes):
    return (
        kernel.product(rows, weights, sizes),
        kernel.rows_gradient(g, weights, sizes),
        kernel.weights_gradient(rows, g, sizes),
    )


def arrays(dtype, rows: int = ROWS, groups: int = 5):
    shapes = (rows, INPUTS), (groups, INPUTS, OUTPUTS), (rows, OUTPUTS)
    return tuple(jnp.asarray(small.normal(i, *shape), dtype) for i, shape in enumerate(shapes))


def as_parameters():
    """Kernels and types; what takes long to compile, interpreted, is for --full."""
    for kernel, dtype in itertools.product(KERNELS, (jnp.float32, jnp.bfloat16)):
        long = kernel == MEGABLOX and dtype == jnp.bfloat16
        yield pytest.param(
            kernel, dtype, marks=[pytest.mark.full] * long, id=f"{kernel} {dtype.__name__}"
        )


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kernel, dtype", [*as_parameters()])
def test_products_and_gradients(kernel, dtype, sizes):
    rows, weights, g = arrays(dtype)
    got = with_gradients(kernel, rows, weights, g, jnp.asarray(SIZES[sizes], jnp.int32))
    for found, expected in zip(got, plainly(rows, weights, g, np.array(SIZES[sizes])), strict=True):
        assert found.dtype == dtype
        # float32 keeps 2e-5 of sums over 60 numbers; bfloat16 rounds the result alone, to 8 bits.
        tolerance = (
            {"rtol": 2e-5, "atol": 2e-5} if dtype == jnp.float32 else {"rtol": 2**-8, "atol": 1e-3}
        )
        np.testing.assert_allclose(np.asarray(found, np.float64), expected, **tolerance)


@pytest.mark.parametrize("kernel", small.named([BLOCKS], [MEGABLOX]))
def test_a_sum_of_gradients_and_rows_that_nothing_fills(monkeypatch, kernel):
    """Of the rows of groups; behind them is anything."""
    monkeypatch.setattr(config_sizes, "FEW_ROWS", ROWS)
    monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    form, sizes = KERNELS[kernel], np.array([7, 0, 20, 3, 0])
    rows, weights, g = arrays(jnp.float32)

    @jax.jit
    def run(rows, weights, g, sizes):
        total = form.add_rows_gradient(rows, g, weights, sizes, ROWS // 2)
        return total, form.product(rows, weights, sizes, fills_empty=False)

    got = run(rows, weights, g, jnp.asarray(sizes, jnp.int32))
    product, by_rows, _ = plainly(rows, weights, g, sizes)
    for found, expected in zip(got, (np.asarray(rows) + by_rows, product), strict=True):
        there = slice(0, sizes.sum())
        np.testing.assert_allclose(found[there], expected[there], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("rows, groups", [(3, 5), (8, 1), (130, 2)])
def test_odd_numbers_of_rows(rows, groups):
    sizes = np.random.default_rng(rows).multinomial(rows, [1 / groups] * groups)
    given = arrays(jnp.float32, rows, groups)
    got = with_gradients(BLOCKS, *given, jnp.asarray(sizes, jnp.int32))
    for found, expected in zip(got, plainly(*given, sizes), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_rows_of_a_block():
    sizes = [
        grouped.block_rows(*size)
        for size in ((3, 5), (61, 5), (1024, 8), (4096, 8), (16384, 1), (16384, 4))
    ]
    assert sizes == [3, 8, 8, 32, 256, 256]


FORMS = {
    "product": lambda rows, weights, g, sizes: grouped.product(rows, weights, sizes),
    "rows": lambda rows, weights, g, sizes: grouped.rows_gradient(g, weights, sizes),
    "weights": lambda rows, weights, g, sizes: grouped.weights_gradient(rows, g, sizes),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_cost_follows_the_rows(form):
    """One product is compiled, of a block of rows with one matrix, inside of the loop over a
    group's blocks: flops are its own times the blocks that there are. At the sizes of mixtral_8x7b
    and deepseek_v3, chosen at random, that is at most 1.15 times the rows' own."""
    rows, groups = 4096, 2
    given = (*arrays(jnp.float32, rows, groups), jax.ShapeDtypeStruct((groups,), jnp.int32))
    compiled = jax.jit(FORMS[form]).lower(*given).compile()
    blocks = grouped.BLOCKS_OF_WEIGHTS if form == "weights" else grouped.BLOCKS
    size = grouped.block_rows(rows, groups, blocks=blocks)
    program, block = Program(compiled.as_text()), 2 * size * INPUTS * OUTPUTS
    # which counts the body of a loop once
    assert block <= compiled.cost_analysis()["flops"] < 1.1 * block
    loops = [i for i in program.inline(program.entry) if i.opcode == "while"]
    inner = [i for loop in loops for i in program.inline(loop.calls["body"]) if i.opcode == "while"]
    assert (len(loops), len(inner)) == (1, 1)


@pytest.mark.parametrize(
    "rows, experts_of_a_device, taken",
    [(2 * 16384, 1, 16384), (2 * 8192, 4, 8192), (65536, 8, 60000), (32768, 8, 32768)],
)
def test_blocks_at_real_sizes(rows, experts_of_a_device, taken):
    """Blocks compute at most 15 % more than the rows, 20 % on GPUs, where a block's turn takes
    time: two thirds are products of rows and their gradients, a third the weights' gradients."""
    shares = np.random.default_rng(0).dirichlet(np.full(experts_of_a_device, 20.0))
    sizes = np.random.default_rng(1).multinomial(taken, shares)
    for most, of_rows, bound in (
        (grouped.MOST_ROWS, grouped.BLOCKS, 1.15),
        (grouped.MOST_ROWS_ON_GPU, grouped.BLOCKS_ON_GPU, 1.2),
    ):
        computed = 0
        for blocks, number in ((of_rows, 2), (grouped.BLOCKS_OF_WEIGHTS, 1)):
            size = grouped.block_rows(rows, experts_of_a_device, most, blocks)
            computed += number * -(-sizes // size).sum() * size
        assert computed <= bound * 3 * taken


def test_blocks_on_gpus_are_larger():
    """The name of the compiled loop has a block's rows: 512 of a group of 4,096 on GPUs."""
    shapes = (
        ((32768, INPUTS), jnp.bfloat16),
        ((8, INPUTS, OUTPUTS), jnp.bfloat16),
        ((8,), jnp.int32),
    )
    given = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    for kernel, rows in ((LARGE_BLOCKS, 512), (BLOCKS, 256)):
        lowered = jax.jit(products.KERNELS[kernel].product).lower(*given)
        assert f"row_blocks_32768_8_{rows}" in lowered.as_text(debug_info=True)


def test_the_gradient_of_a_product_is_by_groups():
    """products.product asks the kernel of the platform, forward and backward."""
    rows, weights, g = arrays(jnp.float32)
    sizes = jnp.asarray(SIZES["room left"], jnp.int32)

    @jax.jit
    def run(rows, weights, g):
        y, vjp = jax.vjp(
            lambda r, w: products.product(r[None], w, sizes, products.COLUMNS)[0], rows, weights
        )
        return y, *vjp(g)

    for found, expected in zip(
        run(rows, weights, g), plainly(rows, weights, g, np.array(SIZES["room left"])), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_tiles_of_megablox():
    assert [megablox.tile_rows(*size) for size in ((16, 4), (4096, 4), (65536, 1), (48, 1))] == [
        16,
        64,
        512,
        16,
    ]
    assert [megablox.tile_columns(n, 2) for n in (40, 1024, 4096, 14336, 1536, 1100)] == [
        40,
        1024,
        1024,
        1024,
        768,
        1024,
    ]
    assert megablox.tile_columns(4096, 4) == 512
