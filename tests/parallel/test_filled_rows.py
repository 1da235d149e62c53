"""Work on filled rows: the rows that are there are those of all rows' work, however many they
are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import small

from jaxtrain.config import sizes
from jaxtrain.config.sizes import exceeds_mean
from jaxtrain.parallel.experts.filled_rows import on_rows, sum_over_rows

ROWS, WIDTH = 50, 3


def work(x, by_row):
    """Two results of different shapes and types."""
    return (x * by_row[:, None]).astype(jnp.bfloat16), x.sum(-1) + by_row


@pytest.mark.parametrize("mean", small.named([19], [20, 49]))
def test_rows_that_are_there(monkeypatch, mean):
    """None, fewer than the mean, as many, one more, a block more, and all. Behind their last block
    is what was there."""
    monkeypatch.setattr(sizes, "FEW_ROWS", ROWS)
    monkeypatch.setattr(lax, "empty", lambda shape, dtype: jnp.full(shape, -1, dtype))
    random = np.random.default_rng(0)
    x, by_row = random.normal(size=(ROWS, WIDTH)), random.normal(size=ROWS)
    x, by_row = jnp.float32(x), jnp.float32(by_row)
    expected = jax.tree.map(np.asarray, work(x, by_row))
    run, block = jax.jit(lambda number: on_rows(work, mean, number, x, by_row)), -(-mean // 8)
    for number in (0, mean // 2, mean, mean + 1, mean + block, ROWS):
        number = min(number, ROWS)
        computed = min(ROWS, mean + -(-max(0, number - mean) // block) * block)
        for got, all_rows in zip(run(number), expected, strict=True):
            assert got.dtype == all_rows.dtype
            np.testing.assert_allclose(  # a sum's order is another in another program
                *(np.float32(a[:computed]) for a in (got, all_rows)), rtol=1e-6, atol=1e-6
            )
            assert (got[computed:] == -1).all()


def test_sums_over_rows_that_are_there(monkeypatch):
    """Each of them counts once, whatever lies behind them."""
    monkeypatch.setattr(sizes, "FEW_ROWS", ROWS)
    x = small.normal(0, ROWS, WIDTH)

    @jax.jit
    def run(number):
        filled = jnp.where(jnp.arange(ROWS)[:, None] < number, x, jnp.nan)
        masked = lambda counts, x: jnp.where(counts[:, None], x, 0).sum(0)
        return sum_over_rows(masked, 19, number, filled)

    for number in (0, 9, 19, 20, 22, 30, 49, ROWS):
        np.testing.assert_allclose(run(number), x[:number].sum(0), rtol=1e-5, atol=1e-5)


def test_few_rows_are_computed_at_once():
    """So are those of which the mean is not known, or that the mean fills."""
    many = sizes.FEW_ROWS
    assert exceeds_mean(many, many // 2)
    assert not any(exceeds_mean(*of) for of in ((many, many), (many, 0), (many - 1, many // 2)))
    jaxpr = jax.make_jaxpr(lambda x: on_rows(jnp.sin, 2, jnp.int32(1), x))(jnp.zeros((8, 2)))
    assert [equation.primitive.name for equation in jaxpr.eqns] == ["sin"]
