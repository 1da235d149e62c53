"""Attention block by block against the whole scores: values, gradients, and what is not
computed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.parallel.attention import blockwise, flash
from jaxtrain.parallel.attention.causal import AttentionSettings, attend_causal, grouped_attention
from jaxtrain.parallel.attention.flash import CAUSAL, Inputs, Sight

BATCH, LENGTH, HEADS = 2, 24, 6


def normal(*shape, seed=1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def arrays(kv_heads=2, length=LENGTH, head=4, value=6) -> tuple[np.ndarray, ...]:
    """Queries, keys, values and a gradient of the output; values have heads of a size of their
    own."""
    shapes = (HEADS, head), (kv_heads, head), (kv_heads, value), (HEADS, value)
    return tuple(normal(BATCH, length, *shape, seed=i) for i, shape in enumerate(shapes))


def segments(seed=0) -> jax.Array:
    return jnp.asarray(
        (np.random.default_rng(seed).random((BATCH, LENGTH)) < 0.15).cumsum(1), jnp.int32
    )


@pytest.fixture
def block(monkeypatch):
    """A function that makes blocks of so many tokens."""

    def begin(size: int):
        monkeypatch.setattr(blockwise, "LEAST_BLOCK", 1)
        monkeypatch.setattr(blockwise, "SCORES", BATCH * HEADS * size * size)

    return begin


@functools.partial(jax.jit, static_argnums=0)  # op by op it would take longer
def with_gradients(fn, q, k, v, g):
    y, vjp = jax.vjp(fn, q, k, v)
    return y, *vjp(g)


def test_size_of_a_block(block):
    assert blockwise.block_size(8, 1024, 1024) == 256
    assert blockwise.block_size(4, 8192, 131072) == 2048
    assert blockwise.block_size(32, 8192, 131072) == 512  # no more scores at a time
    assert blockwise.block_size(1, 1000, 1000) == 250
    assert blockwise.block_size(1, 1021, 1021) == 1021  # a prime
    # pairs of blocks are counted in 32 bits, whatever divides the chunk
    for keys in (99_999_999, 64 * 1_562_501, 1 << 27):
        assert (keys // blockwise.block_size(4, keys, keys)) ** 2 < 2**31
    assert [blockwise.is_long(8, n, n) for n in (512, 1021, 1023, 1024, 1031)] == [
        False,
        False,
        False,
        True,
        False,
    ]
    block(4)
    assert blockwise.block_size(BATCH * HEADS, LENGTH, LENGTH) == 4


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("kv_heads, size", [(6, 4), (2, 8), (1, 24)])
def test_same_as_whole_scores(block, kv_heads, size, documents):
    block(size)
    own = segments() if documents else None
    mask = np.tril(np.ones((LENGTH, LENGTH), bool))[None, None]
    if documents:
        mask = mask & np.asarray(own[:, None, :, None] == own[:, None, None, :])
    given = arrays(kv_heads)
    pair = (own, own) if documents else None
    by_blocks = lambda *a: flash.attend(blockwise.KERNEL, Inputs(*a, CAUSAL, pair))
    got = with_gradients(by_blocks, *given)
    wanted = with_gradients(lambda q, k, v: grouped_attention(q, k, v, mask), *given)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=3e-6)


def test_chunks_of_queries(block):
    """As on a device of a context: chunks 1 and 2 of 4, which see keys of the whole sequence."""
    block(3)
    q, k, v, g = arrays()
    q, g = q[:, 6:18], g[:, 6:18]
    mask = (np.arange(6, 18)[:, None] >= np.arange(LENGTH))[None, None]
    got = with_gradients(
        lambda *a: flash.attend(blockwise.KERNEL, Inputs(*a, Sight(jnp.array([1, 2]), 3))),
        q,
        k,
        v,
        g,
    )
    wanted = with_gradients(lambda q, k, v: grouped_attention(q, k, v, mask), q, k, v, g)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=3e-6)


def test_blocks_that_nobody_sees_are_not_computed(block):
    """Otherwise their weights of 0 would meet values that are not numbers."""
    block(4)
    q, k, v, g = arrays()
    k[:, 12:], v[:, 12:] = np.nan, np.nan
    y = jax.jit(lambda: flash.attend(blockwise.KERNEL, Inputs(q, k, v, CAUSAL)))()
    assert np.isfinite(y[:, :12]).all() and np.isnan(y[:, 12:]).all()

    @jax.jit
    def first_half(q, k, v, g):
        inputs = Inputs(q, k, v, Sight((0, 1), 1))
        out, lse = blockwise.output_and_lse(inputs, jnp.float32)
        gradients = blockwise.gradients(flash.AttentionResiduals(inputs, out, lse), g, jnp.float32)
        below = inputs._replace(sight=Sight((0, 1), 1, diagonal=False))
        return out, gradients, blockwise.output_and_lse(below, jnp.float32)

    whole, (_, dk, dv), (out, lse) = first_half(q[:, :12], k, v, g[:, :12])
    assert np.isfinite(whole).all()
    assert not np.any(dk[:, 12:]) and not np.any(dv[:, 12:])
    # Without the diagonal the first chunk sees nothing.
    assert not np.any(out[:, :6]) and (lse[:, :6] == flash.MASKED).all()


def test_memory_grows_with_the_sequence_alone():
    def temporary(length):
        given = arrays(length=length, head=8, value=8)
        fn = lambda q, k, v: attend_causal(q, k, v, None, AttentionSettings(kernel="xla"))
        compiled = jax.jit(lambda *a: with_gradients(fn, *a)).lower(*given).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    block = 4 * BATCH * HEADS * 256 * 256
    # of scores, float32; all of them would be 192 blocks more
    assert temporary(4096) - temporary(2048) < block


def test_bfloat16_sums_in_float32(block):
    block(4)
    given = [jnp.asarray(a, jnp.bfloat16) for a in arrays()]
    fn = lambda *a: flash.attend(blockwise.KERNEL, Inputs(*a, CAUSAL))
    got = with_gradients(fn, *given)
    exact = with_gradients(fn, *(a.astype(jnp.float32) for a in given))
    for a, b in zip(got, exact, strict=True):
        assert a.dtype == jnp.bfloat16
        # A few roundings of 2^-9 each, of values up to the largest
        np.testing.assert_allclose(
            a.astype(jnp.float32), b, rtol=0, atol=4 * 2**-9 * np.abs(b).max()
        )
