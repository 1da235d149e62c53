"""A kernel on each device's own heads, forward and gradient: on its own and inside the runtime's
manual region, in a loop as an op is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import small
from support.plain_loop import assert_same, gradients, reference
from support.small import Case

from jaxtrain.devices.mesh import BATCH_AXES, MANUAL_AXES, STAGE, make_mesh
from jaxtrain.models import grouped_query, rotary
from jaxtrain.parallel.attention import causal
from jaxtrain.parallel.attention.heads import by_heads, heads_first

HEADS, KV_HEADS, LENGTH = 8, 4, 6


def arrays():
    random = np.random.default_rng(0)
    shapes = [(4, LENGTH, HEADS, 4), (4, LENGTH, KV_HEADS, 4), (4, LENGTH, KV_HEADS, 4)]
    return [jnp.asarray(random.normal(size=s), jnp.float32) for s in shapes]


def mask():
    segments = np.random.default_rng(1).integers(0, 2, (4, LENGTH))
    return jnp.asarray(np.tril(segments[:, None, :, None] == segments[:, None, None, :]))


def kernel(q, k, v, mask):
    """Stands in for a library's: it fails on more heads than one device has."""
    kernel.heads.append((q.shape[2], k.shape[2]))
    return causal.grouped_attention(q, k, v, mask)


@pytest.fixture(autouse=True)
def fresh():
    kernel.heads = []


def loss(q, k, v, mask):
    y = by_heads(kernel, (q, k, v), (mask,))
    return (y * jnp.cos(jnp.arange(y.size).reshape(y.shape))).sum(), y


def expected(q, k, v, m):
    def plain(q, k, v):
        y = causal.grouped_attention(q, k, v, m)
        return (y * jnp.cos(jnp.arange(y.size).reshape(y.shape))).sum(), y

    (_, y), gradients = jax.jit(jax.value_and_grad(plain, (0, 1, 2), has_aux=True))(q, k, v)
    return [y, *gradients]


@pytest.mark.parametrize("tokens", [24, 7])  # three tiles, and no tile
def test_an_order_in_memory_changes_no_number(tokens):
    x, g = np.random.default_rng(0).normal(size=(2, 2, tokens, 4, 6)).astype(np.float32)

    def with_gradient(x, g):
        y, vjp = jax.vjp(heads_first, x)
        return y, *vjp(g)

    with jax.set_mesh(make_mesh((1, 1, 1, 1, 1, 2), jax.devices()[:2])):
        y, by_x = jax.jit(with_gradient)(x, g)
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(by_x, g)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("model", small.named([1, 4], [2]))
def test_under_jit(model, masked):
    m = mask() if masked else None
    with jax.set_mesh(make_mesh((1, 1, 1, 1, 1, model), jax.devices()[:model])):
        (_, y), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*arrays(), m)
    assert set(kernel.heads) == {(HEADS // model, KV_HEADS // model)}
    for got, wanted in zip([y, *gradients], expected(*arrays(), m), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_in_an_op_that_only_one_stage_runs(masked):
    m = mask() if masked else jnp.ones((4, 1, LENGTH, LENGTH), bool)
    rows = P(BATCH_AXES)

    def local(q, k, v, m):
        def op(_, carried):
            (_, y), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(
                q, k, v, m if masked else None
            )
            return [a + b for a, b in zip(carried, (y, *gradients), strict=True)]

        zeros = [jnp.zeros_like(a) for a in (q, q, k, v)]
        made = jax.lax.fori_loop(0, (jax.lax.axis_index(STAGE) == 1).astype(int), op, zeros)
        return [a[None] for a in made]

    def of_shard(rows: slice):  # the loss's cosines are those of a data shard's own rows
        return expected(*(a[rows] for a in arrays()), m[rows] if masked else None)

    wanted = [
        np.concatenate(parts)
        for parts in zip(of_shard(slice(0, 2)), of_shard(slice(2, 4)), strict=True)
    ]
    with jax.set_mesh(make_mesh((1, 2, 2, 1, 1, 2))):
        out = P(STAGE, BATCH_AXES)
        run = jax.shard_map(
            local,
            in_specs=(rows,) * 4,
            out_specs=[out] * 4,
            axis_names=set(MANUAL_AXES),
            check_vma=False,
        )
        made = jax.jit(run)(*arrays(), m)
    assert set(kernel.heads) == {(HEADS // 2, KV_HEADS // 2)}
    for got, w in zip(made, wanted, strict=True):
        assert not got[0].any(), "the other stage ran it too"
        np.testing.assert_allclose(got[1], w, rtol=1e-5, atol=1e-5)


def test_without_a_mesh():
    np.testing.assert_array_equal(
        by_heads(kernel, arrays(), (None,)), causal.grouped_attention(*arrays())
    )


def test_attention_takes_this_way_for_a_library_kernel(monkeypatch):
    """With a mask for cuDNN, each device's part of the heads goes to jax's function."""
    calls = []

    def stand_in(q, k, v, mask, scale, implementation):
        assert scale == q.shape[3] ** -0.5
        calls.append((q.shape[2], implementation))
        return causal.grouped_attention(q, k, v, mask)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    with jax.set_mesh(make_mesh((1, 1, 1, 1, 1, 4), jax.devices()[:4])):
        got = jax.jit(causal.attend_by_cudnn_mask)(*arrays(), mask())
        np.testing.assert_allclose(
            got, causal.grouped_attention(*arrays(), mask()), rtol=1e-5, atol=1e-5
        )
    assert calls == [(2, "cudnn")]


FIRST = {
    "the partitioner splits them": Case((2, 1, 4), changes={"model.kv_heads": 2}),
    "zb_h1": Case((2, 2, 1), "zb_h1", 1, 4, {"model.kv_heads": 2, "pipeline.remat": "none"}),
    "inputs of layers": Case(
        (1, 2, 1), changes={"model.layers": 7, "pipeline.save": ("layer_input",)}
    ),
    "named": Case(
        (1, 2, 1), changes={"pipeline.remat": "selective", "pipeline.save": ("attention", "mlp_in")}
    ),
    "selective, normed": Case(
        (1, 2, 1), changes={"model.qk_norm": True, "pipeline.remat": "selective"}
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", FIRST)
def test_a_step_with_heads_first(monkeypatch, name):
    """As on TPUs, on CPU devices."""
    for module in (rotary, grouped_query):
        monkeypatch.setattr(module, "orders_by_heads", lambda: True)
    config = FIRST[name].config()
    assert_same(gradients(config), reference(config, 1))
