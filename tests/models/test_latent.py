"""Latent attention against plain numpy, written down from the paper's equations, and through its
cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config import ModelConfig
from jaxtrain.models.latent import LatentAttention
from jaxtrain.models.spec import binder, specs

BATCH, LENGTH, WIDTH, HEADS, HEAD, ROTATED, VALUE, QUERIES, RANK = 2, 9, 12, 3, 4, 2, 5, 7, 6
EPSILON = 0.3  # large enough to be seen, and not that of the other norms
CAUSAL = np.tril(np.ones((LENGTH, LENGTH), bool))


YARN = {  # without a query latent, where cases have either one
    "rope_scaling": "yarn",
    "rope_factor": 8.0,
    "rope_original_length": 4,
    "rope_attention_factor": 1.5,
    "rope_mscale_all_dim": 2.0,
}
ROTATION, SCORE = 1.5, (0.2 * np.log(8) + 1) ** 2  # the fastest angle, the only one, stays


def latent(query_rank=QUERIES):
    sizes = {
        "width": WIDTH,
        "heads": HEADS,
        "head_dim": HEAD,
        "rope_head_dim": ROTATED,
        "value_head_dim": VALUE,
        "kv_rank": RANK,
    }
    others = {"rotary_base": 100.0, "init_std": 0.1, "latent_norm_epsilon": EPSILON}
    others |= {"biases": ("qkv", "out")} | ({} if query_rank else YARN)
    cfg = ModelConfig(**sizes, **others, attention="mla", query_rank=query_rank)
    module, random = LatentAttention(cfg, 0.1), np.random.default_rng(0)
    return binder(module), jax.tree.map(
        lambda s: random.normal(size=s.shape).astype(np.float32) * 0.5, specs(module)
    )


def turned(x, positions, factor):
    """Pairs (i, i + half) of the last dimension of [T, …, R] turned by their angles, times a
    factor."""
    half = x.shape[-1] // 2
    angle = positions.reshape(-1, *[1] * (x.ndim - 1)) * 100.0 ** (-np.arange(half) / half)
    pair = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle) * factor
    return np.concatenate([pair.real, pair.imag], -1)


def plain(params, x_TD, positions, allowed):
    """One sequence, equations 9 to 13 and 14 to 19 of arXiv:2405.04434, with norms on the
    latents."""
    dense = lambda name, x: x @ params[name]["weight"] + params[name].get("bias", 0)
    norm = lambda name, x: (
        x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * params[name]["scale"]
    )
    down = dense("compress", x_TD)
    ahead, latent, shared = (
        down[:, : -RANK - ROTATED],
        down[:, -RANK - ROTATED : -ROTATED],
        down[:, -ROTATED:],
    )
    q = dense("query", norm("query_norm", ahead) if "query_norm" in params else x_TD).reshape(
        LENGTH, HEADS, -1
    )
    kv = dense("expand", norm("norm", latent)).reshape(LENGTH, HEADS, -1)
    scaled = "query_norm" not in params
    factor = ROTATION if scaled else 1
    rotated = turned(q[..., HEAD:], positions, factor)
    shared, out = turned(shared, positions, factor), np.zeros((LENGTH, HEADS, VALUE))
    for t, n in np.ndindex(LENGTH, HEADS):
        seen = np.flatnonzero(allowed[t])
        scores = (kv[seen, n, :HEAD] @ q[t, n, :HEAD] + shared[seen] @ rotated[t, n]) / np.sqrt(
            HEAD + ROTATED
        )
        scores *= SCORE if scaled else 1
        weights = np.exp(scores - scores.max())
        out[t, n] = weights / weights.sum() @ kv[seen, n, HEAD:]
    return dense("out", out.reshape(LENGTH, -1))


def inputs():
    return np.random.default_rng(1).normal(size=(BATCH, LENGTH, WIDTH)).astype(
        np.float32
    ), np.arange(LENGTH)


def test_biases_are_those_of_deepseeks_attention():
    """`attention_bias` of transformers' DeepseekV3Attention: q_a_proj, kv_a_proj_with_mqa and
    o_proj have biases; q_b_proj, kv_b_proj and q_proj have none."""
    for query_rank in (QUERIES, 0):
        _, params = latent(query_rank)
        assert {name for name in params if "bias" in params[name]} == {"compress", "out"}


@pytest.mark.parametrize("query_rank", [QUERIES, 0])
def test_the_papers_equations(query_rank):
    apply, params = latent(query_rank)
    (x, positions), segments = inputs(), np.array([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0] * LENGTH])
    got = apply(params)(x, positions[None], segments)
    for b in range(BATCH):
        allowed = CAUSAL & (segments[b][:, None] == segments[b])
        np.testing.assert_allclose(
            got[b], plain(params, x[b], positions, allowed), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("query_rank", [QUERIES, 0])
def test_through_a_cache(query_rank):
    apply, params = latent(query_rank)
    x, positions = inputs()
    # what is in unused slots is never looked at
    cache, parts = [jnp.full((BATCH, LENGTH + 3, RANK + ROTATED), 7.0)], []
    cached = jax.jit(
        lambda x, positions, cache, first: apply(params).cached(
            x, positions, cache, first, x.shape[1]
        )
    )
    for first, end in ((0, 4), (4, 5), (5, 9)):
        y, cache = cached(x[:, first:end], positions[None, first:end], cache, first)
        parts.append(y)
    whole = jax.jit(lambda x, positions: apply(params)(x, positions))(x, positions[None])
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=1e-5, atol=1e-5)
