"""The splash kernel, interpreted, against plain XLA: values and gradients, by kind of mask; which
blocks are computed at all."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import attended
from support.attended import arrays, segments

from jaxtrain.config import splash_backward
from jaxtrain.parallel.attention import flash, splash
from jaxtrain.parallel.attention.flash import Inputs, Sight


@pytest.fixture(autouse=True)
def smallest_blocks(monkeypatch):
    monkeypatch.setattr(splash, "MOST", splash.LANES)


@functools.partial(jax.jit, static_argnames=("diagonal", "pairs", "backward"))
def by_splash(
    q, k, v, g, whole=(0,), of_queries=None, of_keys=None, diagonal=True, pairs=0, backward="auto"
):
    documents = None if of_queries is None else (of_queries, of_keys)
    sight = Sight(whole, pairs, diagonal)
    return attended.with_gradients(
        lambda *a: flash.attend(splash.kernel(True, backward), Inputs(*a, sight, documents)),
        *(q, k, v, g),
    )


def assert_same(got, wanted, tolerance=2e-5):
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "shape, documents",
    [
        ({}, 5),  # grouped heads, sizes as of latent attention
        pytest.param({}, 0, marks=pytest.mark.full),
        pytest.param({"kv_heads": 4, "key": 192, "value": 128}, 3, marks=pytest.mark.full),
        pytest.param({"kv_heads": 1, "key": 64, "value": 64}, 300, marks=pytest.mark.full),
        pytest.param(
            {"heads": 1, "kv_heads": 1, "batch": 3, "tokens": 384}, 9, marks=pytest.mark.full
        ),
    ],
)
def test_same_as_plain_xla(shape, documents):
    q, k, v, g = arrays(**shape)
    own = segments(*q.shape[:2], min(documents, q.shape[1] - 1)) if documents else None
    assert_same(
        by_splash(q, k, v, g, of_queries=own, of_keys=own),
        attended.plain(q, k, v, g, None, own, own),
    )


@pytest.mark.parametrize(
    "backward, sum_bytes",
    [
        ("two_kernels", splash_backward.SUM_BYTES),
        ("fused", 128 * 80 * 4),  # a call for each block of keys
        pytest.param("auto", 80, marks=pytest.mark.full),  # no room: two kernels
    ],
)
def test_backwards(backward, sum_bytes, monkeypatch):
    """Two kernels, and the fused one in several calls; in the other tests it is called once."""
    monkeypatch.setattr(splash_backward, "SUM_BYTES", sum_bytes)
    monkeypatch.setattr(splash_backward, "MOST", splash.LANES)
    q, k, v, g = arrays()
    own = segments(*q.shape[:2], 5)
    compiled_anew = jax.jit(functools.partial(by_splash.__wrapped__, backward=backward))
    got = compiled_anew(q, k, v, g, of_queries=own, of_keys=own)
    assert_same(got, attended.plain(q, k, v, g, None, own, own))


def test_chunks_of_a_context():
    """The first chunk of queries and the last of four, as device 0 of two has them: keys of the
    whole sequence, documents apart."""
    q, k, v, g = arrays(batch=1, keys=512)
    own = segments(1, 512, 4)
    of_queries, last_key = (
        jnp.concatenate([a[..., :128], a[..., 384:]], -1) for a in (own, jnp.arange(512))
    )
    got = by_splash(q, k, v, g, jnp.array([0, 3]), of_queries, own, pairs=3)
    assert_same(got, attended.plain(q, k, v, g, last_key, of_queries, own))


@pytest.mark.full
def test_keys_of_another_device():
    """As in a step of the ring: the first chunk of queries sees nothing, which makes zeros and no
    gradient."""
    q, k, v, g = arrays()
    y, dq, dk, dv = by_splash(q, k, v, g, jnp.array([0, 2]), diagonal=False, pairs=2)
    inputs = Inputs(q, k, v, Sight(jnp.array([0, 2]), 2, False))
    _, lse = splash.kernel(True).forward(inputs, jnp.float32)
    assert (
        not np.any(y[:, :128]) and not np.any(dq[:, :128]) and (lse[:, :128] == flash.MASKED).all()
    )
    wanted = attended.plain(q[:, 128:], k, v, g[:, 128:], np.full(128, 255))
    assert_same([y[:, 128:], dq[:, 128:], dk, dv], wanted)


@pytest.mark.full
def test_a_prompt_read_into_a_cache():
    """Tokens 128 to 256 of a prompt, after those in the cache's first half; what lies beyond is
    never looked at."""
    q, k, v, _ = arrays(batch=1, tokens=128, keys=384)
    k, v = (a.at[:, 256:].set(jnp.nan) for a in (k, v))
    run = jax.jit(attended.from_cache, static_argnums=0)
    wanted = run("xla", q, k[:, :256], v[:, :256])
    np.testing.assert_allclose(run("splash", q, k, v), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.full
def test_in_bfloat16():
    given = arrays(dtype=jnp.bfloat16)
    own = segments()
    # Queries are rounded once more when they are scaled; results are sums of some hundred products
    # of numbers about 1.
    assert_same(
        by_splash(*given, of_queries=own, of_keys=own), attended.plain(*given, None, own, own), 3e-2
    )


def meetings(own=None, full_chunks=(0,), tokens=512, keys=512, batch=1) -> np.ndarray:
    """Which blocks of queries meet which blocks of keys, for the first sequence."""
    q, k = jnp.zeros((batch, tokens, 1, 8)), jnp.zeros((batch, keys, 1, 8))
    pairs = splash._block_pairs(Inputs(q, k, k, Sight(full_chunks), own), 128, 128)
    return np.asarray(pairs.run_BXY[0]).astype(int)


def test_only_blocks_that_see_each_other_are_computed():
    np.testing.assert_array_equal(meetings(), np.tril(np.ones((4, 4))))
    np.testing.assert_array_equal(
        meetings(full_chunks=jnp.array([0, 3]), tokens=256), [[1, 0, 0, 0], [1, 1, 1, 1]]
    )
    halves = jnp.repeat(jnp.array([[1, 2]]), jnp.array([256, 256]), 1, total_repeat_length=512)
    np.testing.assert_array_equal(
        meetings((halves, halves)), [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    )


def test_what_is_fetched_next():
    """The next block that is computed: of the same row of the grid, or the first of the next;
    sequences are behind one another."""
    run = jnp.asarray(np.stack([np.tril(np.ones((2, 2), bool)), np.eye(2, dtype=bool)]))
    pairs = splash._BlockPairs(128, 128, jnp.arange(256, dtype=jnp.int32), run, 256, None)
    np.testing.assert_array_equal(pairs.by_queries().data_next[0], [[0, 0], [0, 1], [2, 3], [3, 3]])
    np.testing.assert_array_equal(
        pairs.by_queries().block_mask[0], [[1, 0], [1, 1], [1, 0], [0, 1]]
    )
    np.testing.assert_array_equal(pairs.by_keys().data_next[0], [[0, 1, 2, 3], [1, 1, 2, 3]])


def test_sizes_of_blocks():
    assert [splash.block_size(n, 1024) for n in (8192, 1024, 1536, 2176, 128, 100, 200)] == [
        1024,
        1024,
        768,
        128,
        128,
        0,
        0,
    ]
