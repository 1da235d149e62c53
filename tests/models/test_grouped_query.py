"""Attention against plain numpy, one query at a time and through a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config import ModelConfig
from jaxtrain.models.grouped_query import Attention
from jaxtrain.models.rotary import Rotary
from jaxtrain.models.spec import binder, specs
from jaxtrain.parallel.attention.causal import attend, causal_blocks

BATCH, LENGTH, WIDTH, HEAD = 2, 9, 12, 4


def normal(*shape, seed=1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def plain(q, k, v, allowed) -> np.ndarray:
    """Query by query. allowed[b, t, s]: whether query t may look at key s."""
    out = np.zeros_like(q)
    group = q.shape[2] // k.shape[2]
    for b, t, n in np.ndindex(q.shape[:3]):
        seen = np.flatnonzero(allowed[b, t])
        scores = k[b, seen, n // group] @ q[b, t, n] / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max())
        out[b, t, n] = weights / weights.sum() @ v[b, seen, n // group]
    return out


CAUSAL = np.tril(np.ones((LENGTH, LENGTH), bool))


@pytest.mark.parametrize("kv_heads", [6, 3, 2, 1])
def test_causal_attention_in_groups(kv_heads):
    q, k, v = (
        normal(BATCH, LENGTH, 6, HEAD),
        normal(BATCH, LENGTH, kv_heads, HEAD, seed=2),
        normal(BATCH, LENGTH, kv_heads, HEAD, seed=3),
    )
    wanted = plain(q, k, v, np.broadcast_to(CAUSAL, (BATCH, LENGTH, LENGTH)))
    np.testing.assert_allclose(attend(q, k, v), wanted, rtol=1e-5, atol=1e-5)


def test_a_mask_takes_the_place_of_causality():
    q, k, v = (
        normal(BATCH, 3, 4, HEAD),
        normal(BATCH, LENGTH, 2, HEAD, seed=2),
        normal(BATCH, LENGTH, 2, HEAD, seed=3),
    )
    allowed = np.random.default_rng(0).random((BATCH, 3, LENGTH)) < 0.5
    allowed[..., 4] = True
    np.testing.assert_allclose(
        attend(q, k, v, allowed[:, None]), plain(q, k, v, allowed), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    "length, blocks", [(254, 1), (256, 2), (300, 2), (513, 1), (514, 2), (512, 4)]
)
def test_a_causal_mask_skips_what_it_forbids(length, blocks):
    """The same values and gradients as the mask alone, from fewer scores."""
    assert causal_blocks(length) == blocks
    arrays = (
        normal(2, length, 4, HEAD),
        normal(2, length, 2, HEAD, seed=2),
        normal(2, length, 2, HEAD, seed=3),
    )
    segments = np.random.default_rng(0).integers(0, 3, (2, length)).cumsum(1) // 20
    mask = (segments[:, None, :, None] == segments[:, None, None, :]) & np.tril(
        np.ones((length, length), bool)
    )
    g = normal(2, length, 4, HEAD, seed=4)
    compiled = lambda causal: (
        jax.jit(
            lambda *a: [
                (y := jax.vjp(lambda *a: attend(*a, mask, mask_is_causal=causal), *a))[0],
                *y[1](g),
            ]
        )
        .lower(*arrays)
        .compile()
    )
    whole, cut = compiled(False), compiled(True)
    for a, b in zip(cut(*arrays), whole(*arrays), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)
    flops = cut.cost_analysis()["flops"] / whole.cost_analysis()["flops"]
    assert abs(flops / ((blocks + 1) / (2 * blocks)) - 1) < 0.1, flops


def test_large_scores_and_equal_keys():
    """The softmax neither overflows nor loses its sum."""
    q = np.full((1, LENGTH, 1, HEAD), 300, np.float32)
    k = np.broadcast_to(normal(1, 1, 1, HEAD) * 300, (1, LENGTH, 1, HEAD))
    v = normal(1, LENGTH, 1, HEAD)
    averages = np.cumsum(v, 1) / np.arange(1, LENGTH + 1)[:, None, None]
    np.testing.assert_allclose(attend(q, k, v), averages, rtol=1e-5, atol=1e-5)


def test_bfloat16_sums_in_float32():
    q, k, v = (jnp.asarray(normal(1, LENGTH, 2, HEAD, seed=i), jnp.bfloat16) for i in range(3))
    got = attend(q, k, v)
    assert got.dtype == jnp.bfloat16
    exact = attend(*(a.astype(jnp.float32) for a in (q, k, v)))
    # Weights and output are rounded once each: half of 2^-8, of values about 1
    np.testing.assert_allclose(got.astype(jnp.float32), exact, rtol=0, atol=2 * 2**-8)


def attention(**fields):
    defaults = {
        "width": WIDTH,
        "heads": 6,
        "kv_heads": 2,
        "head_dim": HEAD,
        "positions": "learned",
        "rotary_base": 100.0,
    }
    cfg = ModelConfig(**defaults | {"biases": ("qkv", "out"), "init_std": 0.1} | fields)
    module = Attention(cfg, 0.1)
    random = np.random.default_rng(0)
    return binder(module), jax.tree.map(
        lambda s: random.normal(size=s.shape).astype(np.float32) * 0.5, specs(module)
    )


def test_the_layer_with_documents_apart():
    apply, params = attention()
    x = normal(BATCH, LENGTH, WIDTH)
    segments = np.array([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0, 0, 0, 1]])
    dense = lambda name, x: x @ params[name]["weight"] + params[name]["bias"]
    heads = [dense(name, x).reshape(BATCH, LENGTH, -1, HEAD) for name in ("query", "key", "value")]
    allowed = CAUSAL & (segments[:, :, None] == segments[:, None])
    wanted = dense("out", plain(*heads, allowed).reshape(BATCH, LENGTH, -1))
    np.testing.assert_allclose(
        apply(params)(x, np.zeros((1, LENGTH), int), segments), wanted, rtol=1e-4, atol=1e-4
    )


def test_documents_apart_with_positions_from_0_are_documents_alone():
    apply, params = attention(positions="rotary", biases=())
    x = normal(1, LENGTH, WIDTH)
    packed = apply(params)(
        x, np.array([[0, 1, 2, 3, 0, 1, 2, 3, 4]]), np.array([[5, 5, 5, 5, 6, 6, 6, 6, 6]])
    )
    for part in (slice(0, 4), slice(4, 9)):
        alone = apply(params)(x[:, part], np.arange(x[:, part].shape[1])[None])
        np.testing.assert_allclose(packed[:, part], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_through_a_cache(positions):
    gated = {"attention_gate": True, "qk_norm": True, "qk_norm_over": "projection"}
    apply, params = attention(
        **gated if positions == "learned" else {},
        positions=positions,
        rope_scaling="yarn",
        rope_factor=8.0,
        rope_original_length=4,
        rotary_dim=2,
    )
    x, where = normal(BATCH, LENGTH, WIDTH), np.arange(LENGTH)[None]
    # what is in unused slots is never looked at
    cache = [jnp.full((BATCH, LENGTH + 3, 2, HEAD), 7.0)] * 2
    parts = []
    for first, end in ((0, 4), (4, 5), (5, 9)):
        y, cache = apply(params).cached(
            x[:, first:end], where[:, first:end], cache, first, end - first
        )
        parts.append(y)
    np.testing.assert_allclose(
        np.concatenate(parts, 1), apply(params)(x, where), rtol=1e-5, atol=1e-5
    )


def test_norms_of_queries_and_keys_are_before_the_rotation():
    apply, params = attention(positions="rotary", qk_norm=True, norm_epsilon=0.1, biases=())
    x, positions = normal(BATCH, LENGTH, WIDTH), np.arange(LENGTH)[None]
    rotated = Rotary(ModelConfig(rotary_base=100.0), HEAD)
    for got, name in zip(apply(params).project(x, positions), ("query", "key"), strict=False):
        heads = (x @ params[name]["weight"]).reshape(BATCH, LENGTH, -1, HEAD)
        size = np.sqrt((heads**2).mean(-1, keepdims=True) + 0.1)
        normed = heads / size * params[f"{name}_norm"]["scale"]
        np.testing.assert_allclose(got, rotated(normed, positions), rtol=1e-4, atol=1e-5)
